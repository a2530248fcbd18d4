"""Accelerate: batches as its dispatcher takes them, and as its sequence parallelism does, with transformers' Trainer too.

Its dispatcher (`DispatchCollator`) gathers and broadcasts a batch. None, ints and strings raise there, and a tensor whose
first dimension is not the batch is cut wrong without an error (accelerate 1.15 utils/operations.py, data_loader.py
`DataLoaderDispatcher`). The adapter belongs behind the prepared loader.

Its sequence parallelism (`context_parallel_collator`), torch's or DeepSpeed's Ulysses, throws every mask away and computes
plain causal attention, so a batch passes only where that is exact. Recurrent layers run on a rank's shard as if it were the
row, so such models are refused unless `adapt` runs them. Nothing is patched: a batch is made into what the stack reads,
before the stack shards it.
Sources: transformers 5.23 trainer.py:2393-2485; accelerate 1.15 accelerator.py:4152-4220 (`maybe_context_parallel`),
big_modeling.py:755-840 (the hooks); torch 2.13 distributed/tensor/experimental/_context_parallel; DeepSpeed
runtime/sequence_parallel/ulysses_sp.py (`UlyssesSPDataLoaderAdapter`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from collate_npu.collate.transport import shipped
from collate_npu.consumers.by_sequence import runs_by_sequence
from collate_npu.consumers.model_traits import config_of, layer_kinds, needs_mask_2d, text_config, windows
from collate_npu.errors import CollateError, UnsupportedFormError, a_type, explain
from collate_npu.integrations.patching import once_imported, patch, release
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, of_kind
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.forms import none_is_exact
from collate_npu.outputs import ignore_first_labels, shift_labels
from collate_npu.parallel import ContextParallel
from collate_npu.segments import Segments


@dataclass(frozen=True)
class DispatchCollator:
    """A collator of `inner`'s batch with every value a contiguous tensor `[B, ...]`. A None mask is left out, `segment_ids`
    always stand beside a 2D mask, and any other value is refused.

    With `dispatch_batches=True` (the default of an IterableDataset) the first process joins batches, so they need one
    width: `padding="max_length"`. `split_batches=True` joins only a last batch that does not divide by the processes with
    rows of the first one: it needs one width too, or `drop_last=True` in the DataLoader. Picklable if `inner` is.

    >>> from collate_npu import PaddingCollator
    >>> collator = DispatchCollator(PaddingCollator(pad_token_id=0, attention_mask="2d"))
    >>> list(collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]))
    ['input_ids', 'position_ids', 'attention_mask', 'attention_mask_2d', 'segment_ids']
    """

    inner: Callable[..., Mapping[str, Any]]

    def __call__(self, features: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the batch. Raises `CollateError` that lists each key which Accelerate cannot carry."""
        batch = {key: value for key, value in self.inner(features, *args, **kwargs).items() if value is not None}
        if KEEP_KEY in batch and SEGMENT_KEY not in batch:  # Accelerate joins batches by the keys of the first
            batch[SEGMENT_KEY] = batch[KEEP_KEY].int()
        problems = dispatch_problems(batch)
        for key in of_kind(batch, "vision"):
            if problems.get(key) or not _one_each(features, key):
                problems[key] = "images, and Accelerate cuts them by the count of rows, not by whose they are"
        if problems:
            listed = "; ".join(f"{key} is {what}" for key, what in problems.items())
            rule = "Accelerate can only gather tensors whose first dimension is the batch."
            remedy = "Set dispatch_batches=False. Offsets: padding_free=False. Images: one for each sample."
            raise CollateError(explain("batch", listed, rule, remedy, more="none-dispatch"))
        return shipped({key: value.contiguous() for key, value in batch.items()})


