"""transformers' Trainer and accelerate with the sequence shared out between two real ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import gloo_trainer as work

START = 120
"""Seconds: importing transformers in each rank."""


@pytest.mark.parametrize(("lengths", "width"), [([16, 16], 16), ([9, 16], 16), ([5, 12, 20], 24)])
def test_a_step_in_accelerates_context_is_the_step_alone(pair, lengths, width):
    for answer in pair(work.accelerate_step, lengths, width, seconds=START):
        assert answer["in_order"]
        assert answer["loss"] == pytest.approx(answer["right"], abs=1e-5)
        assert answer["grads"] < 1e-5
        assert answer["seen"] == dict.fromkeys(answer["seen"], (len(lengths), width // 2))
        assert set(answer["seen"]) == {"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"}


@pytest.mark.parametrize(("lengths", "width"), [([9, 16], 16), ([5, 12, 20], 24)])
def test_trainers_own_context_on_our_batch_is_the_step_alone(pair, lengths, width):
    for answer in pair(work.trainer_step, lengths, width, seconds=START):
        assert answer["loss"] == pytest.approx(answer["right"], abs=1e-5)
        assert answer["grads"] < 1e-5


def test_what_we_refuse_trainer_computes_wrongly_in_silence(pair):
    """Left padding: accelerate's hooks drop the mask, and real tokens attend padding. Right padding is the control."""
    for side, wrong in (("right", False), ("left", True)):
        ours = pair(work.plain_trainer_step, side, [9, 16], 16, seconds=START)[0]
        right = pair(work.alone_loss, side, [9, 16], 16, seconds=START)[0]
        assert (abs(ours - right) > 1e-3) is wrong, (side, ours, right)


def test_a_recurrent_model_on_a_shard_is_wrong_in_silence_which_is_why_we_refuse_it(pair):
    ours, right = pair(work.recurrent_shard, seconds=START)[0]
    assert abs(ours - right) > 1e-3
