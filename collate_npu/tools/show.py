"""Show: a batch, its Segments or a mask, drawn with `■` (attends, real), `⬚` (blocked, padding) and `◧` (a part of a block).

For people: what is wider than `WIDE` places is folded by blocks, and tensors are read back to the host.
Legend: B batch, S width, Q query rows, K keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, Side, host_tensor
from collate_npu.collate.collators import PaddingCollator
from collate_npu.consumers.mask_choice import describe_shape
from collate_npu.errors import CollateError, explain, printable, shape_of
from collate_npu.keys import KEEP_KEY, MASK_KEY
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.dense_mask import derive_segments
from collate_npu.segments import Segments
from collate_npu.tools.describe import Words, is_dense, reads

WIDE, ROWS = 32, 16
"""The most cells of a line, which fits a terminal of 80 columns, and the most rows and squares that are drawn."""
WIDEST, MOST = 4096, 1 << 22
"""Of `--lengths`: the widest batch that gets a dense mask, and the most places."""


def picture(shown: Mapping[str, Any] | Segments | Tensor) -> Words:
    """Return a batch, its `Segments`, or a mask, drawn as text.

    Segments: a line for each row, with digits where a row holds several sequences. A mask: a square for each row, side by
    side. What is refused is drawn as it stands, with the reason.

        >>> print(picture(Segments.from_lengths([3, 5], side="left")))
        ⬚ ⬚ ■ ■ ■
        ■ ■ ■ ■ ■
    """
    if isinstance(shown, Segments):
        lines: Iterable[str] = _rows(shown.array)
    else:
        lines = _batch(shown) if isinstance(shown, Mapping) else _alone(host_tensor("mask", shown))
    return Words(printable("\n".join(lines)))


def _batch(batch: Mapping[str, Any]) -> Iterator[str]:
    held = batch.get(MASK_KEY)
    masks = {key: x for key, x in (held if isinstance(held, Mapping) else {MASK_KEY: held}).items() if is_dense(x)}
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        yield f"refused: {error}"
        rows = {key: x for key in (KEEP_KEY, MASK_KEY) if isinstance(x := batch.get(key), Tensor) and x.ndim == 2}
        for key, x in {**masks, **rows}.items():
            yield from (f"{key}: {shape_of(x)}", *_drawn(host_tensor(key, x)))
        return
    yield f"{KEEP_KEY if KEEP_KEY in batch else 'segments'}: {describe_shape(segments)}"
    yield from _rows(segments.array)
    for key, full in masks.items():
        yield from (f"{key}: {shape_of(full)}, {reads(full, segments)}", *_drawn(full, segments))


def _alone(x: Tensor) -> Iterator[str]:
    """A mask without its batch."""
    if not 2 <= x.ndim <= 4:
        raise CollateError(explain("mask", shape_of(x), "Masks have two to four dimensions.", "Pass one of them."))
    try:
        segments = derive_segments(x)
    except CollateError as error:
        yield from (*_drawn(x), f"refused: {error}")
        return
    yield from _rows(segments.array) if x.ndim == 2 and x.shape == segments.shape else _drawn(x, segments)


def _drawn(x: Tensor, segments: Segments | None = None) -> list[str]:
    """A mask `[B, S]` as rows, others as squares, of any head. Without Segments True is drawn as `■`."""
    x = host_tensor(MASK_KEY, x)
    blocked = segments is not None and reads(x, segments).endswith("blocked")
    additive = x.is_floating_point() and (segments is not None or bool((x < 0).any()))
    keep = x >= 0 if additive else x == 0 if blocked else x != 0
    if keep.ndim == 2:
        return _rows(keep.int().numpy())
    squares = (keep if keep.ndim == 3 else keep.any(dim=1))[:ROWS].numpy()
    block = _block(max(squares.shape[1:]))
    cells = [[" ".join(line) for line in _folded(square, block, block)] for square in squares]
    across = max(1, (2 * WIDE + 3) // (len(cells[0][0]) + 3))
    groups = (cells[at : at + across] for at in range(0, len(cells), across))
    return [*("   ".join(parts) for group in groups for parts in zip_longest(*group)), *_more(len(keep), block)]


def _rows(ids_BS: Array) -> list[str]:
    block = _block(ids_BS.shape[1])
    if block == 1 and (ids_BS > 1).any():
        cells = [["123456789"[(n - 1) % 9] if n else "⬚" for n in ids_S] for ids_S in ids_BS[:ROWS].tolist()]
    else:
        cells = _folded(ids_BS[:ROWS] > 0, 1, block)
    return [*map(" ".join, cells), *_more(len(ids_BS), block)]


def _folded(keep_QK: Array, down: int, across: int) -> list[list[str]]:
    """The sign of each block of places: all of them attend, none, or a part."""
    at_Q, at_K = (np.arange(0, n, step) for n, step in zip(keep_QK.shape, (down, across)))
    every = np.logical_and.reduceat
    none, whole = (every(every(x, at_Q, 0), at_K, 1) for x in (~keep_QK, keep_QK.astype(bool)))
    signs: list[list[str]] = np.select([none, whole], ["⬚", "■"], default="◧").tolist()
    return signs


def _block(width: int) -> int:
    return 1 << max(-(-width // WIDE) - 1, 0).bit_length()


def _more(count: int, block: int) -> list[str]:
    return [f"... {count - ROWS} more"] * (count > ROWS) + [f"{block} places a cell"] * (block > 1)


def batch_of_lengths(lengths: str, *, side: Side, packed: bool) -> dict[str, Any]:
    """Return a batch by lengths. `3,5`: two rows of 3 and of 5 tokens; `3+2,5`: two sequences in the first."""
    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
    except ValueError:
        raise CollateError(explain("--lengths", lengths, "Lengths are whole numbers.", "Write 3,5 or 3+2,5.")) from None
    widest = max(map(sum, rows))
    if min(map(min, rows)) < 0 or len(rows) * widest > MOST:
        rule = f"Lengths are 0 or more, and at most {MOST} places are drawn."
        raise CollateError(explain("--lengths", lengths[:80], rule, "Write shorter ones: a picture shows the same."))
    layout: dict[str, Any] = {} if packed or widest <= WIDEST else {"attention_mask": "2d"}
    collator = PaddingCollator(pad_token_id=0, padding_side=side, padding_free=packed, **layout)
    return collator([{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows])
