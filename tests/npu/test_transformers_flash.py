"""transformers' own NPU flash path on tiny models, run on the CPU by our reference under the real operator's schema.

The path is the one an Ascend card takes: `attn_implementation="flash_attention_2"`, padding cut away, TND. Padded rows are
compared with transformers' sdpa and with each sample alone; the operator's calls with `fusion_attention_kwargs`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collate_npu import PaddingCollator, Segments, per_sequence
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.kernels.fusion_attention.operator_call import DEFAULTS
from collate_npu.testing import tiny_model

MODELS = ("qwen3", "qwen3_5_text")
SIDES = ("left", "right")
LENGTHS = (5, 9, 2)
PAD = 60
TOLERANCE = 1e-5
GIVEN = ("input_layout", "atten_mask", "sparse_mode", "actual_seq_qlen", "actual_seq_kvlen", "pre_tockens", "next_tockens",
         "inner_precise", "prefix")  # fmt: skip

pytestmark = pytest.mark.usefixtures("torch_npu")


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, PAD, (length,), generator=generator).tolist() for length in LENGTHS]


def batch_of(model_type: str, side: Any, rows: list[list[int]]) -> dict[str, Any]:
    collator = PaddingCollator(pad_token_id=PAD, padding_side=side, consumer="transformers", model_type=model_type)
    return collator([{"input_ids": row} for row in rows])


def models(model_type: str) -> tuple[Any, Any]:
    return tuple(
        tiny_model(model_type, vocab_size=PAD + 4, attn_implementation=kind) for kind in ("flash_attention_2", "sdpa")
    )  # type: ignore[return-value]


def attention_layers(model: Any) -> int:
    return sum(kind == "full_attention" for kind in model.config.layer_types)


def same(recorded: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """The call gave what we say, and its other mask arguments have the operator's defaults."""
    for name in GIVEN:
        got, ours = (arguments.get(name, DEFAULTS[name]) for arguments in (recorded, wanted))
        if isinstance(ours, torch.Tensor):
            assert got.dtype == ours.dtype, name
            assert torch.equal(got, ours), name
        else:
            assert (list(got) if isinstance(got, (list, tuple)) else got) == ours, name
    return True


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("side", SIDES)
def test_a_padded_batch_gives_what_sdpa_and_each_sample_alone_give(
    model_type: str, side: str, calls: list[dict[str, Any]]
) -> None:
    flash, sdpa = models(model_type)
    rows, batch = samples(), batch_of(model_type, side, samples())
    segments = Segments.from_lengths([len(row) for row in rows], side=side)  # type: ignore[arg-type]
    with torch.no_grad():
        by_flash = flash(**batch, use_cache=False).logits
        assert len(calls) == attention_layers(flash) > 0
        by_sdpa = sdpa(**batch, use_cache=False).logits
        alone = [sdpa(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    for logits, theirs, reference in zip(per_sequence(by_flash, segments), per_sequence(by_sdpa, segments), alone):
        assert float((logits - theirs).abs().max()) <= TOLERANCE
        assert float((logits - reference).abs().max()) <= TOLERANCE
        assert float(reference.abs().max()) > 0.5, "logits this small hide a wrong mask"
    wanted = fusion_attention_kwargs(segments, layout="TND", causal_mode=3)
    assert all(same(call, wanted) for call in calls)
    scale = flash.config.head_dim**-0.5
    assert all(call["scale"] == pytest.approx(scale) for call in calls)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_batch_without_padding_takes_the_compressed_triangle(model_type: str, calls: list[dict[str, Any]]) -> None:
    flash, sdpa = models(model_type)
    rows = [row[:2] for row in samples()]
    batch = batch_of(model_type, "right", rows)
    with torch.no_grad():
        difference = flash(**batch, use_cache=False).logits - sdpa(**batch, use_cache=False).logits
    assert float(difference.abs().max()) <= TOLERANCE
    wanted = fusion_attention_kwargs(Segments.from_lengths([2, 2, 2]), layout="BSND", causal_mode=3)
    assert calls
    assert all(same(call, wanted) for call in calls)


@pytest.mark.parametrize("side", SIDES)
def test_gradients_of_a_padded_batch_are_sdpas(side: str, calls: list[dict[str, Any]]) -> None:
    batch = batch_of("qwen3", side, samples())
    segments = Segments.from_lengths(LENGTHS, side=side)  # type: ignore[arg-type]
    grads = []
    for model in models("qwen3"):
        logits = torch.cat(per_sequence(model(**batch, use_cache=False).logits, segments))
        logits.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert calls
    assert grads[0].keys() == grads[1].keys()
    scale = max(float(g.abs().max()) for g in grads[1].values())
    assert max(float((grads[0][name] - grads[1][name]).abs().max()) for name in grads[0]) <= TOLERANCE * scale


def test_left_padding_without_the_mask_is_wrong_here_too(calls: list[dict[str, Any]]) -> None:
    """The control: a path that ignored the mask would not pass the tests above."""
    flash, _ = models("qwen3")
    rows, batch = samples(), batch_of("qwen3", "left", samples())
    segments = Segments.from_lengths(LENGTHS, side="left")
    with torch.no_grad():
        wrong = flash(**(batch | {"attention_mask": None}), use_cache=False).logits
        right = flash(input_ids=torch.tensor([rows[0]]), use_cache=False).logits[0]
    assert float((per_sequence(wrong, segments)[0] - right).abs().max()) > 0.1
    assert next(call["input_layout"] for call in calls) == "BSND"
