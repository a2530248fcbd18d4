"""Installed: which packages are here and in which version, by their metadata alone: nothing is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from collate_npu.tools import kernel_hazards

PACKAGES = (
    "torch", "numpy", "torch_npu", "transformers", "accelerate", "trl", "datasets", "megatron-core", "mindspeed", "ms-swift",
    "mcore-bridge", "verl", "twinkle-kit", "torchtitan", "llamafactory", "axolotl", "kernels", *kernel_hazards.PACKAGES,
)  # fmt: skip
UNKNOWN = "installed, version not known"
"""What stands for a version where the metadata of a package is broken."""


def installed() -> dict[str, str]:
    """Installed packages and their versions, in the order of `PACKAGES`."""
    return {name: found for name in PACKAGES if (found := version_of(name))}


def version_of(name: str) -> str:
    """The version of a package, "" where it is not installed, `UNKNOWN` where its metadata does not say."""
    try:
        found: str | None = version(name)
    except PackageNotFoundError:
        return ""
    except Exception:  # no METADATA, or one that is no text: each release of Python raises something else
        return UNKNOWN
    return found or UNKNOWN


def release(text: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
