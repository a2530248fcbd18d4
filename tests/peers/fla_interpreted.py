"""fla's released Triton kernels on a CPU, in Triton's own interpreter: import this before fla.

What stands in for the card, and only that: the autotuner takes a kernel's first configuration, because there is nothing
to time; and a loop over a number that the kernel loaded counts in Triton's integers, as a compiled one does.
"""

import builtins
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from importlib import import_module

import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import _implicit_cvt

Autotuner._bench = lambda self, *args, config, **meta: (0.0, 0.0, 0.0)


def counting(*bounds):
    """`range`, whose numbers are Triton's where its bounds are."""
    if not any(isinstance(bound, tl.tensor) for bound in bounds):
        return builtins.range(*bounds)
    read = (int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else bound for bound in bounds)
    return map(_implicit_cvt, builtins.range(*read))


def count_in_triton():
    """In every module of fla that is imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.range = counting


for name in ("fla.modules.convolution", "fla.ops.gated_delta_rule"):
    import_module(name)
count_in_triton()
