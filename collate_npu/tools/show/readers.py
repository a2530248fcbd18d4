"""Readers: the same batch as each consumer reads it, and as each context-parallel rank holds it.

No dense mask is built: what a consumer gets is its route, drawn from the Segments. Legend: B batch, S width, Q query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from collate_npu.arrays import Side
from collate_npu.collate.collators import Layout, PaddingCollator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import SPELLED, Case, Route
from collate_npu.errors import CollateError, explain
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel, cu_seqlens_of, query_rows, token_runs
from collate_npu.segments import Segments
from collate_npu.tools.audit.data import encoded, read_rows
from collate_npu.tools.show.sheet import Attention, Panel, attention_of


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
    kept = "attention_mask_2d stays" if route.keeps_mask_2d else "attention_mask_2d is taken out"
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
    """For each rank the places it holds, and its queries against all keys; or why they cannot share it."""
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


# --- inputs

MOST_PLACES = 1 << 28
"""Places of a dense mask beyond which none is built to be looked at: the 2D mask says the same."""

MOST_TOKENS = 1 << 22
"""Places of `--lengths`."""


def features_of_lengths(lengths: str) -> list[dict[str, Any]]:
    """`3,5`: two rows of 3 and of 5 tokens; `3+2,5`: two sequences in the first."""
    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
    except ValueError:
        raise CollateError(explain("--lengths", lengths, "Lengths are whole numbers.", "Write 3,5 or 3+2,5.")) from None
    if len(rows) * max(map(sum, rows)) > MOST_TOKENS or min(map(min, rows)) < 0:
        rule = f"Lengths are 0 or more, and at most {MOST_TOKENS} places are drawn."
        raise CollateError(explain("--lengths", lengths[:80], rule, "Write shorter ones: a picture shows the same."))
    return [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]


def features_of_data(path: Path, tokenizer: Any, rows: int, max_length: int) -> list[dict[str, Any]]:
    """Its first rows as a trainer of a language model has them: where a row has no labels, every token is one."""
    features = [encoded(row, tokenizer, max_length) for row in read_rows(path)[:rows]]
    if not any(feature["input_ids"] for feature in features):
        raise CollateError(explain("--data", "no line with tokens", "A batch has rows.", "Name a file with text."))
    return [{"labels": list(feature["input_ids"]), **feature} for feature in features if feature["input_ids"]]


def reader_of(folder: Path | None, *, bytes_too: bool) -> Any:
    """What reads the tokens, if anything does."""
    if folder is not None:
        from collate_npu.tools.audit.candidates import load_tokenizer

        return load_tokenizer(folder)
    from collate_npu.testing import byte_tokenizer

    return byte_tokenizer() if bytes_too else None


def collated(
    features: list[dict[str, Any]], *, side: Side, packed: bool, ranks: ContextParallel | None, pad_token_id: int = 0
) -> dict[str, Any]:
    """In rows that the ranks can share out, flat ones sequence by sequence."""
    widest = max(len(feature["input_ids"]) for feature in features)
    collate = PaddingCollator(
        pad_token_id=pad_token_id,
        padding_side=side,
        padding_free=packed,
        pad_to_multiple_of=None if ranks is None else ranks.multiple,
        attention_mask="2d" if len(features) * widest**2 > MOST_PLACES and not packed else "auto",
        layout=Layout(sequence_multiple=ranks.document_multiple if ranks is not None and ranks.documents else None),
    )
    return collate(list(features))
