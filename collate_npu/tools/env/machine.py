"""Machine: system, memory, processors, the CANN toolkit and the settings in the environment; nothing is imported."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

SETTINGS = (
    "NPU_FA2_SPARSE_MODE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "USE_MCORE_GDN", "COLLATE_NPU_DEBUG", "COLLATE_NPU_GUARD",
    "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
)  # fmt: skip
_OF_INTEREST = re.compile("ascend|cann|cuda|driver|hccl|nvidia", re.IGNORECASE)
_CANN_FILES = ("version.info", "version.cfg", "*-linux/ascend_toolkit_install.info", "*/version.info")
"""Where releases of CANN say which they are, below ASCEND_HOME_PATH; torch_npu reads the third (utils/collect_env.py)."""
_VERSION = re.compile(r"^\s*(?:version|\w+_running_version)\s*=\s*\[?(?:[\d.]+:)?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)


def settings() -> dict[str, str]:
    """The settings that are set; of a library path only what leads to a card's libraries."""
    found = {name: value for name in SETTINGS if (value := os.environ.get(name))}
    if "LD_LIBRARY_PATH" in found:
        found["LD_LIBRARY_PATH"] = _shortened(found["LD_LIBRARY_PATH"])
    return found


def _shortened(value: str) -> str:
    entries = [entry for entry in value.split(os.pathsep) if entry]
    named = [entry for entry in entries if _OF_INTEREST.search(entry)]
    more = len(entries) - len(named)
    return os.pathsep.join([*named, *([f"({more} more)"] if more else [])])


def system() -> str:
    """System, Python, C library, processors and memory in one line."""
    libc = " ".join(platform.libc_ver()).strip()
    parts = [
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        libc,
        _processors(),
        _memory(),
    ]
    return ", ".join(filter(None, parts))


def _processors() -> str:
    here = os.cpu_count() or 0
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here
    return f"{ours} CPUs" + (f" of {here}" if ours != here else "") if here else ""


def _memory() -> str:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return ""
    return f"{size / 2**30:.1f} GiB RAM"


def cann() -> str:
    """The CANN toolkit that ASCEND_HOME_PATH names, and its version; why not, where there is none."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME", "")
    if not home:
        return "none: ASCEND_HOME_PATH is not set"
    if not Path(home).is_dir():
        return f"none: ASCEND_HOME_PATH is {home}, which is no folder"
    said = next(_versions(Path(home)), "")
    return f"{said or 'version not told'} in {home}"


def _versions(home: Path) -> Iterator[str]:
    for path in (path for pattern in _CANN_FILES for path in sorted(home.glob(pattern))):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := _VERSION.search(text):
            yield found[1]
