"""Tests against the real torch_npu wheel, with stand-ins for CANN: the nox session `npu`. Elsewhere they skip, and say why.

Run with TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that `import torch` does not want CANN before the stand-ins are there.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cann_stub
import pytest
import torch
from attention_oracle import reference_fusion_attention

REQUIRED = "COLLATE_NPU_REQUIRE_WHEEL"
"""Set by the nox session: there a missing wheel is a failure, not a reason to skip."""


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The stand-in libraries, compiled once, loaded nowhere yet."""
    if reason := cann_stub.missing():
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(reason)
    return cann_stub.build(tmp_path_factory.mktemp("cann"))


@pytest.fixture(scope="session")
def torch_npu(stand_ins: list[Path]) -> Any:
    """The real wheel in this process, on two pretended devices."""
    os.environ[cann_stub.DEVICES] = "2"
    cann_stub.preload(stand_ins)
    import torch_npu

    return torch_npu


@pytest.fixture(scope="session")
def _kernel(torch_npu: Any) -> Iterator[list[dict[str, Any]]]:
    """Our reference as the CPU kernel of the real operator, differentiable; the list holds its calls."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(reference_fusion_attention)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))
        return reference_fusion_attention(*args, **kwargs)

    library = torch.library.Library("npu", "IMPL")
    for key in ("CPU", "AutogradCPU"):
        library.impl("npu_fusion_attention", kernel, key)
    yield calls
    library._destroy()


@pytest.fixture
def calls(_kernel: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every call of the operator in this test, with the arguments that were given."""
    _kernel.clear()
    return _kernel


@pytest.fixture
def without_cann(stand_ins: list[Path]) -> Callable[..., str]:
    """Run Python code in a new process where the wheel is installed and CANN is not; the answer is what it prints."""
    import subprocess
    import sys

    del stand_ins  # skips where there is no wheel

    def run(code: str, **environment: str) -> str:
        env = {name: value for name, value in os.environ.items() if name not in (cann_stub.DEVICES, "LD_LIBRARY_PATH")}
        done = subprocess.run([sys.executable, "-c", code], env=env | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
