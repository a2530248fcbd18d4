"""The package beside the wheel: with CANN, without CANN, with CANN and no card."""

from collections.abc import Callable
from pathlib import Path

import cann_stub
import pytest

RUNS_WITHOUT = """
import collate_npu, collate_npu.kernels.fusion_attention, sys
from collate_npu import Segments
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 5]))
assert kwargs["sparse_mode"] == 3
assert not [name for name in sys.modules if name.startswith("torch_npu")]
try:
    import torch_npu
except ImportError as error:
    print(error)
"""


def test_without_cann_the_package_works_and_only_torch_npu_does_not(without_cann: Callable[..., str]) -> None:
    said = without_cann(RUNS_WITHOUT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ".so: cannot open shared object file" in said, "is CANN installed after all?"


def test_without_cann_torch_itself_names_the_switch(without_cann: Callable[..., str]) -> None:
    code = "try:\n    import torch\nexcept RuntimeError as error:\n    print(error)"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in without_cann(code, TORCH_DEVICE_BACKEND_AUTOLOAD="1")


def test_cann_without_a_card_is_no_device(without_cann: Callable[..., str], stand_ins: list[Path]) -> None:
    code = "import torch, collate_npu.kernels.fusion_attention; print(torch.npu.is_available(), torch.npu.device_count())"
    said = without_cann(code, LD_LIBRARY_PATH=str(stand_ins[0].parent), TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert said.endswith("False 0")


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_without_cann_the_environment_report_explains_the_state(without_cann: Callable[..., str], autoload: str) -> None:
    """Also where torch loads torch_npu by itself, and `import torch` fails."""
    code = "from collate_npu.tools.env import environment as e; found = e(); print(found['npu'], '|', *found['hazards'])"
    said = without_cann(code, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert "torch_npu does not load" in said
    assert ".so: cannot open shared object file" in said
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU, or source CANN's set_env.sh" in said


COMMAND = "import runpy, sys; sys.argv = ['collate-npu', 'env']; runpy.run_module('collate_npu', run_name='__main__')"


def test_the_command_names_pretended_devices(without_cann: Callable[..., str], stand_ins: list[Path]) -> None:
    environment = {"LD_LIBRARY_PATH": str(stand_ins[0].parent), cann_stub.DEVICES: "2", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    said = without_cann(COMMAND, **environment)
    assert "- devices: npu x 2 (Ascend910B1)" in said
    assert "- npu: torch_npu loads" in said
