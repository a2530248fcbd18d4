"""Faults: a mask as it came, read as the truth reads it; where it is refused, with the places that speak against it.

A square of queries and keys costs two or three passes over its bytes. Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import Tensor

from collate_npu.errors import CollateError
from collate_npu.host import host_tensor
from collate_npu.masks.derive import read_bare_mask
from collate_npu.masks.evidence import Known, Reading
from collate_npu.masks.extents import sequences
from collate_npu.masks.patterns import CAUSAL
from collate_npu.masks.polarity import Bools, MaskValues, Polarity
from collate_npu.masks.square import Square
from collate_npu.segments import Segments
from collate_npu.tools.show.attention import Attention, compared

MEANS: dict[Polarity, str] = {"keep": "True attends", "masked": "True is blocked", "bias": "added to scores"}


def keys_of_mask(full: Tensor) -> Bools:
    """bool `[B, S]`, True = real, of a 2D mask that was refused: as it stands, or turned where it can only be masked."""
    values = _values(full)
    if values.declared == "bias":
        return values.read("bias")
    turned = _alone(full, "keep", None) is None and _alone(full, "masked", None) is not None
    return values.read("masked") if turned else np.not_equal(values.raw, 0)


def attentions_of_mask(full: Tensor, B: int, known: Segments | None) -> tuple[list[Attention], Polarity]:
    """One for each of the B rows of the batch, and the polarity it is read by: `known` says what is real."""
    values = _values(full)
    polarities: tuple[Polarity, ...] = ("bias",) if values.declared == "bias" else ("keep", "masked")
    read = {polarity: Square(values, polarity, B) for polarity in polarities}
    best = max(polarities, key=lambda polarity: _agreement(read[polarity], full, known))
    return list(_attentions(read[best], full, known)), best


def faults_of_mask(full: Tensor, B: int, others: Segments | None) -> tuple[list[Attention], Polarity]:
    """Of a mask that is refused, beside what it ought to be by the `others`, the sources of the batch that agree.

    Without them: a mask that says one thing by itself is not at fault; any other is held against causal attention on
    the tokens that attend themselves, and the polarity under which less is wrong is taken.
    """
    values = _values(full)
    if full.shape[-1] != full.shape[-2] or (others is not None and others.shape != (B, full.shape[-1])):
        return attentions_of_mask(full, B, None)
    polarities: tuple[Polarity, ...] = ("bias",) if values.declared == "bias" else ("keep", "masked")
    tried = [(polarity, *_judged(full, Square(values, polarity, B), polarity, others)) for polarity in polarities]
    polarity, judged, _ = min(tried, key=lambda trial: trial[2])
    return judged, polarity


def _judged(full: Tensor, square: Square, polarity: Polarity, others: Segments | None) -> tuple[list[Attention], int]:
    """Each row beside what it ought to be, and how many places are otherwise; padding counts for the choice alone."""
    reading = _alone(full, polarity, square.shape[0])
    if reading is not None and others is None:
        return list(_attentions(square, full, reading.segments)), 0
    truth = others if others is not None else sequences(square, square.diagonal())[0]
    pattern = CAUSAL if reading is None or reading.pattern is None else reading.pattern
    found = [compared(attention, truth, pattern) for attention in _attentions(square, full, truth)]
    everywhere = [replace(attention, counts=None).grid(max(square.shape[1], 1)).wrong for attention in found]
    return found, sum(everywhere)


def _alone(full: Tensor, polarity: Polarity, B: int | None) -> Reading | None:
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


def _agreement(square: Square, full: Tensor, known: Segments | None) -> int:
    """Over how many tokens mask and truth agree: a real one attends itself, or is attended."""
    if known is None or known.shape != square.shape:
        return 0
    square_one = full.shape[-2] == full.shape[-1]
    real_BS = square.diagonal() if square_one else np.stack([square.rows(b, 0, 1)[0] for b in range(len(known.array))])
    return int((real_BS == (known.array > 0)).sum())


def _attentions(square: Square, full: Tensor, known: Segments | None) -> Iterator[Attention]:
    B, K = square.shape
    fits = known is not None and known.shape == (B, K)
    for b in range(B):
        owner = known.array[b] if known is not None and fits else np.ones(K, np.int32)
        yield Attention(b=b, shape=(int(full.shape[-2]), K), rows=_reader(square, b), owner=owner)


def _reader(square: Square, b: int):  # type: ignore[no-untyped-def]
    return lambda low, high: square.rows(b, low, high)
