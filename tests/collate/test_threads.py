"""Threads: one object used by many at once gives each what it gives one; nothing of a call is kept where another sees it."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, wrap_collator
from collate_npu.collate import wire
from collate_npu.consumers.consumer import consumers

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


def at_once(work, arguments):
    """`work` of every argument, by threads that begin together."""
    barrier = threading.Barrier(THREADS)

    def share(n):
        barrier.wait(30)
        return [(i, work(arguments[i])) for i in range(n, len(arguments), THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        done = dict(pair for part in pool.map(share, range(THREADS)) for pair in part)
    return [done[i] for i in range(len(arguments))]


def samples(seed):
    """1 to 4 rows of up to 300 tokens, lists and arrays, some packed: another shape with every seed."""
    random = np.random.default_rng(seed)
    rows = []
    for length in random.integers(2, 300 if seed % 5 == 0 else 40, size=random.integers(1, 5)):
        ids = random.integers(0, 1000, length)
        row = {"input_ids": ids.tolist() if seed % 2 else ids, "labels": ids.tolist() if seed % 3 else ids}
        if seed % 7 == 0:
            row["attention_mask"] = (np.arange(length) > length // 3) + 1
        rows.append(row)
    return rows


def inner(features):
    """A collator as people write one."""
    width = max(len(row["input_ids"]) for row in features)
    ids = torch.zeros(len(features), width, dtype=torch.long)
    keep = torch.zeros(len(features), width, dtype=torch.long)
    for b, row in enumerate(features):
        ids[b, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
        keep[b, : len(row["input_ids"])] = torch.as_tensor(row.get("attention_mask", 1))
    return {"input_ids": ids, "attention_mask": keep, "labels": ids.clone()}


def adapted(adapter):
    """What an adapter makes of batches that arrive with a 2D mask alone."""
    return lambda features: adapter(inner(features))


MAKERS = {
    "padded": lambda: PaddingCollator(pad_token_id=0, attention_mask="2d"),
    "left": lambda: PaddingCollator(LEFT, consumer="transformers"),
    "flat": lambda: PaddingCollator(pad_token_id=0, padding_free=True, sequence_multiple=4, max_sequences=16),
    "wrapped": lambda: wrap_collator(inner, attention_mask="4d"),
    "adapter": lambda: adapted(BatchAdapter(**RECURRENT)),
}


def outcome(collator, seed):
    """The batch, or the words it is refused with."""
    try:
        return collator(samples(seed))
    except CollateError as error:
        return str(error)


def alike(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("name", MAKERS)
def test_one_object_in_eight_threads(name):
    seeds, alone, shared = range(800), MAKERS[name](), MAKERS[name]()
    expected = [outcome(alone, seed) for seed in seeds]
    found = at_once(lambda seed: outcome(shared, seed), seeds)
    wrong = [seed for seed in seeds if not alike(expected[seed], found[seed])]
    assert not wrong
    assert sum(isinstance(each, dict) for each in found) > 600


def readings(segments):
    """Everything one can read off, computed or kept."""
    names = [name for name in dir(Segments) if not name.startswith("_")]
    values = {name: getattr(segments, name) for name in names}
    plain = {
        name: value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value for name, value in values.items()
    }
    return {name: value for name, value in plain.items() if not callable(value)}


KEEP = np.arange(300) % 7 < 5
GIVEN = {
    "from_ids": [KEEP * (1 + np.arange(300) // 7), np.zeros(300, int)],
    "from_keep": [KEEP, ~KEEP],
    "from_lengths": [[1, 2, 3] * 30, [5], []],
}
if hasattr(Segments, "laid_out"):  # builders that compute nothing before it is asked for
    GIVEN |= {"laid_out": ([[1, 2, 3] * 30, [5] * 20, []], 200), "kept": (np.stack([KEEP, ~KEEP]),)}


@pytest.mark.parametrize("build", GIVEN)
def test_segments_are_read_by_many_while_they_compute_what_they_keep(build):
    arguments = GIVEN[build] if isinstance(GIVEN[build], tuple) else (GIVEN[build],)
    expected = readings(getattr(Segments, build)(*arguments))
    assert {"ids", "keep", "lengths", "position_ids", "spans"} <= set(expected)
    for _ in range(20):
        segments = getattr(Segments, build)(*arguments)
        assert all(found == expected for found in at_once(lambda _, held=segments: readings(held), range(THREADS)))


def test_what_is_looked_up_once_is_the_same_for_all():
    """The consumers are found on the first call, and several threads may make it."""
    expected = dict(consumers())
    for _ in range(20):
        consumers.cache_clear()
        assert all(dict(found) == expected for found in at_once(lambda _: consumers(), range(THREADS)))


def test_the_warning_of_the_neutral_form_is_given():
    """Once a process; threads that come to it in the same moment may each give it."""
    wire._warn_of_neutral_form.cache_clear()
    collator = PaddingCollator(pad_token_id=0, attention_mask="4d")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at_once(lambda seed: collator(samples(seed)), range(64))
    assert 1 <= len([each for each in caught if "True = blocked" in str(each.message)]) <= THREADS
