"""What is recorded of a forward: who reads, who hands on, and who was handed nothing."""

import pytest
import torch
from torch import nn

from collate_npu import CollateError
from collate_npu.proof.received import by_readers, received_calls, received_masks


class Attention(nn.Module):
    def forward(self, hidden, attention_mask=None):
        return hidden


class IdentityOp(nn.Module):
    def forward(self, hidden, *args, **kwargs):
        return hidden


class Layer(nn.Module):
    """Hands the mask to one part, forgets another, and takes a 2D one that it keeps for itself."""

    def __init__(self):
        super().__init__()
        self.told, self.forgotten, self.cross, self.mlp = Attention(), Attention(), IdentityOp(), nn.Linear(4, 4)

    def forward(self, hidden, attention_mask=None, **kwargs):
        hidden = self.told(hidden, attention_mask=attention_mask)
        self.cross(hidden, attention_mask=attention_mask)
        return self.mlp(self.forgotten(hidden))


HIDDEN, MASK, KEEP = torch.ones(2, 3, 4), torch.ones(2, 1, 3, 3).bool(), torch.ones(2, 3).bool()


def model_of():
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([Layer()])
    return model, model.decoder.layers[0]


def test_readers_are_the_innermost_and_one_that_was_handed_nothing_is_one():
    model, layer = model_of()
    with received_calls(model) as received:
        layer(HIDDEN, attention_mask=MASK, attention_mask_2d=KEEP, cu_seq_lens_q=torch.tensor([0, 3]))
    readers = {each.name: each for each in by_readers(received)}
    assert set(readers) == {"decoder.layers.0.told", "decoder.layers.0.forgotten"}
    assert readers["decoder.layers.0.told"].told["attention_mask"] is MASK
    assert "attention_mask" not in readers["decoder.layers.0.forgotten"].told
    assert all(reader.told["attention_mask_2d"] is KEEP for reader in readers.values()), "what the layer around holds"
    assert all(reader.hidden == (2, 3, 4) for reader in readers.values())
    assert str(readers["decoder.layers.0.told"]) == "attention_mask bool [2, 1, 3, 3], attention_mask_2d bool [2, 3]"
    assert received["decoder.layers.0"].offsets == {"cu_seq_lens_q"}
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_masks_are_copies_of_every_call():
    (model, layer), mask = model_of(), MASK.clone()
    with received_masks(model) as masks:
        layer(HIDDEN, attention_mask=mask)
        mask.zero_()
        layer(HIDDEN)
    assert [None if found is None else bool(found.all()) for found in masks["decoder.layers.0.told"]] == [True, None]
    with pytest.raises(CollateError, match="model"), received_masks(None):
        pass


@pytest.mark.parametrize("key", ["encoder_hidden_states", "key_value_states"])
def test_cross_attention_is_told_by_what_it_is_given(key):
    class Cross(nn.Module):
        def forward(self, **kwargs):
            return kwargs

    class Plain(nn.Module):
        def forward(self, hidden, number=0):
            return hidden

    model = nn.Module()
    model.layers = nn.Module()
    model.layers.cross, model.layers.plain, model.layers.inner = Cross(), Plain(), nn.Module()
    model.layers.inner.cross, model.layers.inner.plain = Cross(), Plain()
    with received_calls(model) as received:
        for layer in (model.layers, model.layers.inner):
            layer.plain(HIDDEN)
        model.layers.cross(hidden=HIDDEN, attention_mask=MASK)
        model.layers.inner.cross(hidden=HIDDEN, attention_mask=MASK)
        assert not received["layers.inner.cross"].crosses
        model.layers.inner.cross(hidden=HIDDEN, attention_mask=MASK, **{key: HIDDEN})
        assert received["layers.inner.cross"].crosses
    assert set(received) == {"layers.inner.cross"}, "what stands outermost hands on"
