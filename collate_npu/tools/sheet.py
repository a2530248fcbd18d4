"""Sheet: what a picture says, before it is drawn: panels of rows and of squares, tokens, and the refusals in words.

Legend: B batch, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, dims, host_tensor, whole_number
from collate_npu.consumers.mask_routing import describe_shape
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.keys import KEEP_KEY, with_role
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.dense_mask import Bools, Known, MaskValues, Polarity, Square, fill_rows, regions_of
from collate_npu.masks.dense_reader import sequences
from collate_npu.masks.derive import MASK_KEY, derive_segments, read_bare_mask
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments
from collate_npu.validation import check_tokenizer


class Cell(IntEnum):
    """What a cell of a picture says of its place, or of all places of its block."""

    BLOCKED = 0
    WHOLE = 1
    PART = 2
    TOO_MUCH = 3
    TOO_LITTLE = 4
    COUNTED = 5
    IGNORED = 6
    ON_PADDING = 7


SIGNS: Mapping[Cell, tuple[str, str, str]] = {
    Cell.WHOLE: ("■", "", "attends, real"),
    Cell.BLOCKED: ("⬚", "dim", "blocked, padding"),
    Cell.PART: ("◧", "", "a part of the block"),
    Cell.TOO_MUCH: ("+", "bold red", "attends and ought not to"),
    Cell.TOO_LITTLE: ("-", "bold red", "is blocked and ought to attend"),
    Cell.COUNTED: ("o", "dim", "label counts"),
    Cell.IGNORED: ("×", "red", "label ignored"),
    Cell.ON_PADDING: ("!", "bold red", "label on padding"),
}
"""Sign, style and meaning: a sign says what a colour says."""
COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "bright_cyan")
"""Of the sequences of a row, in turn; red is for what is wrong."""


def sign_of(cell: int, owner: int = 0, numbered: bool = False) -> tuple[str, str]:
    """Return sign and style; a sequence's number stands for a whole cell where rows hold several."""
    sign, style, _ = SIGNS[Cell(cell)]
    if not owner or style:
        return sign, style
    return "123456789"[(owner - 1) % 9] if numbered and cell == Cell.WHOLE else sign, COLOURS[(owner - 1) % len(COLOURS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What each query of row `b` of a batch attends: `rows(low, high)` is bool `[high - low, K]`."""

    b: int
    shape: tuple[int, int]
    """`(Q, K)`."""
    rows: Callable[[int, int], Bools]
    owner: Array
    """int32 `[K]`: the sequence of each key, 0 for padding; all 1 where nobody knows."""
    queries: Array
    """int64 `[Q]`: the place of each query in the whole row."""
    ought: Callable[[int, int], Bools] | None = None
    """What it should be, as `rows`, where that is known and differs."""
    counts: Bools | None = None
    """bool `[Q]`: the queries for which that matters; outputs at padding are read by nobody."""

    def fold(self, block: int) -> tuple[Array, int]:
        """Return int8 `[R, C]`, a `Cell` for block * block places, and how many places ought to be otherwise."""
        Q, K = self.shape
        folded = [self._fold_rows(low, min(low + block, Q), block) for low in range(0, Q, block)]
        cells = np.array([cells for cells, _ in folded], np.int8).reshape(len(folded), -(-K // block))
        return cells, sum(wrong for _, wrong in folded)

    def _fold_rows(self, low: int, high: int, block: int) -> tuple[Array, int]:
        """Return one row of cells, and how many of its places ought to be otherwise."""
        seen_QK = self.rows(low, high)
        count_C = _sums(seen_QK, block)
        size_C = _sums(np.ones((1, self.shape[1]), bool), block) * (high - low)
        cells_C = np.where(count_C == 0, Cell.BLOCKED, np.where(count_C == size_C, Cell.WHOLE, Cell.PART))
        if self.ought is None:
            return cells_C, 0
        wrong_QK = seen_QK != self.ought(low, high)
        if self.counts is not None:
            wrong_QK &= self.counts[low:high, None]
        much_C, little_C = _sums(wrong_QK & seen_QK, block), _sums(wrong_QK & ~seen_QK, block)
        cells_C = np.where(much_C > 0, Cell.TOO_MUCH, np.where(little_C > 0, Cell.TOO_LITTLE, cells_C))
        return cells_C, int(much_C.sum() + little_C.sum())


def attention_of(
    segments: Segments, b: int, *, pattern: Pattern = CAUSAL, queries: Tensor | None = None, opened: bool = False
) -> Attention:
    """Return `dense(segments, pattern=pattern, rows=queries)[b, 0]`, of which a block is built at a time.

    `opened`: a query that sees no key sees itself, as `masks.forms.open_empty_rows` has it.
    """
    S, regions = segments.shape[1], regions_of(segments)[b]
    places = np.arange(S) if queries is None else queries.numpy()

    def rows(low: int, high: int) -> Bools:
        out_QK, picked = np.empty((high - low, S), bool), places[low:high]
        cuts = np.flatnonzero(np.diff(picked) != 1) + 1
        for part_QK, run in zip(np.split(out_QK, cuts), np.split(picked, cuts)):
            fill_rows(part_QK, int(run[0]), regions, pattern, True, False)
        if opened:
            empty_N = np.flatnonzero(~out_QK.any(axis=1))
            out_QK[empty_N, picked[empty_N]] = True
        return out_QK

    return Attention(b=b, shape=(len(places), S), rows=rows, owner=segments.array[b], queries=places)


def signs_of(cells_C: Array, owner_K: Array, block: int, *, numbered: bool = False) -> list[tuple[str, str]]:
    """Return a row of cells as signs with their styles, by the sequence of each key."""
    return [sign_of(cell, owner, numbered) for cell, owner in zip(cells_C.tolist(), one_owner(owner_K, block).tolist())]


def one_owner(ids: Array, block: int) -> Array:
    """Return int32 `[C]`: the sequence that all tokens of a block belong to, 0 where it holds none or several."""
    starts = np.arange(0, len(ids), block)
    high_C = np.maximum.reduceat(ids, starts)
    low_C = np.minimum.reduceat(np.where(ids > 0, ids, np.iinfo(np.int32).max), starts)
    return np.where(low_C == high_C, high_C, 0).astype(np.int32)


def block_for(width: int, cells: int) -> int:
    """Return the least round number of places a cell must stand for, so that a row of `width` has at most so many cells."""
    least = -(-width // max(cells, 1))
    return 1 << max(least - 1, 0).bit_length() if least <= 64 else -(-least // 64) * 64


def _sums(values_QK: Bools, block: int) -> Any:
    """int64 `[C]`: how many places of each block of columns are True."""
    return np.add.reduceat(np.count_nonzero(values_QK, axis=0), np.arange(0, values_QK.shape[1], block))


_BLOCK = 256
"""Query rows that are compared at once."""
MEANS: dict[Polarity, str] = {"keep": "True attends", "masked": "True is blocked", "bias": "added to scores"}


def squares_of_mask(full: Tensor, B: int, truth: Segments | None) -> tuple[list[Attention], Polarity]:
    """Return a square for each of the B rows, beside what it ought to be by the `truth`, and the polarity under which less
    is wrong.

    Rows with places that are wrong come first. Without a truth: a mask that says one thing by itself is not at fault; any
    other is held against causal attention on the tokens that attend themselves.
    """
    values = _values(full)
    if full.shape[-1] != full.shape[-2] or (truth is not None and truth.shape != (B, full.shape[-1])):
        polarity = values.declared or "keep"
        return _squares(Square(values, polarity, B), full, None), polarity
    polarities: tuple[Polarity, ...] = ("bias",) if values.declared == "bias" else ("keep", "masked")
    tried = [(polarity, _beside(full, Square(values, polarity, B), polarity, truth)) for polarity in polarities]
    polarity, squares = min(tried, key=lambda trial: sum(square.fold(_BLOCK)[1] for square in trial[1]))
    if truth is not None or squares[0].ought is not None:  # padding counts for the choice alone
        squares = [replace(square, counts=square.owner > 0) for square in squares]
    return sorted(squares, key=lambda square: square.fold(_BLOCK)[1] == 0), polarity


def _beside(full: Tensor, square: Square, polarity: Polarity, truth: Segments | None) -> list[Attention]:
    """Return each row beside what it ought to be."""
    reading = None
    with suppress(CollateError):
        reading = read_bare_mask(MaskValues(full, polarity), Known(), batch_size=square.shape[0])
    if reading is not None and truth is None:
        return _squares(square, full, reading.segments)
    pattern = CAUSAL if reading is None or reading.pattern is None else reading.pattern
    known = sequences(square, square.diagonal())[0] if truth is None else truth
    squares = _squares(square, full, known)
    return [replace(found, ought=attention_of(known, found.b, pattern=pattern).rows) for found in squares]


def _values(full: Tensor) -> MaskValues:
    """Return its numbers; what no mask holds (NaN, 0.5) is read as "not 0"."""
    try:
        return MaskValues(full, None)
    except CollateError:
        return MaskValues(full != 0, None)


def _squares(square: Square, full: Tensor, known: Segments | None) -> list[Attention]:
    (B, K), Q = square.shape, int(full.shape[-2])
    owner_BK = np.ones((B, K), np.int32) if known is None else known.array
    rows = [partial(square.rows, b) for b in range(B)]
    return [Attention(b=b, shape=(Q, K), rows=rows[b], owner=owner_BK[b], queries=np.arange(Q)) for b in range(B)]


LOST = "\ufffd"
"""What stands for bytes that are no text."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch as text. Only those that are drawn are decoded."""

    decode: Callable[[list[int]], str]
    input_ids: Tensor
    """`[B, S]`."""

    def text(self, b: int, places: Sequence[int]) -> str:
        """Return the tokens at these places as one text, "" where the batch has none."""
        B, S = self.input_ids.shape
        ids = [int(self.input_ids[b, s]) for s in places if b < B and s < S]
        try:
            text = self.decode(ids) if min(ids, default=0) >= 0 else LOST
        except Exception:  # of a tokenizer that has no such id
            text = LOST
        lost = len(ids) == 1 and (not text or LOST in text)
        return f"#{ids[0]}" if lost else escaped(text)  # what is no text by itself is named by its id: `#228`


def escaped(text: str) -> str:
    """Return the text on one line, with nothing that moves the cursor: a newline is `\\n`, a space at either end is `·`."""
    inner = text.strip(" ")
    before, after = (len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))) if inner else (len(text), 0)
    safe = "".join(c if c.isprintable() or c == "\u200d" else c.encode("unicode_escape").decode() for c in inner)
    return "·" * before + safe + "·" * after


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One view: rows, squares, or a refusal."""

    heading: str = ""
    facts: str = ""
    refused: str = ""
    ids: Array | None = None
    """The rows of the batch: int32 `[B, S]`, 0 is padding, n the n-th sequence of the row."""
    labels: Array | None = None
    """int8 `[B, S]`: a `Cell` of labels, 0 for none."""
    squares: tuple[Attention, ...] = ()
    derived: bool = False
    """Was it made from the truth, and did not come with the batch?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The panels, in order."""

    panels: tuple[Panel, ...]
    tokens: Tokens | None = None
    """Where there is a tokenizer."""

    @property
    def packed(self) -> bool:
        """True if some row holds several sequences."""
        return any(panel.ids is not None and panel.ids.max(initial=0) > 1 for panel in self.panels)


def sheet_of(shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, tokenizer: Any = None) -> Sheet:
    """Return what is to be drawn of a batch, its `Segments` or a mask; of one row where `row` is given."""
    if isinstance(shown, Segments):
        panels: Iterable[Panel] = (Panel(facts=describe_shape(shown), ids=shown.array), _attends(shown))
    else:
        panels = _batch(shown) if isinstance(shown, Mapping) else _alone(host_tensor("mask", shown))
    panels = list(panels)
    held = {square.b for panel in panels for square in panel.squares}
    held |= {b for panel in panels if panel.ids is not None for b in range(len(panel.ids))}
    if row is not None and whole_number("row", row) not in held:
        rule = f"The rows are 0 to {max(held)}." if held else "There is no row."
        raise CollateError(explain("row", str(row), rule, "Name one of them, or leave it out for all."))
    picked = (replace(panel, squares=tuple(x for x in panel.squares if row in (None, x.b))) for panel in panels)
    return Sheet(panels=tuple(picked), tokens=_tokens(shown, tokenizer) if isinstance(shown, Mapping) else None)


def _tokens(batch: Mapping[str, Any], tokenizer: Any) -> Tokens | None:
    if tokenizer is not None:
        check_tokenizer(tokenizer, does="decode")
    ids = next((batch[key] for key in with_role(batch, "tokens") if key != "inputs_embeds"), None)
    if tokenizer is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    return Tokens(lambda numbers: str(tokenizer.decode(numbers)), ids)


def labels_of(batch: Mapping[str, Any], segments: Segments) -> Array | None:
    """int8 `[B, S]`, as `Panel.labels`; None where the batch has no labels of tokens."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or dims(labels) != segments.shape or labels.is_floating_point():
        return None
    counted_BS, real_BS = Sources.of(batch).array("labels") >= 0, segments.array > 0
    kinds, codes = [counted_BS & ~real_BS, counted_BS, real_BS], [Cell.ON_PADDING, Cell.COUNTED, Cell.IGNORED]
    return np.select(kinds, codes, default=0).astype(np.int8)


