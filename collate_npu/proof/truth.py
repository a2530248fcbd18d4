"""Truth: what a batch says of its tokens, to the model that is called with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from collate_npu.consumers.adapter import own_patterns
from collate_npu.consumers.consumer import Case, Model
from collate_npu.consumers.models import config_of, consumer_of
from collate_npu.errors import AmbiguousMaskError
from collate_npu.keys import KEYS, of_kind, with_role
from collate_npu.masks.find import agreed
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
    sources = Sources.of(_with_tokens(batch))
    if segments is None:
        try:
            segments = _agreed(sources, declared, about)
        except AmbiguousMaskError:
            if not (held := _held(batch)):
                raise
            segments = _agreed(sources | held, declared, about)
    flat = len(segments.ids) == 1 and any(batch[key] is not None for key in of_kind(batch, "offsets"))
    return Case(segments=segments, model=about, pattern=Pattern.of(declared or "causal"), padding_free=flat)


def has_two_sides(model: nn.Module) -> bool:
    """Is it an encoder beside a decoder? The config of a decoder alone may say so, too."""
    said = getattr(config_of(model), "is_encoder_decoder", False)
    return bool(said) and any(name.rpartition(".")[2] == "encoder" for name, _ in model.named_modules())


def _agreed(sources: Sources, declared: str | Pattern | None, model: Model) -> Segments:
    row = sources.shape()[0] == 1
    flat = row and bool(sources.offsets or sources.lengths or sources.named["positions"])
    own = own_patterns(model.config) if model.model_type else ()
    return ready(agreed(sources, polarity=None, pattern=declared, padding_free=flat, own=own))


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


def _with_tokens(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a layer is called with by a name that the door knows, where there are no tokens; torchtitan's `positions`."""
    if isinstance(batch, Mapping) and batch.get("position_ids") is None and isinstance(batch.get("positions"), Tensor):
        batch = {**batch, "position_ids": batch["positions"]}
    if not isinstance(batch, Mapping) or any(batch[key] is not None for key in with_role(batch, "tokens")):
        return batch
    values = (value for key, value in batch.items() if key not in KEYS and isinstance(value, Tensor))
    states = next((value for value in values if value.ndim == 3 and value.is_floating_point()), None)
    return batch if states is None else {**batch, "inputs_embeds": states}
