"""Documents: a padding-free row whose documents are each padded to what a layout can share out.

Real lengths travel beside the padded ones: `cu_seqlens` counts real tokens, `cu_seqlens_padded` says where documents
stand in the row (the pair of Megatron's core/packed_seq_params.py). Costs one copy a key. Legend: N documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, check_places, host_tensor, whole_number
from collate_npu.checked import checked
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import KEYS, TOKENS, Key, of_kind
from collate_npu.masks.find import agreed, check_known
from collate_npu.masks.offsets import kept_apart
from collate_npu.masks.places import aligned
from collate_npu.masks.sources import Sources, misfit
from collate_npu.outputs import check_held
from collate_npu.parallel.layout import ContextParallel
from collate_npu.segments import Segments


@checked
def cu_seqlens_of(batch: Mapping[str, Any], segments: Segments | None = None) -> Tensor | None:
    """Where the documents of a flat row stand: the offsets `split_batch` goes by, and `gather_sequence` must be given.

    Those of padded sequences where the batch has them (`cu_seqlens_padded` ...), else `cu_seq_lens_q`, `cu_seqlens` ...;
    else those of a flat row of segments without padding (with padding the segments do not tell where it belongs).

    >>> cu_seqlens_of({"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8]}).tolist()
    [0, 4, 8]
    """
    sources = Sources.of(batch)
    if sources.offsets:
        name, physical, _ = kept_apart(sources.offsets)
        value = sources.get(name)
        return value if isinstance(value, Tensor) and value.ndim == 1 else torch.from_numpy(physical)
    if segments is not None and segments.shape[0] == 1 and segments.padding_side == "none":
        return segments.cu_seqlens
    return None


@checked
def pad_documents(
    batch: Mapping[str, Any],
    cp: ContextParallel | None = None,
    *,
    multiple: int = 1,
    segments: Segments | None = None,
    pad_token_id: int = 0,
    keys: Mapping[str, Key] = KEYS,
) -> tuple[dict[str, Any], Segments]:
    """A flat row `[1, S]` with each document padded to `multiple` and to `cp.document_multiple`, the row to `cp.multiple`.

    The last document takes the alignment tail, so no document is invented. Adds `cu_seqlens` (real) and
    `cu_seqlens_padded` (where documents stand); `cu_seq_lens_q/k` and `max_length_q/k` become the padded ones, since
    their kernels have no others. `segments` tell which tokens are real, where the row already holds padding; those
    returned tell how many places are padding now (`num_padding`, `padding_share`). Documents of 3 and 2 on 2 zigzag
    ranks, or with `multiple=4` on one::

        1 1 1 2 2   ->   1 1 1 0 2 2 0 0        cu_seqlens 0 3 5, cu_seqlens_padded 0 4 8

    Padding stands behind its document, which is exact for causal layers. A multiple of the chunk (64) leaves recurrent
    kernels no shorter chunk at a document's end, where some are wrong (flash-linear-attention-npu issues 367, 544, 733).

    >>> row = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    >>> batch, segments = pad_documents(row, multiple=4)
    >>> batch["input_ids"].tolist(), batch["cu_seqlens_padded"].tolist(), segments.num_padding
    ([[1, 2, 3, 0, 4, 5, 0, 0]], [0, 4, 8], 3)
    """
    sources = Sources.of(batch)
    _check_kinds(sources)
    if segments is None:
        segments = agreed(sources, polarity=None, pattern=None, padding_free=True)
    else:
        check_known(sources, segments)
    if segments.shape[0] != 1 or segments.hole_rows:
        rule = "Documents stand in one flat row, the padding of each at its end."
        raise CollateError(explain("segments", repr(segments), rule, "unpad() the row first."))
    lengths_N, starts_N = (
        np.array(segments.sequence_lengths, np.int64),
        np.array(segments.spans, np.int64).reshape(-1, 3)[:, 1],
    )
    each, whole = (1, 1) if cp is None else (cp.document_multiple, cp.multiple)
    each = lcm(whole_number("multiple", multiple, least=1), each)
    check_places("multiple", each * len(lengths_N), "Each document is padded to it: a chunk is 64.")
    places_N = np.array(aligned(lengths_N.tolist(), each), np.int64)
    places_N[-1:] += -places_N.sum() % lcm(each, whole)
    plan = _Plan.of(segments.shape[1], lengths_N, starts_N, places_N)
    pad_token_id = whole_number("pad_token_id", pad_token_id, least=-(1 << 63))
    keys = with_fills(keys, {"pad": pad_token_id, "pad_type": 0, "ignored": -100})
    out = {key: plan.moved(key, value, keys.get(key)) for key, value in sources.items()}
    real, padded = (torch.from_numpy(np.cumsum([0, *sizes_N]).astype(np.int32)) for sizes_N in (lengths_N, places_N))
    for key in (*sources.named["offsets"], *sources.named["padded_offsets"]):
        # kernels that take cu_seq_lens_q have no padded ones beside it
        told = padded if key.endswith("padded") or key.startswith("cu_seq_lens") else real
        out[key] = told.to(batch[key].device) if isinstance(batch[key], Tensor) else told
    longest = int(places_N.max(initial=0))
    for key in (*sources.named["longest"], *sources.named["tail"]):
        value = longest if key in sources.named["longest"] else 0
        out[key] = torch.full_like(batch[key], value) if isinstance(batch[key], Tensor) else value
    for key in (*sources.named["lengths"], *sources.named["padded_lengths"]):
        if sources.array(key).size > 1 or len(lengths_N) == 1:  # else one number of the whole row
            sizes = torch.from_numpy(places_N if key.endswith("padded") else lengths_N).view(
                -1, *[len(lengths_N)] * (sources.array(key).ndim > 1)
            )
            out[key] = sizes.to(batch[key]) if isinstance(batch[key], Tensor) else sizes.tolist()
    out |= {"cu_seqlens": real, "cu_seqlens_padded": padded}
    return out, plan.segments


def _check_kinds(sources: Sources) -> None:
    """Raise for what says where tokens stand, and cannot be built again here."""
    for key, full in sources.masks.items():
        if full.ndim > 2:
            remedy = "Leave it out and build dense(segments) from what pad_documents returns."
            raise UnsupportedFormError(explain(key, shape_of(full), "A dense mask is not padded by document.", remedy))
    if old := [key for key in of_kind(sources, "offsets") if KEYS[key].role is None and sources[key] is not None]:
        rule = "It holds offsets of the row as it was."
        raise CollateError(
            explain(old[0], f"a {type(sources[old[0]]).__name__}", rule, "Leave it out, and build it afterwards.")
        )


def with_fills(keys: Mapping[str, Key], fills: Mapping[Any, float]) -> dict[str, Key]:
    """The same keys with numbers for what padding holds, where `fills` has them by name ("pad", "ignored", ...)."""
    return {key: replace(rule, fill=fills[rule.fill]) if rule.fill in fills else rule for key, rule in keys.items()}


def place_documents(
    batch: Mapping[str, Any], segments: Segments, places: Sequence[int], *, keys: Mapping[str, Key] = KEYS
) -> tuple[dict[str, Any], Segments]:
    """A flat row without padding, each document moved to its place (`masks.places`); its offsets stay as they are."""
    lengths_N = np.zeros(len(places), np.int64)
    lengths_N[: segments.num_sequences] = segments.sequence_lengths
    starts_N = np.cumsum(lengths_N) - lengths_N
    plan = _Plan.of(segments.num_tokens, lengths_N, starts_N, np.asarray(places, np.int64))
    return {key: plan.moved(key, value, keys.get(key)) for key, value in batch.items()}, plan.segments


def as_tensor(key: str, value: Any, rule: Key | None, shape: tuple[int, int]) -> Any:
    """A list or an array of tokens as a tensor; under a key that nobody knows, one of numbers that begins `[B, S]`."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    if rule is not None:
        return value if rule.share == "replicate" else host_tensor(key, value)
    with suppress(CollateError):
        held = host_tensor(key, value)
        return held if isinstance(value, np.ndarray) or tuple(held.shape[:2]) == shape else value
    return value


def jagged(values: Tensor, offsets: Tensor) -> Tensor:
    """A jagged tensor `[N, j, ...]` of documents that stand side by side in `values`."""
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested


def jagged_cu_seqlens(x: Tensor, cp: ContextParallel) -> Tensor:
    """The offsets of a jagged tensor, for layouts that keep documents apart; raises for the others."""
    if cp.layout not in ("document_zigzag", "document_contiguous"):
        rule = f"A jagged tensor is shared out document by document; the layout is {cp.layout}."
        remedy = "Use document_zigzag or document_contiguous, or split the padded or flat tensor."
        raise UnsupportedFormError(explain("jagged tensor", shape_of(x.values()), rule, remedy))
    offsets: Tensor = cast(Any, x).offsets()
    return offsets


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where each place of the new row is filled from. Legend: S old width, W new width."""

    width: int  # S
    source: Tensor  # int64 [W]: the place in the old row, for padding that of the last real token before it
    steps: Tensor  # int64 [W]: 0 for a real token, k for the k-th padding behind it
    segments: Segments

    @classmethod
    def of(cls, width: int, lengths_N: Array, starts_N: Array, places_N: Array) -> _Plan:
        """From N documents: their real lengths, where they start now, and the places each is to take up."""
        number_W = np.repeat(np.arange(len(places_N)), places_N)
        place_W = np.arange(len(number_W))
        at_W = place_W - (np.cumsum(places_N) - places_N)[number_W]
        real_W = at_W < lengths_N[number_W]
        source_W = np.maximum.accumulate(np.where(real_W, starts_N[number_W] + at_W, 0))
        steps_W = place_W - np.maximum.accumulate(np.where(real_W, place_W, -1))
        segments = Segments(((number_W + 1) * real_W)[None])
        return cls(width, torch.from_numpy(source_W), torch.from_numpy(steps_W), segments)

    def moved(self, key: str, value: Any, rule: Key | None) -> Any:
        """One key of the batch in the new row; keys without a token dimension come back as they are."""
        held = as_tensor(key, value, rule, (1, self.width))
        rule = rule or (TOKENS if isinstance(held, Tensor) and tuple(held.shape[:2]) == (1, self.width) else None)
        if not isinstance(held, Tensor) or rule is None or rule.share == "replicate":
            return value
        targets = rule.role == "labels" and held.is_floating_point()
        if rule.or_sample and (targets or held.ndim == 1 or held.shape[1] == 1 != self.width):
            return value  # of whole samples: classes [B], or float targets
        dim = min(1 if rule.share == "rows" else rule.dim, held.ndim - 1) % max(held.ndim, 1)
        if held.layout is not torch.strided or not held.ndim or held.shape[dim] != self.width:
            raise misfit(key, shape_of(held), (1, self.width))
        held = held if self.width else held.new_zeros([1 if d == dim else n for d, n in enumerate(held.shape)])
        taken = held.index_select(dim, self.source.to(held.device))
        steps = self.steps.to(held.device).view([-1 if d == dim else 1 for d in range(held.ndim)])
        if rule.fill == "next":
            return taken + steps.to(held.dtype)
        if isinstance(rule.fill, str):
            return taken
        check_held(key, rule.fill, held.dtype)
        return taken.masked_fill(steps > 0, rule.fill)
