"""Threads: one object used by many at once gives each what it gives one; nothing of a call is kept where another sees it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from laws.compared import bits

from collate_npu import BatchAdapter, CollateError, PaddingCollator, wrap_collator

THREADS = 8
LEFT = SimpleNamespace(pad_token_id=0, padding_side="left")
RECURRENT = {"consumer": "megatron", "needs_mask_2d": True}


@pytest.fixture(autouse=True)
def switching():
    """Threads change places as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def samples(seed):
    """1 to 4 rows of up to 300 tokens, lists and arrays, some packed: another shape with every seed."""
    random = np.random.default_rng(seed)
    rows = []
    for length in random.integers(2, 300 if seed % 5 == 0 else 40, size=random.integers(1, 5)):
        ids = random.integers(0, 1000, length)
        row = {"input_ids": ids.tolist() if seed % 2 else ids, "labels": ids.tolist() if seed % 3 else ids}
        rows.append(row | ({"attention_mask": (np.arange(length) > length // 3) + 1} if seed % 7 == 0 else {}))
    return rows


def inner(features):
    """A collator as people write one: packing numbers as its mask."""
    return {**PaddingCollator(pad_token_id=0, attention_mask="2d")(features), "segment_ids": None, "attention_mask_2d": None}


def adapted(adapter):
    """What an adapter makes of batches that arrive with a 2D mask alone."""
    return lambda features: adapter(inner(features))


MAKERS = {
    "padded": lambda: PaddingCollator(pad_token_id=0, attention_mask="2d"),
    "left": lambda: PaddingCollator(LEFT, consumer="transformers"),
    "flat": lambda: PaddingCollator(pad_token_id=0, padding_free=True, pad_to_multiple_of=4),
    "wrapped": lambda: wrap_collator(inner, attention_mask="4d"),
    "adapter": lambda: adapted(BatchAdapter(**RECURRENT)),
}


def outcome(collator, seed):
    """The batch, to the bit, or the words it is refused with."""
    try:
        return bits(collator(samples(seed)))
    except CollateError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_one_object_in_eight_threads(name):
    seeds, alone, shared = range(800), MAKERS[name](), MAKERS[name]()
    expected = [outcome(alone, seed) for seed in seeds]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda seed: outcome(shared, seed), seeds))
    assert found == expected
    assert sum(isinstance(each, dict) for each in found) > 600
