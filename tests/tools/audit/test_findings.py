"""The audit sees what it is there to see: a wrong mask, a lost boundary, a refusal, a kernel that is missing, NaN.

That a wrong gradient alone is seen, and what passes: test_measure.
"""

from contextlib import nullcontext
from functools import wraps

import pytest
import torch

pytest.importorskip("transformers")
import recurrent_oracle
from recurrent_oracle import reference_kernels
from text import sample_ids

from collate_npu import CollateError, PaddingCollator, Segments
from collate_npu.masks import dense
from collate_npu.releases import MISSING_KERNEL_RAISES
from collate_npu.testing import byte_tokenizer, tiny_config, tiny_model
from collate_npu.tools.audit.case import FLAT, PADDED, Audit, Subject, audit

pytestmark = pytest.mark.models
NEWER = pytest.mark.skipif(not MISSING_KERNEL_RAISES.holds(), reason="5.20 is the first release that asks for boundaries")
TOKENIZER = byte_tokenizer()
SAMPLES = sample_ids(TOKENIZER, count=4, max_length=80, seed=5)


def tiny(name, **settings):
    return tiny_model(name, vocab_size=len(TOKENIZER), **settings)


FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
LLAMA = tiny("llama")
OURS = [column for column, way in FLAT.items() if way.whose == "ours"]


def found(model, samples=SAMPLES, **settings):
    """Findings by side and column."""
    how = {"pad_token_id": TOKENIZER.pad_token_id, "gradients": False, **settings}
    return {(each.side, each.column): each for each in audit(model, samples, **how)}


def one(model, **settings):
    (finding,) = found(model, **settings).values()
    return finding


def test_ours_pass_and_others_fail_on_the_left_alone_and_the_model_stays_as_it_was():
    assert len({len(ids) for ids in SAMPLES}) > 2
    assert all(ids[-1] == TOKENIZER.eos_token_id == TOKENIZER.pad_token_id for ids in SAMPLES)
    model = tiny("qwen3_next").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cases = found(model, gradients=True, tolerance=1e-4)
    for (side, column), case in cases.items():
        wrong = (side, column) == ("left", "4D mask alone")
        assert (case.right, case.logits > 1, case.gradient > 0.05) == (not wrong, wrong, wrong), (side, column)
    assert {column for _, column in cases} == PADDED.keys() - {"no mask"}, "one wrong way a layout"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_a_refusal_is_neither_wrong_nor_an_error_and_what_a_model_raises_is_no_pass():
    refusing = tiny("rwkv", attn_implementation="eager")
    case = one(refusing, sides=["left"], columns=["collator"])
    assert (case.refused, case.right, "pad right" in case.note) == (True, None, True)
    assert one(refusing, sides=["left"], columns=["no mask"]).logits > 1
    model = tiny("llama")
    model.forward = lambda attention_mask=None, forward=model.forward, **kwargs: (
        forward(**kwargs) if attention_mask is None else exec("raise RuntimeError('no masks today')")
    )
    case = one(model, sides=["left"], columns=["collator"])
    assert (case.note, case.refused, case.right) == ("RuntimeError: no masks today", False, None)


@pytest.mark.parametrize("alone", [False, True], ids=["a padded place", "a sample alone"])
def test_a_number_that_is_not_finite_fails_with_any_tolerance(alone):
    """Every place of a result is looked at: test_measure."""
    model = tiny("qwen3_next")
    shortest = min(range(len(SAMPLES)), key=lambda row: len(SAMPLES[row]))

    def spoil(module, inputs, output):
        if alone == (len(output.logits) == 1):
            output.logits[0 if alone else shortest, 0, -1] = float("nan")

    model.register_forward_hook(spoil)
    for tolerance in (None, 1e30):
        case = one(model, sides=["left"], columns=["collator"], gradients=True, tolerance=tolerance)
        assert (case.right, "not finite" in case.note) == (False, True)


def test_a_tolerance_takes_the_place_of_what_is_measured():
    how = {"sides": ["left"], "columns": ["no mask"], "gradients": True}
    wrong = one(LLAMA, **how)
    errors = {"logits": wrong.logits, "loss": wrong.loss, "gradient": wrong.gradient}
    assert wrong.astray == (*errors,)
    for tolerance in errors.values():
        larger = tuple(name for name, error in errors.items() if error > tolerance)
        assert one(LLAMA, **how, tolerance=tolerance).astray == larger


def test_an_encoder_is_measured_on_both_sides_and_one_that_pools_on_the_right_alone():
    from transformers import BertForSequenceClassification

    pooled = BertForSequenceClassification(tiny_config("bert", vocab_size=len(TOKENIZER)))
    for side in ("left", "right"):
        assert one(tiny("bert"), sides=[side], columns=["collator"]).right
        assert one(pooled, sides=[side], columns=["collator"]).refused is (side == "left")


@pytest.mark.parametrize(("name", "deaf"), [
    ("llama", ""), ("jamba", ""), *(pytest.param("qwen3_next", deaf, marks=NEWER) for deaf in (
        "", "plain", "causal_conv1d_fn", "reference_gated_delta_rule"))])  # fmt: skip
