"""Truth: what a batch says of its tokens, to the model that is called with it."""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.adapter import AT_MODEL
from collate_npu.consumers.mask_routing import Case, Model
from collate_npu.consumers.model_traits import consumer_of, has_two_sides
from collate_npu.errors import AmbiguousMaskError
from collate_npu.keys import KEYS, of_kind, with_role
from collate_npu.masks.batch_reader import agreed
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, ready


def case_of(
    model: nn.Module, batch: Mapping[str, Any], *, segments: Segments | None = None, pattern: str | Pattern | None = None
) -> Case:
    """The Segments of the batch, where they are not given by `segments`, and what is known of the model.

    A layer that is called with hidden states `[B, S, D]` and no tokens is asked like a model with `inputs_embeds`.
    Raises what the door raises.
    """
    about = Model.of(model) if consumer_of(model) in ("transformers", "megatron") else Model()
    both = about.pattern == "bidirectional" or has_two_sides(model)
    declared = pattern or ("bidirectional" if both else None)
    sources = _of_all_ranks(_with_tokens(Sources.of(batch)), about.config)
    if segments is None:
        try:
            segments = _agreed(_without_windows(sources), declared, about)
        except AmbiguousMaskError:
            known, held = AT_MODEL.get(get_ident()), _held(sources)
            if not held and (known is None or known.shape != sources.shape()):
                raise
            segments = _agreed(sources | held, declared, about) if held or known is None else known
    flat = len(segments.ids) == 1 and any(sources[key] is not None for key in of_kind(sources, "offsets"))
    return Case(segments=segments, model=about, pattern=Pattern.of(declared or "causal"), padding_free=flat)


def _agreed(sources: Sources, declared: str | Pattern | None, model: Model) -> Segments:
    row = sources.shape()[0] == 1
    flat = row and bool(sources.offsets or sources.lengths or sources.named["positions"])
    own = model.own_patterns if model.model_type else ()
    return ready(agreed(sources, polarity=None, pattern=declared, padding_free=flat, own=own))


def _without_windows(sources: Sources) -> Sources:
    """Of a mapping of masks beside offsets the parts whose layers see less than the whole past say nothing of sequences; the
    kernels that get them are judged."""
    masks = sources.get("attention_mask")
    if not isinstance(masks, Mapping) or not sources.offsets:
        return sources
    whole = {kind: each for kind, each in masks.items() if not any(word in kind for word in ("chunk", "sliding", "window"))}
    return sources | {"attention_mask": whole or None}


def _of_all_ranks(sources: Sources, config: Any) -> Sources:
    """Where Megatron's ranks share a flat row its offsets are of the whole of it: so are the recurrent layers' kernels."""
    ranks, held = getattr(config, "context_parallel_size", 1) or 1, _held(sources)
    S = ranks * sources.shape()[1]
    ends = {int(held[key][-1]) for key in with_role(held, "offsets", "padded_offsets") if len(held[key])}
    if ranks == 1 or sources.shape()[0] != 1 or S not in ends:
        return sources
    return Sources.of({**held, "input_ids": torch.arange(S)[None]})


def _held(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What an object of the batch says: Megatron's `packed_seq_params`, NeMo RL's `flash_attn_kwargs`, mcore-bridge's
    `extra_block_kwargs`."""
    held: dict[str, Any] = {}
    for value in batch.values():
        if not isinstance(value, (Tensor, str, list, tuple)):
            fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            told = with_role(fields, "offsets", "padded_offsets", "keep", "segment_ids")
            held |= {key: fields[key] for key in told if fields[key] is not None}
    return held


def _with_tokens(sources: Sources) -> Sources:
    """torchtitan's `positions`, and what a layer is called with where there are no tokens, by names that the door knows."""
    if sources.get("position_ids") is None and isinstance(sources.get("positions"), Tensor):
        sources = sources | {"position_ids": sources["positions"]}
    if sources.named["tokens"]:
        return sources
    values = (value for key, value in sources.items() if key not in KEYS and isinstance(value, Tensor))
    states = next((value for value in values if value.ndim == 3 and value.is_floating_point()), None)
    return sources if states is None else sources | {"inputs_embeds": states}
