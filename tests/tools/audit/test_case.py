"""The audit sees what it is there to see: a wrong mask, a lost boundary, a refusal, a kernel that is missing, NaN.

That a wrong gradient alone is seen, and what passes: test_noise.
"""

from functools import wraps

import pytest
import torch

pytest.importorskip("transformers")
from text import sample_ids

from collate_npu import CollateError, PaddingCollator, Segments
from collate_npu.masks import dense
from collate_npu.proof.measure import Compared, Errors
from collate_npu.releases import MISSING_KERNEL_RAISES
from collate_npu.testing import byte_tokenizer, kernels, reference_kernels, tiny_config, tiny_model
from collate_npu.tools.audit.case import Audit, Finding, audit, raised
from collate_npu.tools.audit.handover import FLAT, PADDED

pytestmark = pytest.mark.models
NEWER = pytest.mark.skipif(not MISSING_KERNEL_RAISES.holds(), reason="5.20 is the first release that asks for boundaries")

TOKENIZER = byte_tokenizer()
SAMPLES = sample_ids(TOKENIZER, count=4, max_length=80, seed=5)
OURS = [column for column, way in FLAT.items() if way.ours]
OTHERS = [column for column in FLAT if column not in OURS]


def tiny(name, **settings):
    return tiny_model(name, vocab_size=len(TOKENIZER), **settings)


def one(model, **settings):
    """The only finding."""
    (found,) = audit(model, SAMPLES, pad_token_id=TOKENIZER.pad_token_id, **{"gradients": False, **settings})
    return found


def flat(name, **settings):
    model = tiny(name, **settings)
    how = {"pad_token_id": TOKENIZER.pad_token_id, "batch_size": 4, "gradients": True, "sides": ["packed"]}
    return Audit(model, SAMPLES, name=name, **how)


def rows_of(case):
    return {column: case.finding("packed", column) for column in FLAT}


def test_the_samples_are_ragged_and_end_with_eos():
    assert len({len(ids) for ids in SAMPLES}) > 2
    assert all(ids[-1] == TOKENIZER.eos_token_id == TOKENIZER.pad_token_id for ids in SAMPLES)


def test_ours_pass_and_others_fail_on_the_left_alone_and_the_model_stays_as_it_was():
    model = tiny("qwen3_next").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = {(f.side, f.column): f for f in audit(model, SAMPLES, pad_token_id=TOKENIZER.pad_token_id)}
    for column, way in PADDED.items():
        left, right = found["left", column], found["right", column]
        if way.ours:
            assert left.refused or (left.right and left.within(1e-4) and left.gradient < 1e-4), column
        else:
            taught = column == "tokenizer's 2D mask"  # its logits are right
            assert (left.logits < 1e-4) if taught else (left.logits > 1), column
            assert left.gradient > (0.02 if taught else 0.05), column
            assert left.right is False, column
        assert right.within(1e-4), column
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_a_refusal_is_neither_wrong_nor_an_error():
    model = tiny("rwkv", attn_implementation="eager")
    found = one(model, sides=["left"], columns=["collator"])
    assert found.refused
    assert found.within(1e-4)
    assert "pad right" in found.note
    assert one(model, sides=["left"], columns=["no mask"]).logits > 1


def test_what_a_model_raises_is_a_finding_and_not_a_pass():
    model = tiny("llama")
    forward = model.forward

    def broken(attention_mask=None, **kwargs):
        if attention_mask is not None:
            raise RuntimeError("no masks today")
        return forward(**kwargs)

    model.forward = broken
    found = one(model, sides=["left"], columns=["collator"])
    assert found.note == "RuntimeError: no masks today"
    assert not found.within(1e-4)


def test_the_gradient_alone_can_fail():
    where = {"model": "m", "attention": "sdpa", "side": "left", "column": "collator", "whose": "ours"}
    assert not Finding(**where, logits=0.0, gradient=1.0).within(1e-4)


@pytest.mark.parametrize("place", ["a padded place", "a sample alone"])
def test_a_number_that_is_not_finite_fails_with_any_tolerance(place):
    """Every place of a result is looked at: test_measure."""
    model = tiny("qwen3_next")
    shortest = min(range(len(SAMPLES)), key=lambda row: len(SAMPLES[row]))

    def spoil(module, inputs, output):
        alone = output.logits.shape[0] == 1
        if alone == (place == "a sample alone"):
            output.logits[0 if alone else shortest, 0, -1] = float("nan")

    model.register_forward_hook(spoil)
    found = one(model, sides=["left"], columns=["collator"], gradients=True)
    assert found.right is False
    assert not found.within(1e30)
    assert "not finite" in found.note


@pytest.mark.parametrize("place", ["logits", "loss", "gradient"])
def test_one_error_that_is_not_finite_is_noted(place):
    case, small = flat("llama"), {"largest": 0.0, "logits": 0.0, "loss": 0.0, "gradient": 0.0}
    for error, noted in ((float("inf"), True), (float("nan"), True), (0.0, False)):
        found = case._judged("packed", "collator", "ours", Compared((Errors(**{**small, place: error}),), ()))
        assert ("not finite" in found.note, found.right) == (noted, not noted)


