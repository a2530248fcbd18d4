"""transformers' own NPU flash path on tiny models, run on the CPU by our reference under the real operator's schema.

The path is the one an Ascend card takes: `attn_implementation="flash_attention_2"`, padding cut away, TND. Padded rows are
compared with transformers' sdpa and with each sample alone; the operator's calls with `fusion_attention_kwargs`.
"""

import itertools
from typing import Any

import pytest
import torch
from attention_oracle import DEFAULTS

from collate_npu import PaddingCollator, Segments
from collate_npu.kernels import fusion_attention_kwargs
from collate_npu.outputs import per_sequence
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
    from transformers import AutoConfig  # it loads torch_npu, which the fixture makes ready

    model = AutoConfig.for_model(model_type)
    collator = PaddingCollator(pad_token_id=PAD, padding_side=side, consumer="transformers", model=model)
    return collator([{"input_ids": row} for row in rows])


def models(model_type: str) -> list[Any]:
    kinds = ("flash_attention_2", "sdpa")
    return [tiny_model(model_type, vocab_size=PAD + 4, attn_implementation=kind) for kind in kinds]  # type: ignore[arg-type]


def check(calls: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Every call gave what we say, and its other mask arguments have the operator's defaults."""
    assert calls
    for recorded, name in itertools.product(calls, GIVEN):
        got, ours = (arguments.get(name, DEFAULTS[name]) for arguments in (recorded, wanted))
        if isinstance(ours, torch.Tensor):
            assert got.dtype == ours.dtype, name
            assert torch.equal(got, ours), name
        else:
            assert (list(got) if isinstance(got, (list, tuple)) else got) == ours, name


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
        assert len(calls) == flash.config.layer_types.count("full_attention")
        by_sdpa = sdpa(**batch, use_cache=False).logits
        alone = [sdpa(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    for logits, theirs, reference in zip(per_sequence(by_flash, segments), per_sequence(by_sdpa, segments), alone):
        assert float((logits - theirs).abs().max()) <= TOLERANCE
        assert float((logits - reference).abs().max()) <= TOLERANCE
        assert float(reference.abs().max()) > 0.5, "logits this small hide a wrong mask"
    check(calls, fusion_attention_kwargs(segments, layout="TND"))
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
    check(calls, fusion_attention_kwargs(Segments.from_lengths([2, 2, 2]), layout="BSND"))
