"""Located: samples are found by their tokens, whatever the side, the order, the packing and the mask; or it is refused."""

import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError
from collate_npu.proof.invariance import locate

PAD = 9


def features(*samples):
    return [{"input_ids": list(ids), "labels": list(ids)} for ids in samples]


def batch(*rows, keep=None, **more):
    made = {"input_ids": torch.tensor(rows), **more}
    return made if keep is None else {**made, "attention_mask": torch.tensor(keep)}


def tokens_of(found, made):
    return [row.flatten().tolist() for row in found.rows(made["input_ids"][..., None])]


@given(strategies.segments(rows=4), st.randoms(use_true_random=False))
def test_samples_are_found_wherever_they_stand(segments, chance):
    """Sequences without a hole, whose tokens are their own; no mask, and samples in another order."""
    if segments.hole_rows or not segments.num_sequences:
        return
    made = batch(*torch.where(segments.keep, torch.arange(segments.array.size).view(segments.shape) + PAD + 1, PAD).tolist())
    flat = made["input_ids"].flatten()[segments.indices]
    samples = [part.tolist() for part in flat.split(list(segments.sequence_lengths))]
    chance.shuffle(samples)
    found = locate(made, features(*samples))
    assert tokens_of(found, made) == samples
    assert torch.equal(found.segments.keep, segments.keep)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_what_is_found_is_what_was_laid_out(samples, left):
    """With few tokens much fits in several places: then it is found by the mask, and never at a wrong one."""
    width = max(map(len, samples)) + 1
    padding = [[0] * (width - len(ids)) for ids in samples]
    rows = [pad + ids if left else ids + pad for pad, ids in zip(padding, samples)]
    kept = [[1] * len(ids) for ids in samples]
    made = batch(*rows, keep=[pad + keep if left else keep + pad for pad, keep in zip(padding, kept)])
    found = locate(made, features(*samples))
    assert tokens_of(found, made) == samples
    assert torch.equal(found.segments.keep.long(), made["attention_mask"])


READ = {
    "a mask that drops a real eos is not believed": ([[1, 2, 9], [4, 9, 9]], [[1, 1, 0], [1, 0, 0]], ([1, 2, 9], [4, 9])),
    "equal samples keep their order": ([[1, 2], [1, 2], [3, 9]], None, ([1, 2], [1, 2], [3])),
    "a part of a longer one": ([[1, 2, 3], [1, 2, 9]], None, ([1, 2], [1, 2, 3])),
    "a mask says where one of padding is": ([[1, 2, 9, 9, 9, 9]], [[1, 1, 0, 1, 1, 0]], ([1, 2], [9, 9])),
}


@pytest.mark.parametrize(("rows", "keep", "samples"), READ.values(), ids=READ)
def test_each_sample_is_given_back_whole(rows, keep, samples):
    made = batch(*rows, keep=keep)
    found = locate(made, features(*samples))
    assert tokens_of(found, made) == [*samples]
    if samples[0] == samples[1]:
        assert found.order == (0, 1, 2)
    if len(rows) == 1:
        assert found.segments.ids[0].tolist() == [1, 1, 0, 2, 2, 0]


REFUSED = {
    "cut": ([[1, 2], [4, 5]], None, r"(?s)samples: 1 bad row.*row 0: got 3 tokens"),
    "masked at random": ([[1, 7, 3], [4, 5, 9]], None, "samples: 1 bad row"),
    "a token that is no sample's": ([[8, 1, 2, 3], [8, 4, 5, 9]], None, "tokens that no sample has"),
    "another row": ([[1, 2, 3], [4, 5, 9], [6, 7, 8]], None, "tokens that no sample has"),
    "another row that a mask keeps": (
        [[1, 2, 3], [4, 5, 9], [6, 7, 8]],
        [[1, 1, 1], [1, 1, 0], [1, 1, 1]],
        "tokens that no",
    ),
}


@pytest.mark.parametrize(("rows", "keep", "said"), REFUSED.values(), ids=REFUSED)
def test_other_tokens_are_refused(rows, keep, said):
    with pytest.raises(CollateError, match=said):
        locate(batch(*rows, keep=keep), features([1, 2, 3], [4, 5]))


@pytest.mark.parametrize(
    "made", [None, {}, {"input_ids": None}, {"inputs_embeds": torch.zeros(1, 2, 3)}, {"input_ids": [1, 2]}]
)
def test_what_has_no_tokens_is_refused(made):
    with pytest.raises(CollateError, match="found by their tokens"):
        locate(made, features([1, 2]))


@pytest.mark.parametrize("sample", [[], [1, 2, 3, 4, 5]])
def test_a_sample_without_tokens_or_longer_than_a_row_is_refused(sample):
    with pytest.raises(CollateError, match=f"row 1: got {len(sample)} tokens"):
        locate(batch([1, 2, 3], [4, 5, 9]), features([1, 2, 3], sample))


@pytest.mark.parametrize("keep", [None, [[1] * 4] * 2])
def test_a_sample_of_padding_alone_is_refused_where_no_mask_says_its_place(keep):
    with pytest.raises(CollateError, match="several places for one sample"):
        locate(batch([1, 2, 9, 9], [9] * 4, keep=keep), features([1, 2, 9, 9], [9, 9]))
    with pytest.raises(CollateError, match="several places for one sample"):
        locate(batch(*[[PAD] * 40] * 8), features(*[[PAD] * n for n in range(20, 28)]))


def test_labels_of_a_batch_are_told_apart_from_those_of_its_samples_and_are_made_where_it_has_none():
    made, samples = batch([9, 4, 5], [1, 2, 3]), features([1, 2, 3], [4, 5])
    labelled = made | {"labels": torch.tensor([[-100, 4, 5], [-100, -100, 3]])}
    assert "1 label differ from the samples" in locate(labelled, samples).label_fault()
    samples[0]["labels"][1] = -100
    assert locate(labelled, samples).label_fault() == ""
    assert locate(made, samples).with_labels()["labels"].tolist() == [[-100, -100, 5], [-100, 2, 3]]


def test_one_answer_a_row_is_none_for_each_of_several_samples():
    packed = locate(batch([1, 2, 3, 4, 5]) | {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, features([1, 2, 3], [4, 5]))
    with pytest.raises(CollateError, match="one answer a row"):
        packed.rows(torch.ones(1, 7))
    apart = locate(batch([1, 2, 3], [4, 5, 9]), features([4, 5], [1, 2, 3]))
    assert [row.tolist() for row in apart.rows(torch.arange(14).view(2, 7))] == [[[*range(7, 14)]], [[*range(7)]]]
