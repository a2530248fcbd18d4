"""torchtitan 0.3.0: what its trainer, its context parallelism and pipeline stages take, made from Segments.

Attention masks are an argument of its models, and padding is a document of its own. `masks_in_forward` makes them inside a
model part, of the rows that arrive there: torch's pipeline schedules cut a batch by dimension 0 of every tensor (torch 2.13
distributed/pipelining/microbatch.py:380-400), VarlenMetadata as if its offsets were rows. Nothing is patched. Offsets cost
O(B * S); a BlockMask takes no dense mask. Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array
from collate_npu.consumers.labels_and_positions import labels_are_shifted, labels_for
from collate_npu.errors import CollateError, UnsupportedFormError, explain, refuse_rows
from collate_npu.keys import KEYS, SEGMENT_KEY, of_kind, with_role
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.forms import mask_mod
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources
from collate_npu.outputs import shift_labels
from collate_npu.segments import Segments
from collate_npu.validation import check_model

PACKAGE, TESTED = "torchtitan", "0.3.0"

_REMEDY_IDS = "Pass segment_ids, which every schedule cuts like the tokens, or cut masks and tokens together with cp_shard."
_Kind = str | Pattern | None
Layers = _Kind | Mapping[str, _Kind]
"""What layers read: a pattern (a BlockMask), `"varlen"` (offsets), None, or a mapping of those by kind of layer."""


def get_attention_masks(
    segments: Segments,
    layers: Layers = "causal",
    *,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
    compiled: bool = True,
) -> Any:
    """Return `attention_masks` for a torchtitan model's forward: a BlockMask, VarlenMetadata, or a mapping by kind of layer.

    `layers_of(model)` reads them off a model. Where masks have names of their own: gpt_oss `{"basic_mask": "causal",
    "sliding_window_mask": Pattern.sliding(128)}`; Muse Glimmer `{"global": "causal", "swa_128": Pattern.sliding(128)}`.

    `block_size` is its FlexAttention.Config's. `compiled=False` is for a few small masks: it builds `[B, 1, S, S]` first.

    >>> masks = get_attention_masks(Segments.from_lengths([3, 5], side="left"), layers_of(model))  # doctest: +SKIP
    >>> model(tokens, attention_masks=masks)  # doctest: +SKIP
    """
    kinds = layers if isinstance(layers, Mapping) else {"": layers}
    masks = {key: _one(segments, kind, device, block_size, compiled) for key, kind in kinds.items()}
    return masks if isinstance(layers, Mapping) else masks[""]


def layers_of(model: Any) -> Layers:
    """Return what the layers of a `Decoder` read, by its config. Raises for models whose masks have other names."""
    check_model(model)
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder

    inner = getattr(model.config.first_attention, "inner_attention", None)
    backends = {FlexAttention.Config: "causal", VarlenAttention.Config: "varlen"}
    full = next((kind for config, kind in backends.items() if isinstance(inner, config)), None)
    if any(getattr(layer, "delta_net", None) is not None for layer in model.config.layers):
        return {"quadratic_attention": full, "deltanet": "varlen"}
    if full is not None and type(model).get_attention_masks is Decoder.get_attention_masks:
        return full
    rule = "Its layers take their masks by names of their own, or take none."
    raise UnsupportedFormError(explain("model", type(model).__name__, rule, "Pass layers={name of the mask: pattern}."))


def positions(segments: Segments) -> Tensor:
    """Return positions, int64 `[B, S]`: 0 at the first token of each sequence, and of each stretch of padding.

    >>> positions(Segments.from_lengths([2, 4], side="left")).tolist()
    [[0, 1, 0, 1], [0, 1, 2, 3]]
    """
    numbers_BS, starts_N = _stretches(segments)
    inside_BS = np.arange(numbers_BS.size).reshape(numbers_BS.shape) - starts_N[numbers_BS]
    return torch.where(segments.keep, segments.position_ids, torch.from_numpy(inside_BS))


def varlen_metadata(segments: Segments, *, device: torch.device | str = "cpu") -> Any:
    """Return VarlenMetadata of the B * S tokens, row after row, padding as documents. Raises for holes in a sequence."""
    from torchtitan.models.common.attention import VarlenMetadata

    rule = "Offsets say where a sequence begins and ends, and nothing of tokens inside it to leave out."
    bad, remedy = [(b, "holes") for b in segments.hole_rows], "unpad() the rows, or use FlexAttention."
    refuse_rows("segments", bad, rule, remedy, kind=UnsupportedFormError)
    host = (*_stretches(segments)[1].tolist(), segments.ids.numel())
    offsets = torch.tensor(host, dtype=torch.int32, device=device)
    longest = int(np.diff(host).max(initial=0))
    return VarlenMetadata(offsets, offsets, longest, longest, host)


def _stretches(segments: Segments) -> tuple[Array, Array]:
    """Return the number of each place's stretch, `[B, S]`, counted from 0 over all rows, and where each stretch begins. A
    stretch is a run of one sequence, or of padding, in one row."""
    ids_BS = segments.array
    begins_BS = np.ones(ids_BS.shape, bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    return begins_BS.cumsum().reshape(ids_BS.shape) - 1, np.flatnonzero(begins_BS)


def _one(segments: Segments, kind: _Kind, device: torch.device | str, block_size: Any, compiled: bool) -> Any:
    if kind is None or kind == "varlen":
        return None if kind is None else varlen_metadata(segments, device=device)
    if compiled:
        from torchtitan.models.common.attention import create_attention_mask as create
    else:
        from torch.nn.attention.flex_attention import create_block_mask as create
    B, S = segments.shape
    return create(_attends(segments, kind, device), B, None, S, S, device=str(device), BLOCK_SIZE=block_size)


def _attends(segments: Segments, pattern: str | Pattern, device: torch.device | str) -> Callable[..., Tensor]:
    """Return a FlexAttention mask function: the pattern for real queries, for padding its own stretch: no row is empty."""
    real, keep = mask_mod(segments, pattern, device), segments.keep.to(device)
    stretch = torch.from_numpy(_stretches(segments)[0]).to(device)

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (stretch[b, q] == stretch[b, k]) & (k <= q)
        return (~keep[b, q] & own) | (keep[b, q] & real(b, h, q, k))

    return attends


def masks_in_forward(model: Any, layers: Layers = None, **settings: Any) -> Any:
    """Let a model part (a Decoder, or a pipeline stage of one) make `attention_masks` of the `segment_ids` it is given.

    `model(tokens, segment_ids=segments.ids)`, or the same keyword to a schedule's `step`, or the key in the trainer's batch.
    `layers` default to `layers_of(model)`; `settings` go to `get_attention_masks`. Returns the hook's handle. The forward
    raises `CollateError` for segments, or masks given instead, that are not of its tokens.

    >>> for part in trainer.model_parts:  # doctest: +SKIP
    ...     masks_in_forward(part)
    """
    layers = layers_of(model) if layers is None else layers
    inner = getattr(model.config.first_attention, "inner_attention", None)
    settings = {"block_size": getattr(inner, "block_size", 128), **settings}

    def prepare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = args[0] if args else kwargs["tokens"]
        kwargs = dict(kwargs)
        ids = kwargs.pop(SEGMENT_KEY, None)
        if ids is None:
            _check_masks(kwargs.get("attention_masks", args[2] if len(args) > 2 else None), tokens)
            return args, kwargs
        ids = _local(ids)
        if tuple(ids.shape) not in _shapes(tokens):
            remedy = "Under context parallelism leave segment_ids out: torchtitan makes masks of positions, and cuts both."
            raise _not_of_tokens(SEGMENT_KEY, list(ids.shape), tokens, remedy)
        segments = Segments.from_ids(ids)
        kwargs["attention_masks"] = get_attention_masks(segments, layers, device=tokens.device, **settings)
        if len(args) < 2 and kwargs.get("positions") is None:
            kwargs["positions"] = positions(segments).to(tokens.device)
        return args, kwargs

    return model.register_forward_pre_hook(prepare, with_kwargs=True, prepend=True)


def _check_masks(masks: Any, tokens: Tensor) -> None:
    """Raise for masks of other tokens: torch reads the first rows of a BlockMask that has too many, without an error."""
    for name, mask in (masks if isinstance(masks, Mapping) else {"": masks}).items():
        key = f"attention_masks {name}".strip()
        if hasattr(mask, "kv_num_blocks"):
            if (mask.kv_num_blocks.shape[0], mask.seq_lengths[0]) not in _shapes(tokens):
                raise _not_of_tokens(key, [mask.kv_num_blocks.shape[0], mask.seq_lengths[0]], tokens)
        elif mask is not None:
            host = mask.cu_seq_q_host or tuple(mask.cu_seq_q.tolist())
            whole = host[-1] in {B * S for B, S in _shapes(tokens)}
            if host[0] != 0 or not whole or len(host) != len(mask.cu_seq_q):
                raise _not_of_tokens(key, f"{len(mask.cu_seq_q)} offsets, {host[0]} to {host[-1]}", tokens)


def _shapes(tokens: Tensor) -> set[tuple[int, int]]:
    """Return each `(B, S)` that masks may have. A DTensor's are of its local rows, or of all if its width is shared out."""
    local = _local(tokens)
    return {(B, S) for B in (tokens.shape[0], local.shape[0]) for S in (tokens.shape[1], local.shape[1])}


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def _not_of_tokens(key: str, got: Any, tokens: Tensor, remedy: str = _REMEDY_IDS) -> CollateError:
    rule = f"The tokens of this call are {list(tokens.shape[:2])} (rows, width), and this is made for others."
    return CollateError(explain(key, str(got), rule, remedy))


