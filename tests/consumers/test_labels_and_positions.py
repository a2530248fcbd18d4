"""Labels that no sample alone learns from are ignored, and no others; positions: which model gets them, and which.

That real models read positions so: tests/integration/test_differential.py.
"""

from types import SimpleNamespace

import pytest
import torch

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments
from collate_npu.consumers.labels_and_positions import positions_for
from collate_npu.consumers.mask_choice import Case, Model, consumer_named
from collate_npu.consumers.model_traits import label_rule
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks.sources import Sources
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
    own = handed_over(segments, {"labels": ids.masked_fill(~segments.keep, -100)})["labels"]
    assert torch.equal(own, ignore_first_labels(ids, segments))
    strange = torch.zeros_like(ids).masked_fill(~segments.keep, -100)
    assert torch.equal(handed_over(segments, {"labels": strange})["labels"], strange)
    for told in ({"labels_shifted": False}, {"consumer": "transformers"}):  # whose models move them themselves
        own = handed_over(segments, {"labels": strange}, **told)["labels"]
        assert torch.equal(own, ignore_first_labels(strange, segments))
    learned = (ignore_first_labels(ids, segments) != -100).float()
    found = handed_over(segments, {"labels": ids.masked_fill(~segments.keep, -100), "loss_mask": segments.keep.float()})
    assert torch.equal(found["loss_mask"], learned)
    assert torch.equal(handed_over(segments, {"labels": own, "loss_mask": torch.ones(3)})["loss_mask"], torch.ones(3))


ENDS = torch.tensor([[0, 6, 0, 7, 8, 8]])
TWO, TEN = Segments.from_lengths([[3, 2]], width=6), Segments.from_lengths([[4, 2]])
NO, SEVENS = -100, torch.where(PACKED.keep, 7, -100)
HANDED = [
    # one label at either end of a sequence tells, and 0 is a token
    (TEN, {"input_ids": ENDS, "labels": [[0, NO, NO, NO, 8, NO]]}, {}, [[0, NO, NO, NO, NO, NO]]),
    (TEN, {"input_ids": ENDS, "labels": [[NO, NO, 0, NO, 8, NO]]}, {}, [[NO, NO, 0, NO, NO, NO]]),
    # without tokens the last label of a sequence before another is taken for its first token
    (PACKED, {"shift_labels": SEVENS}, {}, [[7, 7, 7, 7, 7, NO], [7, 7, 7, 7, NO, NO]]),
    # labels that are moved already stay so on a transformers model
    (TWO, {"labels": [[21, 22, 99, 24, 99, NO]]}, {"consumer": "transformers", "labels_shifted": True},
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


def moved(segments, ids, end):
    """As a dataset moves the labels of each sample, whose last token predicts `end`."""
    labels = shift_labels(ids, segments)
    labels.view(-1)[segments.last_indices] = end
    return labels


@pytest.mark.parametrize("key", ["labels", "shift_labels", "shifted_labels"])
@pytest.mark.parametrize("segments", [LEFT, PACKED], ids=["left", "packed"])
def test_of_moved_labels_the_next_sequences_first_token_is_ignored_and_a_samples_own_end_is_not(segments, key):
    ids = IDS[: segments.ids.numel()].view(segments.shape)
    beside = {} if key == "labels" else {"labels": ids.masked_fill(~segments.keep, NO)}
    own = moved(segments, ids, 99)
    assert torch.equal(handed_over(segments, {key: own} | beside)[key], own)
    following = torch.roll(ids, -1, 1).masked_fill(~torch.roll(segments.keep, -1, 1), NO)  # of the whole row
    following[:, -1] = NO
    found = handed_over(segments, {key: following} | beside)[key]
    parts = segments.ids[:, :-1] != segments.ids[:, 1:]
    wrong = ~segments.keep  # the first token's, where padding stands before it
    wrong[:, :-1] |= parts & segments.keep[:, 1:]
    assert torch.equal(found, following.masked_fill(wrong, -100))
    assert bool((parts & segments.keep[:, 1:] & segments.keep[:, :-1]).any()) == segments.packed


@pytest.mark.parametrize("segments", [LEFT, PACKED], ids=["left", "packed"])
def test_moved_labels_are_refused_where_the_model_moves_them_too(segments):
    """By every door of a transformers model; what the error says makes them right."""
    ids = IDS[: segments.ids.numel()].view(segments.shape)
    labels = moved(segments, ids, NO)
    rows = [{"input_ids": ids[b, at:end].tolist(), "labels": labels[b, at:end].tolist()} for b, at, end in segments.spans]
    for door in (
        lambda **said: handed_over(segments, {"labels": labels}, consumer="transformers", **said),
        lambda **said: PaddingCollator(pad_token_id=0, consumer="transformers", **said)(rows),
    ):
        with pytest.raises(CollateError, match="Pass labels_shifted=True"):
            door()
        door(labels_shifted=True)


def test_rows_that_were_padded_before_are_refused_and_with_one_label_there_are_not():
    rows = {"input_ids": torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]), "attention_mask": torch.ones(2, 4).long()}
    learned = torch.tensor([[NO, 6, 7, 8], [NO, NO, 9, 10]])
    adapter = BatchAdapter(needs_mask_2d=False, consumer="megatron")
    with pytest.raises(CollateError, match=r"row 1: got 2 times the token 0 where a sequence begins"):
        adapter(rows | {"labels": learned})
    learned[1, 1] = 0
    adapter(rows | {"labels": learned})


