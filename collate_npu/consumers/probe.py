"""Probe: a tiny copy of a model runs padded and packed rows, and each sequence must come out as it does alone.

The copy has the class and the settings of the model, stands on its device, and calls the functions that this process found.
On a CPU, torch functions that read the same boundaries stand in for the kernels of a card. The adapter makes the rows. It
takes 50 to 200 milliseconds, once for the code of the layers, and more where a kernel is compiled. Every rank finds the
same. No parameter of the model is read: it may be sharded, or on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.consumers.mask_choice import Model
from collate_npu.consumers.model_traits import config_of, out_of_scope_reason, text_config, unwrap
from collate_npu.consumers.tiny_models import code_of, copy_of, cpu_kernels, device_of, limit_of, settled, states_of
from collate_npu.errors import CollateError
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, of_keep, of_lengths

_LENGTHS = (37, 9, 1, 70)
_EACH, _REAL_S = [[length] for length in _LENGTHS], ~np.isin(np.arange(76), (1, 2, 5))
FORMS: Mapping[str, Segments] = {
    "packed": of_lengths([_LENGTHS[:2], _LENGTHS[2:]], 74, "left"),
    "right": of_lengths(_EACH, 76),
    "left": of_lengths(_EACH, 76, "left"),
    "one": of_lengths(_EACH[:1], 40, "left"),
    "holes": of_keep(_REAL_S & (_REAL_S.cumsum() <= np.array(_EACH))),
}
_DENSE, _RECURRENT = ("right", "left", "holes", "packed"), ("right", "left", "one")
_ANSWERS: dict[Any, Mapping[str, str]] = {}


def leak_reasons(model: Any, adapter: Callable[..., Any], *forms: str, attention: str | None = None) -> dict[str, str]:
    """Return for each of these `FORMS` why a sequence does not come out of this transformers module as it does alone;
    "" where each does; as "scope", why it is out of it. Of a config, a model is built. Raises what that raises if none runs.

    `adapter` is `BatchAdapter`. `attention` is the implementation; None: the module's own.
    """
    whole = unwrap(model)
    seen = (device_of(whole), code_of(whole), limit_of(device_of(whole))) if isinstance(whole, nn.Module) else ()
    key = (forms, attention, repr(config_of(whole).to_dict()), *seen)
    if key not in _ANSWERS:
        _ANSWERS[key] = _asked(whole, adapter, forms, attention)
    return dict(_ANSWERS[key])


def probed(known: Model, model: Any, adapter: Callable[..., Any]) -> Model:
    """Return what is known of a transformers model (module or config), with the leaks that its copy shows to the adapter."""
    leaks, attention = dict.fromkeys(_DENSE, ""), known.attn_implementation
    if isinstance(model, nn.Module) or hasattr(type(model), "get_text_config"):  # else there is nothing to probe
        try:
            leaks = leak_reasons(model, adapter, *(_RECURRENT if known.needs_mask_2d else _DENSE), attention=attention)
        except Exception as error:  # an ImportError, say of a card's libraries: no model runs here
            why = f"no tiny copy of it runs that could be probed ({type(error).__name__})"
            leaks["packed"] = "" if isinstance(error, ImportError) else why
    return replace(known, leaks=leaks)


def _asked(whole: Any, made: Callable[..., Any], forms: Sequence[str], attention: str | None) -> dict[str, str]:
    copy = copy_of(whole)
    own = getattr(text_config(config_of(whole)), "_attn_implementation", None) or "sdpa"
    known = Model.of(copy, attn_implementation=None if attention == own else attention)
    adapter = made(replace(known, pooling="", leaks=dict.fromkeys(FORMS, "")), consumer="transformers")
    draw, device = torch.Generator().manual_seed(0), device_of(copy)
    sequences = [torch.randint(3, 60, (length,), generator=draw).to(device) for length in _LENGTHS]
    with torch.no_grad(), torch.autocast(device.type, enabled=False), cpu_kernels(copy):
        alone = settled(copy, lambda: torch.cat([states_of(copy, input_ids=tokens[None])[0] for tokens in sequences]))
        found = {form: _why_moved(copy, adapter, FORMS[form], torch.cat(sequences), alone) for form in forms}
    return found | {"scope": out_of_scope_reason(copy)}


def _why_moved(copy: Any, adapter: Any, segments: Segments, tokens: Tensor, alone: Tensor) -> str:
    device, keep_BS = tokens.device, segments.keep.to(tokens.device)
    tokens_BS = torch.full(segments.shape, copy.config.get_text_config().vocab_size - 1, device=device)
    tokens_BS[keep_BS] = tokens[: keep_BS.sum()]
    try:
        found = states_of(copy, **adapter.write(Sources({"input_ids": tokens_BS}), segments, False, device))
    except CollateError:
        return ""  # the adapter refuses such rows without a probe, too
    except Exception as error:  # each model fails in its own way
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:400]}"
    worst = float((found[keep_BS] - alone[: keep_BS.sum()]).abs().max() / alone.abs().max())
    beside = "another sequence of its row" if segments.packed else "padding"
    return "" if worst < limit_of(device) else f"{beside} moves a sequence (by {worst:.1g} of the largest value)"