# --- what a dataloader gives its trainer: `({"input": ..., "positions": ...}, labels)`. The trainer hands every other key
# to the model, builds masks from `positions` (a document begins at each 0) and cuts all of it under context parallelism
# (torchtitan 0.3.0 trainer.py:690-765, 800-860).

TrainerBatch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True)
class TitanCollator:
    """`inner`'s batch as torchtitan's trainer takes it: `collate_fn=` of a `ParallelAwareDataloader`.

    `inner` is a `PaddingCollator` or `wrap_collator(...)` without a consumer. `extra` is handed to the model beside the
    tokens (qwen3_5 wants its `special_tokens`). `segment_ids=True` is for `masks_in_forward`. Picklable if `inner` is.

    >>> from collate_npu import PaddingCollator
    >>> inner = PaddingCollator(pad_token_id=0, attention_mask="2d")
    >>> samples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    >>> inputs, labels = TitanCollator(inner)(samples)
    >>> inputs["positions"].tolist(), labels.tolist()
    ([[0, 1, 2], [0, 0, 1]], [[2, 3, -100], [-100, -100, -100]])
    """

    inner: Callable[..., Mapping[str, Any]]
    _: KW_ONLY
    segment_ids: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> TrainerBatch:
        """Return `trainer_batch` of the inner batch, with the same errors."""
        input_dict, labels = trainer_batch(self.inner(features), segment_ids=self.segment_ids)
        return {**input_dict, **self.extra}, labels


