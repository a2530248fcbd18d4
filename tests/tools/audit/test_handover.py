"""Handing over: ours and the others are told apart, and each gives what its name says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu.testing import tiny_model
from collate_npu.tools.audit.handover import OTHERS, OURS, Subject

pytestmark = pytest.mark.models

FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]


@pytest.fixture(scope="module")
def subject():
    model = tiny_model("qwen3_next", vocab_size=8)
    return Subject(name="", model=model, attn_implementation="sdpa", side="left", pad_token_id=7)


def test_columns_are_told_apart():
    assert not set(OURS) & set(OTHERS)


@pytest.mark.usefixtures("newest_transformers")
@pytest.mark.parametrize("column", [*OURS, *OTHERS])
def test_every_way_pads_the_same_tokens(subject, column):
    batch = {**OURS, **OTHERS}[column](subject, FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [7, 4, 5]]
    assert batch["labels"].tolist() == [[1, 2, 3], [-100, -100, 5]]  # no padding predicts a token


def test_the_others_hand_over_what_their_names_say(subject):
    made = {column: handover(subject, FEATURES) for column, handover in OTHERS.items()}
    assert "attention_mask" not in made["None"]
    assert "attention_mask_2d" not in made["None"]
    assert torch.equal(made["bare 4D"]["attention_mask"], subject.dense(FEATURES))
    assert "attention_mask_2d" not in made["bare 4D"]
    assert torch.equal(made["4D + 2D keyword"]["attention_mask_2d"], subject.truth(FEATURES).keep)
