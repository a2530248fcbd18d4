"""`torch_npu.npu_fusion_attention`: its arguments from `Segments`, its contract, and a CPU reference of it.

Imports only torch and numpy, and touches no device: the operator itself is never called from here.
"""

from collate_npu.kernels.fusion_attention.arguments import NpuForm, choose_form, fusion_attention_kwargs
from collate_npu.kernels.fusion_attention.contract import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.reference import reference_fusion_attention

__all__ = [
    "NpuForm", "choose_form", "fusion_attention_kwargs", "prefix_triangle", "reference_fusion_attention", "triangle",
]  # fmt: skip
