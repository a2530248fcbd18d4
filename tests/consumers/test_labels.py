"""Labels: what no sample alone learns from is ignored, whoever moved them, and nothing else is."""

import pytest
import torch

from collate_npu import BatchAdapter, Segments
from collate_npu.consumers.forwards import label_rule
from collate_npu.outputs import ignore_first_labels, shift_labels

LEFT = Segments.from_lengths([3, 5], side="left")
PACKED = Segments.from_lengths([[3, 2], [4]], width=6)
IDS = torch.arange(20, 36)


def handed_over(segments, labels, consumer="megatron", **settings):
    batch = {"input_ids": IDS[: segments.ids.numel()].view(segments.shape), "segment_ids": segments.ids, **labels}
    before = {key: value.clone() for key, value in batch.items()}
    out = BatchAdapter(needs_mask_2d=False, consumer=consumer, **settings)(batch)
    assert all(torch.equal(before[key], batch[key]) for key in before)
    return {key: out[key] for key in labels}


@pytest.mark.parametrize("segments", [LEFT, PACKED], ids=["left", "packed"])
def test_labels_are_told_by_the_tokens_whether_they_are_moved(segments):
    ids = IDS[: segments.ids.numel()].view(segments.shape)
    own = handed_over(segments, {"labels": ids.clone()})["labels"]
    assert torch.equal(own, ignore_first_labels(ids, segments))
    strange = torch.zeros_like(ids)
    assert torch.equal(handed_over(segments, {"labels": strange})["labels"], strange.masked_fill(~segments.keep, -100))
    for told in ({"labels_shifted": False}, {"consumer": "transformers"}):  # whose models move them themselves
        own = handed_over(segments, {"labels": strange}, **told)["labels"]
        assert torch.equal(own, ignore_first_labels(strange, segments))
    for weights in (torch.ones(segments.shape), torch.ones(3)):
        found = handed_over(segments, {"labels": strange, "loss_mask": weights})["loss_mask"]
        assert torch.equal(found, segments.keep.float() if weights.ndim > 1 else weights)


@pytest.mark.parametrize("place", [0, 2])
def test_one_label_at_either_end_of_a_sequence_tells_and_0_is_a_token(place):
    ids = torch.tensor([[0, 6, 0, 7, 8, 8]])
    labels = torch.full_like(ids, -100)
    labels[0, [place, 4]] = ids[0, [place, 4]]
    found = handed_over(Segments.from_lengths([[4, 2]]), {"input_ids": ids, "labels": labels})["labels"]
    assert found[0, 4] == -100


def test_without_tokens_the_last_label_of_a_sequence_before_another_is_taken_for_its_first_token():
    labels = torch.full(PACKED.shape, 7)
    found = handed_over(PACKED, {"shift_labels": labels, "tokens": IDS[:12].view(2, 6)})["shift_labels"]
    assert found.tolist() == [[7, 7, -100, 7, 7, -100], [7, 7, 7, 7, -100, -100]]


def test_labels_that_are_moved_already_stay_so_on_a_transformers_model():
    labels = torch.tensor([[21, 22, 99, 24, 99, 0]])
    segments = Segments.from_lengths([[3, 2]], width=6)
    found = handed_over(segments, {"labels": labels}, consumer="transformers", labels_shifted=True)["labels"]
    assert found.tolist() == [[21, 22, 99, 24, 99, -100]]


def test_the_last_label_of_a_sequence_tells_too():
    """It is the first token of the next one: the labels are moved."""
    labels = torch.tensor([[-100, -100, 23, -100, -100, -100]])
    found = handed_over(Segments.from_lengths([[3, 2]], width=6), {"labels": labels})["labels"]
    assert torch.equal(found, torch.full_like(labels, -100))


def test_a_hole_ends_a_sequence_and_what_follows_it_is_predicted_from_padding():
    hole = Segments([[1, 1, 0, 1, 1], [0, 1, 1, 0, 1]])
    ids = IDS[:10].view(2, 5)
    own = handed_over(hole, {"labels": ids.clone()})["labels"]
    assert torch.equal(own, ignore_first_labels(ids, hole))
    assert own[:, 3:].tolist() == [[-100, 24], [-100, -100]]


def moved(segments, ids, end):
    """As a dataset moves the labels of each sample, whose last token predicts `end`."""
    labels = shift_labels(ids, segments)
    labels.view(-1)[segments.last_indices] = end
    return labels


@pytest.mark.parametrize("key", ["labels", "shift_labels", "shifted_labels"])
@pytest.mark.parametrize("segments", [LEFT, PACKED], ids=["left", "packed"])
def test_of_moved_labels_the_next_sequences_first_token_is_ignored_and_a_samples_own_end_is_not(segments, key):
    ids = IDS[: segments.ids.numel()].view(segments.shape)
    beside = {} if key == "labels" else {"labels": ids.clone()}
    own = moved(segments, ids, 99)
    assert torch.equal(handed_over(segments, {key: own} | beside)[key], own)
    following = torch.roll(ids, -1, 1)  # of the whole row
    found = handed_over(segments, {key: following} | beside)[key]
    parts = segments.ids[:, :-1] != segments.ids[:, 1:]
    wrong = ~segments.keep
    wrong[:, :-1] |= parts & segments.keep[:, 1:]
    assert torch.equal(found, following.masked_fill(wrong, -100))
    assert bool((parts & segments.keep[:, 1:] & segments.keep[:, :-1]).any()) == segments.packed


def test_labels_that_are_no_tokens_and_ignored_ones_stay():
    classes, targets = torch.tensor([3, 1]), torch.rand(2, 5)
    assert torch.equal(handed_over(LEFT, {"labels": classes})["labels"], classes)
    assert torch.equal(handed_over(LEFT, {"labels": targets})["labels"], targets)
    other = torch.full((2, 5), -1)
    assert torch.equal(handed_over(LEFT, {"labels": other})["labels"], other)


def test_tokens_predicted_in_place_lose_no_first_label():
    ids = IDS[:10].view(2, 5)
    batch = {"input_ids": ids, "attention_mask": LEFT.keep.long(), "labels": ids.clone()}
    out = BatchAdapter(needs_mask_2d=False, consumer="transformers", pattern="bidirectional")(batch)
    assert torch.equal(out["labels"], ids.masked_fill(~LEFT.keep, -100))


RULES = {
    **dict.fromkeys(("LlamaForCausalLM", "BertLMHeadModel", "GPT2DoubleHeadsModel"), "next"),
    **dict.fromkeys(("BertForMaskedLM", "GPT2ForTokenClassification", "T5ForTokenClassification"), "places"),
    **dict.fromkeys(("BartForCausalLM", "XLNetLMHeadModel"), "places"),  # of labels that are moved already
    **dict.fromkeys(("T5ForConditionalGeneration", "BartForConditionalGeneration"), "decoder"),
    "LlamaModel": None,
}


@pytest.mark.models
@pytest.mark.parametrize("kind", RULES)
def test_what_a_head_does_with_labels_is_told_by_its_class(kind):
    cls = getattr(pytest.importorskip("transformers"), kind)
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert label_rule(model) == RULES[kind]
    assert label_rule(model.config) == ("decoder" if model.config.is_encoder_decoder else None)
