"""The vendor's own benchmark of the operator, from the wheel `mindstudio-probe`, loaded without its 90 dependencies.

The module needs torch, numpy and einops, a logger and the wheel's constants; the rest of the package (pandas, onnx,
tensorboard) is never imported. Install: `pip install --no-deps mindstudio-probe==26.2.0` and `einops`.
"""

import importlib.util
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

MODULE = "pytorch/bench_functions/npu_fusion_attention.py"
CONSTANTS = "core/common/const.py"
PARENTS = (
    "msprobe",
    *(f"msprobe.{name}" for name in ("pytorch", "pytorch.common", "pytorch.common.utils", "core", "core.common")),
)


def missing() -> str | None:
    """Why the oracle cannot be had here, or None."""
    absent = [name for name in ("msprobe", "einops") if importlib.util.find_spec(name) is None]
    return f"the vendor's benchmark is not installed: {', '.join(absent)} missing" if absent else None


@cache
def oracle() -> Any:
    """The benchmark's module: `npu_fusion_attention` and `npu_fusion_attention_grad`, on the CPU, in float64."""
    spec = importlib.util.find_spec("msprobe")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    stand_ins = {name: ModuleType(name) for name in PARENTS}
    stand_ins["msprobe.pytorch.common.utils"].logger = logging.getLogger("msprobe")  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, stand_ins):
        sys.modules["msprobe.core.common.const"] = _load("msprobe.core.common.const", root / CONSTANTS)
        return _load("vendor_npu_fusion_attention", root / MODULE)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
