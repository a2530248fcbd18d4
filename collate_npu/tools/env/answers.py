"""Answers: what the process of a probe looks at: torch and its devices, torch_npu, and what each stack would run here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from collate_npu.tools.env.reasons import reason, said


def answer(questions: Sequence[str]) -> None:
    """A line of JSON to stdout for each question; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for question in questions:
        try:
            found = ANSWERS[question]()
        except BaseException as error:  # SystemExit too: some libraries end the process they are imported in
            found = {"fails": reason(error)}
        print(json.dumps([question, found]), file=out, flush=True)
    os._exit(0)  # a library that crashes while Python ends has no say in what was found


def _torch() -> dict[str, Any]:
    import torch

    return {"devices": (devices := _devices(torch)), "rounding": _rounding(torch, devices)}


def _devices(torch: Any) -> str:
    try:
        found = [f"cuda x {torch.cuda.device_count()}"] if torch.cuda.is_available() else []
        npu = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            found.append(f"npu x {npu.device_count()} ({npu.get_device_name(0)})")
    except Exception as error:  # a driver that does not answer
        return f"not known: {said(error)}"
    return ", ".join(found) or "cpu only"


ROUNDS: Mapping[str, str] = {
    "torch.npu.matmul.allow_hf32": "HF32",
    "torch.npu.conv.allow_hf32": "HF32",
    "torch.backends.cuda.matmul.allow_tf32": "TF32",
    "torch.backends.cudnn.allow_tf32": "TF32",
}
"""Switches that make a card round float32 products to ten bits. torch_npu 2.13 (npu/npu_config.py:158-212): matmul is off
until set, conv on; torch 2.13: matmul off, cudnn on."""


def _rounding(torch: Any, devices: str) -> dict[str, bool]:
    """The switches of the cards that are here, as they stand in this process."""
    held = {"npu": hasattr(torch, "npu"), "backends": "cuda" in devices}
    found = {name: _read(torch, name) for name in ROUNDS if held[name.split(".")[1]]}
    return {name: value for name, value in found.items() if value is not None}


def _read(torch: Any, name: str) -> bool | None:
    value = torch
    try:
        for part in name.split(".")[1:]:
            value = getattr(value, part)
    except Exception:  # an older release without it, or a newer one that refuses to tell beside its own switch
        return None
    return value if isinstance(value, bool) else None


def _torch_npu() -> dict[str, Any]:
    """torch loads it when it is imported; where that failed or was switched off, the import here says why."""
    version = getattr(import_module("torch_npu"), "version", None)
    return {"cann": str(getattr(version, "cann", None) or "")}


def _mindspeed() -> dict[str, Any]:
    """MindSpeed's start in this process, and what to ask in another."""
    from collate_npu.integrations.mindspeed import FIRST, start_problem

    asks = "integrations.mindspeed.start_problem() says in the training process whether that happened"
    general = f"MindSpeed patches Megatron in the process that trains: {FIRST}; {asks}."
    return {"start": start_problem() or general}


def _runs() -> dict[str, Any]:
    from collate_npu.tools.env.stacks import runs

    return runs()


def _routes() -> dict[str, Any]:
    from collate_npu.tools.env.stacks import routes

    return routes()


ANSWERS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch, "torch_npu": _torch_npu, "mindspeed": _mindspeed, "runs": _runs, "routes": _routes,
}  # fmt: skip


def here(questions: Sequence[str]) -> dict[str, Any]:
    """The same answers from this process, where torch is loaded already: its switches may have been set by now."""
    found = {}
    for question in questions:
        try:
            found[question] = ANSWERS[question]()
        except Exception as error:
            found[question] = {"fails": reason(error)}
    return found


def torch_is_loaded() -> bool:
    return hasattr(sys.modules.get("torch"), "nn")  # a failed import may leave a part of it behind
