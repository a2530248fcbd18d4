"""The judge itself: adapters and collators that are wrong in one way each must be seen, and a right one must pass."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from batches import Case, Draw, case, causal, positions, sliding, together
from judging import BY_NAME, ENTRIES, LIMITS, REASONS, adapt, check_batch, excuse, judge, wrap

from collate_npu import CollateError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROWS = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
PACKS = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]])
RIGHT, HOLE, FULL = np.array([[1, 1, 1, 0, 0], [1] * 5]), np.array([[1, 1, 0, 1, 1]]), np.array([[1, 1, 2, 2]])
NEUTRAL = partial(wrap, with_2d=True)
TRANSFORMERS = partial(adapt, consumer="transformers")


def made(ids: np.ndarray, mask=None, style="left", attends=None, **told) -> Case:
    """A batch of this truth; its mask is bool 4D unless another is given."""
    tokens = np.where(ids > 0, np.arange(ids.size).reshape(ids.shape) + 3, 0)
    attends = causal(ids) if attends is None else attends
    mask = torch.from_numpy(attends)[:, None] if mask is None else mask
    return case(
        Draw(style, ids, tokens, np.random.default_rng(0)), mask, told={"polarity": "keep", "attends": attends, **told}
    )


def beside(found: Case, **keys) -> Case:
    """The same batch with other keys."""
    return replace(found, batch={**found.batch, **keys})


def right(ids: np.ndarray, **changed) -> dict:
    masked = torch.from_numpy(~causal(ids))[:, None]
    out = {"attention_mask": masked, "attention_mask_2d": torch.from_numpy(ids > 0)}
    return {**out, "position_ids": torch.from_numpy(positions(ids)), **changed}


def verdict(out: dict, batch: Case, entry=adapt) -> str:
    """Of an adapter that gives back `out`, whatever it is asked."""
    return judge(lambda case: entry(case, make=lambda *_, **__: lambda batch: dict(out)), batch).verdict


WRONG = {
    "the mask is dropped": {"attention_mask": None},
    "the polarity is turned": {"attention_mask": torch.from_numpy(causal(ROWS))[:, None]},
    "padding is attended": {"attention_mask": torch.from_numpy(~causal(np.ones_like(ROWS)))[:, None]},
    "another pattern": {"attention_mask": torch.from_numpy(~sliding(ROWS, 2))[:, None]},
    "the 2D mask is gone": {"attention_mask_2d": None},
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
ONE_ROW, RESTART = (
    made(np.array([[1, 1, 2, 2, 2]])),
    {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
)
FLAT = replace(made(FULL, flat=True), batch={"input_ids": torch.from_numpy(FULL)})
ONE_SEQUENCE = torch.from_numpy(~causal((PACKS > 0).astype(np.int64)))[:, None]
ANSWERS = [
    ("right", right(ROWS), made(ROWS), adapt),
    ("right", right(PACKS), made(PACKS), NEUTRAL),
    *(("wrong", right(ROWS, **changed), made(ROWS), NEUTRAL) for changed in WRONG.values()),
    ("wrong", right(PACKS, attention_mask=ONE_SEQUENCE), made(PACKS), adapt),
    ("right", RESTART, ONE_ROW, TRANSFORMERS),  # without a mask it packs by positions, and Megatron does not
    ("wrong", {"attention_mask": None}, ONE_ROW, TRANSFORMERS),
    ("wrong", RESTART, ONE_ROW, adapt),
    ("wrong", {**RESTART, "attention_mask": torch.ones(1, 5, dtype=torch.int64)}, ONE_ROW, TRANSFORMERS),
    ("right", {"cu_seq_lens_q": torch.tensor([0, 2, 4])}, FLAT, adapt),
    *(("wrong", {"cu_seq_lens_q": torch.tensor(ends)}, FLAT, adapt) for ends in ([0, 4], [0, 1, 4], [0, 2, 5], [0, 2])),
    ("wrong", {"position_ids": torch.tensor([[0, 1, 2, 3]])}, FLAT, adapt),
    ("wrong", {}, FLAT, adapt),
    ("wrong", right(ROWS), made(ROWS, richer=True), adapt),
]
"""What is said of an answer, whatever it is asked: of one that is wrong in one way each, and of right ones."""


@pytest.mark.parametrize(("said", "out", "batch", "entry"), ANSWERS, ids=range(len(ANSWERS)))
def test_a_wrong_answer_is_seen_and_a_right_one_passes(said, out, batch, entry):
    assert verdict(out, batch, entry) == said


def test_eager_attention_adds_its_mask():
    keep = torch.from_numpy(causal(PACKS))[:, None]
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)

    def read(mask, implementation):
        check = partial(check_batch, {"attention_mask": mask}, consumer="transformers", implementation=implementation)
        return judge(check, made(PACKS)).verdict

    found = {form: [read(mask, form) for mask in (keep, added)] for form in ("sdpa", "eager")}
    assert found == {"sdpa": ["right", "wrong"], "eager": ["wrong", "right"]}


def test_errors_are_told_apart():
    def fails(error, case):
        raise error

    assert judge(partial(fails, CollateError("no")), made(ROWS)).verdict == "refused"
    for error in (KeyError("x"), ValueError("x"), AttributeError("x"), AssertionError("x")):
        assert judge(partial(fails, error), made(ROWS)).verdict == "raw"


# --- where a refusal is honest

ENTRY = {entry.name: entry for entry in ENTRIES}
DERIVE, DERIVE_2D, MEGATRON, WRAP = (ENTRY[name] for name in ("derive", "derive +2D", "megatron", "wrap"))


@pytest.mark.parametrize("reason", REASONS)
def test_no_reason_holds_everywhere(reason):
    """It would excuse every refusal."""
    entry = {"no boundaries": WRAP, "positions against mask": DERIVE}.get(reason, DERIVE_2D)
    assert not REASONS[reason](made(RIGHT), entry)


@pytest.mark.parametrize("title", ENTRY)
@pytest.mark.parametrize("ids", [ROWS, RIGHT], ids=["left", "right"])
def test_no_refusal_of_plain_padding_is_honest(title, ids):
    assert excuse(made(ids), ENTRY[title]) is None
    assert excuse(made(ids), DERIVE, tuple(BY_NAME)) is not None


def test_what_no_reader_could_read_otherwise_is_narrow():
    lone = beside(made(np.array([[1, 2]])), position_ids=torch.zeros(1, 2, dtype=torch.int64))
    assert LIMITS["single tokens by positions"](beside(lone, attention_mask=None), DERIVE)
    assert not LIMITS["single tokens by positions"](lone, DERIVE)
    for ids, holds in (([[1, 1, 0]], True), ([[1, 0, 0]], False), ([[1, 1, 1]], False)):
        assert LIMITS["a place alone"](made(np.array(ids), flat=True), WRAP) is holds
        assert not LIMITS["a place alone"](made(np.array(ids), flat=True), MEGATRON)
    for ids, holds in (([[1, 1, 2, 3]], True), ([[1, 1, 2, 2]], False), ([[1, 2, 2, 3]], False)):
        flat = made(np.array(ids), flat=True)
        alike = replace(flat, draw=replace(flat.draw, tokens=np.ones((1, 4), np.int64)))
        assert bool(LIMITS["tokens alone"](alike, WRAP)) is holds
        assert not LIMITS["tokens alone"](flat, WRAP)
    at = np.arange(5)
    for ids, holds in ((HOLE, True), (np.array([[1, 1, 1, 0, 1]]), False)):
        window = together(ids) & (abs(at[:, None] - at) <= 1)
        assert LIMITS["window or pack"](made(ids, attends=window, pattern=None), DERIVE) is holds
    for size, holds in ((1, True), (2, False)):
        window = sliding(RIGHT, size)
        assert LIMITS["window or pack"](made(RIGHT, attends=window, pattern=None), DERIVE) is holds
