"""Masks of released software through the public entries: right or refused, never wrong, never a raw exception."""

from collections.abc import Iterator

import from_flat_rows
import from_trainers
import from_transformers
import numpy as np
import pytest
from batches import Case, draws
from hypothesis import HealthCheck, given, settings
from judging import ENTRIES, LIMITS, Result, block_mask_attends, judge, told_all
from torch import Tensor

MODULES = (from_transformers, from_trainers, from_flat_rows)
PRODUCERS = {producer.name: producer for module in MODULES for producer in module.PRODUCERS}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
AVAILABLE = [name for name, producer in PRODUCERS.items() if producer.available]


@pytest.mark.draws(12)
@pytest.mark.parametrize("name", AVAILABLE)
def test_right_or_refused(name):
    """The emission is what its row says, and so is what every entry makes of it, or it is refused."""

    @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(draws(PRODUCERS[name].styles))
    def law(drawn):
        if (case := PRODUCERS[name].make(drawn)) is not None:
            assert misdescribed(case) == ()
            assert [fault for fault in judged(case) if fault[1] not in ("right", "refused", "limit")] == []

    law()


def misdescribed(case: Case) -> tuple:
    """A batch whose emission, as its own software reads it, is not what its row says."""
    if case.mask is None or case.flat or np.any(case.silent):
        return ()
    wrong = (read_emission(case) != case.attends) & case.keep[:, :, None]
    return (case.draw.style, case.ids.tolist(), np.argwhere(wrong)[0].tolist()) if wrong.any() else ()


def judged(whole: Case) -> Iterator[tuple[str, str, Result]]:
    """What each entry makes of a batch."""
    for entry in (each for each in ENTRIES if each.applies(whole)):
        case = entry.case(whole)
        result = judge(entry.run, case)
        if result.verdict == "wrong" and entry.wraps:  # what the samples tell beside a silent mask is the truth as well
            result = judge(entry.run, whole)
        unfair = result.verdict == "refused" and told_all(case, entry)
        limit = result.verdict == "wrong" and any(holds(case, entry) for holds in LIMITS.values())
        yield entry.name, "unfair" if unfair else "limit" if limit else result.verdict, result


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
