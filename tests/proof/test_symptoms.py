"""Each pattern of errors has its meaning, and one that is not known has none."""

import pytest
import torch

from collate_npu.proof import symptoms
from collate_npu.proof.symptoms import meaning

LENGTHS = (8, 50, 130, 44, 60)
KNOWN = [-torch.rand(length, generator=torch.Generator().manual_seed(length)).double() - 1 for length in LENGTHS]


def off(begins, *, by=lambda t: 1.0 + 0 * t, ends=None):
    """What is off from a token on, for samples by number."""
    found = [x.clone() for x in KNOWN]
    for n, start in begins.items():
        found[n][start:ends] += by(torch.arange(len(found[n]))[start:ends].double())
    return found


def fading(t):
    return torch.exp(-t / 20)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (off({1: 0, 2: 0, 3: 0, 4: 0}), symptoms.BOUNDARIES + symptoms.STAYS),
        (off({2: 0, 3: 0, 4: 0}, by=fading), symptoms.BOUNDARIES + symptoms.FADES),
        (off({2: 0, 3: 0}, by=fading), symptoms.BOUNDARIES),
        (off({1: 0, 2: 0, 3: 0, 4: 0}, ends=6), symptoms.BOUNDARIES + symptoms.ENDS),
        (off({1: 5, 2: 5, 3: 5, 4: 5}, ends=15), symptoms.BOUNDARIES + symptoms.ENDS),
        (off({0: 0, 1: 0, 3: 0, 4: 0}), symptoms.PADDING + symptoms.STAYS),
        (off({0: 0, 1: 0, 3: 2, 4: 0}, by=fading), symptoms.PADDING + symptoms.FADES),
        (off({0: 0}), symptoms.PADDING),
        (off({0: 0, 3: 2}), symptoms.PADDING),  # both are wrong in their last 42, and that is chance
        (off({0: 0, 1: 0, 2: 0, 3: 0, 4: 0}), symptoms.EVERYWHERE),
        (off({2: 64}), symptoms.CHUNK.format(64)),
        (off({1: 32, 2: 96}), symptoms.CHUNK.format(32)),
        (off({1: 45, 2: 125, 3: 39}), symptoms.TAIL.format(5)),
        (off({1: 16, 2: 80}), symptoms.CHUNK.format(16)),
        (off({0: 0, 2: 16}), ""),
        (off({2: 8, 4: 16}), symptoms.CHUNK.format(8)),
        (off({0: 4}), symptoms.TAIL.format(4)),
        (off({0: 0, 1: 40, 2: 120}), symptoms.TAIL.format(10)),
        (off({0: 1}), symptoms.PADDING),  # nearly all of it is no tail
        (off({0: 1, 2: 5}), ""),
        (off({0: 0, 2: 0}), ""),
        (off({0: 1, 1: 3, 2: 5, 3: 2, 4: 0}), ""),
        (off({}), ""),
        (KNOWN[1:] + KNOWN[:1], symptoms.ORDER),
        ([torch.cat([x[1:], x[:1]]) for x in KNOWN], symptoms.MOVED),
        ([torch.cat([x[-1:], x[:-1]]) for x in KNOWN], symptoms.MOVED),
        (off({3: 7}, by=lambda t: t * float("nan")), symptoms.NAN),
        (off({3: 7}, by=lambda t: t * float("inf")), symptoms.NAN),
    ],
)
def test_a_pattern_is_named(found, said):
    assert meaning(found, KNOWN, 1e-3) == said


def test_samples_of_one_length_that_change_places_are_told_from_errors():
    known = [-torch.rand(2, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    assert meaning([known[0], known[2], known[1], known[3]], known, 1e-3) == symptoms.ORDER
    assert meaning([known[0], known[2] + 1, known[1], known[3]], known, 1e-3) != symptoms.ORDER


def test_samples_that_hold_the_pad_id_alone():
    assert meaning(off({1: 3, 3: 5}), KNOWN, 1e-3, [False, True, False, True, False]) == symptoms.PAD_ID
    assert meaning(off({1: 3, 2: 5}), KNOWN, 1e-3, [False, True, False, True, False]) != symptoms.PAD_ID


@pytest.mark.parametrize(
    ("lengths", "right", "said"),
    [
        ((4, 60, 70, 80), 0, symptoms.BOUNDARIES),
        ((47, 60, 60, 60), 0, symptoms.BOUNDARIES),
        ((48, 60, 60, 60), 0, symptoms.BOUNDARIES + symptoms.STAYS),
        ((53, 53, 53, 100), 3, symptoms.PADDING),
        ((52, 52, 52, 100), 3, symptoms.PADDING + symptoms.STAYS),
        ((40, 40, 40, 100), 3, symptoms.PADDING),  # too short to fade
        ((41, 41, 41, 100), 3, symptoms.PADDING + symptoms.STAYS),
        ((60, 0, 60), 1, symptoms.EVERYWHERE),
    ],
)
def test_what_stands_behind_a_short_text_or_is_short_does_not_tell_how_an_error_fades(lengths, right, said):
    known = [-torch.ones(length).double() for length in lengths]
    assert meaning([x - int(n != right) for n, x in enumerate(known)], known, 1e-3) == said


def test_what_is_no_further_off_than_the_bound_is_no_error():
    assert meaning(off({1: 0, 2: 0, 3: 0}), KNOWN, 2.0) == ""
    known = [-torch.ones(8)]
    assert meaning([known[0] - 1], known, 1.0) == ""
    assert meaning([known[0] - 1 - (torch.arange(8) > 3).float()], known, 1.0) == symptoms.TAIL.format(4)
