"""`adapt(model)`: each batch of a transformers model is proved, made right, or refused, on its way into the forward.

For any stack that runs such a model: whatever makes the batch, behind a collator or in an actor, it comes by here. Hooks
stand on the model, on PEFT's wrapper around it, and on its backbone, which some trainers call by itself (TRL 1.16 for its
chunked losses, OpenRLHF's value heads); a batch goes through the first of them that it comes to.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import cache
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from collate_npu.consumers.adapter import AT_MODEL, BatchAdapter
from collate_npu.consumers.models import consumer_of, is_transformers, text_config, unwrap
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.given import check_model
from collate_npu.integrations.shared_rows import check_share, sharing_ranks
from collate_npu.masks.sources import Sources
from collate_npu.releases import say_outside
from collate_npu.segments import Segments

Kept = tuple[tuple[Any, ...], dict[str, Any]]


class Adapted:
    """What `adapt` put on a model: `.remove()` takes it off, and so does the end of `with adapt(model):`."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Adapted:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def adapt(model: nn.Module, **settings: Any) -> Adapted:
    """Let every batch go through `BatchAdapter(model, **settings)` on its way into `model(...)`; undone by `.remove()`.

    `model` is a transformers model, or any module around one (DDP, FSDP, DeepSpeed, torch.compile, PEFT, a stack's actor).
    What the trainer put together is proved, made right for this model, or refused there; its own batch stays as it was. A
    single row with offsets, or whose mask says no padding, is read as a flat one. Steps of generation behind the prompt
    pass as they are. Where padding stands behind all tokens sdpa and flex_attention get no mask, which is exact, and up to
    twice as fast (`nox -s bench -- --only step`). Costs a copy of the mask to the host each step. Raises
    `UnsupportedFormError` for a module with no transformers model in it, or with several; call it after `get_peft_model`.

    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> handle = adapt(model)
    >>> model(input_ids=torch.tensor([[256, 1], [2, 3]]), attention_mask=torch.tensor([[0, 1], [1, 1]])).logits.shape
    torch.Size([2, 2, 257])
    >>> handle.remove()
    """
    check_model(model)
    say_outside("transformers")
    inside: dict[int, _Door] = {}
    handles: list[RemovableHandle] = []
    places = _places(model, settings)
    for n, module in enumerate(places):
        door = _Door(module, settings, inside, places[:n])
        handles.append(module.register_forward_pre_hook(door, with_kwargs=True))
        handles.append(module.register_forward_hook(door.leave, always_call=True))
    return Adapted(handles)


