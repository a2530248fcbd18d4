"""What is decided for models of Megatron before any stack is there; on the real ones: tests/peers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron
from collate_npu.integrations.verl.engine import _refuse_window


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
