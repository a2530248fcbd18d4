"""Interpreted: fla's released Triton kernels on a CPU, in Triton's own interpreter; slow, and their real code.

What stands in for the card, and only that: the autotuner takes a kernel's first configuration, because there is nothing
to time; and a loop over a number that the kernel loaded counts in Triton's integers, as a compiled one does.
"""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from collate_npu.releases import installed

KERNELS = ("fla.chunk_gated_delta_rule", "fla.fused_recurrent_gated_delta_rule", "fla.chunk_kda", "fla.causal_conv1d")
"""What runs there."""
_MODULES = ("fla.modules.convolution", "fla.ops.gated_delta_rule", "fla.ops.kda")


def interpreted() -> tuple[str, ...]:
    """The kernels that run on this CPU, for the rest of the process; none where fla or triton is not installed.

    Nor where Triton or fla was imported before: then it compiles, and there is no card. Call it first.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        if not (installed("fla") and installed("triton")) or {"triton", "fla"} & sys.modules.keys():
            return ()
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fla: Triton is not supported here
            _stand_in()
    except Exception:  # releases that fit neither each other nor this
        return ()
    return KERNELS


def _stand_in() -> None:
    def first(*_: Any, **__: Any) -> tuple[float, ...]:
        return 0.0, 0.0, 0.0

    import_module("triton.runtime.autotuner").Autotuner._bench = first
    for name in _MODULES:
        import_module(name)
    count_in_triton()


def count_in_triton() -> None:
    """In every module of fla that is imported by now."""
    tensor, read = import_module("triton.language").tensor, import_module("triton.runtime.interpreter")._implicit_cvt

    def counting(*bounds: Any) -> Iterable[Any]:
        """`range`, whose numbers are Triton's where its bounds are."""
        if not any(isinstance(bound, tensor) for bound in bounds):
            return builtins.range(*bounds)
        whole = (int(bound.handle.data.item()) if isinstance(bound, tensor) else bound for bound in bounds)
        return map(read, builtins.range(*whole))

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            vars(module)["range"] = counting
