"""Labels are a source: what data sets write gives, by four doors, each sample's own loss and gradient, or is refused.

The numbers of the batch without us stand beside it: what is right there is right here, and no change of a learned label is
silent.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from collate_npu import BatchAdapter, CollateError, PaddingCollator, adapt, describe, wrap_collator
from collate_npu.testing import tiny_model

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
VOCAB, EOS, NO = 64, 63, -100
TEXTS = [[5, 9, 31, 7, 22], [8, 40, 11], [13, 6, 27, 50, 19, 33, 12]]
SAMPLES = [[*text, EOS] for text in TEXTS]


def rows(values, fill, side):
    width = max(map(len, values))
    return torch.tensor(
        [([fill] * (width - len(v)) + v) if side == "left" else v + [fill] * (width - len(v)) for v in values]
    )


def laid(labels=None, *, side="right", pad=EOS, mask="lengths", at_padding=NO):
    """A batch of the samples, and their labels."""
    labels = labels or SAMPLES
    ids, keep = rows(SAMPLES, pad, side), rows([[1] * len(row) for row in SAMPLES], 0, side)
    batch = {"input_ids": ids, "attention_mask": keep if mask == "lengths" else (ids != pad).long()}
    return batch | {"labels": torch.where(keep == 1, rows(labels, NO, side), at_padding)}, labels


def moved(batch_and_labels, **more):
    batch, labels = batch_and_labels
    return {**batch, "labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NO), **more}, labels


def packed(labels):
    ids, own = ([token for row in of for token in row] for of in (SAMPLES, labels))
    numbers = [n for n, row in enumerate(SAMPLES, 1) for _ in row]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.tensor([numbers]),
        "labels": torch.tensor([own]),
    }, labels


PROMPTS = [[NO, NO, *row[2:]] for row in SAMPLES]
ENDS = [[*row[:-1], NO] for row in PROMPTS]
TURNS = [[*row[:2], EOS, *row[2:]] for row in SAMPLES]
LEARNED, COPIED = "learned at padding", torch.tensor(EOS)
IDIOMS = {
    # name: batch and labels, what a refusal says ("" where it is right)
    "text": (lambda side: laid(side=side), ""),
    "another pad id": (lambda side: laid(side=side, pad=0), ""),
    "completion only": (lambda side: laid(PROMPTS, side=side), ""),
    "assistant only": (lambda side: laid([[NO, *row[1:3], NO, *row[4:]] for row in SAMPLES], side=side), ""),
    "ends not learned": (lambda side: laid(ENDS, side=side), ""),
    "eos by ids != pad": (lambda side: laid(side=side, mask="ids"), ""),
    "eos by ids != pad, completion only": (lambda side: laid(PROMPTS, side=side, mask="ids"), ""),
    "ids copied after padding": (lambda side: laid(side=side, at_padding=COPIED), LEARNED),
    "copied, ids != pad": (lambda side: laid(side=side, mask="ids", at_padding=COPIED), LEARNED),
    "moved": (lambda side: moved(laid(side=side)), "these are moved"),
    "moved, ends not learned": (lambda side: moved(laid(ENDS, side=side)), "these are moved"),
    "packed": (lambda side: packed(PROMPTS), ""),
}
DOORS = {
    "adapter": lambda model, batch: model(**BatchAdapter(model)(batch)).loss,
    "wrapped": lambda model, batch: model(**wrap_collator(lambda _: batch, model=model)([{}])).loss,
    "adapt": lambda model, batch: through_adapt(model, batch),
    "collator": lambda model, batch: model(**collated(model, batch)).loss,
}


def through_adapt(model, batch, **settings):
    with adapt(model, **settings):
        return model(**batch).loss


def collated(model, batch):
    """By our own collator: each row of the batch is a sample, with the mask that it has there."""
    columns = [{key: value[b] for key, value in batch.items()} for b in range(len(batch["input_ids"]))]
    return PaddingCollator(pad_token_id=0, model=model)(columns)


def numbers(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def alone(model, labels):
    """Each sample by itself, weighted by its targets."""
    ones = [(torch.tensor([ids]), torch.tensor([own])) for ids, own in zip(SAMPLES, labels)]
    counts = [int((own[:, 1:] >= 0).sum()) for _, own in ones]
    found = [numbers(model, model(input_ids=ids, labels=own).loss) for ids, own in ones]
    return sum(each * n for each, n in zip(found, counts)) / sum(counts)


def off(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_next"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_data_sets_write_is_right_or_refused_by_every_door(idiom, side, family):
    make, told = IDIOMS[idiom]
    model = tiny_model(family, vocab_size=VOCAB).eval()
    batch, labels = make(side)
    wanted, plain = alone(model, labels), numbers(model, model(**batch).loss)
    assert not told or off(plain, wanted) > 1e-3  # what is refused is wrong without us
    for door, run in DOORS.items():
        if told:
            with pytest.raises(CollateError, match=told):
                run(model, batch)
        elif idiom == "packed" and door != "adapt" and family != "llama":
            continue  # a mask of packing ids is for `adapt`, or attention alone
        else:
            assert off(numbers(model, run(model, batch)), wanted) < 1e-4, door


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("labels", [PROMPTS, ENDS], ids=["ends learned", "ends not learned"])
def test_moved_labels_that_are_declared_are_moved_once(labels, side):
    model = tiny_model("qwen3_next", vocab_size=VOCAB).eval()
    (batch, _), wanted = moved(laid(labels, side=side)), alone(model, labels)
    inner = wrap_collator(lambda _: batch, model=model, labels_shifted=True)
    for found in (
        model(**BatchAdapter(model, labels_shifted=True)(batch)).loss,
        through_adapt(model, batch, labels_shifted=True),
        model(**inner([{}])).loss,
    ):
        assert off(numbers(model, found), wanted) < 1e-4


def test_an_end_token_that_a_mask_drops_is_real_where_labels_learn_it_and_nowhere_else():
    """Holes at each turn, several places, another token's label, an id that the mask keeps elsewhere: nobody knows."""
    batch, _ = laid(mask="ids")
    assert "lengths=[6, 4, 8]" in describe(batch)
    told = "If they are real (pad is eos): make the mask from the lengths"
    ids = rows(TURNS, EOS, "right")
    turns = {"input_ids": ids, "attention_mask": (ids != EOS).long(), "labels": rows(TURNS, NO, "right")}
    kept = {**batch, "attention_mask": batch["attention_mask"].index_fill(1, torch.tensor([7]), 1)}
    other = {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == EOS, 5)}
    weighed = {**other, "loss_mask": batch["attention_mask"].float()}
    for wrong in (turns, kept, other):
        assert told in describe(wrong)
    assert told not in describe(weighed)  # the loss mask leaves these out