RULES = {
    **dict.fromkeys(("LlamaForCausalLM", "BertLMHeadModel", "GPT2DoubleHeadsModel"), "next"),
    "GPT2ForTokenClassification": "places",
    "BartForCausalLM": "places",  # of labels that are moved already
    "LlamaModel": None,
}


@pytest.mark.models
@pytest.mark.parametrize("kind", RULES)
def test_what_a_head_does_with_labels_is_told_by_its_class(kind):
    cls = getattr(pytest.importorskip("transformers"), kind)
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert label_rule(model) == RULES[kind]
    assert label_rule(model.config) is None


# --- positions

SHORT_LEFT, RIGHT = (Segments.from_lengths([2, 4], side=side) for side in ("left", "right"))
WHOLE, ONE_ROW = Segments.from_lengths([4, 4]), Segments.from_lengths([[3, 2]])
IMAGE = {"pixel_values": torch.zeros(1)}
BY_AXES = Model(config=SimpleNamespace(), positions="axes", needs_mask_2d=False)
BY_IDS = Model(config=SimpleNamespace(), positions="padding_idx", first_position=2, needs_mask_2d=False)


def given(model, segments, keys, counted=False):
    sources = Sources.of({"input_ids": torch.full(segments.shape, 5).masked_fill(~segments.keep, 1)} | keys)
    sources.counted = counted
    case = Case(segments=segments, model=model, call=sources)
    return positions_for(consumer_named("transformers"), case, sources, None)


def axes(segments, count=3):
    return torch.stack([segments.position_ids + n for n in range(count)])


def test_a_model_of_several_axes_makes_them_where_it_can():
    assert given(BY_AXES, SHORT_LEFT, IMAGE) is None
    assert torch.equal(given(BY_AXES, SHORT_LEFT, {}), SHORT_LEFT.position_ids)
    assert torch.equal(given(BY_AXES, ONE_ROW, {}), ONE_ROW.position_ids.expand(4, 1, 5))
    own, four = axes(ONE_ROW), axes(ONE_ROW, 4)
    assert torch.equal(given(BY_AXES, ONE_ROW, {"position_ids": own}), torch.cat([ONE_ROW.position_ids[None], own]))
    assert torch.equal(given(BY_AXES, ONE_ROW, {"position_ids": four}), four)
    flat = torch.tensor([[0, 1, 2, 0, 9]])
    assert torch.equal(given(BY_AXES, ONE_ROW, {"position_ids": flat}), torch.stack([ONE_ROW.position_ids, *[flat] * 3]))
    with pytest.raises(UnsupportedFormError, match="where images stand"):
        given(BY_AXES, ONE_ROW, IMAGE)


@pytest.mark.parametrize("positions", [[[0] * 4] * 2, [[0, 1, 2, 1], [0, 1, 2, 3]], [[0, 1, 5, 4], [0, 3, 2, 1]]], ids=str)
def test_positions_that_fall_or_stand_are_nobodys(positions):
    """With a left mask they were passed on, and the answer was off by 0.12."""
    model = Model(config=SimpleNamespace(), needs_mask_2d=False)
    for segments in (SHORT_LEFT, WHOLE):
        with pytest.raises(CollateError, match=r"position_ids: \d bad row"):
            given(model, segments, {"position_ids": torch.tensor(positions)})
        assert given(model, segments, {"position_ids": torch.tensor([[0, 4, 5, 9]] * 2)}).tolist() == [[0, 4, 5, 9]] * 2
    right = SHORT_LEFT.position_ids.masked_fill(~SHORT_LEFT.keep, 1)
    assert given(model, SHORT_LEFT, {"position_ids": right}) is right, "with what they say of padding"


@pytest.mark.parametrize("counted", [False, True])
def test_axes_that_are_given_stay_and_a_model_that_counts_from_two_is_given_them_so(counted):
    own = axes(SHORT_LEFT)
    assert given(BY_AXES, SHORT_LEFT, {"position_ids": own}, counted) is own
    assert torch.equal(given(BY_AXES, ONE_ROW, {"position_ids": axes(ONE_ROW)}, counted)[1:], axes(ONE_ROW))
    model = Model(config=SimpleNamespace(), positions="places", first_position=2, needs_mask_2d=False)
    places = SHORT_LEFT.position_ids
    assert torch.equal(given(model, SHORT_LEFT, {"position_ids": places}, counted), places + 2)
    own = {"position_ids": places + 7, "text_position_ids": places}
    assert given(model, SHORT_LEFT, own, counted=True) is own["position_ids"]


def test_a_model_that_counts_by_ids_is_told_where_padding_is_none_of_its():
    assert given(BY_IDS, RIGHT, {}) is None
    assert given(BY_IDS, WHOLE, {}) is None
    strange = {"input_ids": torch.full((2, 4), 5)}
    assert given(BY_IDS, RIGHT, strange).tolist() == [[2, 3, 1, 1], [2, 3, 4, 5]]
    own = {"input_ids": torch.tensor([[5, 1, 5, 5, 5]])}  # its padding id among the tokens
    assert given(BY_IDS, ONE_ROW, own).tolist() == [[2, 1, 3, 2, 3]]
