"""Documents: a padding-free row whose documents are each padded to what a layout can share out.

Real lengths travel beside the padded ones: `cu_seqlens` counts real tokens, `cu_seqlens_padded` says where documents
stand in the row (the pair of Megatron's core/packed_seq_params.py). Costs one copy a key. Legend: N documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows, shape_of
from collate_npu.keys import KEYS, TOKENS, Key, with_role
from collate_npu.parallel.layout import ContextParallel
from collate_npu.segments import Segments


def cu_seqlens_of(batch: Mapping[str, Any], segments: Segments | None = None) -> Tensor | None:
    """Where the documents of a flat row stand: the offsets `split_batch` goes by, and `gather_sequence` must be given.

    Those of padded sequences where the batch has them (`cu_seqlens_padded` ...), else `cu_seq_lens_q`, `cu_seqlens` ...;
    else those of a flat row of segments without padding (with padding the segments do not tell where it belongs).
    """
    for key in (*with_role(batch, "padded_offsets"), *with_role(batch, "offsets")):
        if (value := batch[key]) is not None:
            return torch.as_tensor(value)
    if segments is not None and segments.shape[0] == 1 and segments.padding_side == "none":
        return segments.cu_seqlens
    return None


def pad_documents(
    batch: Mapping[str, Any],
    cp: ContextParallel,
    *,
    segments: Segments | None = None,
    pad_token_id: int = 0,
    keys: Mapping[str, Key] = KEYS,
) -> tuple[dict[str, Any], Segments]:
    """A flat row `[1, S]` with each document padded to `cp.document_multiple`, the row to `cp.multiple`.

    The last document takes the alignment tail, so no document is invented. Adds `cu_seqlens` (real) and
    `cu_seqlens_padded` (where documents stand); `cu_seq_lens_q/k` and `max_length_q/k` become the padded ones, since
    their kernels have no others. `segments` tell which tokens are real, where the row already holds padding.
    Two documents of 3 and 2 on 2 zigzag ranks (multiple 4)::

        1 1 1 2 2   ->   1 1 1 0 2 2 0 0        cu_seqlens 0 3 5, cu_seqlens_padded 0 4 8
    """
    offsets = cu_seqlens_of(batch, segments)
    if offsets is None:
        rule = "Documents are told apart by their offsets."
        raise CollateError(explain("cu_seqlens", "None", rule, "Keep cu_seq_lens_q in the batch, or pass segments."))
    S = int(offsets[-1])
    lengths_N, starts_N = _real_documents(offsets, segments)
    padded_N = _padded(lengths_N, cp)
    source, ids = _source(lengths_N, starts_N, padded_N)
    out = {key: _repadded(key, value, keys.get(key), S, source, pad_token_id) for key, value in batch.items()}
    real = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32))
    padded = torch.from_numpy(np.concatenate([[0], np.cumsum(padded_N)]).astype(np.int32))
    for key in with_role(batch, "offsets", "padded_offsets"):
        if isinstance(batch[key], Tensor):  # kernels that take cu_seq_lens_q have no padded ones beside it
            out[key] = (padded if key.endswith("padded") or key.startswith("cu_seq_lens") else real).to(batch[key].device)
    out.update(
        {key: _like(batch[key], int(padded_N.max())) for key in with_role(batch, "longest") if batch[key] is not None}
    )
    out |= {"cu_seqlens": real, "cu_seqlens_padded": padded}
    return out, Segments(torch.from_numpy(ids[None]))


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


def _real_documents(offsets: Tensor, segments: Segments | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
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


def _padded(lengths_N: npt.NDArray[Any], cp: ContextParallel) -> npt.NDArray[Any]:
    padded_N = -(-lengths_N // cp.document_multiple) * cp.document_multiple
    if len(padded_N):
        padded_N[-1] += -padded_N.sum() % cp.multiple
    return padded_N


def _source(
    lengths_N: npt.NDArray[Any], starts_N: npt.NDArray[Any], padded_N: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """`source[i]`: index in the old row, or -k for the k-th padding after the last real token; `ids[i]`: segment id."""
    at = np.arange(padded_N.sum()) - np.repeat(np.cumsum(padded_N) - padded_N, padded_N)
    last = np.repeat(lengths_N, padded_N) - 1
    number = np.repeat(np.arange(1, len(padded_N) + 1, dtype=np.int32), padded_N)
    source = np.where(at <= last, np.repeat(starts_N, padded_N) + at, last - at)
    return source, np.where(at <= last, number, 0).astype(np.int32)


def _repadded(key: str, value: Any, rule: Key | None, S: int, source: npt.NDArray[Any], pad_token_id: int) -> Any:
    rule = rule or (TOKENS if isinstance(value, Tensor) and tuple(value.shape[:2]) == (1, S) else None)
    if not isinstance(value, Tensor) or rule is None or rule.share == "replicate":
        return value
    if rule.share == "rows" and value.ndim != 2:
        remedy = "Leave it out and build dense(segments) from what pad_documents returns."
        raise UnsupportedFormError(explain(key, shape_of(value), "A dense mask is not padded by document.", remedy))
    dim = (1 if rule.share == "rows" else rule.dim) % value.ndim
    where = torch.from_numpy(source).to(value.device)
    steps = (-where).clamp(min=0)
    held = torch.arange(len(where), device=value.device) - steps
    taken = value.index_select(dim, where[held])
    by_token = [-1 if d == dim else 1 for d in range(value.ndim)]
    if rule.fill == "next":
        return taken + steps.to(value.dtype).view(by_token)
    fills: dict[Any, float] = {"pad": pad_token_id, "pad_type": 0, "ignored": -100}
    fill = fills.get(rule.fill, rule.fill)
    return taken if isinstance(fill, str) else taken.masked_fill((steps > 0).view(by_token), fill)


def _like(value: Any, longest: int) -> Any:
    return torch.full_like(value, longest) if isinstance(value, Tensor) else longest
