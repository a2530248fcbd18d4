"""The scale is measured on answers alone, one wrong source does not widen it, and what tells nothing is refused."""

import pytest
import torch
from scoring import score, toy

from collate_npu import CollateError
from collate_npu.proof.conformance import _LEAST, alone, difference, measured
from collate_npu.proof.measure import TIMES

LENGTHS = (9, 17, 5, 64)


def drawer(seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return lambda length: torch.randint(3, 256, (length,), generator=drawn).tolist()


def scale(run=toy, shift=0.0, own=None):
    """Of a stack, to whose answers with tokens behind them a relative error is put."""
    draw = drawer()
    samples = [draw(length) for length in LENGTHS]

    def ask(name, batch):
        return run(batch)

    own = own or alone(ask, samples)
    return measured(ask, samples, own, [[x * (1 + shift) for x in own]], draw)


OWN = torch.cat(toy(list(map(drawer(), LENGTHS))))


def rounded(places):
    """Answers that depend in a small place on how many samples are asked for."""
    return lambda samples: [x * (1 + places * (len(samples) - 1)) for x in toy(samples)]


def test_noise_of_float32_is_fine_and_six_times_it_passes():
    found = scale(rounded(1e-7), shift=2e-6)
    assert found.noise == pytest.approx(2e-6, rel=1e-2)
    assert found.limit == TIMES * found.noise
    assert found.bound == pytest.approx(found.limit * float(OWN.abs().max()), rel=1e-2)
    assert scale(rounded(1e-8)).noise == _LEAST


def test_answers_that_are_all_equal_tell_nothing_of_rounding():
    found = scale()
    assert found.limit == found.lost / 10
    assert found.bound == pytest.approx(found.limit * float(OWN.square().mean().sqrt()))
    assert scale(lambda samples: [x * (1 + 1e-3 * (n > 0)) for n, x in enumerate(toy(samples))]) == found  # behind another


def test_one_wrong_source_does_not_widen_what_passes():
    """Were it noise, six times it would pass."""
    found = scale(rounded(1e-7), shift=1e-2)
    assert found.limit == TIMES * _LEAST
    assert found.bound == scale(rounded(1e-7), shift=3e-3).bound < 1e-4
    assert scale(rounded(1e-4), shift=1e-2).limit < 1e-2


def test_noise_of_all_sources_passes_also_where_it_is_coarse():
    found = scale(rounded(2e-3), shift=3e-3)
    assert found.limit == pytest.approx(TIMES * 2e-3, rel=1e-2)
    for low, size in zip(OWN.sort().values[[1, 9]] - 1e-9, (1e-6, 1e-4)):  # flips of bfloat16 are no noise of float32
        found = scale(lambda rows, low=low, size=size: [x + size * (len(rows) > 1) * (x < low) for x in toy(rows)])
        assert found.limit == found.lost / 10


def test_what_tells_nothing_is_refused():
    refused = {
        "do not depend on the tokens": lambda samples: [-torch.ones(len(ids) - 1).double() for ids in samples],
        "noise of .*nothing is proved": rounded(0.5),
        "on the last tokens": lambda samples: [torch.cat([-torch.ones(1).double(), score(ids)[:-1]]) for ids in samples],
        "not a number for a sample alone": lambda samples: [x * float("nan") for x in toy(samples)],
        "asked twice": lambda samples: [x * (1 + torch.rand(1)) for x in toy(samples)],
    }
    for said, run in refused.items():
        with pytest.raises(CollateError, match=said):
            scale(run, shift=0.4 if "noise" in said else 0.0)


def test_a_difference_of_lengths_or_what_is_no_number_passes_nothing():
    x, y = torch.ones(3), torch.ones(2)
    assert difference([x], [y]) == float("inf")
    assert not difference([x * float("nan")], [x]) <= float("inf")
