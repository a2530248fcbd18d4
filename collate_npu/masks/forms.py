"""Forms: what a kernel takes, made from `Segments` and an attention pattern.

Dense forms cost B * Q * S elements and are built only when asked for; on the CPU every element is written once, by
copying rows out of one vector of 2 * S elements (a causal block is the same row, shifted). None and varlen cost O(B * S)
or less; a BlockMask keeps O(B * S) but is found by evaluating every place, unless it is compiled.

Legend: B batch, S width (all keys), Q query rows built, K keys, T tokens without padding, N sequences.
`■` attends, `⬚` is blocked; the pictures are for lengths 3 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

Polarity = Literal["keep", "masked", "bias"]
Array = npt.NDArray[Any]

MAX_MASK_BYTES = 4 << 30


# --- None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes or no, with the reason; true in an `if` when `ok`."""

    ok: bool
    why: str

    def __bool__(self) -> bool:
        return self.ok


def none_is_exact(segments: Segments, pattern: str | Pattern = "causal") -> Verdict:
    """May the mask be left out, for a consumer that then attends causally and ignores outputs at padding?

    Yes only where no real token could see padding or another sequence: causal, padding on the right alone, one sequence
    a row. Nothing here looks at the device; the consumer's kernel decides (MindSpeed dot_product_attention.py:613-617,
    transformers masking_utils.py:307 and ms-swift trainers/utils.py:396-407 each drop the mask on other conditions).
    """
    pattern = Pattern.of(pattern)
    if pattern.kind != "causal":
        return Verdict(False, f"attention is {pattern}, and no mask means plain causal (or full) attention")
    if segments.packed:
        return Verdict(False, "a row holds several sequences, which would see each other")
    if segments.padding_side not in ("none", "right"):
        where = "on the left" if segments.padding_side == "left" else "before or between real tokens"
        return Verdict(False, f"padding stands {where}, so real tokens would attend it")
    return Verdict(True, "causal attention, padding on the right only, one sequence a row")


# --- dense


def dense(
    segments: Segments,
    *,
    polarity: Polarity = "keep",
    pattern: str | Pattern = "causal",
    rows: slice | Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> Tensor:
    """The mask as a tensor `[B, 1, Q, S]`: `rows` picks the Q query rows (all by default), the S keys are always whole.

    Only keys are masked: a padded query still sees the real keys before it, so that right padding leaves no row empty.
    Causal, lengths 3 and 5, padded right and left (the two upper rows of the left one see nothing)::

        ■ ⬚ ⬚ ⬚ ⬚   ■ ⬚ ⬚ ⬚ ⬚       ⬚ ⬚ ⬚ ⬚ ⬚   ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚   ■ ■ ⬚ ⬚ ⬚       ⬚ ⬚ ⬚ ⬚ ⬚   ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚   ■ ■ ■ ⬚ ⬚       ⬚ ⬚ ■ ⬚ ⬚   ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚   ■ ■ ■ ■ ⬚       ⬚ ⬚ ■ ■ ⬚   ■ ■ ■ ■ ⬚
        ■ ■ ■ ⬚ ⬚   ■ ■ ■ ■ ■       ⬚ ⬚ ■ ■ ■   ■ ■ ■ ■ ■

    `polarity="keep"`: True = attends (torch SDPA; `dtype` bool or an int type for 1/0). `"masked"`: True = blocked
    (Megatron-core transformer/utils.py:54, torch_npu `atten_mask`). `"bias"`: 0 attends, `finfo(dtype).min` is blocked
    (transformers masking_utils.py:632), float32 by default. Raises `UnsupportedFormError` beyond `max_mask_bytes`.
    """
    pattern = Pattern.of(pattern)
    dtype, attend, blocked = _values(polarity, dtype)
    query_rows = _query_rows(rows, segments.shape[1])
    _check_bytes(segments, len(query_rows), dtype, max_mask_bytes)
    if torch.device(device).type != "cpu":
        keep = _dense_keep_on(segments, pattern, query_rows, torch.device(device))
        values = torch.tensor([blocked, attend], dtype=dtype, device=device)
        return values[keep.to(torch.int8).int()] if polarity == "bias" else (keep if attend else ~keep).to(dtype)
    carrier, allowed, forbidden = _carrier(dtype, attend, blocked)
    out_BQK = np.empty((segments.shape[0], len(query_rows), segments.shape[1]), carrier)
    _fill(out_BQK, segments, pattern, query_rows, allowed, forbidden)
    return torch.from_numpy(out_BQK).view(dtype)[:, None]


def _values(polarity: Polarity, dtype: torch.dtype | None) -> tuple[torch.dtype, float, float]:
    if polarity == "bias":
        dtype = dtype or torch.float32
        if dtype.is_floating_point:
            return dtype, 0.0, torch.finfo(dtype).min
        raise CollateError(explain("dtype", str(dtype), "A bias is added to scores.", "Pass a float dtype."))
    if polarity in ("keep", "masked"):
        return dtype or torch.bool, float(polarity == "keep"), float(polarity == "masked")
    rule = "A dense form is 'keep' (True attends), 'masked' (True is blocked) or 'bias' (additive)."
    raise CollateError(explain("polarity", repr(polarity), rule, "Name the one your kernel takes."))


def _carrier(dtype: torch.dtype, attend: float, blocked: float) -> tuple[Any, Any, Any]:
    """numpy has no bfloat16: its bits travel as uint16."""
    values = torch.tensor([attend, blocked], dtype=dtype)
    bits = values.view(torch.uint16) if dtype == torch.bfloat16 else values
    array = bits.numpy()
    return array.dtype, array[0], array[1]


def _query_rows(rows: slice | Sequence[int] | Tensor | None, S: int) -> Array:
    if rows is None:
        return np.arange(S)
    if isinstance(rows, slice):
        return np.arange(S)[rows]
    picked = rows.cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows, np.int64)
    if picked.size and (picked.min() < 0 or picked.max() >= S):
        raise CollateError(explain("rows", f"{picked.min()}..{picked.max()}", f"Query rows lie in 0..{S - 1}.", "Clip."))
    return picked


