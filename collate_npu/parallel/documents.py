"""Documents: a padding-free row whose documents are each padded to what a layout can share out.

Real lengths travel beside the padded ones: `cu_seqlens` counts real tokens, `cu_seqlens_padded` says where documents
stand in the row (the pair of Megatron's core/packed_seq_params.py). Costs one copy a key. Legend: N documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, check_places, host_tensor, whole_number
from collate_npu.checked import checked
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows, shape_of
from collate_npu.keys import KEYS, TOKENS, Key, with_role
from collate_npu.masks.places import aligned
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
    for key in (*with_role(batch, "padded_offsets"), *with_role(batch, "offsets")):
        if (value := batch[key]) is not None:
            return value if isinstance(value, Tensor) else host_tensor(key, value)
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
    offsets = cu_seqlens_of(batch, segments)
    if offsets is None:
        rule = "Documents are told apart by their offsets."
        raise CollateError(explain("cu_seqlens", "None", rule, "Keep cu_seq_lens_q in the batch, or pass segments."))
    lengths_N, starts_N = _real_documents(offsets, segments)
    each, whole = (1, 1) if cp is None else (cp.document_multiple, cp.multiple)
    each = lcm(whole_number("multiple", multiple, least=1), each)
    check_places("multiple", each * len(lengths_N), "Each document is padded to it: a chunk is 64.")
    places_N = np.array(aligned(lengths_N.tolist(), each), np.int64)
    places_N[-1:] += -places_N.sum() % lcm(each, whole)
    plan = _Plan.of(int(offsets[-1]), lengths_N, starts_N, places_N)
    pad_token_id = whole_number("pad_token_id", pad_token_id, least=-(1 << 63))
    keys = with_fills(keys, {"pad": pad_token_id, "pad_type": 0, "ignored": -100})
    out = {key: plan.moved(key, value, keys.get(key)) for key, value in batch.items()}
    real, padded = (torch.from_numpy(np.cumsum([0, *sizes_N]).astype(np.int32)) for sizes_N in (lengths_N, places_N))
    for key in with_role(batch, "offsets", "padded_offsets"):
        if isinstance(batch[key], Tensor):  # kernels that take cu_seq_lens_q have no padded ones beside it
            out[key] = (padded if key.endswith("padded") or key.startswith("cu_seq_lens") else real).to(batch[key].device)
    for key in with_role(batch, "longest"):
        if batch[key] is not None:
            longest = int(places_N.max())
            out[key] = torch.full_like(batch[key], longest) if isinstance(batch[key], Tensor) else longest
    out |= {"cu_seqlens": real, "cu_seqlens_padded": padded}
    return out, plan.segments


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


def _real_documents(offsets: Tensor, segments: Segments | None) -> tuple[Array, Array]:
    """Real length and start of each document that has a real token; padding must stand at a document's end."""
    bounds = offsets.cpu().numpy().astype(np.int64)
    starts_N, lengths_N = bounds[:-1], np.diff(bounds)
    if segments is not None:
        if segments.shape != (1, bounds[-1]):
            rule = f"The offsets speak of one flat row of {bounds[-1]} tokens."
            raise CollateError(explain("segments", repr(segments), rule, "Pass the Segments of this very row."))
        keep_S = segments.keep[0].numpy()
        before_S = np.concatenate([[0], np.cumsum(keep_S)])
        lengths_N = before_S[bounds[1:]] - before_S[bounds[:-1]]
        places = enumerate(zip(starts_N, lengths_N, strict=True))
        bad = [(n, f"{k} real tokens, not at its start") for n, (a, k) in places if not keep_S[a : a + k].all()]
        if bad:
            rule = "A document's padding stands at its end."
            raise CollateError(explain_rows("cu_seqlens (rows are documents)", bad, rule, "unpad() the row first."))
    return lengths_N[lengths_N > 0], starts_N[lengths_N > 0]


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
        rule = rule or (TOKENS if isinstance(value, Tensor) and tuple(value.shape[:2]) == (1, self.width) else None)
        if not isinstance(value, Tensor) or rule is None or rule.share == "replicate":
            return value
        targets = rule.role == "labels" and value.is_floating_point()
        if rule.or_sample and (targets or tuple(value.shape[:2]) != (1, self.width)):
            return value  # of whole samples: classes [B], or float targets
        if rule.share == "rows" and value.ndim != 2:
            remedy = "Leave it out and build dense(segments) from what pad_documents returns."
            raise UnsupportedFormError(explain(key, shape_of(value), "A dense mask is not padded by document.", remedy))
        dim = (1 if rule.share == "rows" else rule.dim) % value.ndim
        held = value if value.shape[dim] else value.new_zeros([1 if d == dim else n for d, n in enumerate(value.shape)])
        taken = held.index_select(dim, self.source.to(value.device))
        steps = self.steps.to(value.device).view([-1 if d == dim else 1 for d in range(value.ndim)])
        if rule.fill == "next":
            return taken + steps.to(value.dtype)
        return taken if isinstance(rule.fill, str) else taken.masked_fill(steps > 0, rule.fill)
