"""The judge itself: adapters and collators that are wrong in one way each must be seen, and a right one must pass."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from batches import Case, Draw, case, causal, positions, sliding
from judging import adapt, judge, wrap

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROWS = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
PACKS = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]])
FULL = np.array([[1, 1, 2, 2]])
NEUTRAL = partial(wrap, with_2d=True)
TRANSFORMERS = partial(adapt, consumer="transformers")


def made(ids: np.ndarray, mask=None, style="left", attends=None, **told) -> Case:
    """A batch of this truth; its mask is bool 4D unless another is given."""
    tokens = np.where(ids > 0, np.arange(ids.size).reshape(ids.shape) + 3, 0)
    attends = causal(ids) if attends is None else attends
    mask = torch.from_numpy(attends)[:, None] if mask is None else mask
    told = {"polarity": "keep", "attends": attends, **told}
    return case(Draw(style, ids, tokens, np.random.default_rng(0)), mask, told=told)


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
ONE_ROW = made(np.array([[1, 1, 2, 2, 2]]))
RESTART = {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
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
