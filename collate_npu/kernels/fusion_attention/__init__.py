"""`torch_npu.npu_fusion_attention`: its arguments from `Segments`, its contract as a check, and a CPU reference of it.

Imports only torch and numpy, and touches no device: the operator itself is never called from here.
"""

from collate_npu.kernels import Breach
from collate_npu.kernels.fusion_attention.arguments import NpuForm, choose_form, fusion_attention_kwargs
from collate_npu.kernels.fusion_attention.contract import check_contract, contract_breaches
from collate_npu.kernels.fusion_attention.operator_call import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.reference import reference_fusion_attention

__all__ = [
    "Breach", "NpuForm", "check_contract", "choose_form", "contract_breaches", "fusion_attention_kwargs",
    "prefix_triangle", "reference_fusion_attention", "triangle",
]  # fmt: skip
