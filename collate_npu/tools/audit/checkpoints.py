"""Checkpoints: a folder of a model, looked at before anything is built, and loaded with the class it was saved with.

A folder may hold Python of its own (`auto_map`). It runs with `--trust-remote-code` alone; nobody is asked.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from collate_npu.errors import CollateError, explain
from collate_npu.testing.invariance import check_one_stack
from collate_npu.tools.audit.attentions import first_line

AUTOS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMaskedLM", "AutoModel")


def is_checkpoint(name: str) -> bool:
    """Is it a folder that transformers could load, rather than a model type?"""
    return (Path(name) / "config.json").is_file()


def check_checkpoint(name: str, *, trust: bool) -> None:
    """Refuse, in one line, a folder whose config does not load, or whose own code nobody said to trust."""
    where, remedy = f"--model {name}", "Name the folder of a whole checkpoint of transformers."
    try:
        told = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        rule = "Its config.json is one JSON object."
        raise CollateError(explain(where, f"{type(error).__name__}: {first_line(error)}", rule, remedy)) from None
    if not isinstance(told, dict):
        raise CollateError(explain(where, f"a {type(told).__name__}", "Its config.json is one JSON object.", remedy))
    if told.get("auto_map") and not trust:
        rule = "The folder brings Python code of its own, which would run here."
        remedy = "Read that code, then pass --trust-remote-code; or take auto_map out, if transformers has the model itself."
        raise CollateError(explain(where, "auto_map in config.json", rule, remedy))
    if not told.get("auto_map"):
        _check_type(where, told.get("model_type"))
    try:
        config = config_of_checkpoint(name, trust=trust)
    except Exception as error:  # transformers raises whatever its validators raise
        got = f"{type(error).__name__}: {first_line(error)}"
        raise CollateError(explain(where, got, "Its config.json does not load.", remedy)) from None
    check_one_stack(config)


def _check_type(where: str, model_type: Any) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        near = get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=2)
        rule = f"transformers {transformers.__version__} has no such model type."
        remedy = f"Did you mean {' or '.join(near)}? " if near else ""
        remedy += "A newer transformers may have it."
        raise CollateError(explain(where, f"model_type {model_type}", rule, remedy))


def config_of_checkpoint(name: str, *, trust: bool) -> Any:
    """The config of a folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(Path(name)), trust_remote_code=trust)


def load_checkpoint(name: str, *, trust: bool, attn_implementation: str, dtype: torch.dtype) -> Any:
    """The model of a folder, of the class that its config names: with or without a head, text alone or with vision."""
    import transformers

    config = config_of_checkpoint(name, trust=trust)
    held = getattr(config, "auto_map", None) or {}
    remote = [key for key in held if key in AUTOS]
    saved = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if remote:
        chosen = getattr(transformers, remote[0])
    elif saved is not None:
        chosen = saved
    else:
        autos = [getattr(transformers, auto) for auto in AUTOS]
        chosen = next((auto for auto in autos if type(config) in auto._model_mapping), autos[0])
    settings: dict[str, Any] = {"trust_remote_code": True} if remote else {}
    return chosen.from_pretrained(str(Path(name)), attn_implementation=attn_implementation, dtype=dtype, **settings)
