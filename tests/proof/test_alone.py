"""Alone: which sequences are run again, and what a model of Megatron is handed. On real models: test_delivered_models."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import CollateError, Segments
from collate_npu.consumers.mask_routing import Case, Model
from collate_npu.proof.delivery import check_alone

MegatronModule = type("MegatronModule", (nn.Module,), {"__module__": "megatron.core.transformer.module"})


class Places(MegatronModule):
    """A causal model of Megatron: what it gives for a token depends on it, its place and what its mask lets it see."""

    def __init__(self, kernel):
        super().__init__()
        home = {"DotProductAttention": "transformer", "TEDotProductAttention": "extensions"}[kernel]
        self.core = type(kernel, (nn.Module,), {"__module__": f"megatron.core.{home}"})()
        self.weight = nn.Parameter(torch.eye(4))
        self.config = SimpleNamespace(masked_softmax_fusion=False)
        self.calls = []

    def forward(self, input_ids, position_ids, attention_mask=None, token_type_ids=None):
        self.calls.append((input_ids.tolist(), position_ids.tolist(), attention_mask))
        seen = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril() if attention_mask is None else ~attention_mask[:, 0]
        past = seen.float() @ (input_ids * (1 + position_ids)).float()[..., None]
        return past * torch.ones(4)


def checked(kernel, logits=None, below=None, forward=None):
    model, segments = Places(kernel).eval(), Segments.from_lengths([3, 2, 1])
    model.base_model = below
    ids = torch.arange(1, 10).reshape(3, 3)
    batch = {"input_ids": ids, "labels": ids, "token_type_ids": None, "position_ids": segments.position_ids}
    case = Case(segments=segments, model=Model(needs_mask_2d=False))
    logits = model(ids, segments.position_ids, None) if logits is None else logits
    return check_alone(model, batch, case, logits, forward), model.calls[1:]


@pytest.mark.parametrize(("kernel", "dense"), [("DotProductAttention", True), ("TEDotProductAttention", False)])
def test_megatron_gets_positions_and_a_mask_where_its_kernels_read_one(kernel, dense):
    found, calls = checked(kernel)
    assert found.errors == {0: 0.0, 1: 0.0}
    assert [ids for ids, *_ in calls] == [[[1, 2, 3]], [[1, 2, 3, 1]], [[4, 5]], [[4, 5, 4]]], "alone, and wider"
    for ids, positions, mask in calls:
        assert positions == [[*range(len(ids[0]))]]
        assert (mask is not None) == dense
        assert mask is None or torch.equal(~mask[0, 0], torch.ones(len(ids[0]), len(ids[0])).tril().bool())


def test_wrong_logits_are_told_and_those_of_other_rows_cannot_be_compared():
    with pytest.raises(CollateError, match=r"sequence 0: .*sequence 1: "):
        checked("TEDotProductAttention", torch.ones(3, 3, 4), below=Places("TEDotProductAttention"))
    for shape in ((3, 4), (3, 2, 4), (1, 9, 4)):
        with pytest.raises(CollateError, match="gathers the whole rows"):
            checked("TEDotProductAttention", torch.ones(shape))


def test_a_model_that_pools_is_compared_by_its_states_and_not_a_function_in_its_place():
    below = Places("TEDotProductAttention")
    assert checked("TEDotProductAttention", torch.ones(3, 4), below)[0].errors == {0: 0.0, 1: 0.0}
    with pytest.raises(CollateError, match="gathers the whole rows"):
        checked("TEDotProductAttention", torch.ones(3, 4), below, forward=below)


@pytest.mark.parametrize("mine", ["x", torch.ones(3)])
def test_a_key_of_which_nobody_knows_what_it_would_be_alone(mine):
    case = Case(segments=Segments([[1, 1, 2]]), model=Model(needs_mask_2d=False))
    with pytest.raises(CollateError, match=r"mine.*What it would be for one sequence is not known"):
        check_alone(nn.Linear(4, 4), {"input_ids": torch.ones(1, 3), "mine": mine}, case, torch.ones(1, 3, 4), None)
