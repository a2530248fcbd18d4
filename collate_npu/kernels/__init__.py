"""Kernels: the arguments of attention and of recurrent kernels from `Segments`."""

from collate_npu.kernels.fusion_attention import NpuForm, choose_form, fusion_attention_kwargs, prefix_triangle, triangle
from collate_npu.kernels.gated_delta import Kernel, flat_offsets, gated_delta_kwargs, zero_padding

__all__ = [
    "Kernel", "NpuForm", "choose_form", "flat_offsets", "fusion_attention_kwargs", "gated_delta_kwargs", "prefix_triangle",
    "triangle", "zero_padding",
]  # fmt: skip
