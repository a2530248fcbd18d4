"""fla's released Triton kernels on a CPU, in Triton's own interpreter: import this before fla.

With FLA_KERNELS=triton_ascend those that fla compiles for an Ascend card. Hardware alone is stood in for: fla's flag for an
NPU, a 910B's numbers of cores, and a loop's number, which a compiled kernel holds as an integer of Triton's.
"""

import builtins
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collate_npu.releases import installed

__all__ = ["ASCEND", "LAUNCHED", "count_in_triton"]

ASCEND = os.environ.get("FLA_KERNELS") == "triton_ascend"
LAUNCHED: set[str] = set()
"""fla's kernels that ran, of those for Ascend where they are what is tested: Triton's interpreter is asked, not fla."""

if not (installed("fla") and installed("triton")):
    raise ModuleNotFoundError("fla and triton are what is tested")
if os.environ.get("TRITON_INTERPRET") != "1" and {"triton", "fla"} & sys.modules.keys():
    raise RuntimeError("Triton or fla was imported before: it compiles, and there is no card")
os.environ["TRITON_INTERPRET"] = "1"
import triton  # noqa: E402
from triton.runtime import autotuner, interpreter  # noqa: E402


def count_in_triton() -> None:
    """Let loops of every module of fla that is imported by now count in Triton's integers where their bounds are."""

    def counting(*bounds: Any) -> Iterable[Any]:
        if not any(isinstance(bound, triton.language.tensor) for bound in bounds):
            return builtins.range(*bounds)
        whole = (int(bound.handle.data.item()) if hasattr(bound, "handle") else bound for bound in bounds)
        return map(interpreter._implicit_cvt, builtins.range(*whole))

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            vars(module)["range"] = counting


autotuner.Autotuner._bench = lambda *_, **__: (0.0, 0.0, 0.0)  # a kernel's first configuration
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla: Triton is not supported here
    for each in ("fla.modules.convolution", "fla.ops.gated_delta_rule", "fla.ops.kda"):
        import_module(each)
    count_in_triton()


class Count(int):
    """A loop's number."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return interpreter._implicit_cvt(int(self)).to(*args, **kwargs)


def _counting(own: Any) -> Any:
    def counting(*bounds: Any) -> Any:
        return map(Count, builtins.range(*bounds)) if all(isinstance(each, int) for each in bounds) else own(*bounds)

    return counting


def _arm() -> None:
    root = Path(find_spec("fla").submodule_search_locations[0])
    for path in sorted(root.rglob("*triton_ascend*/*.py")):  # fla imports them at their first call
        with suppress(ImportError):  # of losses: they want a tanh that this Triton has elsewhere
            import_module("fla." + ".".join(path.relative_to(root).with_suffix("").parts))
    count_in_triton()
    for name, module in list(sys.modules.items()):
        if name.startswith("fla"):
            known = {"IS_NPU": True, "get_npu_properties": lambda: {"num_aicore": 24, "num_vectorcore": 48}}
            vars(module).update({key: value for key, value in known.items() if key in vars(module)})
        if name.startswith("fla.") and "triton_ascend" in name:
            module.range = _counting(module.range)


def _watch(launch: Any) -> Any:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ("triton_ascend" if ASCEND else "fla.") in self.fn.__module__:
            LAUNCHED.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    return watched


interpreter.GridExecutor.__call__ = _watch(interpreter.GridExecutor.__call__)
if ASCEND:
    _arm()
