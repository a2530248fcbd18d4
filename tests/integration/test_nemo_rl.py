"""NeMo RL's batches, rebuilt after NVIDIA-NeMo/RL 7ea279a: nemo_rl/models/automodel/data.py:246 and
nemo_rl/models/huggingface/common.py:142, and its forward (automodel/train.py:104). Its package on PyPI is empty (0.0.0).

Legend: N sequences, S width of a packed row.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from collate_npu import CollateError, adapt
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import hybrid_model_types, tiny_model

SEQUENCES = [[5, 9, 2, 77, 3], [40, 41, 42], [7, 1, 8, 3, 20, 31, 64, 12, 6]]
PAD = 7  # text, too
LENGTHS = torch.tensor(list(map(len, SEQUENCES)))


@dataclass
class FlashAttentionKwargs:
    """The four fields of theirs."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packed(tail=0, sequences=SEQUENCES):
    """What `model(...)` gets with `sequence_packing.enabled`: offsets hidden in one argument, positions 0 in the tail."""
    flat = [token for row in sequences for token in row] + [PAD] * tail
    positions = [n for row in sequences for n in range(len(row))] + [0] * tail
    ends = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    longest = max(map(len, sequences))
    given = {"input_ids": torch.tensor([flat]), "attention_mask": None, "position_ids": torch.tensor([positions])}
    return given | {"flash_attn_kwargs": FlashAttentionKwargs(ends, ends.clone(), longest, longest)}


def padded():
    """What it gets without: a mask of ones over padded rows."""
    width = int(LENGTHS.max())
    rows = torch.tensor([row + [PAD] * (width - len(row)) for row in SEQUENCES])
    ones = torch.ones(rows.shape, dtype=torch.bool)
    return {"input_ids": rows, "attention_mask": ones, "position_ids": torch.arange(width).repeat(len(rows), 1)}


def parted(model, batch, use_cache=False):
    """The logits of every sequence of a batch."""
    logits = model(**batch, use_cache=use_cache).logits
    flat = len(batch["input_ids"]) == 1
    starts = [sum(map(len, SEQUENCES[:n])) for n in range(len(SEQUENCES))]
    return [
        logits[0, at : at + len(ids)] if flat else logits[n, : len(ids)]
        for n, (ids, at) in enumerate(zip(SEQUENCES, starts))
    ]


def lone(model):
    rows = [torch.tensor([ids]) for ids in SEQUENCES]
    return [model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0] for row in rows]


@torch.no_grad()
def off(model, batch, **settings):
    """How far the logits of every sequence are from those of the sequence alone."""
    return max(float((x - y).abs().max()) for x, y in zip(parted(model, batch, **settings), lone(model)))


def gradient(model, logits):
    model.zero_grad()
    losses = [
        torch.nn.functional.cross_entropy(x[:-1], torch.tensor(ids[1:]), reduction="sum")
        for x, ids in zip(logits, SEQUENCES)
    ]
    sum(losses).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("tail", [0, 1, 5])
def test_nested_offsets_are_read(tail):
    batch = packed(tail)
    for told in (
        batch["flash_attn_kwargs"],
        vars(batch["flash_attn_kwargs"]),
        SimpleNamespace(**vars(batch["flash_attn_kwargs"])),
    ):
        for keys in (["input_ids", "position_ids"], ["input_ids"]):
            given = {key: batch[key] for key in keys} | {"flash_attn_kwargs": told, "attention_mask": None}
            if tail == 1 and "position_ids" not in keys:  # of one place nothing else says that it is padding
                with pytest.raises(CollateError, match="nothing else says"):
                    segments_from_batch(given, padding_free=True)
                continue
            assert segments_from_batch(given, padding_free=True).lengths == (tuple(map(len, SEQUENCES)),)
    one = packed(tail, SEQUENCES[:1])
    assert segments_from_batch(one, padding_free=True).lengths == ((5,),)


def test_nested_offsets_of_another_row_are_refused():
    batch = packed(3)
    batch["flash_attn_kwargs"].cu_seqlens_q[1] += 1
    with pytest.raises(CollateError, match=r"flash_attn_kwargs\.cu_seqlens_k"):
        segments_from_batch(batch, padding_free=True)


@pytest.mark.parametrize("form", ["lengths beside ones", "lengths alone"])
def test_lengths_beside_a_mask_of_ones(form):
    batch = padded() | {"input_lengths": LENGTHS}
    if form == "lengths alone":
        batch["attention_mask"] = None
    assert segments_from_batch(batch).lengths == tuple((n,) for n in LENGTHS.tolist())
    with pytest.raises(CollateError, match="fit the width"):
        segments_from_batch(batch | {"input_lengths": LENGTHS + 90})


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
        own, ours = gradient(model, lone(model)), gradient(model, parted(model, packed(tail)))
        assert float((ours - own).norm() / own.norm()) < 1e-5
        assert off(model, padded()) < 1e-5
