"""Gated DeltaNet kernels: boundary arguments from `Segments`, their contracts, references in plain torch.

Imports only torch and numpy, and touches no device it is not given: no kernel is ever called from here.
"""

from collate_npu.kernels.gated_delta.arguments import (
    Kernel,
    chunk_indices,
    chunk_offsets,
    flat_offsets,
    gated_delta_kwargs,
    zero_padding,
)
from collate_npu.kernels.gated_delta.reference import reference_causal_conv1d, reference_gated_delta_rule

__all__ = [
    "Kernel", "chunk_indices", "chunk_offsets", "flat_offsets", "gated_delta_kwargs", "reference_causal_conv1d",
    "reference_gated_delta_rule", "zero_padding",
]  # fmt: skip
