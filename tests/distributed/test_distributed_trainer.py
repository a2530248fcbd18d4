"""transformers' Trainer and accelerate with the sequence shared out between two real ranks."""

import functools

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import gloo_trainer as work

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]

START = 120
"""Seconds: importing transformers in each rank."""
SHARDED = {"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"}


@pytest.mark.parametrize(("lengths", "width"), [([16, 16], 16), ([9, 16], 16), ([5, 12, 20], 24)])
def test_a_shared_step_is_the_step_alone(pair, lengths, width):
    for answer in pair(work.trainer_step, lengths, width, seconds=START):
        assert answer["loss"] == pytest.approx(answer["right"], abs=1e-5)
        assert answer["grads"] < 1e-5
        assert answer["seen"] == dict.fromkeys(SHARDED, (len(lengths), width // 2))


@pytest.mark.parametrize(("side", "wrong"), [("right", False), ("left", True)])
def test_what_we_refuse_trainer_computes_wrongly_in_silence(pair, side, wrong):
    """Left padding: accelerate's hooks drop the mask, and real tokens attend padding. Right padding is the control."""
    answer = pair(functools.partial(work.trainer_step, ours=False), [9, 16], 16, side, seconds=START)[0]
    assert (abs(answer["loss"] - answer["right"]) > 1e-3) is wrong
