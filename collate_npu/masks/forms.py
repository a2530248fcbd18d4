"""Forms: what a kernel takes, made from `Segments` and an attention pattern.

Dense forms cost B * Q * S elements and are built only where they are needed; on the CPU every element is written once, by
copying rows out of one vector of 2 * S elements (a causal block is the same row, shifted). None and varlen cost O(B * S)
or less; a BlockMask keeps O(B * S) but is found by evaluating every place, unless it is compiled.
Legend: B batch, S width (all keys), Q query rows built, K keys, T tokens without padding, N sequences.
`■` attends, `⬚` is blocked; the pictures are for lengths 3 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import PLAIN, Array, host_array, whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, explain, refuse_rows, shape_of
from collate_npu.masks.mask_values import Polarity
from collate_npu.masks.patterns import CAUSAL, Pattern, fill_rows, regions_of
from collate_npu.segments import PADS_BEFORE, Segments, keep_array, of_lengths
from collate_npu.validation import checked

MAX_MASK_BYTES = 4 << 30
CPU = torch.device("cpu")
EVALUATED_BYTES = 21
"""Bytes a place that evaluating a predicate takes at its peak (tests measure it)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes or no, with the reason; true in an `if` when `ok`.

    >>> verdict = none_is_exact(Segments.from_lengths([3, 5], side="left"))
    >>> bool(verdict), verdict.ok, verdict.why
    (False, False, 'padding stands on the left, so real tokens would attend it')
    """

    ok: bool
    why: str

    def __bool__(self) -> bool:
        return self.ok


def none_is_exact(segments: Segments, pattern: str | Pattern = "causal") -> Verdict:
    """True if `attention_mask=None` gives the same result, for a consumer that attends causally and ignores padding.

    Yes only where no real token could see padding or another sequence: causal, padding on the right alone, one sequence
    a row. Nothing here looks at the device; the consumer's kernel decides (MindSpeed generate_mask/adaptor.py:26-31,
    transformers masking_utils.py:307 and ms-swift trainers/utils.py:396-407 each drop the mask on other conditions).

    >>> if none_is_exact(Segments.from_lengths([3, 5])):
    ...     print("right padding: leave the mask out")
    right padding: leave the mask out
    >>> none_is_exact(Segments.from_lengths([[3, 2]])).why
    'a row holds several sequences, which would see each other'
    """
    pattern = Pattern.of(pattern)
    if pattern is not CAUSAL and pattern.reaches(segments.longest_span):
        return Verdict(False, f"attention is {pattern}, and no mask means plain causal (or full) attention")
    if segments.packed:
        return Verdict(False, "a row holds several sequences, which would see each other")
    if segments.padding_side in PADS_BEFORE:
        where = "on the left" if segments.padding_side == "left" else "before or between real tokens"
        return Verdict(False, f"padding stands {where}, so real tokens would attend it")
    return Verdict(True, "causal attention, padding on the right only, one sequence a row")


@checked
def dense(
    segments: Segments,
    *,
    polarity: Polarity = "keep",
    pattern: str | Pattern = "causal",
    rows: slice | Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the mask `[B, 1, Q, S]`: `rows` picks the Q query rows (all by default), the S keys are always whole.

    Only keys are masked: a padded query still sees the real keys before it, so that right padding leaves no row empty.
    Causal, lengths 3 and 5, padded right and left (the two upper rows of the left one see nothing)::

        ■ ⬚ ⬚ ⬚ ⬚   ■ ⬚ ⬚ ⬚ ⬚       ⬚ ⬚ ⬚ ⬚ ⬚   ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚   ■ ■ ⬚ ⬚ ⬚       ⬚ ⬚ ⬚ ⬚ ⬚   ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚   ■ ■ ■ ⬚ ⬚       ⬚ ⬚ ■ ⬚ ⬚   ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚   ■ ■ ■ ■ ⬚       ⬚ ⬚ ■ ■ ⬚   ■ ■ ■ ■ ⬚
        ■ ■ ■ ⬚ ⬚   ■ ■ ■ ■ ■       ⬚ ⬚ ■ ■ ■   ■ ■ ■ ■ ■

    `polarity="keep"`: True = attends (torch SDPA; `dtype` bool or an int type for 1/0). `"masked"`: True = blocked
    (Megatron-core transformer/utils.py:54, torch_npu `atten_mask`). `"bias"`: 0 attends, `finfo(dtype).min` is blocked
    (transformers masking_utils.py:632), float32 by default. Raises `UnsupportedFormError` beyond 4 GiB.

    >>> left = Segments.from_lengths([1, 2], side="left")
    >>> dense(left, dtype=torch.int64).tolist()
    [[[[0, 0], [0, 1]]], [[[1, 0], [1, 1]]]]
    >>> dense(left, polarity="masked", rows=[1]).tolist()
    [[[[True, False]]], [[[False, False]]]]
    """
    return write_dense(segments, polarity, Pattern.of(pattern), rows=rows, dtype=dtype, device=torch.device(device))


