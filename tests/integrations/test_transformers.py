"""The Trainer's callback: what it is given is looked at before the first step."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError, PaddingCollator
from collate_npu.integrations.transformers import DeliveryCallback

pytestmark = pytest.mark.models
OURS = PaddingCollator(pad_token_id=0, consumer="transformers")


def begins(callback, loader=None, *, compiled=False, model=None):
    args = SimpleNamespace(torch_compile=True) if compiled else SimpleNamespace()
    callback.on_train_begin(
        args, None, None, model=torch.nn.Linear(1, 1) if model is None else model, train_dataloader=loader
    )


def test_another_collator_is_refused_as_what_is_none_and_one_around_it_is_not():
    with pytest.raises(CollateError, match="int"):
        DeliveryCallback(3)
    wrapped = SimpleNamespace(data_collator=SimpleNamespace(data_collator=OURS))
    for found in (OURS, wrapped):
        begins(DeliveryCallback(OURS), SimpleNamespace(collate_fn=found))
    with pytest.raises(CollateError, match="another function"):
        begins(DeliveryCallback(OURS), SimpleNamespace(collate_fn=list))


def test_compiled_models_are_refused():
    with pytest.raises(CollateError, match="compiled"):
        begins(DeliveryCallback(), compiled=True)
    with pytest.raises(CollateError, match="compiled"):
        begins(DeliveryCallback(), model=torch.compile(torch.nn.Linear(1, 1)))
    begins(DeliveryCallback())