def test_an_encoder_is_measured_on_both_sides_and_one_that_pools_on_the_right_alone():
    from transformers import BertForSequenceClassification

    pooled = BertForSequenceClassification(tiny_config("bert", vocab_size=len(TOKENIZER)))
    for side in ("left", "right"):
        assert one(tiny("bert"), sides=[side], columns=["collator"]).right
        assert one(pooled, sides=[side], columns=["no mask"]).refused is (side == "left")


def test_flat_rows_of_attention_alone_are_proved():
    case = flat("llama", attn_implementation="eager")
    found = rows_of(case)
    assert all(found[column].right and found[column].gradient < 1e-5 for column in OURS)
    assert found["no boundaries"].logits > 1
    assert found["no boundaries"].gradient > 0.1
    assert case.yardstick("packed").tells()
    assert case.first("packed") == ("llama", Segments.from_lengths([[len(ids) for ids in SAMPLES]]), "causal")


@NEWER
def test_with_kernels_ours_are_right_and_each_boundary_left_out_costs():
    case = flat("qwen3_next")
    with reference_kernels(case.subject.model):
        found = rows_of(case)
        assert all(found[column].right for column in OURS)
        for column in OTHERS:
            assert found[column].logits > 0.1, column
            assert found[column].gradient > 0.01, column
        assert case.yardstick("packed").wrong.logits == min(found[column].relative for column in OTHERS)


@NEWER
@pytest.mark.parametrize("name", ["causal_conv1d_fn", "reference_gated_delta_rule"])
def test_a_kernel_that_drops_its_offsets_in_silence_is_caught(monkeypatch, name):
    kernel = getattr(kernels, name)

    @wraps(kernel)
    def deaf(*args, seq_idx=None, cu_seqlens=None, **kwargs):
        return kernel(*args, **kwargs)

    monkeypatch.setattr(kernels, name, deaf)
    case = flat("qwen3_next")
    with reference_kernels(case.subject.model):
        assert not any(case.finding("packed", column).right for column in OURS)


def test_a_family_that_never_asks_is_refused():
    found = rows_of(flat("jamba"))
    assert all(found[column].refused for column in OURS)
    assert found["positions"].right is False


@pytest.mark.parametrize("samples", [SAMPLES[:1], SAMPLES[:3]])
def test_a_row_of_one_sequence_is_no_proof(samples):
    with pytest.raises(CollateError, match=r"a row of one sequence.*Give a --batch-size of 2 or more"):
        next(audit(tiny("llama"), samples, pad_token_id=0, sides=["packed"], batch_size=2))


def test_sequences_of_one_length_are_a_proof_in_a_row_and_none_in_a_padded_batch():
    settings = {"pad_token_id": 7, "gradients": False, "columns": ["collator"]}
    assert next(audit(tiny("llama"), [[1, 2], [3, 4]], sides=["packed"], **settings)).right
    with pytest.raises(CollateError, match="prove nothing"):
        next(audit(tiny("llama"), [[1, 2], [3, 4]], sides=["packed", "left"], **settings))


def test_the_remedy_for_a_missing_kernel_is_one_of_this_device():
    error = ValueError("`f` can't keep packed sequences apart without `g`. Install `g` to train on packed sequences.")
    on_npu, on_cpu = raised(error, "npu"), raised(error, "cpu")
    assert on_npu["no_kernel"]
    assert "Megatron-style stack" in on_npu["note"]
    assert "causal-conv1d" not in on_npu["note"]
    assert "--kernels reference" in on_cpu["note"]
    assert "Install" not in on_npu["note"]
    assert raised(ValueError("else"), "cpu") == {"note": "ValueError: else", "refused": False}


def test_a_kernel_that_is_told_nothing_is_wrong_whatever_the_numbers(monkeypatch):
    """Recurrent layers that add nothing yet: a bare 4D mask changes no number, and is lost all the same."""
    model = tiny("qwen3_next")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("linear_attn.out_proj.weight"):
                weight.zero_()
    settings = {"name": "qwen3_next", "pad_token_id": TOKENIZER.pad_token_id, "batch_size": 4, "gradients": False}
    case = Audit(model, SAMPLES, **settings)
    right = PaddingCollator(TOKENIZER, padding_side="left", model=model)
    assert case.of_collator("right", right).right

    def bare(features):
        batch = right(features)
        keep = batch.pop("attention_mask").bool()
        return {**batch, "attention_mask": dense(Segments.from_keep(keep))}

    found = case.of_collator("bare", bare)
    assert (found.right, found.astray) == (False, ("kernels",))
    assert not found.within(1.0)
    assert "linear_attn: " in found.note
    assert "told nothing: the token at" in found.note
    bare_4d = PADDED["4D mask alone"]
    assert case.finding("left", bare_4d.name).astray == (), "others are not asked what kernels were told"
    monkeypatch.setitem(PADDED, "collator", PADDED["collator"]._replace(hand=bare_4d.hand))
    assert case.finding("left", "collator").astray == ("kernels",)
