"""Labels are a source: an end token that they alone learn, those that a collator makes anew, and rows that look padded.

What data sets write, by each door: test_remedies, which follows the remedy of what is refused.
"""

import pytest
import torch

pytest.importorskip("transformers")
from differential import IGNORED, spread

from collate_npu import BatchAdapter, CollateError, describe, wrap_collator
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
EOS = 63
SAMPLES = [[5, 9, 31, 7, 22, EOS], [8, 40, 11, EOS], [13, 6, 27, 50, 19, 33, 12, EOS]]


def laid(samples, by_ids=False):
    """A batch of the samples; a mask by ids drops their own ends."""
    width = max(map(len, samples))
    ids, labels = (torch.tensor([spread(row, width, fill, "right") for row in samples]) for fill in (EOS, IGNORED))
    return {"input_ids": ids, "attention_mask": (ids != EOS if by_ids else labels != IGNORED).long(), "labels": labels}


def test_an_end_token_that_a_mask_drops_is_real_where_labels_learn_it_and_nowhere_else():
    """Holes at each turn, several places, another token's label, an id that the mask keeps elsewhere: nobody knows."""
    batch, told = laid(SAMPLES, by_ids=True), "If they are real (pad is eos): make the mask from the lengths"
    assert "lengths=[6, 4, 8]" in describe(batch)
    kept = {**batch, "attention_mask": batch["attention_mask"].index_fill(1, torch.tensor([7]), 1)}
    other = {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == EOS, 5)}
    for wrong in (laid([[*row[:2], EOS, *row[2:]] for row in SAMPLES], by_ids=True), kept, other):
        assert told in describe(wrong)
    assert told not in describe({**other, "loss_mask": batch["attention_mask"].float()})  # which leaves these out


@pytest.mark.parametrize("told", ["labels", "loss_mask"])
@pytest.mark.parametrize("how", ["from ids", "by labels == pad", "more ignored"])
def test_labels_that_a_wrapped_collator_makes_anew_are_compared_with_the_samples(how, told):
    """transformers 26357: a prompt that the sample does not learn, an eos that it does."""
    own = [[IGNORED, IGNORED if how != "by labels == pad" else row[1], *row[2:]] for row in SAMPLES]
    values = own if told == "labels" else [[int(x != IGNORED) for x in row] for row in own]
    samples, batch = [{"input_ids": ids, told: value} for ids, value in zip(SAMPLES, values)], laid(SAMPLES)
    ids, first = batch["input_ids"], torch.arange(8) < 3
    lost = {"from ids": ids < 0, "by labels == pad": ids == EOS, "more ignored": first.expand_as(ids)}[how]
    labels = ids.masked_fill(lost | (batch["attention_mask"] == 0), IGNORED)
    wrapped = wrap_collator(lambda _: {**batch, "labels": labels}, attention_mask="2d")
    if how == "more ignored":
        assert int((wrapped(samples)["labels"] >= 0).sum()) == 9
    else:
        with pytest.raises(CollateError, match="others than in the samples"):
            wrapped(samples)


LOOKS = {
    "padded in the data set": ([[5, 6, 7, 8, 9], [0, 0, 0, 9, 10], [0, 0, 4, 5, 6]], 0),
    "a long run of a token that stands elsewhere": ([[7] * 9 + [3, 5], [4, 5, 6, 7, 8, 9, 3, 2, 8, 6, 7]], 7),
    "two first tokens in each row": ([[1, 1, 5, 6, 7], [1, 1, 8, 9, 2], [1, 1, 3, 4, 4]], None),
    "a run of a token that stands elsewhere": ([[7, 7, 3, 4], [5, 6, 7, 8]], None),
    "one row": ([[7, 7, 3, 4]], None),
}


@pytest.mark.parametrize("what", LOOKS)
def test_rows_that_look_padded_under_a_mask_of_ones_are_refused(what):
    """Automodel 3704. Runs of real text: two first tokens (a doubled BOS), a run of a common token, one row alone."""
    ids, fill = torch.tensor(LOOKS[what][0]), LOOKS[what][1]
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == (ids[0, 0] if fill is None else fill), IGNORED)}
    ones, adapter = torch.ones_like(ids), BatchAdapter(tiny_model("llama", vocab_size=64))
    places = {"attention_mask": ones, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    for told in ({"attention_mask": ones}, {"attention_mask_2d": ones}, {"segment_ids": ones}, places):
        if fill is None:
            assert torch.equal(adapter(batch | told)["labels"][:, 1:], batch["labels"][:, 1:])
        else:
            with pytest.raises(CollateError, match="these rows look padded"):
                adapter(batch | told)
