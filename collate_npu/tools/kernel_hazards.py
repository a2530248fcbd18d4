"""Kernel hazards: what is known of the installed kernels of recurrent layers, by release, and what is missing beside them.

Faults of flash-linear-attention ("fla") and of flash-linear-attention-npu ("fla_npu", its module) by their numbers in
fla-org/flash-linear-attention and flashserve/flash-linear-attention-npu, read up to September 2026. Where no release with
the fix was seen, the line says before which fix, not which release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

PACKAGES = (
    "flash-linear-attention", "fla-core", "causal-conv1d", "flash-linear-attention-npu", "flash-linear-attention-npu-a2",
    "flash-linear-attention-npu-a3", "flash-linear-attention-npu-a5", "triton", "triton-ascend", "mamba-ssm", "flash-attn",
    "transformer-engine",
)  # fmt: skip
"""fla ships as two distributions from 0.3.2 on; fla_npu as one, from 26.9 on also as one for each chip (its #647)."""

Version = tuple[int, ...]

_FLA: tuple[tuple[Version, str], ...] = (
    (
        (0, 5, 1),
        "chunk tables go wrong after an empty sequence (#909), and its convolution gives wrong gradients where that of its "
        "output is not contiguous (#871): upgrade to 0.5.1",
    ),
    (
        (0, 5, 3),
        "its convolution gives wrong weight gradients where offsets come with more than one row (#955, open): hand over one "
        "flat row, as this library does. Where states go in or out, gradients are wrong too (#1138, #1140: mended after "
        "0.5.2)",
    ),
)
"""Below which release, and what. #909 and #871 are in tag v0.5.1; the fixes of #1138 and #1140 (#1139, #1141) in no tag."""
_FLA_NPU: tuple[tuple[Version, Version, str], ...] = (
    (
        (0,),
        (26, 7),
        "on A2 long flat rows in bfloat16 may have NaN gradients (#232, open) and tails that are no multiple of 16 NaN "
        "outputs (#242), and the gradient of a final state is never read (#312): mended after 26.6.0 but for #232",
    ),
    (
        (26, 7),
        (26, 8),
        "a build of its main branch: on A2 short tails of packed sequences are off by up to 0.7 before the fix of #367; KDA "
        "is not repeatable before that of #440, its gradients are wrong by 1e4 where a length is no multiple of 64 before "
        "that of #544, and recomputing refuses such lengths before that of #733. The version does not tell: build it anew",
    ),
    (
        (0,),
        (10**6,),
        "KDA's backward pass refuses more than 1024 chunks, 65536 tokens (#508, open), and the recurrent rule for decoding "
        "takes lengths that do not add up (#641, open)",
    ),
)
"""From and below which release, and what. 26.7.0.dev0 is every build of the main branch since July 2026."""
_TORCH_NPU: dict[Version, int] = {(2, 7, 1): 5, (2, 8, 0): 5, (2, 9, 0): 3, (2, 10, 0): 2}
"""The first post release whose streams fla_npu's operators may use (its setup.py:48-55, at 17e24fd)."""


def recurrent_hazards(packages: Mapping[str, str]) -> Iterator[str]:
    """A line for each hazard of these installed packages and versions."""
    yield from _fla(packages)
    yield from _fla_npu(packages)
    yield from _missing(packages)


def _fla(packages: Mapping[str, str]) -> Iterator[str]:
    installed = packages.get("fla-core") or packages.get("flash-linear-attention", "")
    for below, what in _FLA:
        if installed and _version(installed) < below:
            yield f"flash-linear-attention {installed}: {what}."


def _fla_npu(packages: Mapping[str, str]) -> Iterator[str]:
    name = next((name for name in PACKAGES if name.startswith("flash-linear-attention-npu") and name in packages), "")
    if name:
        installed = _version(packages[name])
        yield from (f"{name} {packages[name]}: {what}." for since, below, what in _FLA_NPU if since <= installed < below)
        torch_npu = packages.get("torch_npu", "")
        post = _TORCH_NPU.get(_version(torch_npu), 0)
        if _post(torch_npu) < post:
            first = f"{torch_npu.partition('.post')[0]}.post{post}"
            yield f"torch_npu {torch_npu} beside {name}: numbers may be wrong before {first} (streams out of step): upgrade."
    if "triton-ascend" in packages and _version(packages["triton-ascend"]) < (3, 2, 1):
        yield f"triton-ascend {packages['triton-ascend']} may crash on Ascend 950 (fla_npu's setup.py:182): 3.2.1 is needed."
    if {"torch_npu", "triton"} <= packages.keys() and "triton-ascend" not in packages:
        yield "triton is installed without triton-ascend: an NPU needs the latter, which takes its place (fla's INSTALL.md)."


def _missing(packages: Mapping[str, str]) -> Iterator[str]:
    """What transformers makes of flat rows on recurrent layers without causal-conv1d (integrations/hub_kernels.py:1033)."""
    if "transformers" not in packages or "causal-conv1d" in packages:
        return
    fla = "fla-core" in packages or "flash-linear-attention" in packages
    newer = _version(packages["transformers"]) >= (5, 20)
    if fla and newer:
        yield (
            "flash-linear-attention without causal-conv1d: with cu_seq_lens_q alone transformers raises nothing, and the "
            "convolution runs from one sequence of a flat row into the next. Such rows are refused here, where the model is "
            "given."
        )
    elif fla:
        yield (
            f"transformers {packages['transformers']} with flash-linear-attention and without causal-conv1d drops seq_idx "
            "in silence: the convolution runs from one sequence of a flat row into the next. Such rows are refused here; "
            "transformers 5.20 raises itself."
        )
    if "torch_npu" in packages:
        yield (
            "causal-conv1d is missing, and has no build for an NPU: transformers trains no flat rows of recurrent models "
            "there. Give each sequence its own row, with its 2D mask, or pack on a Megatron-style stack, whose layers take "
            "offsets (mcore-bridge, MindSpeed 0.16, Megatron-core 0.18)."
        )


def _version(text: str) -> Version:
    """The numbers before any suffix: 2.7.1.post2+cpu is (2, 7, 1), 26.7.0.dev0 (26, 7, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _post(text: str) -> int:
    found = re.search(r"\.post(\d+)", text)
    return int(found[1]) if found else 0
