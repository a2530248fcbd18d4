"""Attention implementations by name: those of transformers, of the kernels hub, and what a plugin registered.

A name is checked before any model of the audit is built: it is known, and it computes here. That is tried on a tiny
model of attention alone, because what is missing (a package, a card, a driver) shows only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import torch

from collate_npu.errors import CollateError, explain

DEFAULT = ("sdpa", "eager")


def import_plugins(modules: Sequence[str]) -> None:
    """Import the modules that register what is audited. Raises `CollateError` for one that does not load."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:  # whatever a module of somebody else raises
            got = f"{name} ({type(error).__name__}: {first_line(error)})"
            rule = "A plugin is a module that Python can import from here."
            raise CollateError(explain("--plugin", got, rule, "Put its folder on PYTHONPATH.")) from None


def named(names: Sequence[str]) -> list[str]:
    """The implementations that a command line names, once each; "both" and nothing mean sdpa and eager."""
    chosen = [each for name in names or ["both"] for each in (DEFAULT if name == "both" else [name])]
    return list(dict.fromkeys(chosen))


def check_attentions(names: Sequence[str], device: str, dtype: torch.dtype, *, gradients: bool) -> None:
    """Refuse, with the reason, the first name that transformers does not know or that does not compute here."""
    for name in names:
        _check_known(name)
        if "flash" in name and device.startswith("cpu"):
            rule = "Flash attention kernels run on a card."
            raise CollateError(explain("--attn", f"{name} on {device}", rule, "Name one with --device: cuda or npu."))
        if name == "flex_attention" and device.startswith("cpu") and gradients:
            rule = "flex_attention has no backward pass on a CPU."  # torch 2.13 says so when it is called
            raise CollateError(explain("--attn", f"{name} on {device}", rule, "Add --no-gradients, or name a card."))
        if name not in DEFAULT:
            _check_computes(name, device, dtype)


def _check_known(name: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)})
    if name in known or "/" in name:  # a kernel of the hub: owner/name
        return
    near = get_close_matches(name, known, n=2)
    rule = f"transformers knows {', '.join(known)}, and what a --plugin registers with AttentionInterface."
    raise CollateError(explain("--attn", name, rule, f"Did you mean {' or '.join(near)}?" if near else "Name one of them."))


def _check_computes(name: str, device: str, dtype: torch.dtype) -> None:
    from collate_npu.testing import tiny_model

    try:
        model = tiny_model("llama", vocab_size=8, attn_implementation=name, dtype=dtype)
        if name != "flex_attention":  # it would be compiled, which takes its time, and is done again for other shapes
            with torch.no_grad():
                model.to(device)(input_ids=torch.arange(4, device=device)[None])
    except Exception as error:  # ImportError for a package, ValueError for a device, RuntimeError from a driver ...
        got = f"{name} on {device} in {str(dtype).removeprefix('torch.')}"
        rule = f"It does not run there: {type(error).__name__}: {first_line(error)}"
        remedy = "Install what it needs, or name another: collate-npu env lists what is here."
        raise CollateError(explain("--attn", got, rule, remedy)) from None


def check_is_run(model: torch.nn.Module, name: str) -> None:
    """Refuse a model that runs another implementation than was named, as transformers chooses for some models."""
    config = getattr(model, "config", None)
    runs = getattr(config, "_attn_implementation", None) or name
    both_flash = "flash" in runs and "flash" in name  # the same kernel from the hub
    if runs != name and not both_flash and hasattr(config, "num_attention_heads"):
        raise ValueError(f"transformers runs {runs} in the place of {name}")


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 letters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
