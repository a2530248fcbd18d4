"""Mask values: what the numbers of a mask mean under one polarity; the `Segments` of a key mask `[B, S]`; and the query rows
of a square mask, which are read block by block and compared with those of a pattern.

A polarity says what a value means: keep (True attends), masked (True is blocked) or bias (additive). A value that has no
meaning under any polarity is refused: one pass over the values, in blocks that stay in cache, none for bool.
Legend: B batch, S width, H heads, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.arrays import Array, once
from collate_npu.errors import (
    AmbiguousMaskError,
    CollateError,
    PolarityError,
    UnsupportedFormError,
    explain,
    refuse_rows,
    shape_of,
)
from collate_npu.masks.patterns import CAUSAL, Pattern, Region, fill_rows, regions_of
from collate_npu.segments import Segments, of_keep
from collate_npu.validation import REMEDIES

Polarity = Literal["keep", "masked", "bias"]
Bools = npt.NDArray[np.bool_]
REMEDY_DECLARE_POLARITY = REMEDIES["polarity"]
REMEDY_CARRY_2D = "Let the collator emit attention_mask_2d too (and segment_ids, if rows are packed)."

BLOCKED_BELOW = -9984.0
"""A bias at or below this blocks: Megatron-core fills -1e4 (transformer/utils.py:54), which is -9984 in bfloat16."""
DECLARED_BELOW = -5000.0
"""A declared bias may add a position bias to that fill: half of the fill is the border."""
FILLED_BELOW = -6e4
"""No bias of a position reaches so far (ALiBi's slopes are below 1): finite values beyond it are a fill."""


class MaskValues:
    """A mask of any dtype as numbers; `read` gives it as True = attends under one polarity.

    `declared` is the polarity the caller named, or "bias" where the numbers themselves say so. Raises for NaN, infinities
    upwards, additive ints, values that neither block nor attend for certain, and a polarity the numbers contradict.
    bool has nothing to refuse and is not read; other dtypes are read once, in blocks that stay in cache.
    """

    def __init__(self, full: Tensor, declared: Polarity | None, key: str = "attention_mask") -> None:
        self.full, self.key = full, key
        self.raw: Array = (full.view(torch.uint16) if full.dtype == torch.bfloat16 else full).numpy()
        """The values as they lie in memory; numpy has no bfloat16, whose bits are uint16."""
        self._float = full.is_floating_point()
        below = DECLARED_BELOW if declared == "bias" else BLOCKED_BELOW
        self.additive = self._float and bool(self.range[0] <= below)
        self.packing_ids = not self._float and full.dtype != torch.bool and bool(self.range[1] > 1)
        """Whole numbers above 1: `1 1 2 2 0`."""
        self._refuse_values(declared)
        self.declared: Polarity | None = "bias" if self.additive else declared

    @property
    def got(self) -> str:
        """dtype and shape of the mask, as a message prints them."""
        return shape_of(self.full)

    def read(self, raw: Array, polarity: Polarity) -> Bools:
        """Return True = attends, for `raw` or a part of it; of a bool keep mask it is the mask itself."""
        if polarity == "keep" and raw.dtype == bool:
            return raw
        numbers = self._numbers(raw)
        attends: Bools = numbers > self._threshold if polarity == "bias" else np.equal(numbers, polarity == "keep")
        return attends

    @property
    def valued(self) -> bool:
        """Return True if it adds a value at places that attend (ALiBi, a position bias)."""
        return self.declared == "bias" and any(bool((x[x > self._threshold] != 0).any()) for x in self._blocks())

    @once
    def range(self) -> tuple[Any, Any]:
        """Return the least value, NaN where there is one, and the largest; both 0 for a mask of nothing."""
        lows, highs = zip(*([(x.min(), x.max()) for x in self._blocks()] or [(0, 0)]))
        return np.min(lows), np.max(highs)

    @once
    def _threshold(self) -> float:
        """Return half-way to the fill value, so that a bias added to fill or to 0 changes nothing."""
        if not self.additive:
            return -np.inf
        if np.isfinite(self.range[0]):
            return float(self.range[0]) / 2
        finite = min(float(x.min(initial=0, where=np.isfinite(x))) for x in self._blocks())
        return finite / 2 if finite <= FILLED_BELOW else float(np.finfo(np.float32).min)

    def heads_differ(self) -> bool:
        """Return True if a head of `[B, H, Q, K]` attends other keys than the first."""
        if self.raw.strides[1] == 0:  # one head, repeated
            return False
        read = partial(self.read, polarity=self.declared or "keep")
        return any(bool((read(head_QK) != read(heads[0])).any()) for heads in self.raw for head_QK in heads[1:])

    def _numbers(self, raw: Array) -> Array:
        """Return half precision as float32."""
        if self.full.dtype == torch.bfloat16:
            return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
        return raw.astype(np.float32) if self.full.dtype == torch.float16 else raw

    def _blocks(self) -> Iterator[Array]:
        """Yield the values in flat parts of at most `BLOCK`, or an eighth; what is repeated (stride 0) comes once."""
        whole = self.raw[tuple(slice(1) if step == 0 else slice(None) for step in self.raw.strides)]
        most = min(BLOCK, max(whole.size // 8, 1 << 12))
        parts: Any = np.nditer(whole, ["external_loop", "buffered"], buffersize=most, order="K") if whole.size else ()
        yield from map(self._numbers, parts)

    def _refuse_values(self, declared: Polarity | None) -> None:
        low, high = (0, 1) if self.full.dtype == torch.bool else self.range
        binary = self._float and not self.additive and all(((x == 0) | (x == 1)).all() for x in self._blocks())
        if self._float and np.isnan(low) and self.full.ndim:
            rows = [(b, "NaN") for b, row in enumerate(self.full) if torch.isnan(row).any()]
            rule = "An additive mask holds finite numbers or -inf."
            refuse_rows(self.key, rows, rule, "Look for inf - inf or 0 * inf where it was built.")
        fill = "Fill blocked places with torch.finfo(dtype).min."
        kind: type[CollateError] = CollateError
        if not self._float and low < 0:
            rule = "An additive mask is a float tensor; ints are 1 and 0."
            remedy = "~ of a mask of integers gives -1 and -2: build it by mask == 0. Or convert it with .to(torch.float32)."
        elif self.packing_ids and self.full.ndim != 2:
            rule = "A mask of queries and keys holds 1 and 0; numbers above 1 are packing ids, which are [B, S]."
            remedy = "Convert it to bool, or pass the ids as [B, S]."
        elif self._float and high == np.inf:
            rule, remedy = "An additive mask holds finite numbers or -inf; +inf makes NaN of its row.", fill
        elif self.additive and declared in ("keep", "masked"):
            kind, rule, remedy = PolarityError, f"It is additive, not '{declared}'.", "Pass polarity='bias'."
        elif self._float and not self.additive and not binary:
            rule = f"No value is low enough to block: a bias blocks at {BLOCKED_BELOW:g} or below, other masks hold 0 and 1."
            kind, remedy = AmbiguousMaskError, fill
        elif declared == "bias" and not self._float:
            kind, rule, remedy = PolarityError, "A bias is a float tensor.", "Pass 'keep' or 'masked'."
        elif declared == "bias" and high > 0 and binary:
            rule = "As polarity='bias' it blocks nothing and adds 1 to scores: it looks like a 0/1 mask."
            kind, remedy = PolarityError, "Pass polarity='keep' or 'masked'."
        else:
            return
        raise kind(explain(self.key, "{} with values from {} to {}".format(self.got, *self.range), rule, remedy))


BLOCK = 1 << 19
"""Elements that are read at once: a few arrays of so many bytes stay in a core's cache."""


class Known(NamedTuple):
    """What is known beside a mask: the Segments of its batch, or its padding alone (`parted=False`: one sequence a row)."""

    segments: Segments | None = None
    parted: bool = True
    pattern: Pattern | None = None
    """Declared; None looks for one."""
    unmasked_rows: bool = False
    """The producer fills fully blocked rows with True."""
    prove: bool = True


def read_keys(values: MaskValues, *, alone: bool = False) -> Segments:
    """Return the `Segments` of a mask `[B, S]`: keep, the declared polarity, or packing ids `1 1 2 2 0`. Raises
    `PolarityError` for zeros and, of a mask that stands `alone`, where a row has no token: it may be inverted."""
    if values.full.ndim != 2:
        raise no_mask_error(values)
    if values.packing_ids:
        if values.declared not in (None, "keep"):
            rule = "Numbers above 1 are packing ids, 0 = padding."
            raise PolarityError(explain(values.key, values.got, rule, "Pass polarity=None."))
        segments = Segments.from_ids(values.raw)
    elif values.declared is None and not values.range[1] and values.full.numel():
        rule = "Read as keep, every token is padding; read as masked or additive, none is."
        raise PolarityError(explain(values.key, f"{values.got} of zeros", rule, REMEDY_DECLARE_POLARITY, more="polarity"))
    else:
        segments = of_keep(values.read(values.raw, values.declared or "keep"))
    rows = [(b, "no real token") for b in segments.empty_rows] if alone and values.declared is None else []
    rule = "A [B, S] mask is read as keep, 1 = real token; here it may be inverted."
    remedy = "Pass polarity='keep' if those rows are only padding, polarity='masked' if 1 means padding."
    refuse_rows(values.key, rows, rule, remedy, more="inverted-mask", kind=PolarityError)
    return segments


def read_keys_beside(values: MaskValues, keep_BS: Bools) -> Segments:
    """Return the `Segments` of a key mask: of its two polarities, the one that agrees with the keep mask."""
    if values.packing_ids:
        return Segments.from_ids(values.raw)
    polarities: tuple[Polarity, ...] = (values.declared,) if values.declared else ("keep", "masked")
    readings = [values.read(values.raw, polarity).reshape(keep_BS.shape) for polarity in polarities]
    return of_keep(next((x for x in readings if np.array_equal(x, keep_BS)), readings[0]))


def check_same_padding(segments: Segments, name: str, other: Segments) -> None:
    """Raise unless another source of the same rows (a 2D mask, lengths) names the same padding; lists the rows."""
    wrong = np.flatnonzero(((other.array != 0) != (segments.array != 0)).any(axis=1))
    rows = [(b, f"{other.row_lengths[b]} real tokens, not {segments.row_lengths[b]}") for b in wrong.tolist()]
    rule = "It disagrees with the other mask of the same batch about which tokens are real."
    remedy = "Remove the wrong one, or rebuild both from the lengths; both mark alignment padding as padding."
    refuse_rows(name, rows, rule, remedy, more="sources-disagree")


def no_mask_error(values: MaskValues) -> CollateError:
    """Return the error for a shape that no mask has."""
    if values.full.ndim in (3, 4):
        Q, K = values.full.shape[-2:]
        rule = f"{Q} query rows and {K} keys: a context-parallel shard, or a KV cache."
        remedy = "Derive from the whole mask, before the split; self-attention has as many rows as keys."
        return AmbiguousMaskError(explain(values.key, values.got, rule, remedy))
    rule = "Masks are [B,S], [B,1,1,S], [B,S,S], [S,S], [1,1,S,S], [B,1,S,S] or [B,H,S,S]."
    return UnsupportedFormError(explain(values.key, values.got, rule, "Reshape it, or pass attention_mask_2d."))


def heads_differ_error(values: MaskValues) -> AmbiguousMaskError:
    """Return the error for heads that attend different keys."""
    remedy = "Let the model build it, and pass attention_mask_2d (1 = real token) in its place."
    return AmbiguousMaskError(explain(values.key, f"{values.got}, different from head to head", "Heads share one.", remedy))


def refuse_compressed(values: MaskValues) -> None:
    """Raise for torch_npu's compressed masks: [2048, 2048] (sparse_mode 2-4), [3072, 2048] (6); op-plugin doc:554-606."""
    if tuple(values.full.shape) not in ((2048, 2048), (3072, 2048), (1, 1, 2048, 2048)):
        return
    below_QK = (values.full.reshape(-1, 2048)[:2048] != 0).numpy() == np.tri(2048, dtype=bool)
    if below_QK.all() or not below_QK.any():
        rule = "It is torch_npu's compressed causal triangle, which holds no padding, or 2048 tokens without padding."
        raise AmbiguousMaskError(explain(values.key, values.got, rule, REMEDY_CARRY_2D))


ALL = slice(None)


class Square:
    """`[B, S, S]`, True = attends, of values `[S, S]`, `[B, S, S]` or `[B, H, S, S]` under one polarity: of all heads, which
    are alike, the first. One row serves any `batch_size`."""

    def __init__(self, values: MaskValues, polarity: Polarity, batch_size: int) -> None:
        raw = values.raw[:, 0] if values.raw.ndim == 4 else values.raw
        self._raw_BQK = np.broadcast_to(raw, (batch_size, *raw.shape[-2:]))
        self._read = partial(values.read, polarity=polarity)
        self.shape = batch_size, raw.shape[-1]
        self._scratch: dict[int, bytearray] = {}

    @once
    def blocks(self) -> list[tuple[int, int]]:
        """Return `(first query, last query + 1)`, for every row: at most a fourth of the mask is read at once, or 4 KiB."""
        B, S = self.shape
        rows = max(min(BLOCK, max(B * S * S // 4, 1 << 12)) // max(S, 1), 1)
        step = rows if rows < 8 else rows // 8 * 8
        return [(low, min(low + step, S)) for low in range(0, S, step)]

    def diagonal(self, before: int = 0) -> Bools:
        """Return bool `[B, S - before]`: True where a token attends itself, or the token so many places before it."""
        return self._read(self._raw_BQK.diagonal(-before, axis1=1, axis2=2))

    def at(self, *index: Array | int | slice) -> Bools:
        """Return places, rows or columns: what numpy gives for this index `b, q, k`."""
        return self._read(self._raw_BQK[index])

    def differing(self, b: int, low: int, high: int, regions: Sequence[Region], pattern: Pattern) -> Bools:
        """Return bool `[high - low]`: the query rows that attend other keys than the pattern gives."""
        if high - low not in self._scratch:  # the last block of a mask is smaller
            self._scratch[high - low] = bytearray((high - low) * self.shape[1])
        given = self._scratch[high - low]
        given_QK, found_QK = np.frombuffer(given, bool).reshape(high - low, -1), self.at(b, slice(low, high))
        fill_rows(given_QK, low, regions, pattern, True, False)
        if given == np.ascontiguousarray(found_QK):  # twice as fast as numpy's
            return np.zeros(high - low, bool)
        return np.asarray((found_QK != given_QK).any(axis=1))


def polarities_of(values: MaskValues, segments: Segments | None) -> tuple[Polarity, ...]:
    """Return the polarities to try. A real token attends itself under every pattern: one that is known decides."""
    if values.declared:
        return (values.declared,)
    if segments is None or not segments.spans:
        return "keep", "masked"
    b, q, _ = segments.spans[0]
    return ("keep",) if Square(values, "keep", segments.shape[0]).at(b, q, q) else ("masked",)


def is_causal(values: MaskValues, segments: Segments) -> bool:
    """Return True if plain causal attention on these sequences gives every real row: then no other sequences do."""
    squares = (Square(values, polarity, segments.shape[0]) for polarity in polarities_of(values, segments))
    return any(next(wrong_rows(square, segments, CAUSAL), None) is None for square in squares)


def wrong_rows(square: Square, segments: Segments, pattern: Pattern, proved_BQ: Bools | None = None) -> Iterator[int]:
    """Yield rows in which a real query attends other keys than this pattern; plain causal attention gives `proved_BQ`."""
    counts_BQ = segments.array != 0
    if proved_BQ is not None and pattern == CAUSAL:
        counts_BQ &= ~proved_BQ
    for b, regions in enumerate(regions_of(segments) if counts_BQ.any() else ()):
        for low, high in square.blocks:
            counts_Q = counts_BQ[b, low:high]
            if counts_Q.any() and (square.differing(b, low, high, regions, pattern) & counts_Q).any():
                yield b
                break