def _check_bytes(segments: Segments, Q: int, dtype: torch.dtype, limit: int) -> None:
    B, S = segments.shape
    size = B * Q * S * dtype.itemsize
    if size > limit:
        rule = f"The limit max_mask_bytes is {limit / 2**30:.2f} GiB."
        remedy = "Use None where none_is_exact, varlen(), block_mask(), a slice of rows, or raise the limit."
        raise UnsupportedFormError(explain("dense mask", f"{size / 2**30:.2f} GiB ([{B}, 1, {Q}, {S}])", rule, remedy))


def _fill(out_BQK: Array, segments: Segments, pattern: Pattern, query_rows: Array, allowed: Any, forbidden: Any) -> None:
    S = segments.shape[1]
    limit = pattern.size if pattern.kind == "sliding" else S + 1
    key_minus_query = np.arange(-S, S + 1)
    band = np.where((key_minus_query <= 0) & (key_minus_query > -limit), allowed, forbidden)
    for b in segments.empty_rows:
        out_BQK[b] = forbidden
    ids_BS = segments.ids.numpy()
    runs = list(_runs(query_rows))
    for n, (b, start, end, first, last) in enumerate(_regions(segments)):
        prefix = pattern.prefixes(segments.num_sequences)[n] if pattern.kind == "prefix" else 0
        for at, low, high in runs:
            q0, q1 = max(low, first), min(high, last)
            if q0 < q1:
                block_QK = out_BQK[b, at + q0 - low : at + q1 - low]
                block_QK[:, :start], block_QK[:, end:] = forbidden, forbidden
                _fill_block(block_QK[:, start:end], pattern, q0 - start, prefix, band, allowed, forbidden)
                if (holes := np.flatnonzero(ids_BS[b, start:end] == 0)).size:
                    block_QK[:, start + holes] = forbidden


def _fill_block(block: Array, pattern: Pattern, q0: int, prefix: int, band: Array, allowed: Any, forbidden: Any) -> None:
    """Rows q0, q0 + 1, ... of one sequence, both counted from its first token, against all its keys."""
    Q, K = block.shape
    if pattern.kind == "bidirectional":
        block[:] = allowed
    elif pattern.kind == "chunked":
        block[:] = forbidden
        for low in range(0, K, pattern.size):
            q_from, q_to = max(low - q0, 0), min(low + pattern.size - q0, Q)
            if q_from < q_to:
                part = block[q_from:q_to, low : low + pattern.size]
                np.copyto(part, _shifted(band, q0 + q_from - low, part.shape))
    else:
        np.copyto(block, _shifted(band, q0, block.shape))
        block[:, :prefix] = allowed if prefix else block[:, :prefix]


def _shifted(band: Array, q0: int, shape: tuple[int, ...]) -> Array:
    """View `[i, j] = band[(j) - (q0 + i)]` (band is centred): each row is the one above, moved right by one."""
    centre = len(band) // 2
    item = band.itemsize
    return np.lib.stride_tricks.as_strided(band[centre - q0 :], shape, (-item, item), writeable=False)


def _regions(segments: Segments) -> Iterator[tuple[int, int, int, int, int]]:
    """`(row, first key, last key + 1, first query, last query + 1)` of each sequence.

    Padding queries belong to the sequence before them, leading ones to the first: every row is in one region.
    """
    spans = segments.spans
    S = segments.shape[1]
    for n, (b, start, end) in enumerate(spans):
        first = start if n and spans[n - 1][0] == b else 0
        last = spans[n + 1][1] if n + 1 < len(spans) and spans[n + 1][0] == b else S
        yield b, start, end, first, last


def _runs(query_rows: Array) -> Iterator[tuple[int, int, int]]:
    """`(place in the output, first row, last row + 1)` of each stretch of neighbouring rows."""
    if not len(query_rows):
        return
    cuts = [0, *(np.flatnonzero(np.diff(query_rows) != 1) + 1).tolist(), len(query_rows)]
    for low, high in pairwise(cuts):
        yield low, int(query_rows[low]), int(query_rows[high - 1]) + 1


