"""Masks inside a model part: made of the rows that arrive there, so that no schedule can cut them apart from their tokens.

torch's pipeline schedules cut a batch into micro-batches by dimension 0 of every tensor (torch 2.13
distributed/pipelining/microbatch.py:380-400). A BlockMask is cut by its rows; VarlenMetadata is a tuple of tensors, whose
offsets would be cut as if they were rows. `segment_ids` is a tensor `[B, S]`, and is cut like the tokens.

Legend: B rows of one call, S width, Q/K query and key rows of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, explain
from collate_npu.integrations.torchtitan.masks import Layers, get_attention_masks, layers_of, positions
from collate_npu.keys import SEGMENT_KEY
from collate_npu.segments import Segments

REMEDY_IDS = "Pass segment_ids, which every schedule cuts like the tokens, or cut masks and tokens together with cp_shard."
REMEDY_POSITIONS = "Under context parallelism leave segment_ids out: torchtitan makes masks of positions, and cuts both."


def masks_in_forward(model: Any, layers: Layers = None, **settings: Any) -> Any:
    """Let a model part (a Decoder, or a pipeline stage of one) make `attention_masks` of the `segment_ids` it is given.

    `model(tokens, segment_ids=segments.ids)`, or the same keyword to a schedule's `step`, or the key in the trainer's
    batch. `positions` are made too, where none are given. `layers` default to `layers_of(model)`; `settings` go to
    `get_attention_masks`. Masks that are given instead are compared with the tokens of the call. Returns the hook's
    handle. The forward raises `CollateError` for segments or masks that are not of its tokens.

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
            raise _not_of_tokens(SEGMENT_KEY, list(ids.shape), tokens, REMEDY_POSITIONS)
        segments = Segments.from_ids(ids)
        kwargs["attention_masks"] = get_attention_masks(segments, layers, device=tokens.device, **settings)
        if len(args) < 2 and kwargs.get("positions") is None:
            kwargs["positions"] = positions(segments).to(tokens.device)
        return args, kwargs

    return model.register_forward_pre_hook(prepare, with_kwargs=True, prepend=True)


def _check_masks(masks: Any, tokens: Tensor) -> None:
    """A BlockMask of more rows than the tokens is read from its first, without an error; offsets point anywhere."""
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
    """`(B, S)` of the tokens. Masks of a DTensor are those of its local rows, or of all where its width is shared out."""
    local = _local(tokens)
    return {(B, S) for B in (tokens.shape[0], local.shape[0]) for S in (tokens.shape[1], local.shape[1])}


def _local(x: Any) -> Tensor:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _not_of_tokens(key: str, got: Any, tokens: Tensor, remedy: str = REMEDY_IDS) -> CollateError:
    rule = f"The tokens of this call are {list(tokens.shape[:2])} (rows, width), and this is made for others."
    return CollateError(explain(key, str(got), rule, remedy))
