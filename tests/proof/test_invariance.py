"""`assert_padding_invariant` passes right collators, says what to change of wrong ones, and refuses to compare in words."""

from functools import cache

import pytest
import torch
import toys

pytest.importorskip("transformers")
import transformers

from collate_npu import CollateError, PaddingCollator, wrap_collator
from collate_npu.testing import assert_padding_invariant, byte_tokenizer, tiny_model

pytestmark = pytest.mark.models

EOS = 256
SAMPLES = [[1, 2, 3, 4, 5, EOS], [6, 7, EOS], [8, 9, 10, EOS]]
FAMILIES = ["llama", "gpt2", "qwen3_next"]


@cache
def built(name):
    return tiny_model(name, vocab_size=258)


@pytest.fixture(params=FAMILIES)
def model(request):
    return built(request.param)


def padded(features, *, side="left", mask=True, labels=True):
    """By hand, and right on the right: an int 2D mask by the lengths, no label at padding or first."""
    held = {"input_ids": True, "attention_mask": mask, "labels": labels}
    return {key: value for key, value in toys.padded(features, side, EOS).items() if held[key]}


def right(features):
    return padded(features, side="right")


def by_pad_token(features):
    batch = right(features)
    return {**batch, "attention_mask": (batch["input_ids"] != EOS).long()}


def blind(features):
    return padded(features, mask=False)


def first_labels(features):
    batch = padded(features)
    return {**batch, "labels": torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)}


def all_labels(features):
    batch = right(features)
    return {**batch, "labels": batch["input_ids"]}


def moved_wrong(features):
    """Labels that the collator moved itself, which the model takes in the place of its own."""
    batch = right(features)
    return batch | {"shift_labels": batch["labels"].where(batch["labels"] != EOS, -100)}


@pytest.mark.slow
def test_right_ones_pass(model):
    ours = (PaddingCollator(pad_token_id=EOS, padding_side=side, model=model) for side in ("left", "right"))
    theirs = transformers.DataCollatorForLanguageModeling(byte_tokenizer(pad_is_eos=False), mlm=False)
    for collator in (*ours, right, lambda rows: padded(rows[::-1], side="right", labels=False), theirs):
        assert_padding_invariant(model, collator, SAMPLES)


def test_a_mask_by_the_pad_token_is_wrong_in_words(model):
    said = r"(?s)sample \d \(row \d, from place 0\), token \d of \d.*drops 1 of 6 real .* row 0.*make it from the lengths"
    with pytest.raises(AssertionError, match=said):
        assert_padding_invariant(model, by_pad_token, SAMPLES)


@pytest.mark.slow
def test_no_mask_is_wrong_and_the_remedy_works(model):
    with pytest.raises(AssertionError, match="padding and no attention_mask") as error:
        assert_padding_invariant(model, blind, SAMPLES, gradients=False)
    assert "wrap_collator(your collator, consumer='transformers', model=model)" in str(error.value)
    assert_padding_invariant(model, wrap_collator(blind, consumer="transformers", model=model), SAMPLES)


ANSWERS = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in SAMPLES]
TAUGHT = [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in SAMPLES]


def moved(labels):
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


RELABELLED = {
    "moved twice": (moved, SAMPLES, "shifted, and the model"),
    "dropped": (lambda labels: torch.full_like(labels, -100), SAMPLES, "10 labels .* 10 are ignored"),
    "one dropped": (lambda labels: labels.where(labels != EOS, -100), SAMPLES, r"3 labels .* labels == pad_token_id"),
    "first ones alone": (lambda labels: labels, ANSWERS, ""),
    "prompts taught": (lambda labels: labels, TAUGHT, "3 labels .* token 1 has 2 in place of -100"),
    "another token": (lambda labels: labels.where(labels != 4, 5), SAMPLES, "1 label .* sample 0, token 3 has 5 in place"),
}


@pytest.mark.parametrize("kind", RELABELLED)
def test_labels_are_those_of_the_samples(kind):
    """Of a collator that makes them itself, and of one that changes those it is given."""
    change, samples, said = RELABELLED[kind]

    def collate(features):
        batch = right([{**feature, "labels": feature["input_ids"]} for feature in features])
        return {**batch, "labels": change(batch["labels"])}

    for model in map(built, ("llama", "bert")):
        if not said:
            assert_padding_invariant(model, collate, samples, gradients=False)
            continue
        with pytest.raises(AssertionError, match=said):
            assert_padding_invariant(model, collate, samples, gradients=False)


