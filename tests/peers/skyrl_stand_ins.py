"""What SkyRL 0.3.0 imports at its top and a CPU has not: the padding functions of flash-attn (bert_padding.py), in torch."""

import sys
import typing
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import typing_extensions
from transformers.utils import import_utils

for number in (2, 3, 4):  # transformers looks for them before another stands there
    getattr(import_utils, f"is_flash_attn_{number}_available")()

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12


def unpad_input(hidden_states, attention_mask):
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    at = attention_mask.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[at], at, offsets, int(lengths.max()), lengths


def pad_input(hidden_states, indices, batch, seqlen):
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


for name in ("flash_attn", "flash_attn.bert_padding"):
    module = sys.modules[name] = ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
sys.modules["flash_attn.bert_padding"].__dict__.update(pad_input=pad_input, unpad_input=unpad_input)
