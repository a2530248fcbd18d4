"""Machine: installed packages, system, the CANN toolkit and the settings in the environment; nothing is imported."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from collate_npu.integrations import trainers
from collate_npu.releases import DISTRIBUTIONS, installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What `collate-npu env` prints."""

    system: str
    packages: dict[str, str]
    """Installed packages and their versions."""
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
    hazards: tuple[str, ...] = ()


_SETTINGS = (
    "NPU_FA2_SPARSE_MODE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "USE_MCORE_GDN", "COLLATE_NPU_DEBUG", "COLLATE_NPU_GUARD",
    "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
)  # fmt: skip
_CANN_FILES = ("version.info", "version.cfg", "*-linux/ascend_toolkit_install.info", "*/version.info")
"""Where releases of CANN say which they are, below ASCEND_HOME_PATH; torch_npu reads the third (utils/collect_env.py)."""
_VERSION = re.compile(r"^\s*(?:version|\w+_running_version)\s*=\s*\[?(?:[\d.]+:)?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)
_BASE = (
    "torch", "numpy", "torch_npu", "transformers", "datasets", "mindspeed", "megatron_adaptor", "transformer_engine_npu",
    "llamafactory",
)  # fmt: skip
_KERNELS = (
    *DISTRIBUTIONS["fla"], *DISTRIBUTIONS["causal_conv1d"], *DISTRIBUTIONS["fla_npu"], "kernels", "triton", "triton-ascend",
    "mamba-ssm", "flash-attn", "transformer-engine",
)  # fmt: skip


def packages() -> dict[str, str]:
    """The installed ones among those that training depends on here, and their versions."""
    names = dict.fromkeys((*_BASE, *(package for package, _ in trainers().values()), *_KERNELS))
    return {name: version for name in names if (version := installed(name))}


def settings() -> dict[str, str]:
    """The settings that are set."""
    return {name: value for name in _SETTINGS if (value := os.environ.get(name))}


def system() -> str:
    """System, C library, Python and processors in one line."""
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.platform()}, Python {platform.python_version()}, {ours} of {os.cpu_count()} CPUs"


def cann() -> str:
    """The CANN toolkit that ASCEND_HOME_PATH names, and its version; why not, where there is none."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME", "")
    if not home:
        return "none: ASCEND_HOME_PATH is not set"
    if not Path(home).is_dir():
        return f"none: ASCEND_HOME_PATH is {home}, which is no folder"
    files = (path for pattern in _CANN_FILES for path in sorted(Path(home).glob(pattern)) if path.is_file())
    found = filter(None, (_VERSION.search(path.read_text(encoding="utf-8", errors="replace")) for path in files))
    return f"{next((one[1] for one in found), 'version not told')} in {home}"
