"""MindSpeed-LLM's Qwen3-Next: what is accepted is right in a model of its layers, and what is refused is wrong there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import conv1d, scaled_dot_product_attention, silu

from collate_npu import BatchAdapter, Segments, UnsupportedFormError

CONSUMERS = ("mindspeed_llm", "mindspeed_llm_fsdp2")
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"], model_type="qwen3_next")
DENSE = SimpleNamespace(layer_types=["full_attention"])
RIGHT, LEFT = Segments.from_lengths([3, 8]), Segments.from_lengths([3, 8], side="left")
FLAT, ONE, HOLE = Segments.from_lengths([[3, 5]]), Segments.from_lengths([[8]]), Segments([[1, 1, 0, 0, 1, 1]])
ROWS = Segments.from_lengths([[3, 2], [5]])
EMBED = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
FILTER = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(1))


def layers(ids, recurrent=True, ends=()):
    """Causal attention inside the ends it is told, then a convolution and a decaying sum that are told nothing.

    fsdp2/models/qwen3_next/modeling_qwen3_next.py:836-843 (seq_idx=None) and 1239-1240 (linear_attn_mask = None).
    """
    h = EMBED[ids]
    parts = torch.tensor_split(h, list(ends)[:-1], dim=1)
    h = h + torch.cat([scaled_dot_product_attention(x, x, x, is_causal=True) for x in parts], dim=1)
    if not recurrent:
        return h
    h = silu(conv1d(h.transpose(1, 2), FILTER, padding=3, groups=8)[..., : ids.shape[1]]).transpose(1, 2)
    starts = [0, *ends]
    decay = 0.9 ** torch.arange(ids.shape[1]).flip(0)
    scans = [torch.stack([(x[:, : t + 1] * decay[-t - 1 :, None]).sum(1) for t in range(x.shape[1])], 1)
             for x in torch.tensor_split(h, starts[1:-1], dim=1)]  # fmt: skip
    return torch.cat(scans, dim=1)


def off(segments, recurrent=True, flat=False):
    """The largest error of a real token against its sequence alone."""
    ids = torch.arange(segments.ids.numel()).view(segments.shape) + 1
    ends = torch.tensor(segments.lengths[0]).cumsum(0).tolist() if flat else ()
    out, worst = layers(ids, recurrent, ends), 0.0
    for row, own in enumerate(segments.ids):
        for number in own.unique()[own.unique() > 0]:
            place = own == number
            worst = max(worst, float((out[row, place] - layers(ids[row, place][None], recurrent)[0]).abs().max()))
    return worst


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize(
    ("segments", "model", "flat", "accepted"),
    [
        (RIGHT, HYBRID, False, True),
        (LEFT, HYBRID, False, False),
        (HOLE, HYBRID, False, False),
        (ROWS, HYBRID, False, False),
        (FLAT, HYBRID, True, False),
        (ONE, HYBRID, True, True),
        (RIGHT, DENSE, False, True),
        (LEFT, DENSE, False, False),
        (ROWS, DENSE, False, False),
        (FLAT, DENSE, True, True),
    ],
)
def test_accepted_is_right_and_refused_is_wrong(consumer, segments, model, flat, accepted):
    adapter = BatchAdapter(model, consumer=consumer, padding_free=flat)
    error = off(segments, recurrent=model is HYBRID, flat=flat)
    assert (error < 1e-5) == accepted, error
    if accepted:
        assert adapter.route(segments).form == ("keep_2d" if consumer.endswith("fsdp2") and not flat else "none")
    else:
        with pytest.raises(UnsupportedFormError, match=r"MindSpeed-LLM|several sequences"):
            adapter.route(segments)


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_what_arrives(consumer):
    batch = {"input_ids": RIGHT.ids, "attention_mask_2d": RIGHT.keep}
    out = BatchAdapter(HYBRID, consumer=consumer)(batch)
    assert "attention_mask_2d" not in out
    assert out["attention_mask"] is None or out["attention_mask"].tolist() == RIGHT.keep.int().tolist()


def test_the_remedies_work():
    with pytest.raises(UnsupportedFormError, match=r"Give each sequence its own row, padded right \(padding_free=False"):
        BatchAdapter(HYBRID, consumer="mindspeed_llm", padding_free=True).route(FLAT)
    assert BatchAdapter(HYBRID, consumer="mindspeed_llm").route(Segments.from_lengths([3, 5])).form == "none"
    with pytest.raises(UnsupportedFormError, match=r"Pad right with one sequence a row\.$"):
        BatchAdapter(HYBRID, consumer="mindspeed_llm").route(LEFT)
