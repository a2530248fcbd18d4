"""Probe: questions that import torch or more, each asked in a process of its own, which a library may crash alone.

A driver or a half-installed package may raise, abort, or never come back: then the reason is the answer. The process
finds packages as any Python here does, but never in the working directory, which `python -c` puts first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from collate_npu.releases import KERNELS_TOLD, installed
from collate_npu.tools.refusals import said

SECONDS = 120
"""How long a process may take."""
_PACKAGE = str(Path(__file__).resolve().parents[2] / "__init__.py")
_CODE = """import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("collate_npu", sys.argv[2])
sys.modules["collate_npu"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["collate_npu"])
from collate_npu.tools.env.probe import answer
answer(sys.argv[1])"""
"""This package by its file: the folder around it, which may be the working directory, is no place to find others."""


def ask(question: str, *, seconds: float = SECONDS) -> dict[str, Any]:
    """The answer to one of `ANSWERS`, or `{"fails": why}`."""
    command = [sys.executable, "-c", _CODE, question, _PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"fails": f"no answer within {seconds:.0f} s"}
    with suppress(ValueError):  # nothing, or half an answer
        return dict(json.loads(done.stdout))
    return {"fails": _ended(done.returncode, done.stderr.decode("utf-8", "replace"))}


def _ended(code: int, err: str) -> str:
    """`ended by SIGSEGV (the last line it said)`."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    said = err.strip().splitlines()
    return f"ended {how} ({said[-1].strip()[:300]})" if said else f"ended {how}"


def answer(question: str) -> None:
    """In the process that is asked: a line of JSON to stdout; what libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            found = ANSWERS[question]()
        except (Exception, SystemExit) as error:  # some libraries end the process they are imported in
            found = {"fails": reason(error)}
        json.dump(found, out)
    os._exit(0)  # a library that crashes while Python ends has no say in what was found


def _torch() -> dict[str, Any]:
    import torch

    try:
        found = [f"cuda x {torch.cuda.device_count()}"] if torch.cuda.is_available() else []
        npu = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            found.append(f"npu x {npu.device_count()} ({npu.get_device_name(0)})")
    except Exception as error:  # a driver that does not answer
        return {"devices": f"not known: {said(error)}"}
    return {"devices": ", ".join(found) or "cpu only"}


def _torch_npu() -> dict[str, Any]:
    """torch loads it when it is imported; where that failed or was switched off, the import here says why."""
    version = getattr(import_module("torch_npu"), "version", None)
    return {"cann": str(getattr(version, "cann", None) or "")}


def runs() -> dict[str, str]:
    """What transformers computes attention and Gated DeltaNet with here, asked of itself."""
    found, asked = {}, {"transformers, attention": _attentions, "transformers, Gated DeltaNet": _gated_delta_net}
    for stack, question in asked.items() if installed("transformers") else ():
        try:
            found[stack] = question()
        except Exception as error:  # a package that is half there
            found[stack] = f"not known: {said(error)}"
    return found


def _attentions() -> str:
    """By the names of `attn_implementation`."""
    from transformers import utils

    def has(name: str) -> bool:
        return bool(getattr(utils, name, bool)())

    here = ["sdpa", "eager", *(f"flash_attention_{n}" for n in (2, 3, 4) if has(f"is_flash_attn_{n}_available"))]
    if has("is_torch_npu_available"):
        here.append("flash_attention_2 (npu_fusion_attention)")
    return ", ".join([*here, *["owner/kernel of the hub"] * bool(installed("kernels"))])


def _gated_delta_net() -> str:
    """What each function of the layers of a tiny Qwen3-Next gave way to."""
    from collate_npu.testing import tiny_model
    from collate_npu.tools.audit.candidates import resolved_kernels

    if not KERNELS_TOLD.holds():
        return f"transformers before {KERNELS_TOLD} does not say which functions it resolved"
    chosen = resolved_kernels(tiny_model("qwen3_next", vocab_size=8))
    return ", ".join(f"{name}: {'plain torch' if package == 'torch' else package}" for name, package in chosen.items())


ANSWERS: Mapping[str, Callable[[], dict[str, Any]]] = {"torch": _torch, "torch_npu": _torch_npu, "stacks": runs}


def reason(error: BaseException) -> str:
    """Why something does not load, down to the first cause: of torch's own error (`_import_device_backends`), that library
    of CANN which torch_npu misses."""
    last = error
    while cause := last.__cause__ or last.__context__:
        last = cause
    return said(error) if last is error else f"{said(error)} ({said(last)})"