def write_dense(
    segments: Segments,
    polarity: Polarity,
    pattern: Pattern,
    *,
    rows: slice | Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> Tensor:
    """Return what `dense` returns, for arguments that need no check, up to `max_mask_bytes`."""
    pattern.check(len(segments.sequence_lengths))
    dtype, attend, blocked = _values(polarity, dtype)
    B, S = segments.shape
    runs = [(0, 0, S)] if rows is None else _query_runs(rows, S)
    Q = sum(high - low for _, low, high in runs)
    check_bytes("dense mask", (B, 1, Q, S), dtype.itemsize, max_mask_bytes)
    if device.type != "cpu" and rows is None and pattern == CAUSAL and not segments.packed:
        return _triangle_on(segments, device, dtype, attend, blocked)
    allowed, forbidden = _carried(dtype, attend, blocked)
    out_B1QK = np.empty((B, 1, Q, S), allowed.dtype)
    for (out_QK,), regions in zip(out_B1QK, regions_of(segments)):
        for at, low, high in runs:
            fill_rows(out_QK[at : at + high - low], low, regions, pattern, allowed, forbidden)
    return torch.from_numpy(out_B1QK).view(dtype).to(device)


def _triangle_on(segments: Segments, device: torch.device, dtype: torch.dtype, attend: float, blocked: float) -> Tensor:
    """Return plain causal attention, one sequence a row, made on `device`: B * S bytes go there, not B * S * S."""
    places_S = torch.arange(segments.shape[1], device=device)
    before_SS, keep_BS = places_S[:, None] >= places_S, segments.keep.to(device, non_blocking=True)
    attends_B1SS = before_SS & keep_BS[:, None, None]
    if dtype == torch.bool:
        return attends_B1SS if attend else attends_B1SS.logical_not_()
    values = torch.full((), blocked, dtype=dtype, device=device)
    return torch.where(attends_B1SS, torch.full_like(values, attend), values)


def open_empty_rows(masked: Tensor) -> Tensor:
    """`[B, 1, S, S]`, True = blocked, in place: a query that sees no key, which is padding, then sees itself. For kernels
    that compute such a query in an undefined way (`npu_fusion_attention` with inner_precise=0)."""
    empty_BS = masked[:, 0].all(-1)
    masked[:, 0].diagonal(dim1=-2, dim2=-1).masked_fill_(empty_BS, False)
    return masked


def _values(polarity: Polarity, dtype: torch.dtype | None) -> tuple[torch.dtype, float, float]:
    if dtype is not None and dtype not in PLAIN:
        rule, remedy = "A mask's dtype is bool, a whole number, or a float of 16 bits or more.", "Convert it afterwards."
        raise CollateError(explain("dtype", str(dtype), rule, remedy))
    if polarity == "bias":
        dtype = dtype or torch.float32
        if dtype.is_floating_point:
            return dtype, 0.0, torch.finfo(dtype).min
        raise CollateError(explain("dtype", str(dtype), "A bias is added to scores.", "Pass a float dtype."))
    if polarity in ("keep", "masked"):
        return dtype or torch.bool, float(polarity == "keep"), float(polarity == "masked")
    rule = "A dense form is 'keep' (True attends), 'masked' (True is blocked) or 'bias' (additive)."
    raise CollateError(explain("polarity", repr(polarity), rule, "Pass the one that your kernel takes."))


@cache
def _carried(dtype: torch.dtype, attend: float, blocked: float) -> Array:
    """Both values as numpy holds them, which has no bfloat16: its bits travel as uint16."""
    values = torch.tensor([attend, blocked], dtype=dtype)
    return (values.view(torch.uint16) if dtype == torch.bfloat16 else values).numpy()


def _query_runs(rows: slice | Sequence[int] | Tensor, S: int) -> list[tuple[int, int, int]]:
    """`(place in the output, first row, last row + 1)` of each stretch of neighbouring rows."""
    picked = np.arange(S)[rows] if isinstance(rows, slice) else host_array("rows", rows)
    if (picked.dtype.kind not in "iu" and picked.size) or picked.ndim != 1:
        rule = "Query rows are a slice, or whole numbers [Q]."
        raise CollateError(explain("rows", shape_of(picked), rule, "Of a bool mask, pass rows.nonzero()[:, 0]."))
    if picked.size and (picked.min() < 0 or picked.max() >= S):
        raise CollateError(explain("rows", f"{picked.min()}..{picked.max()}", f"Query rows lie in 0..{S - 1}.", "Clip."))
    cuts = [0, *(np.flatnonzero(np.diff(picked.astype(np.int64)) != 1) + 1).tolist(), len(picked)]
    return [(low, int(picked[low]), int(picked[high - 1]) + 1) for low, high in pairwise(cuts) if low < high]


def check_bytes(what: str, shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    """Raise `UnsupportedFormError` where a tensor of this shape is larger than `max_mask_bytes`."""
    size = math.prod(shape) * itemsize
    if size > limit:
        rule = f"The limit max_mask_bytes is {limit / 2**30:.2f} GiB."
        remedy = "Pad right, where causal attention needs no mask, or pack (offsets); use shorter rows, or let a "
        remedy += "BatchAdapter with a higher limit build it."
        got = f"{size / 2**30:.2f} GiB ({list(shape)})"
        raise UnsupportedFormError(explain(what, got, rule, remedy, more="mask-memory"))


# --- predicates: BlockMask, and dense on a device


@checked
def mask_mod(
    segments: Segments, pattern: str | Pattern = "causal", device: torch.device | str = "cpu"
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the predicate `(b, h, q, k) -> bool` (True attends) that flex_attention and `block_mask` take.

    Same truth as `dense(polarity="keep")`, element by element.

    >>> attends = mask_mod(Segments.from_lengths([3, 5], side="left"))
    >>> attends(torch.tensor(0), None, torch.tensor(4), torch.arange(5)).tolist()
    [False, False, True, True, True]
    """
    pattern = Pattern.of(pattern)
    pattern.check(segments.num_sequences)
    device = torch.device(device)
    sees = pattern.on(device)
    start_BS, number_BS = np.zeros(segments.shape, np.int64), np.zeros(segments.shape, np.int64)
    for b, regions in enumerate(regions_of(segments)):
        for n, start, _, first, last, _ in regions:
            start_BS[b, first:last], number_BS[b, first:last] = start, n
    keep, origin, number = (torch.from_numpy(x).to(device) for x in (keep_array(segments), start_BS, number_BS))

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = keep[b, k] & (number[b, k] == number[b, q])
        attended: Tensor = same & sees(q - origin[b, q], k - origin[b, q], number[b, q])
        return attended

    return attends


@checked
def block_mask(
    segments: Segments,
    *,
    pattern: str | Pattern = "causal",
    device: torch.device | str = "cpu",
    block_size: int = 128,
    compiled: bool = False,
) -> Any:
    """Return torch's `BlockMask` for flex_attention, `[B, 1, S, S]` in blocks (torch nn/attention/flex_attention.py).

    torch evaluates the predicate on all B * S * S places while it builds the mask, which takes up to 21 bytes a place
    (measured on torch 2.13); `compiled=True` fuses that away, for some seconds of compilation at the first call. Raises
    `UnsupportedFormError` where that is beyond 4 GiB.

    >>> block_mask(Segments.from_lengths([200, 256], side="left")).shape
    (2, 1, 256, 256)
    """
    size = whole_number("block_size", block_size, least=1)
    return write_block_mask(segments, Pattern.of(pattern), torch.device(device), block_size=size, compiled=compiled)


def write_block_mask(
    segments: Segments,
    pattern: Pattern,
    device: torch.device,
    *,
    block_size: int = 128,
    compiled: bool = False,
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> Any:
    """Return what `block_mask` returns, for arguments that need no check, up to `max_mask_bytes`."""
    from torch.nn.attention.flex_attention import create_block_mask

    B, S = segments.shape
    whole = -(-S // block_size) * block_size
    if not compiled:
        check_bytes("block mask being built", (B, 1, whole, whole), EVALUATED_BYTES, max_mask_bytes)
    attends = cast(Any, mask_mod(segments, pattern, device))
    return create_block_mask(attends, B, None, S, S, device=str(device), BLOCK_SIZE=block_size, _compile=compiled)


@checked
def varlen(segments: Segments, *, keep_tail: bool = False) -> Segments:
    """The one flat row of the T real tokens, as `unpad` lays them out: its `cu_seqlens`, `cu_seqlens_host`, `max_length` and
    `position_ids` are what kernels of flat rows take, and `ids - 1` their `seq_idx`.

    `keep_tail=True` is for one flat row with padding at its end, which stays in the tensor: the tail becomes one more
    sequence, so that neither kernels nor positions see it as part of the last. Raises where there is not one such row.

    >>> offsets = varlen(Segments.from_lengths([3, 5], side="left"))
    >>> offsets.cu_seqlens.tolist(), offsets.max_length, (offsets.ids - 1).tolist()
    ([0, 3, 8], 5, [[0, 0, 0, 1, 1, 1, 1, 1]])
    >>> varlen(Segments.from_lengths([[3, 2]], width=8), keep_tail=True).cu_seqlens.tolist()
    [0, 3, 5, 8]
    """
    if not keep_tail:
        return Segments.from_lengths([segments.sequence_lengths])
    if segments.shape[0] != 1 or segments.padding_side in PADS_BEFORE:
        rule = "A tail can be kept only in one flat row whose padding stands at its end."
        raise UnsupportedFormError(explain("varlen", repr(segments), rule, "Pass keep_tail=False (tensors of unpad)."))
    return Segments.from_lengths([own_places(segments)])


def offsets_of(segments: Segments, places: Sequence[int] | None = None, *, longest: int | None = None) -> dict[str, Any]:
    """Return everything that a consumer of flat rows may read; an alignment tail is one more sequence.

    transformers' FlashAttentionKwargs and DataCollatorWithFlattening name them; `seq_lens` are the real lengths. `places`
    are what each sequence takes up in the row (`own_places`): then `cu_seqlens` are the real offsets,
    `cu_seqlens_padded` the physical ones, as `cu_seq_lens_q/k` always are, and all of them, `seq_lens` too, have one
    entry for each place. `longest` stands in for the length of the longest, which it must not be below.
    """
    held = own_places(segments) if places is None else list(places)
    flat = of_lengths([held], sum(held))
    physical, longest = torch.tensor([0, *accumulate(held)], dtype=torch.int32), max(longest or 0, flat.max_length)
    offsets: dict[str, Any] = {"position_ids": flat.position_ids, "cu_seq_lens_q": physical}
    offsets |= {"cu_seq_lens_k": physical.clone(), "max_length_q": longest, "max_length_k": longest, "seq_idx": flat.ids - 1}
    lengths = [*segments.lengths[0], *([0] * (len(held) - segments.num_sequences if places is not None else 0))]
    if places is not None:
        real = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        offsets |= {"cu_seqlens": real, "cu_seqlens_padded": physical.clone()}
    return offsets | {"seq_lens": torch.tensor(lengths, dtype=torch.int32)}


# --- places: how much of a flat row each sequence takes up


def own_places(segments: Segments) -> list[int]:
    """Return the places of each sequence of a flat row `[1, S]`. Padding behind a sequence belongs to it, as alignment does;
    a row with padding at its end alone has a tail, which is one more sequence.

    Raises `UnsupportedFormError` for several rows, padding before the first token, and padding inside a sequence.
    """
    B, S = segments.shape
    if B != 1 or segments.hole_rows or (segments.spans and segments.spans[0][1]):
        rule = "Physical offsets describe one flat row [1, S] whose padding follows a sequence or ends the row."
        remedy = "Call unpad() first, and use the offsets of the row without padding."
        raise UnsupportedFormError(explain("offsets", repr(segments), rule, remedy))
    if segments.padding_side not in PADS_BEFORE:
        tail = S - segments.num_tokens
        return [*segments.sequence_lengths, *([tail] if tail else [])]
    starts = [start for _, start, _ in segments.spans]
    return [stop - start for start, stop in zip(starts, [*starts[1:], S])]


def fitting_places(offsets: Array, segments: Segments) -> list[int] | None:
    """Return the places by physical offsets of one flat row, if each sequence begins its own, the tail behind; else None."""
    starts_N, ends_N = (np.array([span[i] for span in segments.spans], np.int64) for i in (1, 2))
    N = len(starts_N)
    if segments.shape[0] != 1 or len(offsets) <= N or offsets[-1] != segments.shape[1] or segments.hole_rows:
        return None
    fits = np.array_equal(offsets[:N], starts_N) and (ends_N <= offsets[1 : N + 1]).all()
    return np.diff(offsets).tolist() if fits else None


def check_cuts(name: str, offsets: Array, segments: Segments) -> None:
    """Raise unless each sequence of one flat row begins at an offset, and none stands inside it."""
    _, starts_N, ends_N = np.array(segments.spans, np.int64).reshape(-1, 3).T
    after_N = np.searchsorted(offsets, starts_N, side="right")
    ends = np.append(offsets, -1)  # behind the last there is no room
    bad_N = np.flatnonzero((offsets[after_N - 1] != starts_N) | (ends[after_N] < ends_N))
    bad = [(n, f"tokens {starts_N[n]} to {ends_N[n] - 1}") for n in bad_N.tolist()]
    rule = f"Each sequence begins at an offset, and no offset is inside it; the offsets are {offsets[:16].tolist()}."
    remedy = "Pass the offsets of these sequences, or leave offsets out."
    refuse_rows(f"{name} (rows are sequences)", bad, rule, remedy, more="sources-disagree")
