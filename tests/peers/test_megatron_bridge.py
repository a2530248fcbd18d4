"""Megatron-Bridge 0.3.1: what its datasets collate, and what its `get_packed_seq_params` gives a Megatron model.

TransformerEngine and modelopt are stand-ins; the datasets are built by their own constructors, of files. Its models, by its
providers, take `forward_step` in `megatron_bridge_work`.
"""

import megatron_bridge_work as work  # first: the stand-ins
import pytest
import torch
from cells import Stack, verdict, worst_of
from megatron.bridge.training import gpt_step
from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
from processes import found_by

from collate_npu import CollateError
from collate_npu.masks.batch_reader import segments_from_batch

NEEDS = ("megatron", "nemo_automodel", "omegaconf")  # the environment that has Megatron-Bridge


def through_get_batch(batch, monkeypatch):
    """As `forward_step` reads it from the iterator: masks and counts are left behind."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **settings: self)
    read = gpt_step.get_batch_from_iterator(iter([batch]), is_first_pp_stage=True, is_last_pp_stage=True)
    return {key: value for key, value in read.items() if value is not None}


@pytest.mark.parametrize(("multiple", "pad_to"), [(1, 16), (1, 24), (4, 16), (4, 32)])
def test_packed_rows(monkeypatch, multiple, pad_to):
    """The dataset's row, and the object its models get."""
    batch = work.packed(work.SAMPLES, multiple, pad_to)
    assert batch["cu_seqlens"].shape[0] == 1
    assert batch["cu_seqlens"][0, -1] == -1
    read = through_get_batch(batch, monkeypatch)
    wanted = (tuple(map(len, work.SAMPLES)),)
    assert segments_from_batch(read, padding_free=True).lengths == wanted
    offsets = {key: value for key, value in read.items() if "seqlens" in key or key == "max_seqlen"}
    params = get_packed_seq_params(offsets)
    given = {"input_ids": read["tokens"], "position_ids": read["position_ids"], "packed_seq_params": params}
    assert segments_from_batch(given, padding_free=True).lengths == wanted


def test_the_dataset_hands_over_a_mask_of_one_number():
    batch = work.packed(work.SAMPLES, 1, 16)
    assert batch["attention_mask"].tolist() == [1]
    with pytest.raises(CollateError, match="attention_mask"):
        segments_from_batch(batch, padding_free=True)


@pytest.mark.nightly
def test_its_cells(tmp_path):
    """Its own step shares a row between two ranks, and cuts its labels with it: nothing of ours stands there."""
    stack = Stack("Megatron-Bridge", ("megatron-bridge", "megatron-core"), "peers_nemo")
    for name, told in found_by("megatron_bridge_work", tmp_path, ranks=2)[0].items():
        family, _, layout = name.partition(" ")
        alone = worst_of(told["alone"])
        ours = (
            worst_of(told["ours"]) if "ours" in told else verdict(not_run="its own step shares the row and its labels out")
        )
        stack.tell(family, layout, alone=alone, ours=ours, line="gpt_batch(read, model) in a step of your own")
        refused = family == "qwen3_next" and layout != "padded right"  # by Megatron 0.16.1
        assert alone["verdict"] == ("refused" if refused else "right"), told
