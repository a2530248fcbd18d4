"""Recording: what it keeps of a module, of positions and of a call, and whose forward it is."""

from types import SimpleNamespace

import pytest
import torch
from stranger import Model
from torch import nn

from collate_npu import Segments
from collate_npu.consumers.mask_routing import Case, Model as Facts
from collate_npu.masks.patterns import Pattern
from collate_npu.proof import watch
from collate_npu.proof.recorder import heard

RIGHT, OTHER = torch.tensor([0, 6, 11, 16]), torch.tensor([0, 5, 11, 16])
IDS = torch.arange(16)[None] % 60 + 1


def case_of(offsets):
    segments = Segments.from_lengths([torch.tensor(offsets).diff().tolist()])
    return Case(segments=segments, model=Facts(), pattern=Pattern.of("causal"), padding_free=True)


def test_each_forward_of_the_model_is_judged_by_the_next_batch():
    model = Model()
    with heard(model, [case_of(RIGHT.tolist()), case_of(RIGHT.tolist())]) as faults, torch.no_grad():
        model.embed(IDS)  # a part of it takes no batch
        nn.Sequential(model.layers[2])[0](model.embed(IDS), OTHER)
        assert faults == []
        model(IDS, RIGHT)
        assert faults == []
        model(IDS, OTHER)
        assert len(faults) == 5
        model(IDS, OTHER)  # no batch is left for it
    assert len(faults) == 5


STATES = torch.tensor([1.0, 0, 0, 2])[None, :, None].expand(1, 4, 2)


def causal_conv1d_fn(x, weight):
    return torch.conv1d(x, weight[:, None], padding=3, groups=x.shape[1])[..., :-3]


class DeltaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, hidden):
        torch.conv1d(hidden, torch.ones(2, 4, 1))  # not by channels
        hidden = causal_conv1d_fn(hidden, self.weight)
        return torch.conv1d(hidden, self.weight[:, None], groups=4)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.outside = nn.Embedding(9, 4), DeltaLayer(), nn.Conv1d(4, 4, 1, groups=4)

    def forward(self, input_ids):
        out = self.layer(self.embed(input_ids).mT)
        torch.conv1d(self.outside(out), torch.ones(4, 1, 1), groups=4)  # not in a layer
        return out


def test_a_convolution_of_torch_counts_in_a_layer_where_no_kernel_is_around_it():
    model = Mixing()
    with watch(say=False) as seen, torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 8).long())
            torch.conv1d(torch.ones(1, 4, 8), model.layer.weight[:, None], groups=4)
    for forward in seen.forwards:
        assert [each.kernel.rpartition(".")[2] for each in forward.calls] == ["causal_conv1d_fn", "conv1d"]
    assert len(seen.forwards) == 2
    assert not seen._recorder.failed


@pytest.mark.parametrize(("zero", "empty"), [(True, [1, 0, 0, 1]), (False, None)])
def test_what_the_models_own_embedding_leaves_zero(zero, empty):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.other = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4, padding_idx=0)
            self.layer, self.config = DeltaLayer(), SimpleNamespace()

        def forward(self, input_ids):
            (self.embed if zero else self.other)(input_ids if zero else input_ids * 0)
            return self.layer(torch.tensor([0.0, 1, 1, 2])[None, :, None].expand(1, 4, 4))

    with watch(say=False) as seen, torch.no_grad():
        Two()(torch.tensor([[0, 3, 4, 0]]))
        nn.Sequential(nn.Sequential(nn.Identity()))(torch.ones(1))
    forward = seen.forwards[0]
    still = empty and [1, 0, 0, 0]
    for found, told in ((forward.empty_T, empty), (forward.calls[0].empty_T, still)):
        assert (found if found is None else found.astype(int).tolist()) == told
    assert not seen._recorder.failed
