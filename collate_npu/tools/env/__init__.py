"""Environment: what is installed, which kernels each stack would run here, what is refused, and known hazards.

For issue reports and for people who wonder why a mask is lost. Imports nothing of what it tells about: whatever may raise,
abort or hang is asked in a process of its own (`probe`), so there is always a report. torch need not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collate_npu.tools.env import answers, installed, machine, probe
from collate_npu.tools.env.combinations import hazards


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What `collate-npu env` prints."""

    system: str
    packages: dict[str, str]
    """Installed packages and their versions, in the order of `installed.PACKAGES`."""
    settings: dict[str, str]
    cann: str
    """The CANN toolkit and its version, or why there is none."""
    devices: str
    npu: str
    """Whether torch_npu works here, and if not, why."""
    runs: dict[str, str]
    """What each stack computes attention and Gated DeltaNet with on this machine."""
    refused: dict[str, dict[str, str]]
    """Stack -> kind of batch -> why it is refused for a Qwen3-Next."""
    hazards: tuple[str, ...]


def environment() -> Environment:
    """Look around. Never raises for a package that is broken: that is a finding."""
    from collate_npu import __version__

    packages, settings = installed.installed(), machine.settings()
    found = _asked(packages)
    torch, npu = _failing(found["torch"]), _npu(packages, found)
    devices = f"not known: torch does not load: {torch}{_alone(packages)}" if torch else str(found["torch"]["devices"])
    rounding: dict[str, bool] = found["torch"].get("rounding", {})
    start = str(found.get("mindspeed", {}).get("start", ""))
    runs, refused = _said(found, "runs"), {} if "fails" in found.get("routes", {}) else found.get("routes", {})
    return Environment(
        system=machine.system(),
        packages={"collate_npu": __version__} | packages,
        settings=settings | {name: str(value) for name, value in rounding.items()},
        cann=machine.cann(),
        devices=devices,
        npu=npu,
        runs=runs,
        refused=refused,
        hazards=tuple(hazards(packages, settings, devices=devices, npu=npu, rounding=rounding, start=start)),
    )


def _asked(packages: Mapping[str, str]) -> dict[str, Any]:
    """In this process where torch is loaded already, so that switches are told as they were set here."""
    first = ["torch", *(["torch_npu"] if "torch_npu" in packages else [])]
    look = answers.here if answers.torch_is_loaded() else probe.ask
    found = look(first)
    if _failing(found["torch"]):
        return found
    return found | probe.ask([*(["mindspeed"] if "mindspeed" in packages else []), "runs", "routes"])


def _alone(packages: Mapping[str, str]) -> str:
    """Whether it is torch_npu that stands in torch's way."""
    if "torch_npu" not in packages:
        return ""
    found = probe.ask(["torch"], TORCH_DEVICE_BACKEND_AUTOLOAD="0")["torch"]
    return "; torch alone does not load either" if _failing(found) else "; torch alone, without torch_npu, does"


def _failing(found: Mapping[str, Any]) -> str:
    return str(found.get("fails", ""))


def _said(found: Mapping[str, Any], question: str) -> dict[str, str]:
    told = dict(found.get(question, {}))
    return {"not known": told["fails"]} if "fails" in told else told


def _npu(packages: Mapping[str, str], found: Mapping[str, Any]) -> str:
    if "torch_npu" not in packages:
        return "torch_npu is not installed"
    if why := _failing(found["torch"]) or _failing(found["torch_npu"]):  # ImportError: libhccl.so: CANN is missing
        return f"torch_npu does not load: {why}"
    cann = found["torch_npu"]["cann"]
    return f"torch_npu loads{f', CANN {cann}' if cann else ''}"
