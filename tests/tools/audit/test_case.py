"""The audit sees what it is there to see: a wrong mask, a refusal, a wrong gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.audit.case import Finding, audit
from collate_npu.tools.audit.data import shipped_text
from collate_npu.tools.audit.samples import sample_ids

pytestmark = pytest.mark.models

TOKENIZER = byte_tokenizer()
SAMPLES = sample_ids(shipped_text(), TOKENIZER, count=4, max_length=96, seed=5)


def findings_of(model, **settings):
    return {(f.side, f.column): f for f in audit(model, SAMPLES, pad_token_id=TOKENIZER.pad_token_id, **settings)}


@pytest.fixture(scope="module")
def found():
    return findings_of(tiny_model("qwen3_next", vocab_size=len(TOKENIZER)))


def test_ours_pass_on_both_sides(found):
    for side in ("left", "right"):
        assert found[side, "collator"].right
        assert found[side, "collator"].within(1e-4)
        assert found[side, "collator"].gradient < 1e-4


@pytest.mark.parametrize("column", ["bare 4D", "None", "4D + 2D keyword"])
def test_others_fail_on_the_left_alone(found, column):
    assert found["left", column].logits > 1
    assert found["left", column].gradient > 0.05
    assert found["right", column].within(1e-4)


def test_the_samples_are_ragged_and_end_with_eos():
    assert len({len(ids) for ids in SAMPLES}) > 2
    assert all(ids[-1] == TOKENIZER.eos_token_id == TOKENIZER.pad_token_id for ids in SAMPLES)


def test_a_model_that_ignores_its_mask_is_caught():
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))
    forward = model.forward
    model.forward = lambda attention_mask=None, **kwargs: forward(**kwargs)
    found = findings_of(model, sides=["left"], columns=["collator"], gradients=False)
    assert not found["left", "collator"].within(1e-4)


def test_a_refusal_is_neither_wrong_nor_an_error():
    model = tiny_model("rwkv", vocab_size=len(TOKENIZER), attn_implementation="eager")
    found = findings_of(model, sides=["left"], columns=["collator", "None"], gradients=False)
    assert found["left", "collator"].refused
    assert found["left", "collator"].within(1e-4)
    assert "Pad right" in found["left", "collator"].note
    assert found["left", "None"].logits > 1


def test_what_a_model_raises_is_a_finding_and_not_a_pass():
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))

    def broken(**kwargs):
        if "attention_mask" in kwargs:
            raise RuntimeError("no masks today")
        return tiny_model("qwen3_next", vocab_size=len(TOKENIZER))(**kwargs)

    model.forward = broken
    found = findings_of(model, sides=["left"], columns=["collator"], gradients=False)
    assert found["left", "collator"].note == "RuntimeError: no masks today"
    assert not found["left", "collator"].within(1e-4)


def test_batches_without_padding_prove_nothing():
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))
    with pytest.raises(CollateError, match="prove nothing"):
        next(audit(model, [[1, 2], [3, 4]], pad_token_id=0))


def test_the_gradient_alone_can_fail():
    wrong = Finding(
        model="m", attn_implementation="sdpa", side="left", column="collator", whose="ours", logits=0.0, gradient=1.0
    )
    assert not wrong.within(1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["a real token of the last row", "a padded place", "a sample alone", "a gradient"])
def test_a_number_that_is_not_finite_fails_with_any_tolerance(place, bad):
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))

    shortest = min(range(len(SAMPLES)), key=lambda row: len(SAMPLES[row]))

    def spoil(module, inputs, output):
        one = output.logits.shape[0] == 1
        row, column = (shortest, 0) if place == "a padded place" else (-1, -1)
        if one == (place == "a sample alone"):
            output.logits[row, column, -1] = bad

    if place == "a gradient":
        last = list(model.parameters())[-1]
        last.register_hook(lambda gradient: torch.full_like(gradient, bad))
    else:
        model.register_forward_hook(spoil)
    found = findings_of(model, sides=["left"], columns=["collator"])["left", "collator"]
    assert found.right is False
    assert not found.within(1e30)
    assert "not finite" in found.note


def test_the_model_stays_as_it_was():
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    findings_of(model, sides=["left"], columns=["collator"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
