"""Labels: what no sample alone learns from is ignored, whoever moved them, and nothing else is."""

import pytest
import torch

from collate_npu import BatchAdapter, Segments
from collate_npu.consumers.model_traits import label_rule
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


ENDS = torch.tensor([[0, 6, 0, 7, 8, 8]])
TWO, TEN = Segments.from_lengths([[3, 2]], width=6), Segments.from_lengths([[4, 2]])
NO, SEVENS = -100, torch.full(PACKED.shape, 7)
HANDED = [
    # one label at either end of a sequence tells, and 0 is a token
    (TEN, {"input_ids": ENDS, "labels": [[0, NO, NO, NO, 8, NO]]}, {}, [[0, NO, NO, NO, NO, NO]]),
    (TEN, {"input_ids": ENDS, "labels": [[NO, NO, 0, NO, 8, NO]]}, {}, [[NO, NO, 0, NO, NO, NO]]),
    # without tokens the last label of a sequence before another is taken for its first token
    (PACKED, {"tokens": IDS[:12].view(2, 6), "shift_labels": SEVENS}, {}, [[7, 7, NO, 7, 7, NO], [7, 7, 7, 7, NO, NO]]),
    # labels that are moved already stay so on a transformers model
    (TWO, {"labels": [[21, 22, 99, 24, 99, 0]]}, {"consumer": "transformers", "labels_shifted": True},
     [[21, 22, 99, 24, 99, NO]]),
    # the last one of a sequence is the first token of the next one: they are moved
    (TWO, {"labels": [[NO, NO, 23, NO, NO, NO]]}, {}, [[NO] * 6]),
    # what are no tokens, or ignored ones, stay
    (LEFT, {"labels": [3, 1]}, {}, [3, 1]), (LEFT, {"labels": [[-1] * 5] * 2}, {}, [[-1] * 5] * 2),
    (LEFT, {"labels": [[0.5, 0.25, 0.125, 1.5, 2.5]] * 2}, {}, [[0.5, 0.25, 0.125, 1.5, 2.5]] * 2),
]  # fmt: skip


@pytest.mark.parametrize(("segments", "given", "settings", "expected"), HANDED)
def test_what_no_sample_alone_learns_from_is_ignored(segments, given, settings, expected):
    tensors = {key: torch.as_tensor(value) for key, value in given.items()}
    assert handed_over(segments, tensors, **settings)[[*given][-1]].tolist() == expected


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
