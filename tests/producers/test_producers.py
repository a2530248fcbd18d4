"""Masks of released software through the public entries: right or refused, never wrong, never a raw exception.

COLLATE_NPU_PRODUCERS_EACH sets how many batches each producer makes in each style (CI: 12).
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import numpy as np
import pytest
from catalogue import PRODUCERS
from drawing import draw
from honest import excuse
from torch import Tensor
from verdicts import ENTRIES, Case, Entry, Result, judge

EACH = int(os.environ.get("COLLATE_NPU_PRODUCERS_EACH", "12"))
SHOWN = 3
AVAILABLE = [name for name, producer in PRODUCERS.items() if producer.available]


@cache
def cases(name: str) -> list[Case]:
    """The producer's batches, made once for all entries."""
    made = (PRODUCERS[name].make(draw(style, index)) for style in PRODUCERS[name].styles for index in range(EACH))
    return [case for case in made if case is not None]


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_emission_is_what_the_catalogue_says(name):
    for case in cases(name):
        if case.mask is None or case.silent:
            continue
        read = read_emission(case)
        wrong = (read != case.attends) & case.keep[:, :, None]
        assert not wrong.any(), (case.draw.style, case.ids.tolist(), np.argwhere(wrong)[0].tolist())


def read_emission(case: Case) -> np.ndarray:
    """bool `[B, S, S]`: the attention that the producer's own consumer computes."""
    from verdicts import block_mask_attends

    mask, (B, S) = case.mask, case.ids.shape
    if isinstance(mask, Tensor) and mask.ndim == 2 and tuple(mask.shape) == (B, S):
        ids = mask.numpy().astype(np.int64)
        return (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, None, :] & np.tri(S, dtype=bool)
    if not isinstance(mask, (Tensor, np.ndarray)):
        return block_mask_attends(mask, (B, S))
    values = np.asarray(mask.float() if isinstance(mask, Tensor) else mask)
    attends = {"bias": lambda: values > -9e3, "masked": lambda: values == 0}.get(case.polarity, lambda: values != 0)()
    while attends.ndim > 3:
        attends = attends.any(axis=1)
    return np.broadcast_to(attends, (B, S, S))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("name", AVAILABLE)
def test_never_wrong_never_raw_never_refused_without_a_reason(name, entry, summary):
    failures = []
    for whole in cases(name):
        if not entry.applies(whole):
            continue
        case = entry.case(whole)
        result = judge(entry.run, case)
        kind = kind_of(result, case, entry, name)
        summary[name, whole.draw.style, entry.name][kind] += 1
        if kind not in ("right", "refused"):
            failures.append((kind, case, result))
    assert not failures, told(failures)


def kind_of(result: Result, case: Case, entry: Entry, name: str) -> str:
    """The verdict; a refusal without a reason is a kind of its own."""
    if result.verdict == "refused" and excuse(case, entry, PRODUCERS[name].ambiguous) is None:
        return "unfair"
    return result.verdict


def told(failures: list[tuple[str, Case, Result]]) -> str:
    counts = Counter(kind for kind, _, _ in failures)
    lines = [f"{kind}, {case.draw.style}, {case.ids.tolist()}: {result.told}" for kind, case, result in failures]
    lines.sort(key=len)
    picked = [line for kind in counts for line in [line for line in lines if line.startswith(kind)][:SHOWN]]
    return "\n".join([", ".join(f"{n} {kind}" for kind, n in counts.items()), *picked])