def test_flat_rows_are_right_where_each_layer_is_told_boundaries(monkeypatch, name, deaf):
    """By kernels, or without any. One that drops its offsets in silence is refused, and a family that never asks for any."""
    if deaf not in ("", "plain"):
        kernel = getattr(recurrent_oracle, deaf)
        hears = wraps(kernel)(lambda *args, seq_idx=None, cu_seqlens=None, **kwargs: kernel(*args, **kwargs))
        monkeypatch.setattr(recurrent_oracle, deaf, hears)
    model = tiny(name, **({"attn_implementation": "eager"} if name == "llama" else {}))
    how = {"pad_token_id": TOKENIZER.pad_token_id, "batch_size": 4, "gradients": True, "sides": ["packed"]}
    with reference_kernels(model) if name == "qwen3_next" and deaf != "plain" else nullcontext():
        case = Audit(model, SAMPLES, name="m", **how)
        cases = {column: case.finding("packed", column) for column in FLAT}
        yardstick = case.yardstick("packed")
    if name == "jamba" or deaf not in ("", "plain"):
        assert all(cases[column].refused for column in OURS)
        return
    assert [cases[column].right for column in OURS] == [True] * len(OURS)
    lost = cases["no boundaries"]
    assert lost.logits > 0.1
    assert lost.gradient > 0.01
    assert yardstick.wrong.logits == lost.relative
    assert yardstick.tells()


EQUAL = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("model", "samples", "sides", "said"),
    [
        (LLAMA, SAMPLES[:1], ["packed"], r"a row of one sequence.*Give a --batch-size of 2 or more"),
        (LLAMA, SAMPLES[:3], ["packed"], "a row of one sequence"),
        (LLAMA, EQUAL, ["packed", "left"], "prove nothing"),
    ],
)
def test_what_would_prove_nothing_is_refused(model, samples, sides, said):
    with pytest.raises(CollateError, match=said):
        found(model, samples, sides=sides, batch_size=2)
    assert one(LLAMA, samples=EQUAL, sides=["packed"], columns=["collator"]).right


def test_a_kernel_that_is_told_nothing_is_wrong_whatever_the_numbers(monkeypatch):
    """Recurrent layers that add nothing yet: a bare 4D mask changes no number, and is lost all the same."""
    model = tiny("qwen3_next")
    for name, weight in model.named_parameters():
        if name.endswith("linear_attn.out_proj.weight"):
            weight.data.zero_()
    settings = {"name": "qwen3_next", "pad_token_id": TOKENIZER.pad_token_id, "batch_size": 4, "gradients": False}
    case = Audit(model, SAMPLES, **settings, tolerance=1.0)
    right = PaddingCollator(TOKENIZER, padding_side="left", model=model)
    assert case.of_collator("right", right).right

    def bare(features):
        batch = right(features)
        return {**batch, "attention_mask": dense(Segments.from_keep(batch["attention_mask"].bool()))}

    yours = case.of_collator("bare", bare)
    assert (yours.right, yours.astray) == (False, ("kernels",))
    assert "linear_attn: " in yours.note
    assert "got nothing: the token at" in yours.note
    bare_4d = PADDED["4D mask alone"]
    assert case.finding("left", "4D mask alone").astray == (), "others are not asked what kernels were told"
    monkeypatch.setitem(PADDED, "collator", PADDED["collator"]._replace(hand=bare_4d.hand))
    assert case.finding("left", "collator").astray == ("kernels",)


# --- the ways of handing over

WAYS_HERE = [("sdpa", "4D mask alone"), ("eager", "4D mask alone")]
WAYS_HERE += [(name, "no mask") for name in ("flash_attention_2", "kernels-community/flash-attn2", "mine")]


@pytest.mark.usefixtures("newest_transformers")
@pytest.mark.parametrize(("attn", "lost"), WAYS_HERE)
def test_only_what_reads_a_dense_mask_gets_one_and_every_way_pads_the_same_tokens(attn, lost):
    """On a card a dense mask in the place of a 2D one makes a flash kernel read past its tensors."""
    model = tiny_model("qwen3_next", vocab_size=8, attn_implementation="eager" if attn == "eager" else "sdpa")
    case = Audit(model, FEATURES, name="", pad_token_id=7, batch_size=2, gradients=False)
    model.config._attn_implementation = attn
    subject, truth = Subject(model=model, side="left", pad_token_id=7), Segments.from_lengths([3, 2], side="left")
    assert case.columns("left") == [*OURS, lost]
    for column in case.columns("left"):
        batch = PADDED[column].hand(subject, FEATURES)
        assert batch["input_ids"].tolist() == [[1, 2, 3], [7, 4, 5]]
        assert [row[1:] for row in batch["labels"].tolist()] == [[2, 3], [-100, 5]], "no padding predicts a token"
        masks = [value for key, value in batch.items() if "mask" in key]
        assert [mask.ndim for mask in masks] == {"4D mask alone": [4], "no mask": []}.get(column, [2]), column
        assert all(torch.equal(mask.bool(), truth.keep) for mask in masks if mask.ndim == 2)


@pytest.mark.parametrize("column", FLAT)
def test_every_way_is_the_same_row(column):
    batch = FLAT[column].hand(Subject(model=LLAMA, side="packed", pad_token_id=7), FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["labels"][0, 1:].tolist() == [2, 3, -100, 5]  # no sequence predicts the next one's first token
    assert ("position_ids" in batch) == (column in OURS)
