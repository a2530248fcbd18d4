"""A second `--external_plugins` file of `swift sft`: flash_attn, on a device that has it (transformers 5.19
modeling_flash_attention_utils.py:97).
"""

import torch
from stand_ins import put_module, varlen_attention
from transformers import modeling_flash_attention_utils as flash


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **_):
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k)


def whole(q, k, v, **_):
    return torch.stack([varlen_attention(*row, *[torch.tensor([0, len(row[0])])] * 2) for row in zip(q, k, v)])


put_module("flash_attn", flash_attn_func=whole, flash_attn_varlen_func=varlen, flash_attn_with_kvcache=None)
put_module("flash_attn.bert_padding", unpad_input=None, pad_input=None)
there = {"general_availability_check": lambda **_: True, "supported_devices": ((lambda: True, "cpu"),)}
flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] |= there
flash.is_flash_attn_2_available = lambda: True