@pytest.mark.parametrize(
    ("collator", "samples", "said"),
    [
        (first_labels, SAMPLES, r"First labels .* \(2\)"),
        (all_labels, SAMPLES, r"Labels stand at padding \(5\)"),
        (moved_wrong, SAMPLES, "The model's own loss is"),
        (lambda rows: padded(rows, side="right", labels=False), TAUGHT, "has no labels"),  # they are those of the tokens
    ],
)
def test_labels_that_train_on_others_or_are_not_there_are_told(collator, samples, said):
    with pytest.raises(AssertionError, match=said):
        assert_padding_invariant(built("llama"), collator, samples)


@pytest.mark.slow
def test_learned_positions_and_flat_rows_are_told():
    with pytest.raises(AssertionError, match="without position_ids"):
        assert_padding_invariant(built("gpt2"), padded, SAMPLES)
    flat = transformers.DataCollatorWithFlattening()
    assert_padding_invariant(built("llama"), flat, SAMPLES)
    with pytest.raises(AssertionError, match=r"boundaries\. adapt\(model\) runs each sample by itself\.$"):
        assert_padding_invariant(built("qwen3_next"), flat, SAMPLES)


def test_a_4d_mask_the_other_way_round_or_alone_is_told():
    neutral = PaddingCollator(pad_token_id=EOS, padding_side="left")
    with pytest.raises(AssertionError, match="True = blocked"):
        assert_padding_invariant(built("llama"), neutral, SAMPLES)

    def alone(features):
        batch = neutral(features)
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "attention_mask": ~batch["attention_mask"]}

    with pytest.raises(AssertionError, match="no 2D mask, and the recurrent layers"):
        assert_padding_invariant(built("qwen3_next"), alone, SAMPLES)


def test_a_tolerance_takes_the_place_of_the_noise_and_what_is_not_finite_fails():
    model = built("llama")
    with pytest.raises(AssertionError, match="the tolerance is 0"):
        assert_padding_invariant(model, right, SAMPLES, tolerance=0)
    assert_padding_invariant(model, by_pad_token, SAMPLES, tolerance=1e3)

    def spoil(module, inputs, output):
        output.logits.data[-1, -1, -1] = float("nan")

    handle = model.register_forward_hook(spoil)
    with pytest.raises(AssertionError, match="not finite"):
        assert_padding_invariant(model, right, SAMPLES, tolerance=1e30)
    handle.remove()


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([[1, 2], [3, 4]], "prove nothing"),
        ([[1, 2], []], "row 1: got no input_ids"),
        ([[1, 2], ["a"]], "row 1"),
        ({"input_ids": [1, 2]}, "got a dict"),
    ],
)
def test_samples_that_prove_nothing_are_refused(samples, said):
    with pytest.raises(CollateError, match=said):
        assert_padding_invariant(built("llama"), padded, samples)


def test_an_encoder_is_not_told_of_first_labels():
    with pytest.raises(AssertionError) as error:
        assert_padding_invariant(built("bert"), lambda rows: first_labels(rows) | {"attention_mask": None}, SAMPLES)
    assert "First labels" not in str(error.value)


def test_other_tokens_and_encoder_decoders_are_refused():
    cut = lambda features: padded([{k: v[:3] for k, v in f.items()} for f in features])  # noqa: E731
    with pytest.raises(CollateError, match="Switch off what changes tokens"):
        assert_padding_invariant(built("llama"), cut, SAMPLES)
    config = transformers.T5Config(vocab_size=258, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    t5 = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(CollateError, match="reads two sequences"):
        assert_padding_invariant(t5, padded, SAMPLES)


def test_the_model_and_the_features_stay_as_they_were_and_a_head_is_not_needed():
    model, seen = tiny_model("llama", vocab_size=258).train().model, []

    def spoils(features):
        batch = right(features)
        seen.append([[*sorted(feature), *set(feature["attention_mask"])] for feature in features])
        features[0]["input_ids"].clear()
        return batch

    samples = [list(ids) for ids in SAMPLES]
    assert_padding_invariant(model, spoils, samples)
    assert samples == SAMPLES
    assert model.training
    assert seen == [[["attention_mask", "input_ids", "labels", 1]] * 3]
    with pytest.raises(AssertionError):
        assert_padding_invariant(model, by_pad_token, SAMPLES)
