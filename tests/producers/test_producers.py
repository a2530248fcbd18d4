"""Masks of released software through the public entries: right or refused, never wrong, never a raw exception.

COLLATE_NPU_PRODUCERS_EACH sets how many batches each producer makes in each style (CI: 20). The seed draws them, and says
which batches each entry is given: every third, another third with each seed; under the profile `fuzz` all.
"""

import os
from collections import defaultdict
from collections.abc import Iterator

import from_flat_rows
import from_trainers
import from_transformers
import numpy as np
import pytest
from batches import Case, draw
from judging import ENTRIES, LIMITS, Entry, Result, block_mask_attends, judge, told_all
from rotation import PROFILE, SEED
from torch import Tensor

EACH = int(os.environ.get("COLLATE_NPU_PRODUCERS_EACH", "20"))
STEP = 1 if PROFILE == "fuzz" else 3
SHOWN = 3
MODULES = (from_transformers, from_trainers, from_flat_rows)
PRODUCERS = {producer.name: producer for module in MODULES for producer in module.PRODUCERS}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
AVAILABLE = [name for name, producer in PRODUCERS.items() if producer.available]


def cases(name: str) -> list[Case]:
    """The producer's batches."""
    made = (PRODUCERS[name].make(draw(style, index)) for style in PRODUCERS[name].styles for index in range(EACH))
    return [case for case in made if case is not None]


@pytest.mark.draws(12)
@pytest.mark.parametrize("name", AVAILABLE)
def test_right_or_refused(name):
    """The emission is what its row says, and so is what every entry makes of it, or it is refused."""
    made = cases(name)
    assert [described for case in made if (described := misdescribed(case))] == []
    failures = [
        (entry.name, kind, case, result)
        for n, entry in enumerate(ENTRIES)
        for kind, case, result in judged(name, entry, made[(n + SEED) % STEP :: STEP])
        if kind not in ("right", "refused", "limit")
    ]
    if failures:
        pytest.fail(told(failures), pytrace=False)


def misdescribed(case: Case) -> tuple:
    """A batch whose emission, as its own software reads it, is not what its row says."""
    if case.mask is None or case.flat or np.any(case.silent):
        return ()
    wrong = (read_emission(case) != case.attends) & case.keep[:, :, None]
    return (case.draw.style, case.ids.tolist(), np.argwhere(wrong)[0].tolist()) if wrong.any() else ()


def judged(name: str, entry: Entry, batches: list[Case]) -> Iterator[tuple[str, Case, Result]]:
    for whole in filter(entry.applies, batches):
        case = entry.case(whole)
        result = judge(entry.run, case)
        if result.verdict == "wrong" and entry.wraps:  # what the samples tell beside a silent mask is the truth as well
            result = judge(entry.run, whole)
        unfair = result.verdict == "refused" and told_all(case, entry)
        limit = result.verdict == "wrong" and any(holds(case, entry) for holds in LIMITS.values())
        yield "unfair" if unfair else "limit" if limit else result.verdict, case, result


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


def test_every_producer_has_a_name_of_its_own():
    assert len(PRODUCERS) == sum(len(module.PRODUCERS) for module in MODULES) >= 80
    assert len(AVAILABLE) >= 40


def told(failures: list[tuple[str, str, Case, Result]]) -> str:
    """How many of each entry and kind, and the smallest examples."""
    by = defaultdict(list)
    for entry, kind, case, result in sorted(failures, key=lambda failure: failure[2].ids.size):
        by[entry, kind].append(f"  {case.draw.style} {case.ids.tolist()}: {result.told}")
    return "\n".join(line for of, lines in by.items() for line in (f"{of}: {len(lines)}", *lines[:SHOWN]))
