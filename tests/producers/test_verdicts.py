"""The judge itself: adapters and collators that are wrong in one way each must be seen, and a right one must pass."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from drawing import STYLES, Draw, causal, draw, positions, sliding
from entries import ENTRIES, Entry, megatron, transformers, wrap
from honest import REASONS, excuse
from producing import case
from verdicts import Case, Result, check_batch, judge

from collate_npu import CollateError, Pattern

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROWS = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
PACKS = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]])
NEUTRAL = partial(wrap, with_2d=True)


def made(ids: np.ndarray, **more) -> Case:
    tokens = np.where(ids > 0, np.arange(ids.size).reshape(ids.shape) + 3, 0)
    drawn = Draw("left", ids, tokens, np.random.default_rng(0))
    attends = more.pop("attends", causal(ids))
    return case(drawn, torch.from_numpy(attends)[:, None], attends=attends, polarity="keep", **more)


def model(out):
    """An adapter that gives back a batch made for it, whatever it is asked."""
    return lambda *args, **settings: lambda batch: dict(out)


def right(ids: np.ndarray, **changed) -> dict:
    masked = torch.from_numpy(~causal(ids))[:, None]
    out = {"attention_mask": masked, "attention_mask_2d": torch.from_numpy(ids > 0)}
    return {**out, "position_ids": torch.from_numpy(positions(ids)), **changed}


def verdict(out: dict, ids: np.ndarray = ROWS, entry=megatron) -> Result:
    return judge(lambda case: entry(case, make=model(out)), made(ids))


@pytest.mark.parametrize("ids", [ROWS, PACKS], ids=["rows", "packs"])
def test_a_right_answer_is_right(ids):
    assert verdict(right(ids), ids).verdict == "right"
    assert verdict(right(ids), ids, NEUTRAL).verdict == "right"


WRONG = {
    "the mask is dropped": {"attention_mask": None},
    "the polarity is turned": {"attention_mask": torch.from_numpy(causal(ROWS))[:, None]},
    "padding is attended": {"attention_mask": torch.from_numpy(~causal(np.ones_like(ROWS)))[:, None]},
    "another pattern": {"attention_mask": torch.from_numpy(~sliding(ROWS, 2))[:, None]},
    "the 2D mask is turned": {"attention_mask_2d": torch.from_numpy(ROWS == 0)},
    "the 2D mask is one token off": {"attention_mask_2d": torch.from_numpy(np.roll(ROWS, 1, 1) > 0)},
    "the 2D mask has another width": {"attention_mask_2d": torch.ones(2, 6, dtype=torch.bool)},
    "the mask has another width": {"attention_mask": torch.zeros(2, 1, 6, 6, dtype=torch.bool)},
    "the mask is of one row": {"attention_mask": torch.zeros(1, 1, 5, 5, dtype=torch.bool)},
    "the mask is not of this consumer": {"attention_mask": torch.from_numpy(ROWS > 0)},
    "the mask is added": {"attention_mask": torch.zeros(2, 1, 5, 5)},
    "positions count padding": {"position_ids": torch.arange(5).expand(2, -1)},
    "the segments are another's": {"segment_ids": torch.from_numpy(PACKS)},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_answer_is_seen(fault):
    assert verdict(right(ROWS, **WRONG[fault]), entry=NEUTRAL).verdict == "wrong"


def test_sequences_that_see_each_other_are_seen():
    one = (PACKS > 0).astype(np.int64)
    assert verdict(right(PACKS, attention_mask=torch.from_numpy(~causal(one))[:, None]), PACKS).verdict == "wrong"


def test_a_2d_mask_that_is_gone_is_seen():
    out = right(ROWS)
    del out["attention_mask_2d"]
    assert verdict(out, entry=NEUTRAL).verdict == "wrong"


def test_no_mask_packs_by_positions_on_transformers_alone():
    ids, row = np.array([[1, 1, 2, 2, 2]]), {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    assert verdict(row, ids, transformers).verdict == "right"
    assert verdict({"attention_mask": None}, ids, transformers).verdict == "wrong"
    assert verdict(row, ids, megatron).verdict == "wrong"
    two_d = {**row, "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
    assert verdict(two_d, ids, transformers).verdict == "wrong", "beside a 2D mask transformers does not look for packs"


def test_eager_attention_adds_its_mask():
    keep = torch.from_numpy(causal(PACKS))[:, None]
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    found = {
        form: [judge(partial(_read, mask=mask, implementation=form), made(PACKS)).verdict for mask in (keep, added)]
        for form in ("sdpa", "eager")
    }
    assert found == {"sdpa": ["right", "wrong"], "eager": ["wrong", "right"]}


def _read(case: Case, mask: torch.Tensor, implementation: str) -> None:
    check_batch({"attention_mask": mask}, case, "transformers", implementation)


def test_values_of_a_mask_are_not_replaced():
    out = right(ROWS)

    def kept(case):
        return megatron(case, make=lambda **_: lambda batch: {**out, "attention_mask": batch["attention_mask"]})

    assert judge(lambda case: megatron(case, make=model(out)), made(ROWS, richer=True)).verdict == "wrong"
    assert "replaced" not in judge(kept, made(ROWS, richer=True)).told


@pytest.mark.parametrize("offsets", [[0, 4], [0, 1, 4], [0, 2, 5], [0, 2]])
def test_offsets_of_a_flat_row_are_compared(offsets):
    ids = np.array([[1, 1, 2, 2]])
    drawn = Draw("packed", ids, ids + 2, np.random.default_rng(0))
    flat = Case(drawn, {"input_ids": torch.from_numpy(ids)}, ids, causal(ids), Pattern.of("causal"), flat=True)

    def entry(out):
        return judge(lambda case: megatron(case, make=model(out)), flat).verdict

    assert entry({"cu_seq_lens_q": torch.tensor([0, 2, 4])}) == "right"
    assert entry({"cu_seq_lens_q": torch.tensor(offsets)}) == "wrong"
    assert entry({"position_ids": torch.tensor([[0, 1, 2, 3]])}) == "wrong"
    assert entry({}) == "wrong"


def test_errors_are_told_apart():
    def refuses(case):
        raise CollateError("no")

    assert judge(refuses, made(ROWS)).verdict == "refused"
    for error in (KeyError("x"), ValueError("x"), AttributeError("x"), AssertionError("x")):
        assert judge(partial(_raise, error=error), made(ROWS)).verdict == "raw"


def _raise(case: Case, error: Exception) -> None:
    raise error


# --- where a refusal is honest

BY_TITLE = {entry.name: entry for entry in ENTRIES}


@pytest.mark.parametrize("title", BY_TITLE)
def test_no_refusal_of_plain_padding_is_honest(title):
    entry = BY_TITLE[title]
    assert excuse(made(ROWS), entry) is None
    assert excuse(made(np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])), entry) is None


def test_a_foreign_pattern_may_be_refused_until_it_is_declared():
    window = made(ROWS, attends=sliding(ROWS, 2), pattern=Pattern.sliding(2))
    assert excuse(window, BY_TITLE["megatron +2D"]) == "foreign pattern"
    assert excuse(window, BY_TITLE["megatron declared"]) is None
    assert excuse(window, BY_TITLE["derive"]) is None


def test_equal_packs_may_be_refused_until_something_tells():
    ids = np.array([[1, 1, 2, 2]])
    assert excuse(made(ids), BY_TITLE["derive"]) == "visible padding"
    assert excuse(made(np.array([[1, 1, 2, 2, 0]])), BY_TITLE["derive"]) == "chunks"
    assert excuse(made(np.array([[1, 1, 2, 2, 0]])), BY_TITLE["derive declared"]) is None
    beside = made(ids, position_ids=torch.from_numpy(positions(ids)))
    assert excuse(beside, BY_TITLE["transformers"]) is None
    assert excuse(beside, BY_TITLE["derive"]) == "visible padding", "a mask alone has no positions beside it"
    assert excuse(made(np.array([[1, 1, 2, 2, 2, 0]])), BY_TITLE["derive"]) is None


def test_a_batch_without_mask_may_be_refused_where_nothing_tells():
    bare = made(ROWS)
    bare.batch["attention_mask"] = None
    assert excuse(bare, BY_TITLE["megatron"]) == "no mask"
    assert excuse(bare, BY_TITLE["wrap"]) is None, "the samples stand on one side"
    assert excuse(bare, BY_TITLE["megatron +2D"]) is None


def test_every_reason_is_a_fact_of_some_batch():
    """A reason that holds nowhere, or everywhere, excuses nothing or all."""
    from catalogue import PRODUCERS

    names = [name for name, producer in PRODUCERS.items() if producer.available]
    seen: dict[str, set[bool]] = {name: set() for name in REASONS}
    for name in names:
        producer = PRODUCERS[name]
        for style in producer.styles:
            for index in (0, 2, 4, 6):
                if (found := producer.make(draw(style, index))) is not None:
                    for entry in ENTRIES:
                        for reason, holds in REASONS.items():
                            seen[reason].add(bool(holds(entry.case(found), entry)))
    assert {name for name, values in seen.items() if values != {True, False}} == set()


# --- what is drawn


@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_what_its_name_says(style):
    drawn = [draw(style, index) for index in range(40)]
    again = [draw(style, index) for index in range(40)]
    assert all((one.ids == other.ids).all() and (one.tokens == other.tokens).all() for one, other in zip(drawn, again))
    assert any(one.shape[0] == one.shape[1] > 1 for one in drawn)
    assert {one.shape[1] for one in drawn} >= {1, 64}
    keeps = [one.keep for one in drawn]
    starts = [keep[:, 0].all() for keep in keeps]
    ends = [keep[:, -1].all() for keep in keeps]
    assert all(keep.all() for keep in keeps) == (style in ("none", "packed"))
    assert {"right": all(starts), "packed_right": all(starts), "left": all(ends)}.get(style, True)
    assert any((~keep).all(axis=1).any() for keep in keeps) == (style == "empty_row")
    assert any((one.ids > 1).any() for one in drawn) == style.startswith("packed")


def test_the_truths_of_patterns_are_those_of_their_pictures():
    ids = np.array([[0, 1, 1, 1, 2, 2]])
    rows = causal(ids)[0].astype(int).tolist()
    assert ["".join(map(str, row)) for row in rows] == ["000000", "010000", "011000", "011100", "000010", "000011"]
    assert sliding(ids, 2)[0].sum() == 8
    assert positions(ids).tolist() == [[0, 0, 1, 2, 0, 1]]


def test_entries_have_names_of_their_own():
    assert len(BY_TITLE) == len(ENTRIES)
    assert all(isinstance(entry, Entry) for entry in ENTRIES)
