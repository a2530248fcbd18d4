"""The probe against what is known of toy models: which layers look at masks and positions, and so which rows leak.

A model takes milliseconds to make and to run, so executions are fewer here than elsewhere.
"""

import pytest
import torch
from hypothesis import given, strategies as st
from rotation import examples
from strategies import Drawn
from torch import nn

pytest.importorskip("transformers")
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from collate_npu import BatchAdapter
from collate_npu.consumers.probe import FORMS, leak_reasons

BEFORE = {"flat", "packed", "left", "one", "holes"}
"""Forms in which something that is no part of a sequence stands before or between its tokens; "right": behind them."""
LEAKS = {
    "alone": set(),
    "masked": set(),
    "causal": BEFORE,
    "sums": BEFORE,
    "sums of real": {"flat", "packed"},
    "all": {*FORMS},
    "places": BEFORE,
    "positions": set(),
}
"""By kind of layer, the forms that move: it looks at no other token; attends by the mask; attends all before; adds up all
before; or what the mask keeps, if it has one value a token; adds up all; counts places by itself; reads `position_ids`."""


class ToyConfig(PretrainedConfig):
    model_type = "collate_npu_toy"

    def __init__(self, kinds=("alone",), hidden_size=8, **given):
        self.kinds, self.hidden_size, self.vocab_size, self.num_attention_heads = list(kinds), hidden_size, 64, 1
        super().__init__(**given)


class Layer(nn.Module):
    def __init__(self, kind, size):
        super().__init__()
        self.kind, self.inner, self.table = kind, nn.Linear(size, size), nn.Embedding(512, size)

    def forward(self, x_BSD, mask, positions):
        B, S = x_BSD.shape[:2]
        y, causal = self.inner(x_BSD), torch.ones(S, S, dtype=torch.bool).tril()
        if self.kind == "all":  # no mean, which one place of 70 hardly moves
            return y.sum(1, keepdim=True).expand_as(y) / 8
        if self.kind in ("masked", "causal"):
            seen = causal
            if self.kind == "masked" and mask is not None:
                seen = seen & mask[:, None].bool() if mask.ndim == 2 else mask[:, 0]
            seen = seen.expand(B, S, S).float()
            return seen / seen.sum(-1, keepdim=True).clamp(min=1) @ y
        if self.kind.startswith("sums"):
            real = mask is not None and mask.ndim == 2 and self.kind == "sums of real"
            return (y * mask[..., None] if real else y).cumsum(1)
        if self.kind == "places" or (self.kind == "positions" and positions is None):
            return self.table(torch.arange(S).expand(B, S))
        return self.table(positions) if self.kind == "positions" else y


class Toy(PreTrainedModel):
    config_class, base_model_prefix, _supports_sdpa = ToyConfig, "model", True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(kind, config.hidden_size) for kind in config.kinds)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None, position_ids=None, output_hidden_states=False, **_):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x, attention_mask, position_ids))
        return BaseModelOutput(last_hidden_state=x, hidden_states=(x,))


@examples(12)
@given(st.data())
def test_the_probe_finds_what_leaks(data):
    drawn = Drawn(data.draw)
    kinds = [drawn.pick((*LEAKS,)) for _ in range(1 + drawn.below(3))]
    model = Toy(ToyConfig(kinds=kinds, hidden_size=8 + drawn.below(57)))
    forms = tuple(form for form in FORMS if drawn.below(4)) or FORMS
    moved = {form for form, why in leak_reasons(model, BatchAdapter, *forms).items() if why}
    wanted = set().union(*(LEAKS[kind] for kind in kinds)) & {*forms}
    assert moved == wanted, (kinds, moved)
