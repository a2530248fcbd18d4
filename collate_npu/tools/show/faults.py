"""Faults: a mask as it came, beside what it ought to be, with the places that differ.

A square of queries and keys costs a few passes over its bytes. Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from collate_npu.arrays import host_tensor
from collate_npu.errors import CollateError
from collate_npu.masks.derive import read_bare_mask
from collate_npu.masks.patterns import CAUSAL
from collate_npu.masks.polarity import Bools, MaskValues, Polarity
from collate_npu.masks.readings import Known, Reading, sequences
from collate_npu.masks.square import Square
from collate_npu.segments import Segments
from collate_npu.tools.show.attention import Attention, attention_of

_BLOCK = 256
"""Query rows that are compared at once."""
MEANS: dict[Polarity, str] = {"keep": "True attends", "masked": "True is blocked", "bias": "added to scores"}


def keys_of_mask(full: Tensor) -> Bools:
    """bool `[B, S]`, True = real, of a 2D mask that was refused: as it stands."""
    values = _values(full)
    return values.read("bias") if values.declared == "bias" else np.not_equal(values.raw, 0)


def squares_of_mask(full: Tensor, B: int, truth: Segments | None) -> tuple[list[Attention], Polarity]:
    """One for each of the B rows, beside what it ought to be by the `truth`, and the polarity under which less is wrong.

    Rows with places that are wrong come first. Without a truth: a mask that says one thing by itself is not at fault; any
    other is held against causal attention on the tokens that attend themselves.
    """
    values = _values(full)
    if full.shape[-1] != full.shape[-2] or (truth is not None and truth.shape != (B, full.shape[-1])):
        polarity = values.declared or "keep"
        return _squares(Square(values, polarity, B), full, None), polarity
    polarities: tuple[Polarity, ...] = ("bias",) if values.declared == "bias" else ("keep", "masked")
    tried = [(polarity, *_judged(full, Square(values, polarity, B), polarity, truth)) for polarity in polarities]
    polarity, judged, _ = min(tried, key=lambda trial: trial[2])
    return sorted(judged, key=lambda square: square.grid(_BLOCK).wrong == 0), polarity


def _judged(full: Tensor, square: Square, polarity: Polarity, truth: Segments | None) -> tuple[list[Attention], int]:
    """Each row beside what it ought to be, and how many places are otherwise; padding counts for the choice alone."""
    reading = _alone(full, polarity, square.shape[0])
    if reading is not None and truth is None:
        return _squares(square, full, reading.segments), 0
    pattern = CAUSAL if reading is None or reading.pattern is None else reading.pattern
    known = sequences(square, square.diagonal())[0] if truth is None else truth
    squares = _squares(square, full, known)
    beside = [replace(found, ought=attention_of(known, found.b, pattern=pattern).rows) for found in squares]
    judged = [replace(found, counts=known.array[found.b] > 0) for found in beside]
    return judged, sum(found.grid(_BLOCK).wrong for found in beside)


def _alone(full: Tensor, polarity: Polarity, B: int) -> Reading | None:
    try:
        return read_bare_mask(host_tensor("attention_mask", full), Known(), polarity=polarity, batch_size=B)
    except CollateError:
        return None


def _values(full: Tensor) -> MaskValues:
    """Its numbers; what no mask holds (NaN, 0.5) is read as "not 0"."""
    held = host_tensor("attention_mask", full)
    try:
        return MaskValues(held, None)
    except CollateError:
        return MaskValues(held != 0, None)


def _squares(square: Square, full: Tensor, known: Segments | None) -> list[Attention]:
    (B, K), Q = square.shape, int(full.shape[-2])
    owner_BK = np.ones((B, K), np.int32) if known is None else known.array
    rows = [partial(square.rows, b) for b in range(B)]
    return [Attention(b=b, shape=(Q, K), rows=rows[b], owner=owner_BK[b], queries=np.arange(Q)) for b in range(B)]
