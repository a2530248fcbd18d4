"""`adapt(model)`: each batch of a transformers model is read on its way into the forward, and runs sequence by sequence.

It serves any stack that runs such a model: a batch passes the forward, whether a collator or an actor made it. Hooks stand
on the model, on PEFT's wrapper around it, and on its backbone, which some trainers call by itself (TRL 1.16 for its chunked
losses, OpenRLHF's value heads). The first hook that a batch reaches reads it. transformers' own `...ForCausalLM` then runs
its flat row; of every other model the backbone does, so that a head sees the rows and the mask that came.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from collate_npu.arrays import dims
from collate_npu.consumers.adapter import KNOWN_BATCHES, BatchAdapter
from collate_npu.consumers.by_sequence import BySequence, ForwardPlan, Way, begin, carry
from collate_npu.consumers.flat_row import CACHES, FlatCall
from collate_npu.consumers.labels_and_positions import labels_for
from collate_npu.consumers.mixers import changed_reason, mixers_of, place_of, way_of, wrap
from collate_npu.consumers.model_traits import (
    consumer_of,
    is_compiled,
    is_transformers,
    position_rule,
    takes,
    text_config,
    unwrap,
    warn_if_left,
    windows,
)
from collate_npu.consumers.shared_rows import SharedPlan, whole_rows
from collate_npu.consumers.tiny_models import exchanges, offsets_asked
from collate_npu.consumers.transformers import ADAPT
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.integrations.accelerate import let_recurrent_layers_pass, ulysses_group
from collate_npu.keys import KEEP_KEY, SEGMENT_KEY
from collate_npu.masks.dialects import SEQUENCE_GROUPS
from collate_npu.masks.sources import Sources
from collate_npu.outputs import shift_labels
from collate_npu.parallel import ContextParallel, ranks_agree, split_tensor
from collate_npu.parallel.agreement import digest, outside_graphs
from collate_npu.releases import say_outside
from collate_npu.segments import PADS_BEFORE, Segments, of_keep
from collate_npu.validation import check_model

Kept = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Adapted(AbstractContextManager["Adapted"]):
    """The hooks that `adapt` put on a model. `.remove()` takes them off, and so does the end of `with adapt(model):`."""

    handles: Sequence[Any] = field(repr=False)
    way: str
    """How its batches run: "by sequence", or "padded" and why; "" for a model that is left as it came."""

    def remove(self) -> None:
        """Take the hooks off. Its mixers stay wrapped, which do nothing then: a backward may still compute them again."""
        for handle in self.handles:
            handle.remove()

    def __exit__(self, *error: object) -> None:
        self.remove()


def adapt(
    model: nn.Module,
    *,
    sequence_group: Any = None,
    layout: Literal["contiguous", "head_tail"] = "contiguous",
    **settings: Any,
) -> Adapted:
    """Let every batch run sequence by sequence inside `model(...)`, in whatever layout it comes; undone by `.remove()`.

    `model` is a transformers model, or any module around one (DDP, FSDP, DeepSpeed, torch.compile, PEFT, a stack's actor).
    The trainer's batch is read by `BatchAdapter(model, **settings)`, and refused where its padding is unknown; its own dict
    stays as it was. A single row with offsets, or whose mask says no padding, is read as a flat one. The model runs one flat
    row of the real tokens, its mixing layers a few buckets of rows of one sequence, and its outputs come back in the shape
    `[B, S, ...]` that came, with zeros at padding. A call with a cache, for attention maps, in a compiled graph, or of a
    model with modules, forwards or hooks of somebody's own goes the padded way: its batch is proved, made right, or refused.
    `.way` says which way a model goes. Of rows that the ranks of `sequence_group` share, a call gets this rank's part: a
    slice of each row, or with "head_tail" the chunks r and 2 * size - 1 - r. Mixers that exchange no tokens then do
    (`consumers/shared_rows.py`), and ranks that differ raise. Stacks that keep such a group need no argument. A loss outside
    the forward must ignore the first label of a sequence. Calls without tokens of text (sound), and steps of generation
    behind the prompt, pass as they are. Costs a copy of the mask to the host each step. A model that is no causal language
    model, no backbone of one and no head on one is left as it came: a warning says so. Raises `UnsupportedFormError` for a
    module with no transformers model in it, or several, and for ignored labels that a trainer counted. Call it after
    `get_peft_model`.

    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> handle = adapt(model)
    >>> model(input_ids=torch.tensor([[256, 1], [2, 3]]), attention_mask=torch.tensor([[0, 1], [1, 1]])).logits.shape
    torch.Size([2, 2, 257])
    >>> handle.remove()
    """
    check_model(model)
    say_outside("transformers")
    share: Callable[[nn.Module], ContextParallel | None] = _shared
    if sequence_group is not None:
        cp = ContextParallel.from_group(sequence_group, layout="zigzag" if layout == "head_tail" else layout)
        share = lambda _: cp  # noqa: E731 (no copy of a model copies the group)
    whole = _transformers_model(model, "consumer" in settings)
    if is_transformers(whole) and warn_if_left(model):
        return Adapted((), "")
    way = _way_of(whole, settings)
    wrap(whole, way)
    mixers = mixers_of(whole, way)
    backbone = place_of(whole, mixers) if mixers else getattr(whole, "base_model", whole)
    before = hooks_of(model)
    inside = before.inside if before else {}  # of an adapt that stands already, which then reads each batch
    handles: list[Any] = []
    places = _hook_places(model, whole, backbone)
    given: dict[str, Any] = {"settings": settings, "share": share, "inside": inside, "way": way}
    given["mixers"] = [*mixers.values()]
    hooks = [_Hooks(module, outer=places[:n], backbone=module is backbone, **given) for n, module in enumerate(places)]
    for module, door in zip(places, hooks):
        handles.append(module.register_forward_pre_hook(door, with_kwargs=True))
        handles.append(module.register_forward_hook(door.leave, prepend=True, always_call=True))
    return Adapted([*handles, let_recurrent_layers_pass()], f"padded: {way.why_padded}" if way.why_padded else "by sequence")


def hooks_of(model: nn.Module) -> _Hooks | None:
    """Return the first hooks of an adapted model."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, _Hooks)), None)


def learned(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the labels of this batch that an adapted model will change, before a trainer counts them."""
    door, sources = hooks_of(model), Sources(batch)
    if door is None or door.shares(model):  # another rank may have the next token of a part
        return {}
    if (adapter := door.adapters[door.by_sequence]).is_left(sources) or not sources.named["tokens"]:
        return {}
    segments = adapter.read(sources, adapter.polarity, _is_flat(sources))
    return labels_for(sources, segments, adapter.label_rule, adapter.shifted, holes=not door.by_sequence)


def _way_of(whole: nn.Module, settings: Mapping[str, Any]) -> Way:
    if not is_transformers(whole):
        return Way("it is no transformers model")
    if position_rule(whole) == "padding_idx":
        return Way("it counts positions by ids")
    if settings.get("pattern") is not None or settings.get("context_parallel") is not None:
        return Way("a pattern or a part of the rows was declared")
    way = way_of(door := _door(whole))
    return Way(why) if (why := changed_reason(door, way, wrapped=False)) else way


def _gathers(mixers: Iterable[nn.Module]) -> bool:
    """Return True if ranks gather parameters inside these mixers (ZeRO-3, FSDP): each rank must call them as often."""
    parts = [part for mixer in mixers for part in mixer.modules() if part is not mixer]
    sharded = any(hasattr(part, "unshard") or "FullySharded" in type(part).__name__ for part in parts)
    return sharded or any(hasattr(each, "ds_id") for mixer in mixers for each in mixer.parameters())


@dataclass(eq=False)
class _Entered:
    """A batch on its way through a model: the hook by which it entered, and the flat row that it becomes, if any."""

    by: _Hooks
    before: ForwardPlan | None
    flat: FlatCall | None = None
    at: _Hooks | None = None
    """The hook where its rows became the flat row."""
    shape: tuple[int, ...] = ()


class _Hooks:
    """The hooks of one module, copied and pickled with it. `inside` holds, for all hooks of a model, the batch that runs in
    each thread. `outer` are the modules that a batch passes before this one."""

    def __init__(
        self, module: nn.Module, *, settings: dict[str, Any], share: Callable[[nn.Module], ContextParallel | None],
        inside: dict[int, _Entered], outer: list[nn.Module], way: Way,
        mixers: list[nn.Module], backbone: bool,
    ) -> None:  # fmt: skip
        self.settings, self.share, self.inside, self.outer, self.way = settings, share, inside, outer, way
        self.mixers, self.backbone = mixers, backbone
        self.by_sequence = not way.why_padded
        self.adapters = {by_sequence: self._made(module, by_sequence) for by_sequence in {self.by_sequence, False}}
        own, inner = ([*inspect.signature(type(each).forward).parameters][1:] for each in (module, unwrap(module)))
        self.names = own if {"input_ids", "inputs_embeds"} & {*own} else inner
        """The arguments of its forward; those of the model inside, if its own forward names no tokens."""
        kind = f"{type(module).__module__}.{type(module).__name__}"
        self.own_head = bool(re.fullmatch(r"transformers\..*(ForCausalLM|LMHeadModel)", kind))
        self.lora = self._has_lora()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept | None:
        entered = self.inside.get(get_ident())
        if entered is not None and not (self.backbone and entered.flat is not None and entered.at in (None, self)):
            if self.backbone and entered.flat is None and not torch.compiler.is_compiling():
                self._check_cut(module, entered.shape[1:], _shape({**dict(zip(self.names, args)), **kwargs})[1:])
            return None
        if self._has_lora() and not self.lora:
            rule = "Its wrapper, made after adapt, calls the model's forward directly, and the model's hooks do not run."
            raise UnsupportedFormError(explain("model", "PEFT", rule, "Call adapt on what get_peft_model returned."))
        return outside_graphs(type(self)._through)(self, module, args, kwargs, torch.compiler.is_compiling())

    def _check_cut(self, module: nn.Module, whole: tuple[int, ...], part: tuple[int, ...]) -> None:
        """Raise if a hook cut rows before transformers' own recurrent layers (ms-swift 4.6.0 sequence_parallel.py:280)."""
        theirs = (each for each in module.modules() if type(each).__module__.startswith("transformers"))
        own = (type(each).forward.__module__.startswith(("torch", "transformers")) for each in theirs)
        if 0 < sum(part) < sum(whole) and self.adapters[False].model.needs_mask_2d and all(own):
            rule = "A hook cut these rows, and the recurrent layers of this model start empty at the cut."
            raise UnsupportedFormError(explain("input_ids", f"{part[0]} of {whole[0]} columns", rule, _WHOLE_ROWS))

    def _has_lora(self) -> bool:
        """True if PEFT put layers into the model (tuners_utils.py:323)."""
        return bool(self.outer) and hasattr(self.outer[-1], "peft_config")

    def shares(self, module: nn.Module) -> bool:
        """Return True if ranks share each row that this model gets."""
        cp = self.share(module)
        return cp is not None and cp.size > 1

    def running(self) -> tuple[Segments | None, bool]:
        """Return the sequences of the batch that runs in this thread, if known, and whether its real tokens run alone."""
        entered = self.inside.get(get_ident())
        return KNOWN_BATCHES.running.get(get_ident()), entered is not None and entered.flat is not None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Bring what the flat row gave back into the rows that came, and forget the batch at the module it entered by."""
        if (entered := self.inside.get(get_ident())) is None:
            return None
        flat = entered.flat
        if entered.at is self and flat is not None:
            begin(None)
            output = None if output is None else flat.restored(output)
        if entered.by is self:  # a backbone that returns may be called again
            begin(entered.before)
            del self.inside[get_ident()]
            KNOWN_BATCHES.running.pop(get_ident(), None)
            if output is not None and flat is not None and entered.at is None:
                rule = "It did not call its backbone as a module, so that its rows ran as they were."
                raise UnsupportedFormError(explain("model", type(module).__name__, rule, _BACKBONE))
        return output if entered.at is self else None

    def _through(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], graph: bool) -> Kept | None:
        batch = Sources({**dict(zip(self.names, args)), **kwargs})
        entered = self.inside.get(get_ident())
        if entered is not None:
            written: dict[str, Any] | None = self._flattened(entered, module, batch)
        else:
            entered = _Entered(self, begin(None), shape=_shape(batch))
            try:
                written = self._written(entered, module, batch, graph)
            except BaseException:
                begin(entered.before)
                raise
            self.inside[get_ident()] = entered
        return None if written is None else (args[len(self.names) :], written)

    def _written(self, entered: _Entered, module: nn.Module, batch: Sources, graph: bool) -> dict[str, Any] | None:
        padded = self._current(module, False)
        if padded.is_left(batch) or not batch.named["tokens"]:  # sound
            return None
        if (_in_use(module, batch) or not torch.is_grad_enabled()) and _decodes(module, batch):
            return _continued(padded, batch)
        cp = self.share(module)
        if cp is not None and cp.size > 1:
            return self._of_a_part(module, batch, cp, graph)
        batch, flat = _with_empty_rows(batch), _is_flat(batch)
        segments = padded.read(batch, padded.polarity, flat)
        why = self._why_padded(module, batch, segments, graph) if self.by_sequence else self.way.why_padded
        by_sequence = not why
        adapter = self._current(module, by_sequence)
        whole = by_sequence and (self.backbone or (self.own_head and not _reads_rows(module, adapter, batch)))
        flat = flat and (whole or not by_sequence or not segments.num_padding)  # else the head needs the mask
        try:
            written, _ = adapter.hand_over(batch, padding_free=flat, segments=segments, holes=not whole)
        except UnsupportedFormError as error:
            ran = f"\nadapt ran it padded: {why}." if why else ""
            raise UnsupportedFormError(str(error).replace(f", or {ADAPT}", "") + ran) from None
        written.pop(SEGMENT_KEY, None)  # which no model takes
        _check_last(batch, segments)
        _check_count(adapter, batch, written, segments, outside=self.own_head and module.training)
        learned: Any = written.get("labels")
        if self.own_head and module.training and getattr(learned, "ndim", 0) == 2 and not (learned[:, 1:] >= 0).any():
            written.setdefault("num_items_in_batch", 1)  # the sum of no losses is 0, their mean NaN
        KNOWN_BATCHES.running[get_ident()] = segments
        device = next(value.device for value in written.values() if isinstance(value, torch.Tensor))
        written |= offsets_asked(module, segments.sequence_lengths, device) if by_sequence else {}
        plain = not segments.packed and segments.num_tokens == segments.array.size
        if plain or not (by_sequence and segments.num_tokens):
            return written
        entered.flat = FlatCall(segments, replace(self.way, buckets="one") if _gathers(self.mixers) else self.way, device)
        return self._flattened(entered, module, written) if whole else written

    def _of_a_part(self, module: nn.Module, batch: Sources, cp: ContextParallel, graph: bool) -> dict[str, Any] | None:
        """Let the recurrent mixers of this thread run for rows of which each rank of `cp` has a part, as the batch has."""
        adapter = self._current(module, self.by_sequence)
        offsets = {key: batch[key] for key in (*batch.named["offsets"], *batch.named["tail"])}
        _check_labels(adapter, module, batch)
        part, device = batch.shape(), next(x.device for x in batch.values() if isinstance(x, torch.Tensor))
        whole_here = any(part[1] in batch.array(key).flat[-1:] for key in batch.named["offsets"])
        if self.share is _shared and _exchanged(adapter, module, batch, 1 if whole_here else cp.size, offsets):
            return None
        why = "it is compiled" if graph or is_compiled(module) else self.way.why_padded or changed_reason(module, self.way)
        with ranks_agree(cp, call="split") as facts:
            if why:
                rule = f"{cp.size} ranks share each row of this {adapter.model.description}, which does not run by sequence"
                raise UnsupportedFormError(explain("input_ids", str(list(part)), f"{rule}: {why}.", _WHOLE_ROWS))
            if whole_here:
                rule = f"{cp.size} ranks share rows, and offsets say that each got whole ones, which a model cuts inside."
                raise UnsupportedFormError(explain("input_ids", str(list(part)), rule, _WHOLE_ROWS))
            facts |= {"part": str(part)} | {key: partial(digest, value) for key, value in offsets.items()}
            whole = whole_rows(batch, cp, offsets)
            facts["keys"] = ", ".join(whole)  # by which each rank reads what came
        targets = whole.get("shift_labels")
        segments = adapter.read(whole, adapter.polarity, _is_flat(whole))
        last_or_padding = shift_labels(torch.zeros(segments.shape, dtype=torch.long), segments) < 0
        if targets is not None and bool((targets >= 0)[last_or_padding].any()):
            rule = "Labels were moved across the end of a sequence, or padding has one."
            remedy = "Ignore the first label of each sequence (-100): wrap_collator(your collator, model=model) does."
            raise UnsupportedFormError(explain("shift_labels", str(list(segments.shape)), rule, remedy))
        for mixer in self.mixers if _gathers(self.mixers) else ():  # a collective in it may be one for its parameters
            laid = cast(BySequence, mixer.forward)
            laid.exchanges = laid.kind not in (None, "2d") and _is_of_a_stack(adapter.model.attn_implementation)
        if module.training:
            carry(module)
        begin(SharedPlan.of(segments, cp, device))
        written = {key: value for key, value in batch.items() if key not in (KEEP_KEY, SEGMENT_KEY)}
        written |= {"use_cache": False} if takes(module, "use_cache") else {}
        if batch.get("position_ids") is None and adapter.model.positions != "none":
            written["position_ids"] = split_tensor(segments.position_ids, cp).to(device)
        return written

    def _flattened(self, entered: _Entered, module: nn.Module, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the call on the flat row, and let this thread's mixers run by its plan."""
        assert entered.flat is not None
        shape = _shape(call)
        if shape != entered.flat.segments.shape:
            rule = f"The tokens that came are {list(entered.flat.segments.shape)}: {type(module).__name__} must get these."
            raise UnsupportedFormError(explain("input_ids", str(list(shape)), rule, _BACKBONE))
        if module.training:
            carry(module)
        known = self._current(module, True)
        flat = entered.flat.flattened(call, module, known.model.positions, shifts=known.label_rule == "next")
        entered.at = self
        begin(entered.flat.plan)
        return flat

    def _why_padded(self, module: nn.Module, batch: Sources, segments: Segments, graph: bool) -> str:
        """Return why this call goes the padded way; "" for one that runs by sequence."""
        if why := "it is compiled" if graph or is_compiled(module) else changed_reason(module, self.way):
            return why
        if self.way.buckets == "even" and _gathers(self.mixers):
            return "ranks gather its parameters, so that each calls a layer once, and its rows must be of one length"
        model, kept = self.adapters[False].model, batch.get("use_cache")
        # a caller may go on from the cache that a model in evaluation makes by itself
        made = kept is None and not segments.packed and batch.get("labels") is None and bool(model.option("use_cache", {}))
        if (_in_use(module, batch) and (_holds(batch) or not segments.packed)) or (made and not module.training):
            return "a cache"
        if model.option("output_attentions", batch):
            return "attention maps"
        if any(batch.get(name) is not None for name in ("adapter_names", "task_ids")):
            return "PEFT has weights for each row"
        ahead = {"images": batch.named["vision"], "types": "token_type_ids" in batch}
        return "an image's tokens see each other" if any(ahead[by] for by in model.looks_ahead) else ""

    def _current(self, module: nn.Module, by_sequence: bool) -> BatchAdapter:
        """Return the adapter: a new one if the model has another attention now, or changed to float64 or from it."""
        known = self.adapters[by_sequence].model
        named = getattr(text_config(known.config), "_attn_implementation", None)
        other = "attn_implementation" not in self.settings and (named or "sdpa") != known.attn_implementation
        dtype = next((each.dtype for each in module.parameters()), None)
        if other or (dtype != known.dtype and torch.float64 in (dtype, known.dtype)):
            self.adapters[by_sequence] = self._made(module, by_sequence)
        return self.adapters[by_sequence]

    def _made(self, module: nn.Module, by_sequence: bool) -> BatchAdapter:
        known = BatchAdapter(module, **self.settings).model
        return BatchAdapter(replace(known, by_sequence=by_sequence), **{"consumer": "transformers", **self.settings})


_BACKBONE = "Call adapt on the backbone itself."


def _reads_rows(head: nn.Module, adapter: BatchAdapter, call: Mapping[str, Any]) -> bool:
    """Return True if the head reads rows: to keep some of their places, for a router's loss, or by a forward or a loss that
    was put on it (TRL 1.16 `add_fused_lm_head`, Liger); accelerate's forward around its own reads none."""
    held, kept = vars(head), call.get("logits_to_keep", call.get("num_logits_to_keep"))
    forward = held.get("_original_forward", held.get("_old_forward", head.forward))
    put = "_loss_function" in held or getattr(forward, "__func__", None) is not type(head).forward
    whole = kept is None or (isinstance(kept, int) and kept == 0)
    return put or not whole or bool(adapter.model.option("output_router_logits", call))


def _shape(call: Mapping[str, Any]) -> tuple[int, ...]:
    return next((dims(call[name])[:2] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None), ())


def _caches(batch: Sources) -> list[Any]:
    return [batch[name] for name in CACHES if batch.get(name) is not None]


def _in_use(module: nn.Module, batch: Sources) -> bool:
    """Return True if this call goes on from a cache, or fills one; where gradients are computed, an empty one is none."""
    trains = module.training and torch.is_grad_enabled()
    return _holds(batch) or (bool(_caches(batch) or batch.get("use_cache")) and not trains)


def _holds(batch: Sources) -> bool:
    with suppress(ValueError):  # a cache of recurrent layers alone does not say
        return any(getattr(cache, "get_seq_length", lambda: 1)() for cache in _caches(batch))
    return True


def _decodes(module: nn.Module, batch: Sources) -> bool:
    """True if this call continues cached tokens, whose mask covers them too, or is a prompt of `generate` without padding:
    it makes None of a mask of ones (transformers 5.23 generation/utils.py:2899). A few models drop every mask, so each is
    asked."""
    (B, width), mask = batch.shape(), batch.get("attention_mask")
    several = B == 1 and (batch.named["offsets"] or (mask is None and _restarts(batch)))
    begins = several and not _holds(batch)  # nobody goes on from these
    if _caches(batch) and (width == 1 or mask is None or getattr(mask, "ndim", 4) != 2 or mask.shape[-1] > width):
        return not begins and _in_use(module, batch)
    asked = not begins and _asks_last(batch) and batch.get("use_cache") is not None and not torch.is_grad_enabled()
    told = asked and (_restarts(batch) or any(batch.named[role] for role in ("mask", "keep", "segment_ids", "labels")))
    prepare, ids = getattr(module, "prepare_inputs_for_generation", None), torch.zeros(1, 1, dtype=torch.long)
    with suppress(Exception):  # a model's own code may want more
        return asked and not told and "attention_mask" in cast(Any, prepare)(ids, attention_mask=ids)
    return False


def _asks_last(batch: Sources) -> bool:
    """True if only the logits of the last column are asked for, as `generate` does (5.23 generation/utils.py:2953)."""
    return isinstance(kept := batch.get("logits_to_keep"), int) and kept == 1


def _continued(adapter: BatchAdapter, batch: Sources) -> dict[str, Any] | None:
    """Return the call with positions that count the cached tokens, and without the first label of a sequence behind padding;
    None if nothing changes. Raises if padding reaches tokens."""
    S, keep = batch.shape()[1], batch.get("attention_mask")
    by_kind = keep.values() if isinstance(keep, Mapping) else (keep,)  # of layer, for a static cache
    for each in by_kind if S > 1 and adapter.model.leaks.get("left") else ():
        if isinstance(each, torch.Tensor) and (isinstance(keep, Mapping) or each.ndim == 4):
            seen_BQK = (each if each.dtype == torch.bool else each == 0)[:, 0] if each.ndim == 4 else (each != 0)[:, None]
            adapter.choose(of_keep(seen_BQK.any(1)[:, :S].cpu().numpy()), padding_free=False)  # a window's last row sees few
    if not isinstance(keep, torch.Tensor) or keep.ndim != 2 or keep.shape[1] <= S:
        return None
    keep_BK = torch.from_numpy(batch.array("attention_mask") != 0)
    positions_BS = (keep_BK.cumsum(1) - 1).clamp(min=0)[:, -S:]
    segments = of_keep(keep_BK[:, -S:].numpy())
    if S > 1:
        adapter.choose(segments, padding_free=False)
    written: dict[str, Any] = labels_for(batch, segments, adapter.label_rule, adapter.shifted)
    given = any(batch.get(name) is not None for name in ("position_ids", "cache_position"))
    if adapter.model.positions == "places" and not (given or bool(keep_BK.all())):
        written["position_ids"] = positions_BS.to(keep.device)
    _check_count(adapter, batch, written, segments)
    return {**batch, **written} if written else None


def _with_empty_rows(batch: Sources) -> Sources:
    """Return the batch, with `segment_ids` if a row of this chunk of a prompt is padding alone."""
    mask = batch.get("attention_mask")
    if not _caches(batch) or getattr(mask, "ndim", 0) != 2 or batch.named["segment_ids"]:
        return batch
    keep_BS = batch.array("attention_mask") != 0
    return batch if keep_BS.any(axis=1).all() else batch | {"segment_ids": torch.from_numpy(keep_BS.astype(np.int32))}


def _check_last(batch: Sources, segments: Segments) -> None:
    """Raise if the last column of a prompt, by which `generate` goes on, is padding."""
    padded = np.flatnonzero((segments.array[:, -1] == 0) & segments.array.any(axis=1)).tolist()
    if padded and _asks_last(batch):
        rule = "Generation goes on from the last column, which is padding there."
        remedy = 'Pad prompts left: padding_side="left".'
        raise UnsupportedFormError(explain("attention_mask", f"rows {padded} padded right", rule, remedy))


_BEFORE = "Pass data_collator=wrap_collator(your collator, model=model), which changes them before the trainer counts them."


def _check_count(
    adapter: BatchAdapter, batch: Sources, written: Mapping[str, Any], segments: Segments, outside: bool = False
) -> None:
    """Raise if a trainer has counted labels that are ignored here: it divides the loss by their number (transformers 5.23
    trainer.py:2335, for a step). Warn if labels are kept from the forward: it counted them, or a loss stands `outside`."""
    counts, shifts, lost = batch.get("num_items_in_batch") is not None, adapter.label_rule == "next", 0
    kept = (counts or outside) and batch.get("labels") is None and batch.get("shift_labels") is None
    if kept and shifts and (segments.packed or segments.padding_side in PADS_BEFORE):
        text = "the trainer keeps the labels from the forward; a loss outside learns each first token from what stands "
        warnings.warn(f"collate_npu: {text}before it, unless its label is -100. {_BEFORE}", stacklevel=2)
    for key in ("labels", "shift_labels") if counts else ():
        if written.get(key) is not None and batch.get(key) is not None:
            first = int(shifts and key == "labels")  # the loss drops a row's first
            lost += int((batch[key][:, first:] >= 0).sum() - (written[key][:, first:] >= 0).sum())
    if lost:
        rule = f"A trainer counted {lost} labels that no sequence alone has: of padding, or the first of a sequence."
        raise UnsupportedFormError(explain("labels", "num_items_in_batch with them", rule, _BEFORE))


def _is_flat(batch: Sources) -> bool:
    """True for one row without a mask, with offsets, or with a mask of ones and positions that restart."""
    if batch.shape()[0] == 1 and batch.get("attention_mask") is not None and not batch.named["offsets"]:
        return all(keep.ndim == 2 and bool(keep.all()) for keep in batch.masks.values()) and _restarts(batch)
    return batch.shape()[0] == 1


def _restarts(batch: Sources) -> bool:
    positions = batch.text_positions(batch.shape())
    return positions is not None and bool((np.diff(positions) != 1).any())


def _hook_places(model: nn.Module, whole: nn.Module, text: nn.Module) -> list[nn.Module]:
    """Return the modules through which a batch may enter: PEFT's wrapper, the model, its backbone, that of text alone; the
    backbone alone if the head around it takes no positions, and so makes them itself."""
    if not is_transformers(whole):
        return [whole]
    # a tuner calls `model.forward`, by which no hook runs (peft 0.20 `BaseTuner.forward`)
    tuned = [x for x in model.modules() if callable(getattr(x, "get_base_model", None)) and x.base_model is not whole]
    places = dict.fromkeys((_door(whole), cast(nn.Module, whole.base_model), text))
    return [*tuned[:1], *places] if _door(whole) is whole else [*places]


def _door(whole: nn.Module) -> nn.Module:
    """Return the model; its backbone if this names positions, and the head around it takes none. One that passes on whatever
    comes is called by nobody (4.57.1 modeling_marian.py:1568)."""
    backbone = cast(nn.Module, whole.base_model)
    named = "position_ids" in inspect.signature(type(backbone).forward).parameters
    return backbone if named and not takes(whole, "position_ids") else whole


def _transformers_model(model: nn.Module, named: bool) -> nn.Module:
    """Return the one transformers model inside, or the caller's own model if a consumer is named for it."""
    stack, inside = consumer_of(model), dict[str, nn.Module]()
    for name, module in model.named_modules():
        if is_transformers(module) and not any(name.startswith(f"{outer}.") or not outer for outer in inside):
            inside[name] = module
    if len(inside) == 1 and stack in (None, "transformers"):
        return next(iter(inside.values()))
    if named and not inside:
        return cast(nn.Module, unwrap(model))
    held = f"a {stack} model" if stack else f"{len(inside)} transformers models in it"
    rule = "adapt takes one transformers model, or a wrapper of one."
    remedy = "Call adapt on each of them. Megatron: gpt_batch of integrations.megatron. Other stacks: `collate-npu "
    remedy += "guide`. A model of your own that takes what transformers' take: pass consumer='transformers'."
    raise UnsupportedFormError(explain("model", f"{type(model).__name__}, {held}", rule, remedy))


# --- rows that a stack has shared out over its ranks before its model is called: what its flash attention, and VeOmni's own
# Gated DeltaNet, exchange is right and passes as it is; every other mixer exchanges by a `SharedPlan`.


def _shared(model: nn.Module) -> ContextParallel | None:
    """Return the ranks that share each row, if the stack that runs this model has any."""
    groups = [ulysses_group(model)]
    for module, name in SEQUENCE_GROUPS.items():
        with suppress(AttributeError):  # a stack that is loaded and has not begun
            groups.append(attrgetter(name)(sys.modules.get(module)))
    return next((ContextParallel.from_group(each, layout="contiguous") for each in groups if each is not None), None)


def _is_of_a_stack(attention: str) -> bool:
    """Return True if the attention of this name may exchange tokens: flash attention, or no function of transformers."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    home = getattr(functions.get(attention), "__module__", "transformers")
    return "flash" in attention or not str(home).startswith("transformers")


def _check_labels(adapter: BatchAdapter, model: Any, batch: Sources) -> None:
    """Raise if the loss would move the labels of a part; one of a stack that shares rows moves none (VeOmni 0.1.12)."""
    loss = getattr(model, "loss_function", None)
    package = str(getattr(getattr(loss, "func", loss), "__module__", "")).partition(".")[0]
    moves = adapter.label_rule == "next" and package not in {stack.partition(".")[0] for stack in SEQUENCE_GROUPS}
    if moves and dims(batch.get("labels")) == batch.shape() and batch.get("shift_labels") is None:
        rule = "The model moves labels within this rank's part, where the next token may be another rank's."
        remedy = "Pass shift_labels beside them: split_tensor(shift_labels(labels, segments), cp)."
        raise UnsupportedFormError(explain("labels", "a part of a row", rule, remedy, more="shard-labels"))


_WHOLE_ROWS = "Let each rank have whole rows: ulysses_size, sequence_parallel_size, ring_attn_size or sp_size of 1."


def _exchanged(adapter: BatchAdapter, model: Any, batch: Sources, ranks: int, offsets: Mapping[str, Any]) -> bool:
    """Return True if the stack exchanges tokens in each mixer of this model: plain attention with its flash attention, and
    its own Gated DeltaNet, which reads the offsets of the whole row on each rank (VeOmni 0.1.12
    ops/kernels/attention/flash.py:190-199, data/data_collator.py:401-417). Of a model with images verl 0.9.1 cuts the row
    inside (models/transformers/monkey_patch.py:158). Raises for windows that it makes otherwise."""
    width = batch.shape()[1] * ranks
    if "flash" not in adapter.model.attn_implementation:
        return False
    if not offsets and (sizes := [size for size in windows(adapter.model.config) if size < width]):
        why = f"ring_flash_attn makes other windows of those of {sizes[0]} (0.1.8 adapters/hf_adapter.py:119-125)"
        rule = f"{ranks} ranks share each row of this {adapter.model.description}, and {why}."
        raise UnsupportedFormError(explain("input_ids", str(list(batch.shape())), rule, _WHOLE_ROWS))
    if adapter.model.needs_mask_2d and not (offsets and any(map(exchanges, model.modules()))):
        return False
    if offsets:
        adapter.hand_over(Sources({"input_ids": torch.zeros(1, width, dtype=torch.long), **offsets}), padding_free=True)
    return True
