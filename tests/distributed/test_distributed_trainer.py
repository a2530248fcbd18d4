"""transformers' Trainer and accelerate with the sequence shared out between two real ranks: what we refuse, and why. Steps
that are right stand in peers/test_transformers_cells.
"""

import functools

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import gloo_trainer as work

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]


@pytest.mark.parametrize(("side", "wrong"), [("right", False), ("left", True)])
def test_what_we_refuse_trainer_computes_wrongly_in_silence(pair, side, wrong):
    """Left padding: accelerate's hooks drop the mask, and real tokens attend padding. Right padding is the control."""
    answer = pair(functools.partial(work.trainer_step, ours=False), [9, 16], 16, side, seconds=120)[0]
    assert (abs(answer["loss"] - answer["right"]) > 1e-3) is wrong
