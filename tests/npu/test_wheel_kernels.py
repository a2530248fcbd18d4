"""`collate-npu kernels` beside the real wheel: its function takes the command's calls, and no card is no pass."""

from typing import Any

import pytest
import torch
from typed import typed

from collate_npu.proof import kernel_runs
from collate_npu.proof.kernel_runs import KERNELS, TRUTHS

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_the_wheels_own_function_takes_our_calls(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where our reference stands behind the real operator's schema."""
    names = ("padded left", "window", "prefix", "packed rows", "chunks")
    monkeypatch.setattr(kernel_runs, "TRUTHS", [truth for truth in TRUTHS if truth.name in names])
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == "torch_npu.npu_fusion_attention")
    found = list(kernel_runs.of_kernel(kernel, kernel.function("npu"), device="cpu", dtype=torch.float32))
    assert {run.state for run in found} == {"right"}, found
    assert len(calls) == len(found) > 25
    assert {call.get("sparse_mode", 0) for call in calls} == {0, 2, 3, 4, 6}


def test_the_command_says_that_a_device_does_not_compute() -> None:
    """On a pretended device zeros would be compared with numbers: it is said at once, and nothing is called."""
    pytest.importorskip("rich")
    result = typed("kernels", "--device", "npu", "--operator", "npu_fusion_attention_v3")
    assert result.exit_code == 2, result.output
    assert "NOT PROVED: nothing was measured on the card; " in result.output
    assert "One and one is not two there" in " ".join(result.output.split())
    assert "would run" in result.output
