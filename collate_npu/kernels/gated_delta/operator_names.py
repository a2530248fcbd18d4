"""Every operator by its name, and the names of `gated_delta_kwargs` for some of them."""

from __future__ import annotations

from difflib import get_close_matches

from collate_npu.errors import CollateError, explain
from collate_npu.kernels.gated_delta.ascend_operators import ASCEND
from collate_npu.kernels.gated_delta.fla_operators import FLA
from collate_npu.kernels.gated_delta.operators import Operator
from collate_npu.kernels.gated_delta.stack_operators import STACKS

OPERATORS: dict[str, Operator] = {row.name: row for row in (*FLA, *ASCEND, *STACKS)}

KERNELS: dict[str, str] = {
    "transformers": "transformers.gdn_layer",
    "fla": "fla.chunk_gated_delta_rule",
    "fla_conv": "fla.causal_conv1d",
    "fla_cp": "fla.build_cp_context",
    "causal_conv1d": "causal_conv1d.causal_conv1d_fn",
    "fla_npu_conv": "fla_npu.causal_conv1d",
    "fla_npu_recurrent": "fla_npu.recurrent_gated_delta_rule",
    "torch_npu": "torch_npu.npu_chunk_gated_delta_rule",
    "megatron": "megatron_core.GatedDeltaNet",
}


def operator_named(kernel: str) -> Operator:
    """The row of this kernel. Modules between package and name do not count, nor does `npu_` before an operator of fla_npu.

    Raises `CollateError` with close matches for names that are not known.
    """
    package, _, path = str(kernel).partition(".")
    short = f"{package}.{path.rpartition('.')[2].removeprefix('npu_' if package == 'fla_npu' else '')}"
    tried = (KERNELS.get(str(kernel)), str(kernel), short, f"{package}.npu_{path}")
    name = next((n for n in tried if n in OPERATORS), None)
    if name is None:
        known = [*KERNELS, *OPERATORS]
        near = get_close_matches(str(kernel), known, 3, 0.5) or list(KERNELS)
        rule = "Kernels are those of gated_delta_kwargs, and the operators that kernels/gated_delta knows."
        raise CollateError(explain("kernel", repr(kernel), rule, f"Close to it: {', '.join(near)}."))
    return OPERATORS[name]
