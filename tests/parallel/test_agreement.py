"""Agreement without a group: nothing is asked. Between processes: tests/distributed/test_distributed_agreement.py."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from collate_npu import ContextParallel, Segments
from collate_npu.parallel import ranks_agree
from collate_npu.parallel.agreement import batch_facts

SEGMENTS = Segments.from_lengths([2, 3])


@pytest.mark.parametrize("cp", [None, ContextParallel(2, 0), ContextParallel(1, 0)])
def test_without_a_group_nobody_is_asked(cp):
    with ranks_agree(cp) as facts:
        facts["width"] = "8"


def _in_a_worker(rows):
    cp = ContextParallel(2, 0)
    object.__setattr__(cp, "group", "a group that this process is not a rank of")
    with ranks_agree(cp):
        return rows


def test_a_dataloader_worker_is_no_rank():
    assert list(DataLoader([1, 2], batch_size=2, num_workers=1, collate_fn=_in_a_worker)) == [[1, 2]]


def test_what_is_said_of_a_batch():
    batch = {"input_ids": SEGMENTS.ids.long(), "attention_mask": None, "inputs_embeds": torch.zeros(2, 3, 4)}
    facts = batch_facts(batch, SEGMENTS)
    assert facts["input_ids"] == "int64 [2, 3]"
    assert facts["attention_mask"] == "None"
    assert facts["segments"] == "[2, 3]"
    assert "the values of inputs_embeds" not in facts  # two ranks may round them apart
    other = batch_facts(batch | {"input_ids": SEGMENTS.ids.long() + 1}, Segments.from_lengths([3, 3]))
    for digest in ("truth", "the values of input_ids"):
        assert facts[digest]() != other[digest]()
        assert facts[digest]() == batch_facts(batch, SEGMENTS)[digest]()
