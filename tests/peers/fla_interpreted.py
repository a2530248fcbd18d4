"""fla's released Triton kernels on a CPU, in Triton's own interpreter: import this before fla."""

from collate_npu.proof.kernel_runs import count_in_triton, interpreted
from collate_npu.releases import installed

__all__ = ["count_in_triton"]

if not (installed("fla") and installed("triton")):
    raise ModuleNotFoundError("fla and triton are what is tested")
if not interpreted():
    raise RuntimeError("fla does not run in Triton's interpreter here")
