"""Releases: the release in which each package changed what we depend on, and the one reader of versions.

A fact of a release stands here once, with its source, for all code that needs it. Versions are read from the metadata of
packages, so nothing is imported. Builds count as the release they lead to: 5.20.0.dev0 is 5.20, 2.13.0+cpu is 2.13.0.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "fla": ("fla-core", "flash-linear-attention"),
    "fla_npu": tuple(f"flash-linear-attention-npu{chip}" for chip in ("", "-a2", "-a3", "-a5")),
    "causal_conv1d": ("causal-conv1d",),
    "megatron": ("megatron-core",),
    "mcore_bridge": ("mcore-bridge",),
}
"""The distributions of a package, where they are not named like it. fla ships as two from 0.3.2 on, its kernels in fla-core;
fla_npu as one, from 26.9 on also as one for each chip (its #647)."""

NEWEST: Mapping[str, str] = {
    "transformers": "5.23.0",
    "fla": "0.6.0",
    "causal_conv1d": "1.6.1",
    "fla_npu": "26.9.1",
    "megatron": "0.19.0",
    "mcore_bridge": "1.6.5",
    "mindspeed": "0.18",
}
"""The newest release whose source was read."""

RUN_RELEASES: Mapping[str, tuple[str, str]] = {
    "torch": ("2.6.0", "2.15.0"),
    "transformers": ("4.57.1", "5.24.0"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "trl": ("0.24.0", "1.16.0"),
    "accelerate": ("1.11.0", "1.15.0"),
}
"""The oldest and the newest release that the tests run. Of other packages one is run: `TESTED` of the integration."""

UNKNOWN = "installed, version not known"
"""What stands for a version where the metadata of a package is broken."""
_FOUND: dict[str, str] = {}
"""The versions by package: reading one takes a millisecond, and every batch may need it."""


def installed(package: str) -> str:
    """Return the installed version of a package: "" if it is not installed, `UNKNOWN` if its metadata is broken."""
    if package not in _FOUND:
        _FOUND[package] = next(filter(None, map(_read, DISTRIBUTIONS.get(package, (package,)))), "")
    return _FOUND[package]


def _read(distribution: str) -> str:
    try:
        found: str | None = version(distribution)
    except PackageNotFoundError:
        return ""
    except Exception:  # no METADATA, or one that is no text: each release of Python raises something else
        return UNKNOWN
    return found or UNKNOWN


def outside(package: str, tested: str = "", here: str | None = None) -> str:
    """Return a warning for a release (default: the installed one) that was not run here; "" for one that was."""
    here = installed(package) if here is None else here
    oldest, newest = RUN_RELEASES.get(package, (tested, tested))
    if not here or numbers(oldest) <= numbers(here) <= numbers(newest):
        return ""
    ran = newest if oldest == newest else f"{oldest} to {newest}"
    return f"{package} {here} is not among the releases that were run ({ran}): `collate-npu guide {page_of(package)}`"


def page_of(package: str) -> str:
    """Return the guide page about a package: its title names it, or else a heading on it."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "guide").glob("*.md"))}
    named = rf" .*\b{re.escape(package)}\b"
    found = (page for marks in ("#", "##") for page, text in texts.items() if re.search(f"(?im)^{marks}{named}", text))
    return next(found, "index")


@cache
def say_outside(package: str, tested: str = "") -> None:
    """Warn of a release that was not run here, once a process."""
    if text := outside(package, tested):
        warnings.warn(f"collate_npu: {text} says what was checked. Run the audit, or guard the first batch.", stacklevel=3)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 16, 0) of `core_r0.16.0`. A text without one (`main`, "") is newer than any."""
    found = re.search(r"\d+(?:\.\d+)+|^\d+$", text)
    return tuple(map(int, found[0].split("."))) if found else (sys.maxsize,)


def post(text: str) -> int:
    """Return the number of a post release: 2 of `2.7.1.post2`, 0 of `2.7.1`."""
    found = re.search(r"\.post(\d+)", text)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Since:
    """A fact that holds from one release of a package on. `str()` of it is the release."""

    package: str
    release: str
    """"" while no release that was read has it."""
    source: str
    before: str = ""
    """What is wrong in earlier releases, for people who have one installed."""
    after: str = ""
    """The release from which that is wrong; "" for all earlier ones."""

    def holds(self, text: str | None = None) -> bool:
        """True if it holds in this version, by default the installed one; a missing package counts as the newest."""
        return numbers(installed(self.package) if text is None else text) >= numbers(self.release)

    def hurts(self, text: str) -> bool:
        """True if something is wrong in this version."""
        return bool(self.before) and not self.holds(text) and numbers(text) >= numbers(self.after or "0")

    def __str__(self) -> str:
        return self.release


# What transformers does.
SINGLE_ROW_MASKED = Since(
    "transformers", "5.15", "recurrent layers read it",
    "drops the mask of a single left-padded row in recurrent layers: such prompts are refused",
)  # fmt: skip
KERNELS_TOLD = Since("transformers", "5.19", "a wrapper keeps which function was resolved: integrations/hub_kernels.py")
MISSING_KERNEL_RAISES = Since("transformers", "5.20", "for flat rows: integrations/hub_kernels.py:1033-1050")

# What the kernels of recurrent layers do: faults by their numbers in fla-org/flash-linear-attention and
# flashserve/flash-linear-attention-npu, read up to September 2026.
FLA_COUNTS_EMPTY = Since("fla", "0.5.1", "#909", "chunk tables go wrong after an empty sequence")
FLA_STATES = Since("fla", "0.5.3", "#1138, #1140", "gradients are wrong where states go in or out")
FLA_ROWS = Since(
    "fla", "", "#955",
    "its convolution gives wrong weight gradients where offsets come with more than one row: hand over one flat row, as "
    "this library does",
)  # fmt: skip
FLA_NPU_A2 = Since(
    "fla_npu", "26.6.1", "#242, #312",
    "on A2 long flat rows in bfloat16 may have NaN gradients (#232, open) and tails that are no multiple of 16 NaN outputs, "
    "and the gradient of a final state is never read",
)  # fmt: skip
FLA_NPU_MAIN = Since(
    "fla_npu", "26.8", "#367, #440, #544, #733; 26.7.0.dev0 is every build of the main branch since July 2026",
    "on A2 short tails of packed sequences are off by up to 0.7 before the fix of #367; KDA is not repeatable before that of"
    " #440, its gradients are wrong by 1e4 where a length is no multiple of 64 before that of #544, and recomputing refuses"
    " such lengths before that of #733. The version does not tell: build it anew",
    after="26.7",
)  # fmt: skip
FLA_NPU_KDA = Since(
    "fla_npu", "", "#508, #641",
    "KDA's backward pass refuses more than 1024 chunks, 65536 tokens, and the recurrent rule for decoding takes lengths "
    "that do not add up",
)  # fmt: skip
TRITON_ASCEND_950 = Since("triton-ascend", "3.2.1", "fla_npu's setup.py:182", "may crash on Ascend 950")
TORCH_NPU_STREAMS = ("2.7.1.post5", "2.8.0.post5", "2.9.0.post3", "2.10.0.post2")
"""The first post releases whose streams fla_npu's operators may use (its setup.py:45-52, at 17e24fd)."""


def precedes(torch_npu: str, firsts: tuple[str, ...]) -> bool:
    """True if it is a post release before the first one of its torch, or of a torch before all of them."""
    installed = numbers(torch_npu)
    same = [post(first) for first in firsts if numbers(first) == installed]
    return post(torch_npu) < same[0] if same else installed < min(map(numbers, firsts))


# What Megatron and MindSpeed do.
MEGATRON_PACKED = Since("megatron", "0.18", "Gated DeltaNet takes packed rows: 0.16.1 ssm/gated_delta_net.py:295 raises")