def trainer_batch(batch: Mapping[str, Any], segments: Segments | None = None, *, segment_ids: bool = False) -> TrainerBatch:
    """Return `({"input": int64 [B, S], "positions": int64 [B, S]}, labels int64 [B, S])` of a padded or packed batch. Labels
    are moved to the token before them; padding and the last token of a sequence get -100. `segment_ids`, int32, are for
    `masks_in_forward`. Raises without labels, and for holes and keys that the model would be called with."""
    read = {*of_kind(KEYS, "truth", "offsets", "positions"), *with_role(KEYS, "tokens", "labels"), "shift_labels"}
    other = [(n, key) for n, key in enumerate(batch) if key not in read and batch[key] is not None]
    rule = "The trainer calls the model's forward with every key beside `input`, and its loss reads none of them."
    remedy = "Leave it out of the samples, build inner without consumer= and model=, or name it in extra=."
    refuse_rows("batch (rows are keys)", other, rule, remedy, kind=UnsupportedFormError)
    segments = segments or segments_from_batch(batch)
    bad = [(b, "holes") for b in segments.hole_rows if not segment_ids]
    rule = "torchtitan begins a document at every position 0, so positions cannot tell of padding inside a sequence."
    remedy = "Take the holes out of the samples, or pass segment_ids=True and call masks_in_forward(part) on each part."
    refuse_rows("segments", bad, rule, remedy, kind=UnsupportedFormError)
    input_dict = {"input": batch[next(iter(with_role(batch, "tokens")))], "positions": positions(segments)}
    if segment_ids:
        input_dict[SEGMENT_KEY] = segments.ids
    return input_dict, _labels(batch, segments)


def _labels(batch: Mapping[str, Any], segments: Segments) -> Tensor:
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor):
        remedy = "Let each sample carry labels, a copy of its input_ids for plain language modelling."
        raise CollateError(explain("labels", type(labels).__name__, "The trainer counts and reads labels [B, S].", remedy))
    sources = Sources({"input_ids": batch[next(iter(with_role(batch, "tokens")))], "labels": labels})
    moved = "shift_labels" in batch or labels_are_shifted(sources.array("input_ids"), sources.array("labels"), segments)
    own = labels_for(sources, segments, "next", True).get("labels", labels) if moved else shift_labels(labels, segments)
    return own.masked_fill(~segments.keep, -100)
