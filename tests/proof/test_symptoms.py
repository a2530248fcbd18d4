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
        (off({0: 0, 1: 0, 3: 0, 4: 0}), symptoms.PADDING + symptoms.STAYS),
        (off({0: 0, 1: 0, 3: 2, 4: 0}, by=fading), symptoms.PADDING + symptoms.FADES),
        (off({0: 0}), symptoms.PADDING),
        (off({0: 0, 3: 2}), symptoms.PADDING),  # both are wrong in their last 42, and that is chance
        (off({0: 0, 1: 0, 2: 0, 3: 0, 4: 0}), symptoms.EVERYWHERE),
        (off({2: 64}), symptoms.CHUNK.format(64)),
        (off({1: 32, 2: 96}), symptoms.CHUNK.format(32)),
        (off({1: 45, 2: 125, 3: 39}), symptoms.TAIL.format(5)),
        (off({0: 1, 2: 5}), ""),
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
    known = [-torch.rand(6, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    assert meaning([known[0], known[2], known[1], known[3]], known, 1e-3) == symptoms.ORDER
    assert meaning([known[0], known[2] + 1, known[1], known[3]], known, 1e-3) != symptoms.ORDER


def test_samples_that_hold_the_pad_id_alone():
    assert meaning(off({1: 3, 3: 5}), KNOWN, 1e-3, [False, True, False, True, False]) == symptoms.PAD_ID
    assert meaning(off({1: 3, 2: 5}), KNOWN, 1e-3, [False, True, False, True, False]) != symptoms.PAD_ID


def test_behind_a_short_text_an_error_of_attention_fades_too_and_tells_nothing():
    known = [-torch.ones(length).double() for length in (4, 60, 70, 80)]
    found = [x - (n > 0) * fading(torch.arange(len(x))) for n, x in enumerate(known)]
    assert meaning(found, known, 1e-3) == symptoms.BOUNDARIES


def test_what_is_nearer_than_the_bound_is_no_error():
    assert meaning(off({1: 0, 2: 0, 3: 0}), KNOWN, 2.0) == ""
