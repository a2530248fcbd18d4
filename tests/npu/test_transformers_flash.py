"""transformers' own NPU flash path on tiny models, run on the CPU by our reference under the real operator's schema.

The path is the one an Ascend card takes: `attn_implementation="flash_attention_2"`, padding cut away, TND. Padded rows are
compared with transformers' sdpa and with each sample alone; the operator's calls with `fusion_attention_kwargs`.
"""

import itertools

import pytest
import torch
from attention_oracle import DEFAULTS

from collate_npu import PaddingCollator, Segments
from collate_npu.kernels import fusion_attention_kwargs
from collate_npu.outputs import per_sequence
from collate_npu.testing import tiny_model

MODELS, LENGTHS, PAD = ("qwen3", "qwen3_5_text"), (5, 9, 2), 60
GIVEN = ("input_layout", "atten_mask", "sparse_mode", "actual_seq_qlen", "actual_seq_kvlen", "pre_tockens", "next_tockens",
         "inner_precise", "prefix")  # fmt: skip

pytestmark = pytest.mark.usefixtures("torch_npu")


def check(calls, wanted):
    """Every call gave what we say, and its other mask arguments have the operator's defaults."""
    assert calls
    for recorded, name in itertools.product(calls, GIVEN):
        got, ours = (arguments.get(name, DEFAULTS[name]) for arguments in (recorded, wanted))
        if isinstance(ours, torch.Tensor):
            assert (got.dtype, torch.equal(got, ours)) == (ours.dtype, True), name
        else:
            assert (list(got) if isinstance(got, (list, tuple)) else got) == ours, name


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(("side", "lengths"), [("left", LENGTHS), ("right", LENGTHS), ("right", (2, 2, 2))])
def test_a_batch_gives_what_sdpa_and_each_sample_alone_give(model_type, side, lengths, calls):
    """Without padding it takes the compressed triangle."""
    kinds = ("flash_attention_2", "sdpa")
    flash, sdpa = (tiny_model(model_type, vocab_size=PAD + 4, attn_implementation=kind) for kind in kinds)
    generator, segments = torch.Generator().manual_seed(0), Segments.from_lengths(lengths, side=side)
    rows = [torch.randint(0, PAD, (length,), generator=generator).tolist() for length in lengths]
    collator = PaddingCollator(pad_token_id=PAD, padding_side=side, consumer="transformers", model=flash.config)
    batch = collator([{"input_ids": row} for row in rows])
    calls.clear()  # those by which the collator asked the model
    with torch.no_grad():
        by_flash = flash(**batch, use_cache=False).logits
        assert len(calls) == flash.config.layer_types.count("full_attention")
        by_sdpa = sdpa(**batch, use_cache=False).logits
        alone = [sdpa(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    for logits, theirs, reference in zip(per_sequence(by_flash, segments), per_sequence(by_sdpa, segments), alone):
        assert max(float((logits - other).abs().max()) for other in (theirs, reference)) <= 1e-5
        assert float(reference.abs().max()) > 0.5, "logits this small hide a wrong mask"
    check(calls, fusion_attention_kwargs(segments, layout="BSND" if lengths == (2, 2, 2) else "TND"))
    assert all(call["scale"] == pytest.approx(flash.config.head_dim**-0.5) for call in calls)
