"""Show: a batch, its Segments or a mask, drawn with `■` (attends, real) and `⬚` (blocked, padding); also as each consumer
reads it, and as each context-parallel rank holds it.

For people: what is wide is folded by blocks, which costs O(Q * K) time for each square, and tensors are read back to the
host. No dense mask is built. Legend: B batch, S width, Q query rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from torch import Tensor

from collate_npu.arrays import Side
from collate_npu.collate.collators import Layout, PaddingCollator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import SPELLED, Case, Route
from collate_npu.errors import CollateError, explain, printable
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel, cu_seqlens_of, query_rows, token_runs
from collate_npu.proof.delivery import Delivery
from collate_npu.segments import Segments
from collate_npu.tools.describe import Description
from collate_npu.tools.files import check_place, encoded, read_rows
from collate_npu.tools.sheet import (
    SIGNS,
    Attention,
    Cell,
    Panel,
    Sheet,
    attention_of,
    block_for,
    sheet_of,
    sign_of,
    signs_of,
)
from collate_npu.tools.terminal import html_fragment, html_page, join_names, put, recorder, terms, verdict_line

NAMED = "italic dim"
"""The style of tokens and their places."""
NOTEBOOK = 88
"""Columns of a page in a notebook, which fit beside its prompt: behind an edge nobody looks for tokens."""


class Picture(Description):
    """Text to print; in a notebook a drawing in colours. `html` is a page with it, and `save` writes that page."""

    __slots__ = ()

    @property
    def html(self) -> str:
        """One self-contained page."""
        return html_of(self.sheet)

    def save(self, path: str | Path) -> None:
        """Write that page."""
        check_place(Path(path), ".html")
        Path(path).write_text(self.html, encoding="utf-8")


def fragment(shown: Segments | Delivery | Description) -> str:
    """Return what a notebook shows of an object: HTML of its words, and of the first rows of a batch."""
    console = recorder(NOTEBOOK)
    if isinstance(shown, Delivery):
        code = 0 if shown.layers or shown.leak_free else 2
        layers = sorted(shown.layers, key=shown.layers.__getitem__)
        by_form = ((join_names(names, 1), form) for form, names in groupby(layers, shown.layers.__getitem__))
        put(console, verdict_line(code, shown.verdict), terms(by_form), terms(("", fact) for fact in shown.facts()))
    elif isinstance(shown, Segments):
        print_sheet(console, Sheet(panels=(Panel(facts=repr(shown), ids=shown.array),)))
    else:
        loud = ("hazard: ", "padding: not known")
        words = () if isinstance(shown, Picture) else [*shown.splitlines(), ""]
        put(console, *(Text(line, "bold red" if line.startswith(loud) else "") for line in words))
        print_sheet(console, shown.sheet)
    return html_fragment(console)


def picture(shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, tokenizer: Any = None) -> Picture:
    """Return a batch, its `Segments`, or a mask, drawn.

    Segments: one line a row of the batch, digits where a row holds several sequences. A 4D mask: one square for each row
    (or for `row`), side by side, True drawn as it attends where its polarity can be proved and as True where not. A mask
    that is refused is drawn too, with the reason: `+` attends where it ought not to, `-` is blocked where it ought to
    attend. What is wider than 64 places is folded: a cell stands for a block of places, `◧` where only some of them
    attend. With a `tokenizer` the page in a notebook names the tokens.

        >>> print(picture(Segments.from_lengths([3, 5], side="left")))
        ⬚ ⬚ ■ ■ ■
        ■ ■ ■ ■ ■
    """
    sheet = sheet_of(shown, row=row, tokenizer=tokenizer)
    drawn = Picture(text_of(lines(sheet, 0)))
    drawn.sheet = sheet
    return drawn


Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""
UNFOLDED, FOLDED, BARE, MOST = 40, 16, 64, 16
"""Cells of the side of a square that is not folded, and of one that is; of any line without captions; rows and squares of a
panel, with captions."""
GAP = 3
"""Columns between squares that stand side by side."""
MOST_DRAWN = 1 << 32
"""Places of all squares that are drawn, which takes some seconds."""


def lines(sheet: Sheet, width: int) -> list[Line]:
    """Return a sheet drawn for `width` columns, with captions, tokens and the meaning of its signs.

    A width of 0: the cells alone, without captions and without what is derived.
    """
    panels = [panel for panel in sheet.panels if width or not panel.derived]
    out = [line for panel in panels for line in (*_panel(panel, sheet, width), [])]
    used = {text for line in out for text, _ in line}
    legend = [f"{sign} {meaning}" for sign, _, meaning in SIGNS.values() if sign in used]
    legend += ["1 2 .. the first, the second sequence of its row"] if sheet.packed else []
    return [*out, *_words("   ".join(legend), "dim", width)] if width else out[:-1]


def _words(text: str, style: str, width: int) -> list[Line]:
    """A sentence in lines of this width; in one where it is 0."""
    return [[(part, style)] for each in text.splitlines() for part in (wrap(each, width) if width else [each])]


def text_of(drawn: Iterable[Line]) -> str:
    """The lines without their styles."""
    return printable("\n".join("".join(text for text, _ in line).rstrip() for line in drawn))


def _panel(panel: Panel, sheet: Sheet, width: int) -> Iterator[Line]:
    heading = ": ".join(filter(None, (panel.heading, panel.facts if width else "")))
    block = 1
    yield from _words(heading, "bold", width)
    yield from _words(f"refused: {panel.refused}" if panel.refused else "", "bold red", width)
    if panel.ids is not None:
        block = block_for(panel.ids.shape[1], (width - 8) // 2 if width else BARE)
        yield from _rows(panel, sheet, width, block)
    elif panel.squares:
        longest, most = max(panel.squares[0].shape), min((width - 8) // 2, UNFOLDED) if width else BARE
        block = block_for(longest, most if longest <= most or not width else min(most, FOLDED))
        yield from _squares(panel.squares, sheet, width, block)
    if block > 1:
        yield from _words(f"◧ {SIGNS[Cell.PART][2]}; {block} places a cell, each way", "dim", width)


def _rows(panel: Panel, sheet: Sheet, width: int, block: int) -> Iterator[Line]:
    """Yield each row's cells, its number and the beginning of its text; its labels below."""
    assert panel.ids is not None
    shown = panel.ids[:MOST] if width else panel.ids
    starts = np.arange(0, panel.ids.shape[1], block)
    for b, ids_S in enumerate(shown):
        real_C = np.add.reduceat(ids_S > 0, starts)
        size_C = np.diff([*starts, len(ids_S)])
        cells_C = np.where(real_C == 0, Cell.BLOCKED, np.where(real_C == size_C, Cell.WHOLE, Cell.PART))
        cells = _cells(signs_of(cells_C, ids_S, block, numbered=sheet.packed))
        if not width:
            yield cells
            continue
        left = max((width - len(cells) - 8) // 2, 0)  # a letter may take two columns
        text = sheet.tokens.text(b, np.flatnonzero(ids_S)[:left].tolist())[:left] if sheet.tokens and left else ""
        yield [(f"{b:>3} ", "dim"), *cells, (f"  {text}", NAMED)]
        if panel.labels is not None:  # the worst of each block: on padding, ignored, counted
            worst = np.maximum.reduceat(panel.labels[b], starts)
            yield [("    ", ""), *_cells([sign_of(code) if code else (" ", "") for code in worst])]
    yield from _more(len(panel.ids) - len(shown), "more rows")


def _squares(squares: Sequence[Attention], sheet: Sheet, width: int, block: int) -> Iterator[Line]:
    """Yield as many squares side by side as fit; with tokens one below another."""
    Q, K = squares[0].shape
    few = min(len(squares), MOST if width else len(squares), MOST_DRAWN // max(Q * K, 1))
    drawn = [_square(square, sheet, block, captions=bool(width)) for square in squares[:few]]
    columns = max((_columns(line) for square in drawn for line in square), default=0)
    across = max(1, (width + GAP) // (columns + GAP)) if width else max(len(drawn), 1)
    across = 1 if width and sheet.tokens else across
    for at in range(0, len(drawn), across):
        for parts in zip(*drawn[at : at + across]):
            yield [piece for line in parts for piece in (*line, (" " * (columns - _columns(line) + GAP), ""))]
    yield from _more(len(squares) - len(drawn), "not drawn")


def _square(square: Attention, sheet: Sheet, block: int, *, captions: bool) -> list[Line]:
    """Return a line for each row of cells, with the place of its first query before it and its token behind it."""
    cells_RC, number = square.fold(block)
    wrong = f", {number} wrong" if number else ""
    out: list[Line] = [[(f"row {square.b}{wrong}", "bold red" if wrong else "bold")]] if captions else []
    for place, cells_C in zip(square.queries[::block].tolist(), cells_RC):
        cells = _cells(signs_of(cells_C, square.owner, block))
        token = f" {sheet.tokens.text(square.b, [place])[:8]}" if captions and sheet.tokens else ""
        out.append([(f"{place:>4} ", NAMED), *cells, (token, NAMED)] if captions else cells)
    return out


def _cells(signs: Iterable[tuple[str, str]]) -> Line:
    """Cells with a space between them."""
    return [piece for sign in signs for piece in (sign, (" ", ""))][:-1]


def _columns(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _more(number: int, what: str) -> Iterator[Line]:
    if number > 0:
        yield [(f"... {number} {what}", "dim")]


def print_sheet(console: Console, sheet: Sheet) -> None:
    """Print a sheet, drawn for the width of this terminal."""
    put(console, *(Text.assemble(*line) for line in lines(sheet, console.width)))


def html_of(sheet: Sheet) -> str:
    """Return one page that loads nothing."""
    console = recorder()
    print_sheet(console, sheet)
    return html_page("collate-npu show", html_fragment(console))


def consumer_panels(
    batch: Mapping[str, Any], consumer: str, *, context_parallel: ContextParallel | None = None, **model: Any
) -> Iterator[Panel]:
    """What one consumer is given, or the words in which it is refused. Raises for a name that is no consumer's.

    `model` says whose layers decide, in the words of `BatchAdapter`.
    """
    adapter = BatchAdapter(consumer=consumer, **model)  # type: ignore[arg-type]
    try:
        segments = segments_from_batch(batch, padding_free=adapter.padding_free)
        route = BatchAdapter(consumer=adapter.consumer, context_parallel=context_parallel, **model).route(segments)
    except CollateError as error:
        yield Panel(heading=consumer, refused=str(error), derived=True)
        return
    kept = "attention_mask_2d stays" if route.keeps_mask_2d else "attention_mask_2d is removed"
    facts = f"{adapter.consumer.key} {SPELLED[route.form]}; {kept} ({route.why})"
    for kind, squares in _by_kind(adapter, segments, route):
        yield Panel(heading=f"{consumer} {kind}".strip(), facts=facts, squares=squares, derived=True)


def _by_kind(adapter: BatchAdapter, segments: Segments, route: Route) -> Iterator[tuple[str, tuple[Attention, ...]]]:
    """What attends whom in each kind of attention layer; layers that read the 2D mask alone have no square."""
    patterns: Mapping[str, Pattern | None] = {"": adapter.pattern}
    if route.form == "mapping":
        flat = adapter.padding_free
        case = Case(segments=segments, model=adapter.model, pattern=adapter.pattern, padding_free=flat)
        patterns = adapter.consumer.patterns(case)
    seen = segments
    if route.form == "none" and not adapter.padding_free:  # padding is attended
        seen = Segments(np.ones(segments.shape, np.int32))
    opened = adapter.consumer.opens_empty_rows and route.form == "masked"
    for kind, pattern in patterns.items():
        if pattern is not None:
            yield kind, tuple(attention_of(seen, b, pattern=pattern, opened=opened) for b in range(segments.shape[0]))


def rank_panels(batch: Mapping[str, Any], cp: ContextParallel) -> Iterator[Panel]:
    """Return for each rank its places and its queries against all keys; or why they cannot share a row."""
    try:
        segments = segments_from_batch(batch)
        offsets = cu_seqlens_of(batch, segments) if cp.documents else None
        yield from [_rank(segments, cp.with_rank(rank), offsets) for rank in range(cp.size)]
    except CollateError as error:
        yield Panel(heading=f"{cp.size} ranks", refused=str(error), derived=True)


def _rank(segments: Segments, cp: ContextParallel, offsets: Any) -> Panel:
    B, S = segments.shape
    runs = [f"{start}-{stop - 1}" for start, stop in token_runs(S, cp, offsets)]
    facts = f"{cp.layout}, holds places {', '.join(runs[:6])}{', ...' if len(runs) > 6 else ''}"
    queries = query_rows(S, cp, offsets)
    squares = tuple(attention_of(segments, b, queries=queries) for b in range(B))
    return Panel(heading=f"rank {cp.rank} of {cp.size}", facts=facts, squares=squares, derived=True)


def views_of(batch: Mapping[str, Any], consumers: Iterable[str], *, row: int | None, tokenizer: Any, **model: Any) -> Sheet:
    """Return the sheet of a batch; what each consumer and each rank gets stands in the place of what is derived."""
    panels = [panel for name in consumers for panel in consumer_panels(batch, name, **model)]
    panels += [] if model["context_parallel"] is None else rank_panels(batch, model["context_parallel"])
    sheet = sheet_of(batch, row=row, tokenizer=tokenizer)
    own = sheet.panels if not panels else tuple(panel for panel in sheet.panels if not (panel.derived and panel.squares))
    return replace(sheet, panels=(*own, *panels))


# --- inputs

MOST_SQUARE = 1 << 28
"""Places of a dense mask beyond which none is built to be looked at: the 2D mask says the same."""
MOST_TOKENS = 1 << 22
"""Places of `--lengths`."""


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise `CollateError` unless one thing is named."""
    named = [name for name, value in inputs.items() if value is not None]
    if len(named) != 1:
        rule = "One thing is shown: --lengths, --batch, --data or --mask."
        raise CollateError(explain("input", " and ".join(named) or "none", rule, "Name one of them."))


def features_of_lengths(lengths: str) -> list[dict[str, Any]]:
    """Return features by lengths. `3,5`: two rows of 3 and of 5 tokens; `3+2,5`: two sequences in the first."""
    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
    except ValueError:
        raise CollateError(explain("--lengths", lengths, "Lengths are whole numbers.", "Write 3,5 or 3+2,5.")) from None
    if len(rows) * max(map(sum, rows)) > MOST_TOKENS or min(map(min, rows)) < 0:
        rule = f"Lengths are 0 or more, and at most {MOST_TOKENS} places are drawn."
        raise CollateError(explain("--lengths", lengths[:80], rule, "Write shorter ones: a picture shows the same."))
    return [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]


def features_of_data(path: Path, tokenizer: Any, rows: int, max_length: int) -> list[dict[str, Any]]:
    """Return the first rows as a trainer of a language model has them: where a row has no labels, every token is one."""
    features = [encoded(row, tokenizer, max_length) for row in read_rows(path)[:rows]]
    if not any(feature["input_ids"] for feature in features):
        raise CollateError(explain("--data", "no line with tokens", "A batch has rows.", "Name a file with text."))
    return [{"labels": list(feature["input_ids"]), **feature} for feature in features if feature["input_ids"]]


def collate_rows(
    features: list[dict[str, Any]], *, side: Side, packed: bool, ranks: ContextParallel | None, tokenizer: Any
) -> dict[str, Any]:
    """Collate into rows that the ranks can share out, flat ones sequence by sequence."""
    widest = max(len(feature["input_ids"]) for feature in features)
    collate = PaddingCollator(
        pad_token_id=0 if tokenizer is None else tokenizer.pad_token_id,
        padding_side=side,
        padding_free=packed,
        pad_to_multiple_of=None if ranks is None else ranks.multiple,
        attention_mask="2d" if len(features) * widest**2 > MOST_SQUARE and not packed else "auto",
        layout=Layout(sequence_multiple=ranks.document_multiple if ranks is not None and ranks.documents else None),
    )
    return collate(features)
