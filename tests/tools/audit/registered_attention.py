"""A plugin: two attention implementations under names of their own, one of which drops its mask."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def hears(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def deaf(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})


for name, function in (("hears", hears), ("deaf", deaf)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
