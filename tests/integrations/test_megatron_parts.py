"""What is decided for models of Megatron before any stack is there; on the real ones: tests/peers."""

import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import CollateError, ContextParallel, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron, swift
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.integrations.twinkle import Stages
from collate_npu.keys import KEEP_KEY

LEFT = Segments.from_lengths([2, 3], side="left")
BATCH = {"input_ids": torch.ones(2, 3).long(), "attention_mask": LEFT.keep.long()}


def local(**config):
    """A model of Megatron's own attention."""
    model = nn.Sequential(type("DotProductAttention", (nn.Module,), {})())
    model.config = SimpleNamespace(**{"num_moe_experts": None, "linear_attention_freq": None, **config})
    return model


ONE_RANK, KEEP = ContextParallel(1, 0), LEFT.keep
REFUSED = [
    ({}, "No key says which tokens are padding"), ({"attention_mask": KEEP[:1].long()}, "The batch has 2 rows"),
    ({"attention_mask": KEEP.long(), "attention_mask_2d": KEEP.flip(1)}, "disagree"),
    ({"attention_mask_2d": KEEP & torch.tensor([[True], [False]])}, "no real token"),
]  # fmt: skip


@pytest.mark.parametrize(("masks", "said"), REFUSED)
def test_a_batch_that_says_nothing_or_two_things_is_refused(masks, said):
    with pytest.raises(CollateError, match=said):
        megatron.gpt_batch({"input_ids": BATCH["input_ids"], **masks}, local(), context_parallel=ONE_RANK)


@pytest.mark.parametrize(
    ("given", "handed_on"), [([[0, 1, 2], [0, 1, 2]], LEFT.position_ids.tolist()), ([[0, 5, 6]] * 2,) * 2]
)
def test_positions_that_count_places_are_counted_again_and_your_own_are_kept(given, handed_on):
    batch = {**BATCH, "position_ids": torch.tensor(given)}
    inputs, _ = megatron.gpt_batch(batch, local(), context_parallel=ONE_RANK)
    assert inputs["position_ids"].tolist() == handed_on


def test_recurrent_layers_that_leave_padding_out_take_no_packed_rows():
    with pytest.raises(UnsupportedFormError, match="A recurrent layer carries its state"):
        mcore_bridge.check_padding(Segments.from_lengths([[2, 3]]), "megatron", recurrent=True, model_type=None)


def test_every_sequence_that_ranks_cannot_share_out_is_named(monkeypatch):
    kind = make_dataclass("PackedSeqParams", ["cu_seqlens_q"])
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", SimpleNamespace(PackedSeqParams=kind))
    row = Segments.from_lengths([[4, 1, 2]])
    assert megatron.packed_seq_params(row, context_parallel=ONE_RANK).cu_seqlens_q.tolist() == [0, 4, 5, 7]
    with pytest.raises(CollateError, match=r"(?s)2 bad rows.*row 1: got 1 places.*row 2: got 2 places"):
        megatron.packed_seq_params(row, context_parallel=ContextParallel(2, 0).for_documents())


@pytest.mark.parametrize(("ranks", "asked", "padded_to"), [(1, 3, 3), (1, None, None), (2, None, None), (2, 3, 12)])
def test_swifts_rows_are_padded_to_what_both_chunks_of_each_rank_take(ranks, asked, padded_to):
    def original(self, batch, padding_to):
        return {"seq_lens": [2], KEEP_KEY: torch.ones(1, 3), "padding_to": padding_to}

    template = SimpleNamespace(use_megatron=True, padding_free=False, sequence_parallel_size=ranks)
    out = swift._collate(original, template, [], padding_to=asked)
    assert out["padding_to"] == padded_to
    assert out[KEEP_KEY].tolist() == [[True, True, False]]


def by_megatron(home, **fields):
    config = {key: fields.pop(key) for key in ("sequence_parallel",) if key in fields}
    model = type("GPTModel", (nn.Sequential,), {"__module__": home, **fields})(*local())
    model.config = SimpleNamespace(num_moe_experts=4, linear_attention_freq=None, **config)
    return megatron.gpt_batch(BATCH, model, context_parallel=ONE_RANK)[0]


CORE, ON = "megatron.core", {"sequence_parallel": True}
ROUTERS = [
    ({"home": CORE, **ON, "pre_process": True}, False), ({"home": CORE, **ON}, False),  # it shares the mask out itself
    ({"home": CORE, **ON, "pre_process": False}, True), ({"home": CORE, "pre_process": False}, False),
    ({"home": "mcore_bridge.model", **ON, "pre_process": True}, True),
]  # fmt: skip
"""Whose model with which settings, and whether tensor-parallel ranks share the routers' mask."""


@pytest.mark.parametrize(("given", "shared"), ROUTERS)
def test_routers_masks_are_shared_out_once_where_tensor_parallel_ranks_share_a_row(monkeypatch, given, shared):
    monkeypatch.setattr(mcore_bridge, "router_padding", lambda *given, shared: shared)
    monkeypatch.setattr(mcore_bridge, "pass_through_forward", lambda model, batch, extras: {**batch, **extras})
    assert by_megatron(**given)["padding_mask"] == shared


def stages(size, rank):
    mesh = SimpleNamespace(cp_world_size=size, cp_rank=rank, tp_world_size=None)
    return Stages(SimpleNamespace(framework="megatron", device_mesh=mesh), None, None)


@pytest.mark.parametrize(("size", "rank", "held"), [(None, None, (1, 0, 1)), (1, 3, (1, 0, 1)), (2, 1, (2, 1, 1))])
def test_twinkles_mesh_says_who_shares_a_row(size, rank, held):
    cp = stages(size, rank).cp
    assert (cp.size, cp.rank, cp.tensor_parallel) == held
    with pytest.raises(CollateError, match="cp_rank None"):
        stages(2, None).cp  # noqa: B018
