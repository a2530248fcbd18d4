"""NeMo RL's batches through `adapt`, rebuilt after NVIDIA-NeMo/RL 7ea279a: nemo_rl/models/automodel/data.py:246 and
nemo_rl/models/huggingface/common.py:142. Its package on PyPI is empty (0.0.0). How they are read: tests/producers.
"""

from dataclasses import make_dataclass

import pytest
import torch

from collate_npu import CollateError, adapt
from collate_npu.masks import segments_from_batch
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import hybrid_model_types, tiny_model

SEQUENCES = [[5, 9, 2, 77, 3], [40, 41, 42], [7, 1, 8, 3, 20, 31, 64, 12, 6]]
PAD = 7  # text, too
LENGTHS = torch.tensor(list(map(len, SEQUENCES)))
NESTED = make_dataclass("FlashAttentionKwargs", ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"])


def packed(tail):
    """What `model(...)` gets with `sequence_packing.enabled`: offsets hidden in one argument, positions 0 in the tail."""
    ends, longest = torch.tensor([0, 5, 8, 17], dtype=torch.int32), 9
    flat = [token for row in SEQUENCES for token in row] + [PAD] * tail
    positions = [n for row in SEQUENCES for n in range(len(row))] + [0] * tail
    given = {"input_ids": torch.tensor([flat]), "attention_mask": None, "position_ids": torch.tensor([positions])}
    return given | {"flash_attn_kwargs": NESTED(ends, ends.clone(), longest, longest)}


def padded():
    """What it gets without: a mask of ones over padded rows."""
    width = int(LENGTHS.max())
    rows = torch.tensor([row + [PAD] * (width - len(row)) for row in SEQUENCES])
    ones = torch.ones(rows.shape, dtype=torch.bool)
    return {"input_ids": rows, "attention_mask": ones, "position_ids": torch.arange(width).repeat(len(rows), 1)}


@torch.no_grad()
def off(model, batch, use_cache=False):
    """How far the logits of every sequence are from those of the sequence alone."""
    logits, errors = model(**batch, use_cache=use_cache).logits, []
    found = logits[0, : int(LENGTHS.sum())].split(LENGTHS.tolist()) if len(logits) == 1 else logits
    for ids, mine in zip(SEQUENCES, found):
        row = torch.tensor([ids])
        own = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0]
        errors.append(float((mine[: len(ids)] - own).abs().max()))
    return max(errors)


def test_lengths_beside_a_mask_of_ones():
    batch = padded() | {"input_lengths": LENGTHS}
    for given in (batch, batch | {"attention_mask": None}):
        assert segments_from_batch(given).lengths == tuple((n,) for n in LENGTHS.tolist())
    with pytest.raises(CollateError, match="fit the width"):
        segments_from_batch(batch | {"input_lengths": LENGTHS + 90})
    other = packed(3)
    other["flash_attn_kwargs"].cu_seqlens_q[1] += 1
    with pytest.raises(CollateError, match=r"flash_attn_kwargs\.cu_seqlens_k"):
        segments_from_batch(other, padding_free=True)


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("name", sorted({"qwen3", "qwen3_next", "qwen3_5_text"} & {"qwen3", *hybrid_model_types()}))
def test_packed_rows(name, tail):
    """NeMo RL#2105, #4167: nothing reads the nested offsets. With a cache transformers does not look at positions either."""
    if name != "qwen3" and not KERNELS_TOLD.holds():
        pytest.skip("no older release hands boundaries on")
    model = tiny_model(name, vocab_size=120).eval()
    assert off(model, packed(tail), use_cache=True) > 1
    with adapt(model):
        assert max(off(model, packed(tail), use_cache=cache) for cache in (False, True)) < 2e-5
        assert off(model, padded()) < 1e-5