def _batch(batch: Mapping[str, Any]) -> Iterator[Panel]:
    carried = batch.get(MASK_KEY)
    masks = _tensors(carried if isinstance(carried, Mapping) else {MASK_KEY: carried})
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        yield Panel(refused=str(error))
        yield from _refused(batch, masks)
        return
    heading = KEEP_KEY if KEEP_KEY in batch else "segments"
    yield Panel(heading=heading, facts=describe_shape(segments), ids=segments.array, labels=labels_of(batch, segments))
    squares = {key: x for key, x in masks.items() if not _is_keys(x, segments.shape)}
    yield from (_mask(key, x, segments.shape[0], segments) for key, x in squares.items())
    if not squares:
        yield _attends(segments)


def _refused(batch: Mapping[str, Any], masks: Mapping[str, Tensor]) -> Iterator[Panel]:
    """Every mask as it stands, and where it differs from what the rest of the batch says."""
    others, shape = None, (0, 0)
    with suppress(CollateError):
        shape = Sources(batch).shape()
        others = segments_from_batch({key: x for key, x in batch.items() if key != MASK_KEY})
    for key, x in {**_tensors({KEEP_KEY: batch.get(KEEP_KEY)}), **masks}.items():
        rows = shape[0] if x.shape[0] == 1 or x.ndim == 2 else x.shape[0]
        yield _keys(key, x) if _is_keys(x, shape) else _mask(key, x, max(rows, 1), others)


