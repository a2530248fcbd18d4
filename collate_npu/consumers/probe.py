"""Probe: what a model does with padded and packed rows is asked of the model, not looked up.

A tiny copy of its own class and settings, on its device, with the functions that this process resolved, gets rows as the
adapter hands them over; every sequence must come out as it does alone. That takes 50 to 200 milliseconds, once for the code
of the layers, and is the same on every rank. No parameter is needed: they may be sharded, on meta, or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.consumers.consumer import Model
from collate_npu.consumers.models import config_of, text_config, unwrap
from collate_npu.consumers.recurrent import AS_IT_IS, asks_by_itself, kernel_calls, mend, variables_of
from collate_npu.consumers.tiny import alone_with, copy_of
from collate_npu.errors import CollateError
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, of_keep, of_lengths


def _rows(*lengths: int) -> dict[str, Segments]:
    real_S = ~np.isin(np.arange(76), (1, 2, 5))
    rows = [[length] for length in lengths]
    return {
        "flat": of_lengths([lengths], sum(lengths)),
        "packed": of_lengths([lengths[:2], lengths[2:]], sum(lengths[2:]) + 3, "left"),
        "right": of_lengths(rows, 76),
        "left": of_lengths(rows, 76, "left"),
        "one": of_lengths(rows[:1], 40, "left"),
        "holes": of_keep(real_S & (real_S.cumsum() <= np.array(lengths)[:, None])),
    }


ROWS: Mapping[bool, Mapping[str, Segments]] = {True: _rows(37, 9, 1, 70), False: _rows(37, 9, 5, 70)}
"""For recurrent layers and others, the rows of each form. Funnel pools, and takes no single token."""
_ANSWERS: dict[Any, Mapping[str, str]] = {}


def why_rows_move(
    model: Any, adapter: Callable[..., Any], *forms: str, attention: str | None = None, mended: bool = False
) -> dict[str, str]:
    """For each of these forms (`ROWS`), why its sequences do not come out of this transformers module as they do alone, ""
    where they do. Of a config, a model of it is asked. Raises what transformers raises where no copy runs.

    `adapter` is `BatchAdapter`, of `attention` (None: the module's own); `mended`: its functions are mended (recurrent.py).
    """
    whole = unwrap(model)
    if isinstance(whole, nn.Module) and any(map(asks_by_itself, whole.modules())):  # they raise without offsets, alone too
        return dict.fromkeys(forms, "its layers hand their kernels the offsets themselves" if mended else "")
    seen = (_device(whole), _code(whole), _limit(_device(whole))) if isinstance(whole, nn.Module) else ()
    key = (mended, forms, attention, repr(config_of(whole).to_dict()), *seen)
    if key not in _ANSWERS:
        _ANSWERS[key] = _asked(whole, adapter(consumer="transformers", needs_mask_2d=False), forms, attention, mended)
    return dict(_ANSWERS[key])


def why_sequences_mix(model: Any, adapter: Callable[..., Any], *, attention: str | None = None, mended: bool = False) -> str:
    """Why packed rows move in recurrent layers; "" where they do not: a flat row, and of a mended model rows, too."""
    try:
        found = why_rows_move(model, adapter, "flat", *(["packed"] if mended else []), attention=attention, mended=mended)
    except Exception as error:  # each config validates in its own way, and each model fails in its own
        return _said(error)
    return found["flat"] or found.get("packed", "")


def _said(error: Exception) -> str:
    """What transformers, a kernel or a patch of somebody's raises is the answer; of our own, its rule."""
    said = str(error).partition("\n")[0][:400]
    return said.split(". ")[1] if isinstance(error, CollateError) and ". " in said else f"{type(error).__name__}: {said}"


def _asked(whole: Any, adapter: Any, forms: Sequence[str], attention: str | None, mended: bool) -> dict[str, str]:
    copy = copy_of(whole).to(_device(whole) if isinstance(whole, nn.Module) else "cpu")
    own = getattr(text_config(config_of(whole)), "_attn_implementation", None) or "sdpa"
    model = Model.of(copy, attn_implementation=None if attention == own else attention)
    rows = ROWS[bool(model.needs_mask_2d)]
    adapter.model = replace(model, keeps_apart=mended, boundaries_unread="", moves=dict.fromkeys(rows, ""))
    draw, device = torch.Generator().manual_seed(0), _device(copy)
    sequences = [torch.randint(3, 60, (length,), generator=draw).to(device) for length in rows["flat"].sequence_lengths]
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ExitStack() as stack:
        states = [_hidden(copy, input_ids=tokens[None]) for tokens in sequences]
        if any(each is None for each in states):
            return dict.fromkeys(forms, "it pools places")
        alone = torch.cat([each[0] for each in states])
        if mended:
            stack.callback(mend(copy).remove)
        else:
            AS_IT_IS.add(get_ident())
            stack.callback(AS_IT_IS.discard, get_ident())
        return {form: _why_moved(copy, adapter, rows[form], form == "flat", torch.cat(sequences), alone) for form in forms}


def _why_moved(copy: Any, adapter: Any, segments: Segments, flat: bool, tokens: Tensor, alone: Tensor) -> str:
    device, keep_BS = tokens.device, segments.keep.to(tokens.device)
    tokens_BS = torch.full(segments.shape, copy.config.get_text_config().vocab_size - 1, device=device)
    tokens_BS[keep_BS] = tokens[: keep_BS.sum()]
    try:
        batch = adapter.routed(Sources({"input_ids": tokens_BS}), segments, flat, device)
    except CollateError as error:
        return _said(error) if flat else ""  # such rows are refused behind the probe, too
    try:
        found = _hidden(copy, **batch)
    except Exception as error:
        return _said(error)
    worst = float((found[keep_BS] - alone[: keep_BS.sum()]).abs().max() / alone.abs().max())
    beside = "another sequence of its row" if segments.packed else "padding"
    return "" if worst < _limit(device) else f"{beside} moves a sequence (by {worst:.1g} of the largest value)"


def _limit(device: torch.device) -> float:
    """Float32 moves the largest value by 1e-6, products of ten bits, as on cards, by 2e-3; leaks by 0.02, in hybrids 0.3."""
    x = torch.full((1, 1), 1 + 2.0**-12, device=device)
    return 1e-3 if device.type == "cpu" and float(x @ x) > 1 else 2e-2


def _hidden(copy: Any, **batch: Any) -> Any:
    """The last hidden states `[B, S, D]`, and what its head makes of them where that is of tokens; None where none are."""
    out = copy(**{**alone_with(copy, batch["input_ids"]), **batch})  # a batch may say use_cache, too
    B, S = batch["input_ids"].shape
    if (encoded := getattr(out, "encoder_last_hidden_state", None)) is not None:  # of whole blocks (Pegasus-X)
        return encoded[:, :S].float()
    states = (getattr(out, "hidden_states", None) or [None])[-1]
    shown = [each.float() for each in (states, out[0]) if getattr(each, "shape", ())[:2] == (B, S)]
    return torch.cat(shown, -1) if shown else None


def _device(model: Any) -> torch.device:
    return next((each.device for each in model.parameters() if each.device.type != "meta"), torch.device("cpu"))


def _code(whole: Any) -> tuple[Any, ...]:
    """What its layers run: the forwards of their classes, and the functions that they call."""
    forwards = dict.fromkeys(type(module).forward for module in whole.modules())
    return (*forwards, *(variables_of(call.function).get("implementation") for call in kernel_calls(whole)))
