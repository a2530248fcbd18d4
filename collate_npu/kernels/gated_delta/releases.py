"""Which release of each package a call meets: named by the caller, else installed, else the newest one that was read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import NoneType

from collate_npu.errors import CollateError, explain

Release = tuple[float, ...]

NEWEST: Mapping[str, str] = {
    "transformers": "5.23.0",
    "fla": "0.5.2",
    "causal_conv1d": "1.6.1",
    "fla_npu": "26.9.1",
    "megatron": "0.19.0",
    "mcore_bridge": "1.6.5",
    "mindspeed": "0.18",
}
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "fla": ("flash-linear-attention", "fla-core"),
    "causal_conv1d": ("causal-conv1d",),
    "fla_npu": tuple(f"flash-linear-attention-npu{chip}" for chip in ("", "-a2", "-a3", "-a5")),
    "megatron": ("megatron-core",),
    "mcore_bridge": ("mcore-bridge",),
    "mindspeed": ("mindspeed",),
}
_SPELLINGS = {"flash_linear_attention": "fla", "fla_core": "fla", "megatron_core": "megatron", "hf": "transformers"}
_ABSENT = ("", "none", "absent", "missing", "not installed")


@dataclass(frozen=True, slots=True)
class Releases:
    """`named`: package to release, None for one that is not there."""

    named: Mapping[str, str | None]

    @classmethod
    def of(cls, versions: Mapping[str, str] | None) -> Releases:
        """`{"fla": ""}` says that fla is not installed; so does `{"fla": "0.5.2"}` of the convolution beside it."""
        if not isinstance(versions, (Mapping, NoneType)):
            rule = "Releases are a dict by package."
            raise CollateError(explain("versions", type(versions).__name__, rule, "Pass {'transformers': '5.23.0'}."))
        named: dict[str, str | None] = {}
        for package, version in (versions or {}).items():
            name = str(package).replace("-", "_").lower()
            absent = version is None or str(version).strip().lower() in _ABSENT
            named[_SPELLINGS.get(name, name)] = None if absent else str(version)
        if named.get("fla") and "transformers" in named:
            named.setdefault("causal_conv1d", None)
        return cls(named)

    def text(self, package: str) -> str | None:
        """The release as it is written, None where the package is not there."""
        return self.named[package] if package in self.named else _installed(package) or NEWEST.get(package, "")

    def has(self, package: str) -> bool:
        return self.text(package) is not None

    def before(self, package: str, release: str) -> bool:
        """Is it there, and older than `release`? A branch name without a number (`main`) is newer than any."""
        text = self.text(package)
        return text is not None and _numbers(text) < _numbers(release)


def _installed(package: str) -> str | None:
    for distribution in DISTRIBUTIONS.get(package, ()):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(text: str) -> Release:
    """`core_r0.16.0`, `v26.6.0`, `0.5.2.dev1`: the last dotted number; `(inf,)` without one."""
    found: list[str] = re.findall(r"\d+(?:\.\d+)+|^\d+$", text)
    return tuple(float(n) for n in found[-1].split(".")) if found else (float("inf"),)