def _tensors(masks: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks that can be drawn."""
    out = {}
    for key, value in masks.items():
        with suppress(CollateError):
            if value is not None and 2 <= (x := host_tensor(key, value)).ndim <= 4:
                out[key] = x
    return out


def _is_keys(x: Tensor, shape: tuple[int, int]) -> bool:
    """One value a token, and no square that all rows share."""
    return x.ndim == 2 and (x.shape[0] != x.shape[1] or tuple(x.shape) == shape)


def _keys(heading: str, x: Tensor) -> Panel:
    """Return a 2D mask that was refused, as it stands: 1 = real."""
    values = _values(x)
    real = values.read("bias") if values.declared == "bias" else np.not_equal(values.raw, 0)
    return Panel(heading=heading, facts=shape_of(x), ids=real.astype(np.int32))


def _mask(heading: str, x: Tensor, B: int, truth: Segments | None) -> Panel:
    squares, polarity = squares_of_mask(x, B, truth)
    heads = f", any of its {x.shape[1]} heads" if x.ndim == 4 and x.shape[1] > 1 else ""
    return Panel(heading=heading, facts=f"{shape_of(x)}, {MEANS[polarity]}{heads}", squares=tuple(squares))


def _alone(x: Tensor) -> Iterator[Panel]:
    """A mask without its batch: as a padding mask where it is one, else as it stands, with what speaks against it."""
    if not 2 <= x.ndim <= 4:
        raise CollateError(explain("mask", shape_of(x), "Masks have two to four dimensions.", "Pass one of them."))
    whole = x.ndim == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    if whole and bool((x > x.shape[1]).any() or (x < 0).any()):
        rule = "These look like token ids or labels: a row cannot hold more sequences than tokens."
        raise CollateError(explain("mask", f"{shape_of(x)}, {x.max()} in it", rule, "Pass the whole batch: picture(batch)."))
    try:
        segments = derive_segments(x)
    except CollateError as error:
        yield _keys("", x) if x.ndim == 2 else _mask("", x, x.shape[0], None)
        yield Panel(refused=str(error))
        return
    if x.ndim > 2:
        yield _mask("", x, segments.shape[0], segments)
    yield Panel(facts=f"found: {describe_shape(segments)}", ids=segments.array, derived=x.ndim > 2)


def _attends(segments: Segments) -> Panel:
    """Return the squares that the Segments say."""
    squares = tuple(attention_of(segments, b) for b in range(segments.shape[0]))
    return Panel(heading="causal attention", facts="no 4D mask came", squares=squares, derived=True)
