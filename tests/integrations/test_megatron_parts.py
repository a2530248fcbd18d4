"""What is decided for models of Megatron before any stack is there; on the real ones: tests/peers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron, swift
from collate_npu.integrations.swift import masks as swift_masks
from collate_npu.integrations.twinkle.stages import Stages, _segments
from collate_npu.integrations.verl.engine import _refuse_window
from collate_npu.keys import KEEP_KEY


@pytest.mark.parametrize(
    ("home", "stage", "sequence_parallel", "shared"),
    [
        ("megatron.core", {"pre_process": True}, True, False),  # it shares the mask out itself
        ("megatron.core", {}, True, False),
        ("megatron.core", {"pre_process": False}, True, True),
        ("megatron.core", {"pre_process": False}, None, False),
        ("mcore_bridge.model", {"pre_process": True}, True, True),
    ],
)
def test_routers_masks_are_shared_out_once(monkeypatch, home, stage, sequence_parallel, shared):
    monkeypatch.setattr(megatron.mcore_bridge, "router_padding", lambda padding, shared: shared)
    monkeypatch.setattr(megatron.mcore_bridge, "pass_through_forward", lambda model, inputs, extras: extras)
    model = type("GPTModel", (nn.Module,), {"__module__": home, **stage})()
    model.config = SimpleNamespace(**({} if sequence_parallel is None else {"sequence_parallel": sequence_parallel}))
    assert megatron._passed_on({"padding_mask": torch.ones(1)}, model) == {"padding_mask": shared}


@pytest.mark.parametrize(("window", "longest"), [((4, 0), 5), ((0, 0), 1), (4, 5), ((-1, 0), 9), (None, 9)])
def test_a_window_is_refused_from_the_first_row_on_that_it_would_cut(window, longest):
    def given(length):
        return {"input_ids": torch.nested.nested_tensor([torch.ones(1), torch.ones(length)], layout=torch.jagged)}

    _refuse_window(window, given(longest))
    if window not in ((-1, 0), None):
        with pytest.raises(UnsupportedFormError, match="No attention of MindSpeed's reads a window"):
            _refuse_window(window, given(longest + 1))


def test_padding_is_zeroed_in_the_first_argument_alone():
    keep, hidden = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.ones(3, 2, 4)  # [S, B, H]
    config = SimpleNamespace(sequence_parallel=False)
    out, more = megatron.mcore_bridge._zero_padding(keep, config, None, (hidden, "more"))
    assert torch.equal(out[..., 0].T, keep.float())
    assert more == "more"


@pytest.mark.parametrize(("ranks", "asked", "padded_to"), [(1, 3, 3), (1, None, None), (2, None, None), (2, 3, 12)])
def test_swifts_rows_are_padded_to_what_both_chunks_of_each_rank_take(ranks, asked, padded_to):
    def original(self, batch, padding_to):
        return {"seq_lens": [2], KEEP_KEY: torch.ones(1, 3), "padding_to": padding_to}

    template = SimpleNamespace(use_megatron=True, padding_free=False, sequence_parallel_size=ranks)
    out = swift._collate(original, template, [], padding_to=asked)
    assert out["padding_to"] == padded_to
    assert out[KEEP_KEY].tolist() == [[True, True, False]]


def test_swifts_recurrent_layers_that_leave_padding_out_take_no_packed_rows(monkeypatch):
    monkeypatch.setattr(swift_masks.mcore_bridge, "masks_padding", lambda model_type: True)
    trainer = SimpleNamespace(args=SimpleNamespace(attention_backend="local"), kernel="megatron", npu=False)
    wants = swift_masks.TrainerMasks._wants_dense
    assert wants(trainer, Segments.from_lengths([2, 3], side="left"), recurrent=True)
    with pytest.raises(UnsupportedFormError, match="A recurrent layer carries its state"):
        wants(trainer, Segments.from_lengths([[2, 3]]), recurrent=True)


@pytest.mark.parametrize(("size", "rank", "held"), [(None, None, (1, 0)), (1, 3, (1, 0)), (2, 1, (2, 1))])
def test_twinkles_mesh_says_who_shares_a_row(size, rank, held):
    mesh = SimpleNamespace(cp_world_size=size, cp_rank=rank, tp_world_size=None)
    stages = SimpleNamespace(processor=SimpleNamespace(device_mesh=mesh, framework="megatron"))
    cp = Stages.cp.fget(stages)
    assert (cp.size, cp.rank) == held


@pytest.mark.parametrize(
    ("axes", "lengths"), [(0, (4,)), (1, (2, 2)), (3, (4,)), (4, (2, 2))]
)  # the first of four is text's
def test_one_sample_of_twinkles_may_have_positions_of_several_axes(axes, lengths):
    row = {"input_ids": torch.ones(1, 4).long()}
    row |= {"position_ids": torch.tensor([[0, 1, 0, 1]] * axes)} if axes else {}
    assert _segments(row).lengths == (lengths,)
