"""axolotl 0.19.0: `axolotl train` with our plugin in its YAML, and its collators wrapped."""

import pytest
import torch
from axolotl.utils.collators import BatchSamplerDataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq
from cells import Stack, of_job
from processes import found_by
from watching import gradient_error

from collate_npu import wrap_collator
from collate_npu.errors import UnsupportedFormError
from collate_npu.testing import byte_tokenizer, tiny_model

NEEDS = ("axolotl",)

RIGHT = 1e-5
JOBS = [f"{family} plain {who}" for family in ("qwen3", "qwen3_next") for who in ("own", "ours")]
JOBS += [f"{family} packed {who}" for family in ("qwen3", "qwen3_next") for who in ("own", "ours")]
JOBS += ["qwen3 rows ours", "qwen3_next dpo ours", "qwen3_next patched ours"]  # never taken back


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every job gave; one process, one training step each."""
    folder = tmp_path_factory.mktemp("axolotl")
    silent = {"AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    return found_by("axolotl_work", folder, folder, *JOBS, variants=(silent,))[0]


def saw(runs, job):
    found = runs[job]
    print(job, f"{found['error']:.1e}", found["compared"], found["masks"], found["collator"], found["refused"][-300:])
    return found


@pytest.mark.parametrize(
    "job", ["qwen3 rows", "qwen3_next plain", "qwen3_next packed", "qwen3_next patched", "qwen3_next dpo"]
)
def test_with_the_plugin_each_sequence_is_as_alone(runs, job):
    found = saw(runs, f"{job} ours")
    collator = "DataCollatorForPreference" if "dpo" in job else "WrappedCollator"  # of DPO the forward is watched
    assert (found["refused"], found["collator"]) == ("", collator)
    assert found["compared"] >= 4
    assert found["error"] < RIGHT


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize(("layout", "setting"), [("padded right", "plain"), ("packed", "packed")])
def test_its_cells(runs, family, layout, setting):
    """Without CUDA sample packing runs the states of a hybrid together in silence."""
    stack = Stack("axolotl", ("axolotl", "transformers"), "peers_axolotl")
    own, ours = (of_job(saw(runs, f"{family} {setting} {who}")) for who in ("own", "ours"))
    stack.tell(family, layout, alone=own, ours=ours, line="plugins: [collate_npu.integrations.axolotl.CollatePlugin]")


# --- the collators

PACKERS = [BatchSamplerDataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq]
SEQUENCES = [[5, 9, 2, 77, 3], [40, 41, 42], [7, 1, 8, 3, 200, 31, 64, 12, 6]]
IDS = [SEQUENCES[:2], SEQUENCES[2:]]


def samples(masked=True):
    """Rows of samples, as axolotl's multipack sampler hands them over; its collators write into them."""
    for row in IDS:
        yield [
            {"input_ids": list(ids), "labels": list(ids), "position_ids": list(range(len(ids)))}
            | ({"attention_mask": [1] * len(ids)} if masked else {})
            for ids in row
        ]


@torch.no_grad()
def worst(model, batch, rows, side="right"):
    logits, gaps = model(**batch).logits, []
    for b, row in enumerate(rows):
        at = 0 if side == "right" else logits.shape[1] - sum(map(len, row))
        for ids in row:
            gaps.append(logits[b, at : at + len(ids)] - model(input_ids=torch.tensor([ids])).logits[0])
            at += len(ids)
    return max(float(gap.abs().max()) for gap in gaps)


@pytest.mark.parametrize(("packer", "masked", "side"), [(PACKERS[0], True, "left"), (PACKERS[1], False, "right")])
def test_packed_rows(packer, masked, side):
    tokenizer = byte_tokenizer(padding_side=side)
    model = tiny_model("qwen3", vocab_size=len(tokenizer))
    inner = packer(tokenizer, pad_to_multiple_of=8)
    batch = wrap_collator(inner, model=model)(list(samples(masked)))
    assert worst(model, batch, IDS, side) < 1e-4
    assert gradient_error(model, batch, SEQUENCES) < 1e-5
    flat = wrap_collator(inner, model=model, padding_free=True)(list(samples(masked)))
    assert flat["input_ids"].shape == (1, 17)
    assert worst(model, flat, [SEQUENCES]) < 1e-4
    assert gradient_error(model, flat, SEQUENCES) < 1e-5
    hybrid = tiny_model("qwen3_next", vocab_size=len(tokenizer))
    with pytest.raises(UnsupportedFormError, match="Give each sequence its own row"):
        wrap_collator(inner, model=hybrid)(list(samples(masked)))
