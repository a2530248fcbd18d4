"""Device: does the one that was named compute here?"""

from __future__ import annotations

import torch

from collate_npu.errors import CollateError, explain
from collate_npu.tools.refusals import refused


def _here() -> list[str]:
    """Those that torch knows and finds."""
    found = [getattr(torch, name, None) for name in ("cuda", "npu")]
    return ["cpu", *(str(each.__name__).rpartition(".")[2] for each in found if each is not None and each.is_available())]


def check_device(device: str, dtype: torch.dtype) -> None:
    """Refuse a device that does not compute; a pretended one (CANN stand-ins) returns zeros: every case would pass."""
    here = f"Name a device of this machine: {', '.join(_here())}."
    with refused("--device", device, f"{dtype} does not compute there.", here):
        if device.startswith("npu"):
            import torch_npu  # noqa: F401
        two = (torch.ones(3, device=device, dtype=dtype) + 1).float().cpu()
    if not torch.equal(two, torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))
