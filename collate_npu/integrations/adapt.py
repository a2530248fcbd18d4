"""`adapt(model)`: each batch of a transformers model is proved, made right, or refused, on its way into the forward.

For any stack that runs such a model: whatever makes the batch, behind a collator or in an actor, it comes by here. Hooks
stand on the model, on PEFT's wrapper around it, and on its backbone, which some trainers call by itself (TRL 1.16 for its
chunked losses, OpenRLHF's value heads); a batch goes through the first of them that it comes to.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from collate_npu.arrays import host_array
from collate_npu.consumers.adapter import MADE, BatchAdapter, has_choices
from collate_npu.consumers.labels_and_positions import check_labels, labels_for
from collate_npu.consumers.model_traits import (
    consumer_of,
    has_two_sides,
    is_transformers,
    label_rule,
    needs_mask_2d,
    poolers,
    text_config,
    unwrap,
)
from collate_npu.consumers.probe import sequences_mix_reason
from collate_npu.consumers.recurrent import describe_packing, mend
from collate_npu.errors import UnsupportedFormError, explain, explain_rows
from collate_npu.integrations.context_parallel import check_share, sharing_ranks
from collate_npu.masks.sources import Sources
from collate_npu.releases import say_outside
from collate_npu.segments import Segments, of_keep
from collate_npu.validation import check_model

Kept = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Adapted:
    """What `adapt` put on a model: `.remove()` takes it off, and so does the end of `with adapt(model):`."""

    handles: Sequence[Any] = field(repr=False)
    packed: str
    """How each recurrent kernel keeps the sequences of a row apart, or why they are not mended; "" without such layers."""

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Adapted:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def adapt(model: nn.Module, **settings: Any) -> Adapted:
    """Let every batch go through `BatchAdapter(model, **settings)` on its way into `model(...)`; undone by `.remove()`.

    `model` is a transformers model, or any module around one (DDP, FSDP, DeepSpeed, torch.compile, PEFT, a stack's actor).
    What the trainer put together is proved, made right for this model, or refused there; its own batch stays as it was. A
    single row with offsets, or whose mask says no padding, is read as a flat one. Recurrent layers keep the sequences of a
    row apart; `.packed` says how. Calls without tokens of text (sound), and steps of generation behind the prompt, pass
    as they are. Where padding stands behind all tokens of a causal call that nothing else reads, sdpa and flex_attention get
    no mask: exact, and faster. Costs a copy of the mask to the host each step. Raises `UnsupportedFormError` for a module
    with no transformers model in it, or several, and for labels that a trainer has counted or keeps. After `get_peft_model`.

    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> handle = adapt(model)
    >>> model(input_ids=torch.tensor([[256, 1], [2, 3]]), attention_mask=torch.tensor([[0, 1], [1, 1]])).logits.shape
    torch.Size([2, 2, 257])
    >>> handle.remove()
    """
    check_model(model)
    say_outside("transformers")
    inside: dict[int, _Hooks] = {}
    handles: list[Any] = [pooler.register_forward_pre_hook(_first_real_token) for pooler in poolers(model)]
    places = _hook_places(model, settings)
    hooks = [_Hooks(module, settings, inside, places[:n]) for n, module in enumerate(places)]
    for module, door in zip(places, hooks):
        handles.append(module.register_forward_pre_hook(door, with_kwargs=True))
        handles.append(module.register_forward_hook(door.leave, always_call=True))
    return Adapted([*handles, *hooks], hooks[0].mixed or (describe_packing(places[0]) if hooks[0].keeps_apart else ""))


class _Hooks:
    """The hooks of one module, copied and pickled with it. `inside` says for all hooks of a model by which one each
    thread came in, and `outer` are the modules through which a batch comes to this one."""

    def __init__(
        self, module: nn.Module, settings: dict[str, Any], inside: dict[int, _Hooks], outer: list[nn.Module]
    ) -> None:
        self.settings, self.inside, self.outer = settings, inside, outer
        asked: dict[str, Any] = {"attention": settings.get("attn_implementation"), "mended": True}
        recurrent = is_transformers(unwrap(module)) and needs_mask_2d(module)
        self.mixed = sequences_mix_reason(module, BatchAdapter, **asked) if recurrent else ""
        """Why the recurrent layers behind it do not keep the sequences of a row apart, even mended."""
        self.keeps_apart = recurrent and not self.mixed
        self.mended = mend(module) if self.keeps_apart else None
        self.adapter = self._made(module)
        own, inner = ([*inspect.signature(type(each).forward).parameters][1:] for each in (module, unwrap(module)))
        self.names = own if {"input_ids", "inputs_embeds"} & {*own} else inner
        """The arguments of its forward; of the model's inside, if its own names no tokens."""
        self.lora = self._has_lora()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept | None:
        if get_ident() in self.inside:
            return None
        if self.keeps_apart and self.mended is None:
            self.mended = mend(module)
        if self._has_lora() and not self.lora:
            rule = "Its wrapper, made after adapt, calls the model's forward directly, and the model's hooks do not run."
            raise UnsupportedFormError(explain("model", "PEFT", rule, "Call adapt on what get_peft_model returned."))
        through = _eager(type(self)._through) if "torch._dynamo" in sys.modules else type(self)._through
        return cast("Kept | None", through(self, module, args, kwargs))

    def __getstate__(self) -> dict[str, Any]:
        """The state without what was mended: a copy mends its own layers."""
        return {**vars(self), "mended": None}

    def _has_lora(self) -> bool:
        """True if PEFT put layers into the model (tuners_utils.py:323)."""
        return bool(self.outer) and hasattr(self.outer[-1], "peft_config")

    def remove(self) -> None:
        """Put back what was mended."""
        if self.mended is not None:
            self.mended.remove()
        self.keeps_apart, self.mended = False, None

    def leave(self, *_: Any) -> None:
        if self.inside.get(get_ident()) is self:  # a backbone that returns may be called again
            del self.inside[get_ident()]
            MADE.running.pop(get_ident(), None)

    def _through(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept | None:
        batch = Sources({**dict(zip(self.names, args)), **kwargs})
        mended = None
        if batch.get("encoder_outputs") is not None or not batch.named["tokens"]:
            if self.adapter.model.labels == "decoder":  # sound, or what an encoder made of the prompt
                check_labels(batch, None, "decoder", self.adapter.model.model_type)
        elif _decodes(batch):
            mended = _continued(self._current(module), batch)
        elif (ranks := sharing_ranks()) > 1:
            check_share(self._current(module), module, batch, ranks)
        else:
            mended = self._mended(module, batch)
        self.inside[get_ident()] = self
        return None if mended is None else (args[len(self.names) :], mended)

    def _mended(self, module: nn.Module, batch: Sources) -> dict[str, Any]:
        adapter = self._current(module)
        if has_choices(batch):
            return adapter.mended(batch, padding_free=False)[0]
        mended, segments = adapter.mended(_with_empty_rows(batch), padding_free=_is_flat(batch))
        _check_last(batch, segments)
        _check_count(adapter, batch, mended)
        _check_behind_prompt(batch, mended, segments)
        _check_outside(adapter, module, batch, segments)
        MADE.running[get_ident()] = segments
        return mended

    def _current(self, module: nn.Module) -> BatchAdapter:
        """The adapter; a new one if the model got another attention since, or became float64 or stopped being it."""
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
        if self.mixed and made.model.boundaries_unread:
            made.model = replace(made.model, boundaries_unread=self.mixed)
        if self.keeps_apart:
            made.model = replace(made.model, keeps_apart=True, boundaries_unread="")
        return made


def _first_real_token(pooler: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Put the first real token of a row at its first place, which a pooler takes."""
    segments = MADE.running.get(get_ident())
    moved = segments is not None and segments.padding_side not in ("none", "right") and not segments.packed
    if segments is None or not moved or not args or args[0].shape[:2] != segments.shape:
        return None
    first_B = segments.keep.int().argmax(dim=1).to(args[0].device)
    rows_B = torch.arange(len(first_B), device=args[0].device)
    return (torch.cat([args[0][rows_B, first_B][:, None], args[0][:, 1:]], dim=1), *args[1:])


def _cached(batch: Sources) -> bool:
    return any(batch.get(name) is not None for name in ("past_key_values", "cache", "cache_params", "state"))  # 5.24: cache


def _decodes(batch: Sources) -> bool:
    """True if this call continues cached tokens. Its mask, if any, covers these too; `generate` makes None of a mask of
    ones, so that a prefill without one has no padding, and of a static cache's masks for each kind of layer (transformers
    5.23 generation/utils.py:2899)."""
    mask, width = batch.get("attention_mask"), batch.shape()[1]
    return _cached(batch) and (width == 1 or mask is None or getattr(mask, "ndim", 4) != 2 or mask.shape[-1] > width)


def _continued(adapter: BatchAdapter, batch: Sources) -> dict[str, Any] | None:
    """The rest of rows whose first tokens are cached, a learned prefix perhaps: positions count the tokens before, and the
    first label of a sequence behind padding is ignored. None where nothing changes. Raises where padding reaches tokens."""
    S, keep = batch.shape()[1], batch.get("attention_mask")
    each: Any = next(iter(keep.values()), None) if isinstance(keep, Mapping) else keep  # of a static cache, by kind of layer
    if S > 1 and getattr(each, "ndim", 0) == 4 and adapter.model.moves.get("left"):
        seen_BS = each[:, 0, -1, :S] if each.dtype == torch.bool else each[:, 0, -1, :S] == 0
        adapter.route(of_keep(seen_BS.cpu().numpy()), padding_free=False)
    if not isinstance(keep, torch.Tensor) or keep.ndim != 2 or keep.shape[1] <= S:
        return None
    keep_BK = torch.from_numpy(batch.array("attention_mask") != 0)
    positions_BS = (keep_BK.cumsum(1) - 1).clamp(min=0)[:, -S:]
    segments = of_keep(keep_BK[:, -S:].numpy())
    if S > 1:
        behind = of_keep(keep_BK.numpy()).hole_rows  # padding stands between the prefix and the tokens of these
        if adapter.model.prefix != (prefix := keep_BK.shape[1] - S if behind else 0):
            adapter.model = replace(adapter.model, prefix=prefix)
        adapter.route(segments, padding_free=False)
    mended: dict[str, Any] = labels_for(batch, segments, adapter.label_rule(batch), adapter.shifted)
    given = any(batch.get(name) is not None for name in ("position_ids", "cache_position"))
    if adapter.model.positions == "places" and not (given or bool(keep_BK.all())):
        mended["position_ids"] = positions_BS.to(keep.device)
    _check_count(adapter, batch, mended)
    return {**batch, **mended} if mended else None


def _with_empty_rows(batch: Sources) -> Sources:
    """The batch with `segment_ids` where a chunk of a prompt has a row of padding alone."""
    mask = batch.get("attention_mask")
    if not _cached(batch) or getattr(mask, "ndim", 0) != 2 or batch.named["segment_ids"]:
        return batch
    keep_BS = batch.array("attention_mask") != 0
    return batch if keep_BS.any(axis=1).all() else batch | {"segment_ids": torch.from_numpy(keep_BS.astype(np.int32))}


def _check_last(batch: Sources, segments: Segments) -> None:
    """Raise if the last column of a prompt is padding: `generate` asks for the logits of that column alone (transformers
    5.23 generation/utils.py:2953), and goes on from there."""
    padded = np.flatnonzero((segments.array[:, -1] == 0) & segments.array.any(axis=1)).tolist()
    if padded and batch.get("logits_to_keep") == 1:
        rule = "Generation goes on from the last column, which is padding there."
        raise UnsupportedFormError(
            explain("attention_mask", f"rows {padded} padded right", rule, 'Pad prompts left: padding_side="left".')
        )


_BEFORE = "Pass data_collator=wrap_collator(your collator, model=model), which changes them before the trainer counts them."


def _check_count(adapter: BatchAdapter, batch: Sources, mended: Mapping[str, Any]) -> None:
    """Raise where a trainer has counted labels that are ignored here: it divides the loss by their number (transformers 5.23
    trainer.py:2335, of all batches of a step)."""
    counted, moved, lost = batch.get("num_items_in_batch"), adapter.label_rule(batch) == "next", 0
    for key in ("labels", "shift_labels") if counted is not None else ():
        if mended.get(key) is not None and batch.get(key) is not None:
            first = int(moved and key == "labels")  # the loss drops a row's first
            lost += int((batch[key][:, first:] >= 0).sum() - (mended[key][:, first:] >= 0).sum())
    if lost:
        rule = f"A trainer counted {lost} labels that no sequence alone has: of padding, or the first of a sequence."
        raise UnsupportedFormError(explain("labels", "num_items_in_batch with them", rule, _BEFORE))


def _check_behind_prompt(batch: Sources, mended: Mapping[str, Any], segments: Segments) -> None:
    """Raise where virtual tokens of PEFT stand before the padding of a row, and the first token behind it is learned: alone
    it is predicted from the last virtual token."""
    if not segments.hole_rows or batch.get("inputs_embeds") is None or mended.get("labels") is batch.get("labels"):
        return
    lost_BS = batch.array("labels") != host_array("labels", mended["labels"])
    bad = [(b, "a learned token behind padding") for b in segments.hole_rows if (lost_BS[b] & (segments.array[b] > 0)).any()]
    if bad:
        rule = "In the batch this token is predicted from padding; alone, from the token before it."
        raise UnsupportedFormError(
            explain_rows("labels", bad, rule, "Pad right, or ignore the first label of each sample (-100).")
        )


def _check_outside(adapter: BatchAdapter, module: nn.Module, batch: Sources, segments: Segments) -> None:
    """Raise where the loss is taken outside this forward, of labels that would be ignored here: by a Trainer that keeps them
    (label_smoothing_factor, compute_loss_func), or by a head of transformers whose own forward ran without its hooks."""
    frame = sys._getframe() if batch.get("labels") is None and (segments.packed or segments.num_padding) else None
    while frame is not None:
        held = frame.f_locals if frame.f_code.co_name in ("forward", "compute_loss") else {}
        holder, labels = held.get("self"), held.get("labels")
        rule = label_rule(holder) if isinstance(holder, nn.Module) else adapter.label_rule(batch)
        if holder is not module and rule and isinstance(labels, torch.Tensor) and labels.shape == segments.shape:
            if labels_for(batch | {"labels": labels}, segments, rule, False):
                why = "The loss is taken outside this forward, of labels of padding or of the first of a sequence."
                remedy = f"{_BEFORE} Where a model's forward was called by name, call the model that adapt was given."
                raise UnsupportedFormError(explain("labels", f"held by {type(holder).__name__}", why, remedy))
            return
        frame = frame.f_back


def _is_flat(batch: Sources) -> bool:
    """True for one row without a mask, with offsets, or with a mask of ones over positions that begin again."""
    shape = batch.shape()
    if shape[0] != 1 or batch.get("attention_mask") is None or batch.named["offsets"]:
        return shape[0] == 1
    if any(keep.ndim != 2 or not keep.all() for keep in batch.masks.values()):
        return False
    positions = batch.text_positions(shape)
    return positions is not None and bool((np.diff(positions) != 1).any())


def _hook_places(model: nn.Module, settings: dict[str, Any]) -> list[nn.Module]:
    """The modules through which a batch may enter: PEFT's wrapper, the model, its backbone. Of a head that takes no
    positions, and so makes them itself, the backbone alone."""
    whole = _transformers_model(model, "consumer" in settings)
    if not is_transformers(whole):
        return [whole]
    # a tuner calls `model.forward`, by which no hook runs (peft 0.20 `BaseTuner.forward`); a prompt is put before the model
    peft = [each for each in model.modules() if callable(getattr(each, "get_base_model", None))]
    tuned = [each for each in peft if each.base_model is not whole]
    backbone = cast(nn.Module, whole.base_model)
    if _takes_positions(backbone) and not _takes_positions(whole):
        return [backbone]
    encoder = [cast(Any, whole).get_encoder()] if has_two_sides(whole) else []  # `generate` calls it by itself
    return [*tuned[:1], *filter(is_transformers, dict.fromkeys((whole, backbone, *encoder)))]  # FSMT's is a bare module


def _transformers_model(model: nn.Module, named: bool) -> nn.Module:
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
    rule = "adapt takes one transformers model, or a wrapper of one."
    remedy = "Call adapt on each of them. Megatron: gpt_batch of integrations.megatron. Other stacks: `collate-npu "
    remedy += "guide`. A model of your own that takes what transformers' take: pass consumer='transformers'."
    raise UnsupportedFormError(explain("model", f"{type(model).__name__}, {held}", rule, remedy))


def _takes_positions(module: nn.Module) -> bool:
    """True if its forward takes positions."""
    kinds = inspect.signature(type(module).forward).parameters
    return "position_ids" in kinds or any(each.kind is each.VAR_KEYWORD for each in kinds.values())


@cache
def _eager(function: Any) -> Any:
    return cast(Any, torch.compiler).disable(function)
