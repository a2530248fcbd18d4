"""Environment: what is installed, which kernels it can run, and the hazards known for that combination.

For issue reports and for people who wonder why a mask is lost. Reads package metadata, tries `import torch` and
`import torch_npu`, and costs what these imports cost. torch need not load: that is what is explained.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from collate_npu.tools import kernel_hazards

PACKAGES = (
    "torch", "numpy", "torch_npu", "transformers", "accelerate", "trl", "megatron-core", "mindspeed", "ms-swift",
    "mcore-bridge", "verl", "twinkle-kit", "torchtitan", "llamafactory", "axolotl", *kernel_hazards.PACKAGES,
)  # fmt: skip
SETTINGS = ("NPU_FA2_SPARSE_MODE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "USE_MCORE_GDN", "ASCEND_HOME_PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What `collate-npu env` prints."""

    system: str
    packages: dict[str, str]
    """Installed packages and their versions, in the order of `PACKAGES`."""
    settings: dict[str, str]
    devices: str
    npu: str
    """Whether torch_npu works here, and if not, why."""
    hazards: tuple[str, ...]


def environment() -> Environment:
    """Look around. Never raises for a package that is broken: that is a finding."""
    from collate_npu import __version__

    packages = {"collate_npu": __version__} | {name: v for name in PACKAGES if (v := _version(name))}
    settings = {name: value for name in SETTINGS if (value := os.environ.get(name))}  # importing torch changes them
    torch_fails = _why_not("torch")
    npu = _npu(packages, torch_fails)
    devices = f"not known: torch does not load: {torch_fails}" if torch_fails else _devices()
    rounding = {} if torch_fails else _rounding(devices)
    return Environment(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        packages=packages,
        settings=settings | {name: str(value) for name, value in rounding.items()},
        devices=devices,
        npu=npu,
        hazards=(*_hazards(packages, settings, devices, npu), *_rounded(rounding)),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _devices() -> str:
    import torch

    try:
        found = [f"cuda x {torch.cuda.device_count()}"] if torch.cuda.is_available() else []
        npu = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            found.append(f"npu x {npu.device_count()} ({npu.get_device_name(0)})")
    except Exception as error:  # a driver that does not answer
        return f"not known: {_said(error)}"
    return ", ".join(found) or "cpu only"


_ROUNDS = {
    "torch.npu.matmul.allow_hf32": "HF32",
    "torch.npu.conv.allow_hf32": "HF32",
    "torch.backends.cuda.matmul.allow_tf32": "TF32",
    "torch.backends.cudnn.allow_tf32": "TF32",
}
"""Switches that make a card round float32 products to ten bits. torch_npu 2.13 (npu/npu_config.py:158-212): matmul is off
until set, conv on; torch 2.13: matmul off, cudnn on."""


def _rounding(devices: str) -> dict[str, bool]:
    """The switches of the cards that are here, as they stand in this process."""
    import torch

    held = {"npu": hasattr(torch, "npu"), "backends": "cuda" in devices}
    found = {name: _read(torch, name) for name in _ROUNDS if held[name.split(".")[1]]}
    return {name: value for name, value in found.items() if value is not None}


def _read(torch: Any, name: str) -> bool | None:
    value = torch
    try:
        for part in name.split(".")[1:]:
            value = getattr(value, part)
    except Exception:  # an older release without it, or a newer one that refuses to tell beside its own switch
        return None
    return value if isinstance(value, bool) else None


def _rounded(rounding: dict[str, bool]) -> Iterator[str]:
    on = [name for name, value in rounding.items() if value]
    if on:
        kinds = " and ".join(sorted({_ROUNDS[name] for name in on}))
        yield (
            f"{kinds} rounds float32 products to ten bits ({', '.join(on)}): right results differ by 1e-3. The audit "
            "measures that noise; set them to False to compare in full float32."
        )


def _why_not(package: str) -> str:
    """Why a package does not load, down to the first cause, or nothing.

    torch ends its own import with a RuntimeError where it cannot load an installed torch_npu
    (torch/__init__.py, `_import_device_backends`); the missing CANN library is the cause of that error.
    """
    try:
        import_module(package)
    except Exception as error:
        first: BaseException = error
        last = first
        while cause := last.__cause__ or last.__context__:
            last = cause
        return _said(first) if last is first else f"{_said(first)} ({_said(last)})"
    return ""


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _npu(packages: dict[str, str], torch_fails: str) -> str:
    """torch loads the backend when it is imported; where that failed or was switched off, the import here says why."""
    if "torch_npu" not in packages:
        return "torch_npu is not installed"
    if why := torch_fails or _why_not("torch_npu"):  # ImportError: libhccl.so and the like: the CANN libraries are missing
        return f"torch_npu does not load: {why}"
    cann = getattr(getattr(import_module("torch_npu"), "version", None), "cann", None)
    return f"torch_npu loads{f', CANN {cann}' if cann else ''}"


def _hazards(packages: dict[str, str], settings: dict[str, str], devices: str, npu: str) -> Iterator[str]:
    yield from _npu_hazards(packages, settings, npu)
    if "mindspeed" in packages and "torch does not load" not in devices:
        yield _start_order()
    if "torch" not in packages:
        yield "torch is not installed: install the build for this machine (the CPU build where there is no card)."
    elif "torch does not load" in devices and "torch_npu" not in packages:
        yield "torch is installed and does not load: every other command needs it."
    if "triton" in packages and {"flash-linear-attention", "fla-core"} & packages.keys() and devices == "cpu only":
        yield (
            "flash-linear-attention (fla-core) and triton are installed and there is no GPU: transformers hands Gated "
            "DeltaNet to their kernels, which fail on a CPU. Uninstall them here."
        )
    if "transformers" in packages and _release(packages["transformers"]) < (5, 15):
        yield (
            f"transformers {packages['transformers']} drops the mask of a single left-padded row in recurrent layers "
            "(mended in 5.15): such batches are refused."
        )
    yield from kernel_hazards.recurrent_hazards(packages)
    if "mcore-bridge" in packages:
        yield from _gated_delta_net_hazards(packages, settings)


def _gated_delta_net_hazards(packages: dict[str, str], settings: dict[str, str]) -> Iterator[str]:
    """mcore-bridge 1.6.5: model/gpts/qwen3_next.py:456-458; megatron-core core/transformer/transformer_config.py:982-986."""
    bridge, core = packages["mcore-bridge"], packages.get("megatron-core", "")
    yield (
        f"No Gated DeltaNet of mcore-bridge {bridge} reads attention_mask_2d: call integrations.swift.install() or "
        "integrations.megatron.mcore_bridge.install() before the model is built, or pad right."
    )
    if settings.get("USE_MCORE_GDN", "1").lower() in ("0", "false", "no", "off"):
        yield (
            "USE_MCORE_GDN=0 takes transformers' Gated DeltaNet: no context parallelism, and with transformers 5.13 or newer"
            f" (here {packages.get('transformers', 'none')}) no Qwen3-Next without that install. Unset it."
        )
    elif core and _release(core) < (0, 18):
        yield f"Gated DeltaNet of megatron-core {core} has no context parallelism: 0.18 is the first release with it."


def _start_order() -> str:
    """MindSpeed's start in this process, and what to ask in another: it needs torch, as MindSpeed does."""
    from collate_npu.integrations.mindspeed import FIRST, start_problem

    asks = "integrations.mindspeed.start_problem() says in the training process whether that happened"
    return start_problem() or f"MindSpeed patches Megatron in the process that trains: {FIRST}; {asks}."


def _npu_hazards(packages: dict[str, str], settings: dict[str, str], npu: str) -> Iterator[str]:
    if "torch_npu" not in packages:
        return
    torch, torch_npu = packages.get("torch", ""), packages["torch_npu"]
    if _release(torch) != _release(torch_npu):
        # "{PyTorch version}" or "{PyTorch version}.postN": COMPATIBILITY.md of Ascend/pytorch, which also names the CANN
        # release of each pair: torch_npu 2.7.1 takes CANN 8.3.RC1, 2.7.1.post2 CANN 8.5.0, 2.12.0 CANN 9.1.0
        yield (
            f"torch {torch} and torch_npu {torch_npu} are not a pair: install the same minor release of both, the one "
            "made for this machine's CANN."
        )
    if "does not load" in npu:
        yield (
            "torch_npu is installed without the CANN libraries, and `import torch` loads it: set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU, or source CANN's set_env.sh. transformers imports it too "
            "when it builds a model, and fails: uninstall torch_npu for that."
        )
    if settings.get("NPU_FA2_SPARSE_MODE") == "2":
        yield (
            "NPU_FA2_SPARSE_MODE=2 aligns the causal triangle to the top left: right for training, wrong wherever there "
            "are more keys than queries (a KV cache). The default, 3, is right for both."
        )
    if "transformers" in packages:
        yield (
            "transformers' flash attention on NPU drops sliding windows without an error "
            "(integrations/npu_flash_attention.py:54-104): use sdpa for models that have them."
        )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