def _one_each(features: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if each sample holds one image, or one value of an image, under this key."""
    values = [row.get(key) if isinstance(row, Mapping) else None for row in features]
    return all(x is not None and (getattr(x, "ndim", 0) == KEYS[key].unit or len(x) == 1) for x in values)


def dispatch_problems(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return each key on whose value Accelerate's dispatcher would raise, or which it would cut wrong, and the reason."""
    size, reasons = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            reasons[key] = a_type(value)
        elif not value.ndim or len(value) != size:
            reasons[key] = f"of shape {list(value.shape)} in a batch of {size}"
    return reasons


# --- rows that are shared out over ranks

Backend = Literal["torch", "deepspeed"]


def refuse_model(model: Any, backend: Backend = "torch") -> None:
    """Raise `UnsupportedFormError` for models these stacks compute wrongly in silence. Takes a module or a config.

    Recurrent layers (Gated DeltaNet, Mamba, short convolutions) get a shard, out of order under torch's head-tail
    layout, and never exchange their state: accelerate refuses them for some layer names and versions only. Layers with
    a window become full attention, because the hooks drop the mask.

    >>> from collate_npu.testing import tiny_config
    >>> refuse_model(tiny_config("qwen3_next", vocab_size=257))
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: model: got Qwen3NextConfig. Its recurrent layers would run on one rank's
        shard of the row, without the state of the tokens before it. Call adapt(model, sequence_group=group) first,
        with layout='head_tail' for torch's context parallelism.
    """
    name = type(config_of(model)).__name__
    if needs_mask_2d(model) and not runs_by_sequence(model, shared=backend == "torch"):
        rule = "Its recurrent layers would run on one rank's shard of the row, without the state of the tokens before it."
        remedy = "Call adapt(model, sequence_group=group) first, with layout='head_tail' for torch's context parallelism."
        remedy = remedy if backend == "torch" else "Call adapt(model) first."
        raise UnsupportedFormError(explain("model", name, rule, remedy))
    kinds = {kind for kind in layer_kinds(text_config(config_of(model))) if re.search("sliding|chunk", kind)}
    if kinds and backend == "torch":
        rule = f"The context-parallel hooks drop the mask that layers of type {sorted(kinds)} need."
        raise UnsupportedFormError(explain("model", name, rule, "Use a model of full attention, or no context parallelism."))


def deepspeed_group(model: Any) -> Any:
    """Return the ranks that share the rows of this model under DeepSpeed's Ulysses, whose attention stands in the place of
    transformers' own (0.19.6 ulysses_sp.py:520-572); None without it, or in an evaluation, which has whole rows."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    put = functions.get(getattr(text_config(config_of(model)), "_attn_implementation", None))
    ulysses = dict(zip(put.__code__.co_freevars, put.__closure__ or ())).get("uattn") if isfunction(put) else None
    held: Any = None if ulysses is None else ulysses.cell_contents
    return None if held is None or (held.disable_in_eval and not model.training) else held.process_group


_HOLDERS = map("adapt {}".format, count())


def let_recurrent_layers_pass() -> Any:
    """Let `Accelerator.prepare` take models that `adapt` runs by sequence, until `.remove()` of what is returned: their
    recurrent layers exchange what they need (1.15 big_modeling.py:760-831)."""
    holder = next(_HOLDERS)
    once_imported(holder, "accelerate.accelerator", partial(_lift, holder))
    return SimpleNamespace(remove=partial(release, holder))


def _lift(holder: str) -> None:
    home = sys.modules["accelerate.accelerator"]
    for name in ("_refuse_recurrent_layers_under_sequence_parallelism", "_attach_context_parallel_hooks"):
        if hasattr(home, name):
            patch(holder, home, name, _unless_adapted)


def _unless_adapted(original: Callable[..., Any], model: Any) -> Any:
    """What is refused by the names of layers is looked up in the config: here none is named but for windows."""
    hides = runs_by_sequence(model) and not windows(config_of(model))
    return original(SimpleNamespace(named_modules=model.named_modules) if hides else model)


def ready_batch(
    batch: Mapping[str, Any],
    *,
    size: int,
    segments: Segments | None = None,
    backend: Backend = "torch",
    attn_implementation: str = "sdpa",
    keep: bool = False,
) -> dict[str, Any]:
    """Return the whole batch in the form that the stack then shards over `size` ranks.

    `torch`: adds `shift_labels` and `position_ids`, keeps a 2D `attention_mask` (Trainer counts tokens with it) and
    never None, which Trainer calls `.dim()` on. `deepspeed`: adds `position_ids`, from which Ulysses tells documents
    apart; its loader shifts labels itself, so the first label of each sequence becomes -100; no mask, unless `keep` asks for
    the 2D one. Tensors are owned copies, since torch cuts buffers in place. `segments` are by default read from the batch.
    Raises `UnsupportedFormError` if causal attention without a mask is not exact, `CollateError` for the width.
    """
    segments = segments or segments_from_batch(batch)
    exact = none_is_exact(segments)
    multiple = ContextParallel(size, 0, layout="zigzag" if backend == "torch" else "contiguous").multiple
    if segments.shape[1] % multiple:
        rule = f"{size} ranks take a multiple of {multiple}; torch changes its layout in silence at other widths."
        raise CollateError(explain("width", str(segments.shape[1]), rule, f"Collate with pad_to_multiple_of={multiple}."))
    # Ulysses tells documents apart by position_ids, where its kernel can; a hole inside one it cannot see
    apart = backend == "deepspeed" and attn_implementation.startswith(("flash", "flex")) and not segments.hole_rows
    if not exact and not apart:
        rule = f"Under {backend} sequence parallelism every mask is dropped, and {exact.why}."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Pad right with one sequence a row."))
    out = {key: value for key, value in batch.items() if key not in of_kind(batch, "truth")}
    if not exact or "position_ids" not in out:
        out["position_ids"] = segments.position_ids
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.ndim == 2 and backend == "torch":
        out.setdefault("shift_labels", shift_labels(labels, segments))
    elif isinstance(labels, Tensor) and labels.ndim == 2:
        out["labels"] = ignore_first_labels(labels, segments)
        out["labels"][:, 0] = -100
    if of_kind(batch, "truth") and (backend == "torch" or keep):
        out["attention_mask"] = segments.keep.to(torch.int64)
    device = getattr(batch.get("input_ids"), "device", None)
    tensors = {key: value for key, value in out.items() if isinstance(value, Tensor)}
    return out | {key: x.clone(memory_format=torch.contiguous_format).to(device) for key, x in tensors.items()}


def context_parallel_collator(
    inner: Callable[[list[Any]], Mapping[str, Any]], *, size: int, model: Any, backend: Backend = "torch"
) -> Callable[[list[Any]], dict[str, Any]]:
    """Return a collator for a Trainer with `cp_size` (torch) or `sp_size` (deepspeed) of `size`: `ready_batch` of `inner`'s.

    Picklable if `inner` is. Refuses recurrent models. Trainer shards input_ids, labels, shift_labels, attention_mask and
    position_ids alone: take other per-token keys out.
    """
    refuse_model(model, backend)
    implementation = getattr(text_config(config_of(model)), "_attn_implementation", None) or "sdpa"
    keep = runs_by_sequence(model)  # of an evaluation, where rows are whole
    return partial(_collate, inner, size=size, backend=backend, attn_implementation=implementation, keep=keep)


def _collate(inner: Callable[[list[Any]], Mapping[str, Any]], features: list[Any], **settings: Any) -> dict[str, Any]:
    return ready_batch(inner(features), **settings)
