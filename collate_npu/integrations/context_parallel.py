"""transformers' Trainer and Accelerate with the sequence shared out: torch context parallel, and DeepSpeed's Ulysses.

Both throw every mask away and compute plain causal attention, so a batch passes only where that is exact; both run
recurrent layers on a rank's shard as if it were the row, so such models are refused. Nothing is patched: a batch is
made into what the stack reads, before the stack shards it.

Sources: transformers 5.23 trainer.py:2393-2485; accelerate 1.15 accelerator.py:4152-4220 (`maybe_context_parallel`),
big_modeling.py:755-840 (the hooks); torch 2.13 distributed/tensor/experimental/_context_parallel; DeepSpeed
runtime/sequence_parallel/ulysses_sp.py (`UlyssesSPDataLoaderAdapter`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.model_traits import config_of, needs_mask_2d, text_config, windows
from collate_npu.consumers.recurrent import reads_boundaries_itself
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.keys import of_kind
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.sources import Sources
from collate_npu.outputs import ignore_first_labels, shift_labels
from collate_npu.parallel import ContextParallel
from collate_npu.releases import MEGATRON_PARALLEL
from collate_npu.segments import Segments

Backend = Literal["torch", "deepspeed"]


def refuse_model(model: Any, backend: Backend = "torch") -> None:
    """Raise `UnsupportedFormError` for models these stacks compute wrongly in silence. Takes a module or a config.

    Recurrent layers (Gated DeltaNet, Mamba, short convolutions) get a shard, out of order under torch's head-tail
    layout, and never exchange their state: accelerate refuses them for some layer names and versions only. Layers with
    a window would be run as full attention by the hooks that drop the mask.

    >>> from collate_npu.testing import tiny_config
    >>> refuse_model(tiny_config("qwen3_next", vocab_size=257))
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: model: got Qwen3NextConfig. Its recurrent layers would run on one rank's
        shard of the row, without the state of the tokens before it. Use Megatron (its GatedDeltaNet gathers the row
        from megatron-core 0.18 on), or no sequence parallelism here.
    """
    name = type(config_of(model)).__name__
    if needs_mask_2d(model):
        rule = "Its recurrent layers would run on one rank's shard of the row, without the state of the tokens before it."
        remedy = f"Use Megatron (its GatedDeltaNet gathers the row from megatron-core {MEGATRON_PARALLEL} on), or no "
        remedy += "sequence parallelism here."
        raise UnsupportedFormError(explain("model", name, rule, remedy))
    kinds = set(getattr(text_config(config_of(model)), "layer_types", None) or ()) - {"full_attention"}
    if kinds and backend == "torch":
        rule = f"The context-parallel hooks drop the mask that layers of type {sorted(kinds)} need."
        raise UnsupportedFormError(explain("model", name, rule, "Use a model of full attention, or no context parallelism."))


def ready_batch(
    batch: Mapping[str, Any],
    *,
    size: int,
    segments: Segments | None = None,
    backend: Backend = "torch",
    attn_implementation: str = "sdpa",
) -> dict[str, Any]:
    """The whole batch in the form that the stack shards by itself, on `size` ranks.

    `torch`: adds `shift_labels` and `position_ids`, keeps a 2D `attention_mask` (Trainer counts tokens with it) and
    never None, which Trainer calls `.dim()` on. `deepspeed`: adds `position_ids`, from which Ulysses tells documents
    apart; its loader shifts labels itself, so the first label of each sequence becomes -100; no mask. Tensors are owned
    copies, since torch cuts buffers in place. `segments` default to what the batch itself tells.
    Raises `UnsupportedFormError` where causal attention without a mask is not exact, `CollateError` for the width.
    """
    segments = segments or segments_from_batch(batch)
    exact = none_is_exact(segments)
    multiple = ContextParallel(size, 0, layout="zigzag" if backend == "torch" else "ulysses").multiple
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
    if backend == "torch" and of_kind(batch, "truth"):
        out["attention_mask"] = segments.keep.to(torch.int64)
    device = getattr(batch.get("input_ids"), "device", None)
    tensors = {key: value for key, value in out.items() if isinstance(value, Tensor)}
    return out | {key: x.clone(memory_format=torch.contiguous_format).to(device) for key, x in tensors.items()}


def context_parallel_collator(
    inner: Callable[[list[Any]], Mapping[str, Any]], *, size: int, model: Any, backend: Backend = "torch"
) -> Callable[[list[Any]], dict[str, Any]]:
    """A collator for Trainer with `cp_size` (torch) or `sp_size` (deepspeed) of `size`: `inner`'s batch, made ready.

    Picklable if `inner` is. Refuses recurrent models. Trainer shards input_ids, labels, shift_labels, attention_mask and
    position_ids alone: take other per-token keys out.
    """
    refuse_model(model, backend)
    implementation = getattr(text_config(config_of(model)), "_attn_implementation", None) or "sdpa"
    return partial(_collate, inner, size=size, backend=backend, attn_implementation=implementation)


def _collate(inner: Callable[[list[Any]], Mapping[str, Any]], features: list[Any], **settings: Any) -> dict[str, Any]:
    return ready_batch(inner(features), **settings)


# --- rows that a stack has shared out over its ranks before its model is called: no hook sees the whole row, so a batch
# passes as it is, or is refused. Attention that is exchanged inside flash attention is right; recurrent layers run on the
# places of their rank alone, but for VeOmni's own.

_SIZES: dict[str, Any] = {
    "openrlhf.models.ring_attn_utils": lambda of: 1 if of.RING_ATTN_GROUP is None else of.RING_ATTN_GROUP.size(),
    "skyrl.backends.skyrl_train.distributed.ulysses.utils": lambda of: of.get_ulysses_sequence_parallel_world_size(),
    # its getter builds a state where there is none, which raises on more than one rank
    "veomni.distributed.parallel_state": lambda of: getattr(of._PARALLEL_STATE, "ulysses_size", 1),
}
"""Where a stack keeps how many ranks share a row: OpenRLHF 0.11.2, SkyRL 0.3.0, VeOmni 0.1.12."""


def sharing_ranks() -> int:
    """How many ranks share each row in this process, by the stacks that are imported."""
    return max((size(sys.modules[name]) for name, size in _SIZES.items() if name in sys.modules), default=1)


def check_share(adapter: BatchAdapter, model: Any, batch: Sources, ranks: int) -> None:
    """Raise unless this rank's places of a row are computed as the whole row would be.

    VeOmni's attention and its own Gated DeltaNet exchange heads for places, and read the offsets of the whole row, which
    each rank has (0.1.12 ops/kernels/attention/flash.py:190-199, data/data_collator.py:401-417).
    """
    offsets = {key: batch[key] for key in (*batch.named["offsets"], *batch.named["tail"])}
    exchanged = not adapter.model.needs_mask_2d or (offsets and any(map(reads_boundaries_itself, model.modules())))
    width, why = batch.shape()[1] * ranks, ""
    if not exchanged or "flash" not in adapter.model.attn_implementation:
        why = "some of its layers see the places of their rank alone"
    elif not offsets and (sizes := [size for size in windows(adapter.model.config) if size < width]):
        why = f"ring_flash_attn makes other windows of those of {sizes[0]} (0.1.8 adapters/hf_adapter.py:119-125)"
    if why:
        rule = f"{ranks} ranks share each row of this {adapter.model.description}, and {why}."
        remedy = "Set ulysses_size, sequence_parallel_size or ring_attn_size to 1; plain attention: use flash_attention_2."
        raise UnsupportedFormError(explain("input_ids", str(list(batch.shape())), rule, remedy))
    if offsets:
        adapter.hand_over(Sources({"input_ids": torch.zeros(1, width, dtype=torch.long), **offsets}), padding_free=True)
