"""Readers: the same batch as each consumer reads it, and as each context-parallel rank holds it.

No dense mask is built: what a consumer gets is its route, drawn from the Segments. Legend: B batch, S width, Q query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Case
from collate_npu.consumers.routes import Route
from collate_npu.errors import CollateError
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.polarity import Bools
from collate_npu.parallel import ContextParallel, cu_seqlens_of, query_rows, token_rows, token_runs
from collate_npu.segments import Segments
from collate_npu.tools.show.attention import Attention, attention_of
from collate_npu.tools.show.sheet import Panel, Rows

READS = {
    "none": "None",
    "keep_2d": "2D, True is real; the model makes the square",
    "masked": "4D, True is blocked",
    "keep": "4D, True attends",
    "bias": "4D, added to scores",
    "mapping": "a mapping by kind of layer",
    "block_mask": "a BlockMask",
}


def consumer_panels(
    batch: Mapping[str, Any],
    consumer: str,
    *,
    model_type: str,
    padding_free: bool = False,
    context_parallel: ContextParallel | None = None,
) -> Iterator[Panel]:
    """What one consumer is given, or the words in which it is refused. Raises for a name that is no consumer's."""
    adapter: BatchAdapter | None = None
    try:
        settings: dict[str, Any] = {"consumer": consumer, "model_type": model_type, "padding_free": padding_free}
        BatchAdapter(**settings)
        adapter = BatchAdapter(**settings, context_parallel=context_parallel)
        segments = segments_from_batch(batch, padding_free=padding_free)
        route = adapter.route(segments)
    except CollateError as error:
        if adapter is None and context_parallel is None:
            raise
        yield Panel(title=consumer, refused=str(error), derived=True)
        return
    kept = "attention_mask_2d stays" if route.keeps_mask_2d else "attention_mask_2d is taken out"
    for kind, attentions in _by_kind(adapter, segments, route):
        facts = f"{adapter.consumer.key} {READS[route.form]}; {kept} ({route.why})"
        yield Panel(title=f"{consumer} {kind}".strip(), facts=facts, squares=attentions, derived=True)


def _by_kind(adapter: BatchAdapter, segments: Segments, route: Route) -> Iterator[tuple[str, tuple[Attention, ...]]]:
    """What attends whom in each kind of attention layer; layers that read the 2D mask alone have no square."""
    case = Case(segments=segments, model=adapter.model, pattern=adapter.pattern, padding_free=adapter.padding_free)
    if route.form == "none":
        seen = segments if adapter.padding_free else Segments(np.ones(segments.shape, np.int32))
        yield "", _squares(seen, adapter.pattern, False)
        return
    patterns = adapter.consumer.patterns(case) if route.form == "mapping" else {"": adapter.pattern}
    for kind, pattern in patterns.items():
        if pattern is not None:
            yield kind, _squares(segments, pattern, adapter.consumer.opens_empty_rows and route.form == "masked")


def _squares(segments: Segments, pattern: Pattern, opened: bool) -> tuple[Attention, ...]:
    squares = (attention_of(segments, b, pattern=pattern) for b in range(segments.shape[0]))
    return tuple(map(_opened, squares) if opened else squares)


def _opened(attention: Attention) -> Attention:
    """A query that sees no key sees itself, as `masks.forms.open_empty_rows` has it."""

    def rows(low: int, high: int) -> Bools:
        seen_QK = attention.rows(low, high)
        empty_N = np.flatnonzero(~seen_QK.any(axis=1))
        seen_QK[empty_N, empty_N + low] = True
        return seen_QK

    return replace(attention, rows=rows)


def rank_panels(batch: Mapping[str, Any], cp: ContextParallel) -> Iterator[Panel]:
    """For each rank the places of each row it holds, and its queries against all keys; or why they cannot share it."""
    try:
        yield from _ranks(batch, segments_from_batch(batch), cp)
    except CollateError as error:
        yield Panel(title=f"{cp.size} ranks", refused=str(error), derived=True)


def _ranks(batch: Mapping[str, Any], segments: Segments, cp: ContextParallel) -> Iterator[Panel]:
    B, S = segments.shape
    offsets = cu_seqlens_of(batch, segments) if cp.documents else None
    for rank in range(cp.size):
        place = cp.with_rank(rank)
        tokens, queries = token_rows(S, place, offsets), query_rows(S, place, offsets)
        held_S = np.zeros(S, bool)
        held_S[tokens.numpy()] = True
        facts = f"{cp.layout}, holds places {_told(token_runs(S, place, offsets))}"
        squares = tuple(attention_of(segments, b, queries=queries) for b in range(B))
        rows = Rows(ids=segments.array, held=held_S)
        yield Panel(title=f"rank {rank} of {cp.size}", facts=facts, rows=rows, squares=squares, derived=True)


def _told(runs: Sequence[tuple[int, int]]) -> str:
    """`0-1, 6-7`, the first runs."""
    return ", ".join(f"{start}-{stop - 1}" for start, stop in runs[:6]) + (", ..." if len(runs) > 6 else "")
