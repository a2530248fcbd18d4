"""Masks of released software through the public entries: right or refused, never wrong, never a raw exception.

COLLATE_NPU_PRODUCERS_EACH sets how many batches each producer makes in each style (CI: 20). There each entry is given
every third batch; with COLLATE_NPU_PRODUCERS_ALL=1 it is given all.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import numpy as np
import pytest
from catalogue import PRODUCERS
from drawing import draw
from entries import ENTRIES, Entry
from honest import excuse
from torch import Tensor
from verdicts import Case, Result, block_mask_attends, judge

EACH = int(os.environ.get("COLLATE_NPU_PRODUCERS_EACH", "20"))
STEP = 1 if os.environ.get("COLLATE_NPU_PRODUCERS_ALL") else 3
SHOWN = 3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
AVAILABLE = [name for name, producer in PRODUCERS.items() if producer.available]


@cache
def cases(name: str) -> list[Case]:
    """The producer's batches, made once for all entries."""
    made = (PRODUCERS[name].make(draw(style, index)) for style in PRODUCERS[name].styles for index in range(EACH))
    return [case for case in made if case is not None]


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_emission_is_what_the_catalogue_says(name):
    for case in cases(name):
        if case.mask is None or np.any(case.silent):
            continue
        read = read_emission(case)
        wrong = (read != case.attends) & case.keep[:, :, None]
        assert not wrong.any(), (case.draw.style, case.ids.tolist(), np.argwhere(wrong)[0].tolist())


def read_emission(case: Case) -> np.ndarray:
    """bool `[B, S, S]`: the attention that the producer's own consumer computes."""
    mask, (B, S) = case.mask, case.ids.shape
    if not isinstance(mask, (Tensor, np.ndarray, list)):
        return block_mask_attends(mask, (B, S))
    values = np.asarray(mask.float() if isinstance(mask, Tensor) else mask)
    attends = {"bias": lambda: values > -9e3, "masked": lambda: values == 0}.get(case.polarity, lambda: values != 0)()
    if values.shape == (B, S):  # who is real; what stands beside it tells the sequences apart
        same = (attends == case.keep).all() and (values.max() <= 1 or (values == case.ids).all())
        return case.attends if same else ~case.attends
    while attends.ndim > 3:
        attends = attends.any(axis=1)
    return np.broadcast_to(attends, (B, S, S))


def test_the_catalogue_is_as_large_as_it_says():
    assert len(PRODUCERS) >= 100
    assert len(AVAILABLE) >= 40


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("name", AVAILABLE)
def test_right_or_refused(name, entry, summary):
    failures = []
    for whole in cases(name)[ENTRIES.index(entry) % STEP :: STEP]:
        if not entry.applies(whole):
            continue
        case = entry.case(whole)
        result = judge(entry.run, case)
        if result.verdict == "wrong" and entry.wraps:  # what the samples tell beside a silent mask is the truth as well
            result = judge(entry.run, whole)
        kind = kind_of(result, case, entry, name)
        summary[name, whole.draw.style, entry.name][kind] += 1
        if kind not in ("right", "refused"):
            failures.append((kind, case, result))
    if failures:
        pytest.fail(told(failures), pytrace=False)


def kind_of(result: Result, case: Case, entry: Entry, name: str) -> str:
    """The verdict; a refusal without a reason is a kind of its own."""
    if result.verdict == "refused" and excuse(case, entry, PRODUCERS[name].ambiguous) is None:
        return "unfair"
    return result.verdict


def told(failures: list[tuple[str, Case, Result]]) -> str:
    """How many of each kind, and the smallest examples."""
    counts = Counter(kind for kind, _, _ in failures)
    failures = sorted(failures, key=lambda failure: failure[1].ids.size)
    lines = [", ".join(f"{n} {kind}" for kind, n in counts.items())]
    for kind in counts:
        shown = [(case, result) for other, case, result in failures if other == kind][:SHOWN]
        lines += [f"  {kind}, {case.draw.style} {case.ids.tolist()}: {result.told}" for case, result in shown]
    return "\n".join(lines)