# --- predicates: BlockMask, and dense on a device


def mask_mod(
    segments: Segments, pattern: str | Pattern = "causal", device: torch.device | str = "cpu"
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The predicate `(b, h, q, k) -> bool` (True attends) that flex_attention and `block_mask` take.

    Same truth as `dense(polarity="keep")`, element by element.
    """
    pattern = Pattern.of(pattern)
    B, S = segments.shape
    owner_BS, start_BS, prefix_BS = (np.zeros((B, S), np.int64) for _ in range(3))
    prefixes = pattern.prefixes(segments.num_sequences)
    ids_BS = segments.ids.numpy()
    for n, (b, start, _, first, last) in enumerate(_regions(segments)):
        owner_BS[b, first:last] = ids_BS[b, start]
        start_BS[b, first:last] = start
        prefix_BS[b, first:last] = prefixes[n]
    ids, owner, origin, prefix = (torch.from_numpy(x).to(device) for x in (ids_BS, owner_BS, start_BS, prefix_BS))

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (ids[b, k] == owner[b, q]) & (ids[b, k] > 0)
        return same & _within(pattern, q - origin[b, q], k - origin[b, q], prefix[b, q])

    return attends


def _within(pattern: Pattern, q: Tensor, k: Tensor, prefix: Tensor) -> Tensor:
    if pattern.kind == "bidirectional":
        return k == k
    if pattern.kind == "prefix":
        return (k <= q) | (k < prefix)
    if pattern.kind == "sliding":
        return (k <= q) & (q - k < pattern.size)
    if pattern.kind == "chunked":
        chunks = [torch.div(x, pattern.size, rounding_mode="floor") for x in (q, k)]
        return (k <= q) & (chunks[0] == chunks[1])
    return k <= q


def _dense_keep_on(segments: Segments, pattern: Pattern, query_rows: Array, device: torch.device) -> Tensor:
    B, S = segments.shape
    b = torch.arange(B, device=device)[:, None, None, None]
    q = torch.from_numpy(np.ascontiguousarray(query_rows)).to(device)[:, None]
    return mask_mod(segments, pattern, device)(b, b, q, torch.arange(S, device=device))


def block_mask(
    segments: Segments,
    *,
    pattern: str | Pattern = "causal",
    device: torch.device | str = "cpu",
    block_size: int = 128,
    compiled: bool = False,
) -> Any:
    """torch's `BlockMask` for flex_attention, `[B, 1, S, S]` in blocks (torch nn/attention/flex_attention.py).

    torch evaluates the predicate on all B * S * S places while it builds the mask; `compiled=True` fuses that away, for
    some seconds of compilation at the first call.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    B, S = segments.shape
    attends = cast(Any, mask_mod(segments, pattern, device))
    return create_block_mask(attends, B, None, S, S, device=str(device), BLOCK_SIZE=block_size, _compile=compiled)


# --- varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """Offsets for kernels that take one flat row of sequences: cu_seqlens `0, 3, 8` for lengths 3 and 5."""

    cu_seqlens: Tensor
    """int32 `[N + 1]`, leading 0 (flash-attn, fla; torch_npu's actual_seq_qlen is the same without the 0)."""
    cu_seqlens_host: tuple[int, ...]
    """The same numbers on the host, so that no kernel launch waits for the device."""
    max_length: int
    position_ids: Tensor
    """int64 `[1, T]`."""
    seq_idx: Tensor
    """int32 `[1, T]`, 0-based number of the sequence (causal_conv1d, mamba)."""
    num_sequences: int
    """Real sequences; a padding tail counted in `cu_seqlens` is not one of them."""


def varlen(segments: Segments, *, keep_tail: bool = False) -> Varlen:
    """Offsets of the T real tokens, row after row, as `unpad` lays them out.

    `keep_tail=True` is for one flat row with padding at its end, which stays in the tensor: the tail becomes one more
    sequence, so that neither kernels nor positions see it as part of the last. Raises where there is not one such row.
    """
    lengths = [n for row in segments.lengths for n in row]
    num_sequences = len(lengths)
    if keep_tail:
        if segments.shape[0] != 1 or segments.padding_side not in ("none", "right"):
            rule = "A tail can be kept only in one flat row whose padding stands at its end."
            raise UnsupportedFormError(explain("varlen", repr(segments), rule, "unpad() first, and leave the tail out."))
        lengths += [tail] if (tail := segments.shape[1] - sum(lengths)) else []
    flat = Segments.from_lengths([lengths])
    return Varlen(
        cu_seqlens=flat.cu_seqlens,
        cu_seqlens_host=flat.cu_seqlens_host,
        max_length=flat.max_length,
        position_ids=flat.position_ids,
        seq_idx=flat.ids - 1,
        num_sequences=num_sequences,
    )