REBUILT = {
    "from ids": lambda ids, keep: ids.masked_fill(keep == 0, NO),
    "by labels == pad": lambda ids, keep: ids.masked_fill((keep == 0) | (ids == EOS), NO),
    "more ignored": lambda ids, keep: ids.masked_fill((keep == 0) | (torch.arange(ids.shape[1]) < 3), NO),
}


@pytest.mark.parametrize("told", ["labels", "loss_mask"])
@pytest.mark.parametrize("how", REBUILT)
def test_labels_that_a_wrapped_collator_makes_anew_are_compared_with_the_samples(how, told):
    """transformers 26357: a prompt that the sample does not learn, an eos that it does."""
    own = [[NO, *row[1:]] for row in SAMPLES] if how == "by labels == pad" else PROMPTS
    values = own if told == "labels" else [[int(x != NO) for x in row] for row in own]
    samples = [{"input_ids": ids, told: value} for ids, value in zip(SAMPLES, values)]

    def inner(features):
        (batch, _) = laid()
        return {**batch, "labels": REBUILT[how](batch["input_ids"], batch["attention_mask"])}

    if how == "more ignored":
        assert int((wrap_collator(inner, attention_mask="2d")(samples)["labels"] >= 0).sum()) == 9
        return
    with pytest.raises(CollateError, match="others than in the samples"):
        wrap_collator(inner, attention_mask="2d")(samples)


DOUBLED = [[1, 1, 5, 6, 7], [1, 1, 8, 9, 2], [1, 1, 3, 4, 4]]
LOOKS = {
    "padded in the data set": ([[5, 6, 7, 8, 9], [0, 0, 0, 9, 10], [0, 0, 4, 5, 6]], True),
    "a long run of a token that stands elsewhere": ([[7] * 9 + [3, 5], [4, 5, 6, 7, 8, 9, 3, 2, 8, 6, 7]], True),
    "two first tokens in each row": (DOUBLED, False),
    "a run of a token that stands elsewhere": ([[7, 7, 3, 4], [5, 6, 7, 8]], False),
    "one row": ([[7, 7, 3, 4]], False),
}


@pytest.mark.parametrize("form", ["attention_mask", "attention_mask_2d", "segment_ids", "position_ids beside a mask"])
@pytest.mark.parametrize("what", LOOKS)
def test_rows_that_look_padded_under_a_mask_of_ones_are_refused(what, form):
    """Automodel 3704. Runs of real text: two first tokens (a doubled BOS), a run of a common token, one row alone."""
    ids, refused = LOOKS[what]
    ids = torch.tensor(ids)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == ids[-1 if refused and len(ids) > 2 else 0, 0], NO)}
    batch |= {form.partition(" ")[0]: torch.ones_like(ids)}
    if form.startswith("position"):
        batch |= {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    model = tiny_model("llama", vocab_size=VOCAB)
    if refused:
        with pytest.raises(CollateError, match="these rows look padded"):
            BatchAdapter(model)(batch)
        with adapt(model), pytest.raises(CollateError, match="these rows look padded"):
            model(
                **{key: x for key, x in batch.items() if key in ("input_ids", "labels", "attention_mask", "position_ids")}
                | ({} if "attention_mask" in batch else {"attention_mask": torch.ones_like(ids)})
            )
    else:
        assert torch.equal(BatchAdapter(model)(batch)["labels"][:, 1:], batch["labels"][:, 1:])