class _Door:
    """The hooks of one module, copied and pickled with it. `inside` says for all doors of a model by which one each
    thread came in, and `outer` are the modules through which a batch comes to this one."""

    def __init__(
        self, module: nn.Module, settings: dict[str, Any], inside: dict[int, _Door], outer: list[nn.Module]
    ) -> None:
        self.settings, self.inside, self.outer = settings, inside, outer
        self.adapter = self._made(module)
        self.names = next(filter(_takes_tokens, map(_parameters, (module, unwrap(module)))), _parameters(module))
        self.lora = self._has_lora()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept | None:
        if get_ident() in self.inside:
            return None
        if self._has_lora() and not self.lora:
            rule = "Its wrapper, made after adapt, calls the model's forward by itself, and no hook of the model runs."
            raise UnsupportedFormError(explain("model", "PEFT", rule, "Call adapt on what get_peft_model returned."))
        through = _eager(type(self)._through) if "torch._dynamo" in sys.modules else type(self)._through
        return cast("Kept | None", through(self, module, args, kwargs))

    def _has_lora(self) -> bool:
        """Did PEFT put layers into the model (tuners_utils.py:323)?"""
        return bool(self.outer) and hasattr(self.outer[-1], "peft_config")

    def leave(self, *_: Any) -> None:
        if self.inside.get(get_ident()) is self:  # a backbone that returns may be called again
            del self.inside[get_ident()]
            AT_MODEL.pop(get_ident(), None)

    def _through(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept | None:
        batch, out = Sources({**dict(zip(self.names, args)), **kwargs}), None
        if _decodes(batch):
            pass
        elif (ranks := sharing_ranks()) > 1:
            check_share(self._current(module), module, batch, ranks)
        else:
            mended, segments = self._current(module).mended(batch, padding_free=_is_flat(batch))
            _check_last(batch, segments)
            AT_MODEL[get_ident()] = segments
            out = (args[len(self.names) :], mended)
        self.inside[get_ident()] = self
        return out

    def _current(self, module: nn.Module) -> BatchAdapter:
        """The adapter, built anew where another attention was set since, or the model made float64, or so no more."""
        known = self.adapter.model
        named = getattr(text_config(known.config), "_attn_implementation", None)
        other = "attn_implementation" not in self.settings and (named or "sdpa") != known.attn_implementation
        dtype = next((each.dtype for each in module.parameters()), None)
        if other or (dtype != known.dtype and torch.float64 in (dtype, known.dtype)):
            self.adapter = self._made(module)
        return self.adapter

    def _made(self, module: nn.Module) -> BatchAdapter:
        made = BatchAdapter(module, **self.settings)
        made.at_model = True
        return made


def _decodes(batch: Sources) -> bool:
    """Is this a step of generation? Its mask, if any, covers the tokens of the cache too; `generate` makes None of a mask of
    ones (transformers 5.23 generation/utils.py:2899), so that a prefill without one has no padding. Of an encoder-decoder
    every step has what its encoder made of the prompt, and the prompt no more."""
    if batch.get("encoder_outputs") is not None:
        return True
    mask, width = batch.get("attention_mask"), batch.shape()[1]
    cached = any(batch.get(name) is not None for name in ("past_key_values", "cache_params", "state"))
    return cached and (width == 1 or mask is None or mask.shape[-1] > width)


def _check_last(batch: Sources, segments: Segments) -> None:
    """`generate` asks a prompt for the logits of its last column alone (transformers 5.23 generation/utils.py:2953), and
    goes on from there."""
    padded = np.flatnonzero(segments.array[:, -1] == 0).tolist()
    if padded and batch.get("logits_to_keep") == 1:
        rule = "Generation goes on from the last column, which is padding there."
        raise UnsupportedFormError(
            explain("attention_mask", f"rows {padded} padded right", rule, 'Pad prompts left: padding_side="left".')
        )


def _is_flat(batch: Sources) -> bool:
    """One row without a mask, with offsets, or with a mask of ones over positions that begin again."""
    shape = batch.shape()
    if shape[0] != 1 or batch.get("attention_mask") is None or batch.named["offsets"]:
        return shape[0] == 1
    if any(keep.ndim != 2 or not keep.all() for keep in batch.masks.values()):
        return False
    positions = batch.text_positions(shape)
    return positions is not None and bool((np.diff(positions) != 1).any())


def _places(model: nn.Module, settings: dict[str, Any]) -> list[nn.Module]:
    """Where a batch may come in: PEFT's wrapper, the model, its backbone. Of a head that takes no positions, and so makes
    them itself, the backbone alone."""
    whole = _whole(model, "consumer" in settings)
    if not is_transformers(whole):
        return [whole]
    # a tuner calls `model.forward`, by which no hook runs (peft 0.20 `BaseTuner.forward`); a prompt is put before the model
    peft = [each for each in model.modules() if callable(getattr(each, "get_base_model", None))]
    tuned = [each for each in peft if each.base_model is not whole]
    backbone = cast(nn.Module, whole.base_model)
    if _counts(backbone) and not _counts(whole):
        return [backbone]
    return [*tuned[:1], *dict.fromkeys((whole, backbone))]


def _whole(model: nn.Module, named: bool) -> nn.Module:
    """The one transformers model inside; a model of the caller's own, where its consumer is named."""
    stack, found = consumer_of(model), dict[str, nn.Module]()
    for name, module in model.named_modules():
        if is_transformers(module) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    if len(found) == 1 and stack in (None, "transformers"):
        return next(iter(found.values()))
    if named and not found:
        return cast(nn.Module, unwrap(model))
    held = f"a {stack} model" if stack else f"{len(found)} transformers models in it"
    rule = "adapt stands in the forward of one transformers model, or around it."
    remedy = "Pass each transformers model alone. Megatron: gpt_batch of integrations.megatron. Other stacks: `collate-npu "
    remedy += "guide`. A model of your own that takes what transformers' take: pass consumer='transformers'."
    raise UnsupportedFormError(explain("model", f"{type(model).__name__}, {held}", rule, remedy))


def _counts(module: nn.Module) -> bool:
    """Can its forward be given positions?"""
    kinds = inspect.signature(type(module).forward).parameters
    return "position_ids" in kinds or any(each.kind is each.VAR_KEYWORD for each in kinds.values())


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _takes_tokens(names: list[str]) -> bool:
    return not {"input_ids", "inputs_embeds"}.isdisjoint(names)


@cache
def _eager(function: Any) -> Any:
    return cast(Any, torch.compiler).disable(function)
