"""What the tests draw: lengths, segment ids with holes and gaps, patterns, ragged features. Small values, plain functions.

Legend: B rows, S width, N sequences, L tokens of one sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from collate_npu import BatchAdapter, PaddingCollator, Pattern, Segments
from collate_npu.masks.patterns import Prefix
from collate_npu.parallel import pad_documents

PAD = 7
"""Also an ordinary token of the samples, first, inside and last, as an eos that doubles as pad is."""

CONTAINERS: tuple[Callable[[list[Any]], Any], ...] = (list, tuple, np.array, torch.tensor)


def sides() -> st.SearchStrategy[str]:
    return st.sampled_from(("left", "right"))


def row_lengths(*, rows: int = 4, longest: int = 7, shortest: int = 1) -> st.SearchStrategy[list[int]]:
    """One sequence a row."""
    return st.lists(st.integers(shortest, longest), min_size=1, max_size=rows)


def packed_lengths(*, rows: int = 3, sequences: int = 3, longest: int = 4) -> st.SearchStrategy[list[list[int]]]:
    """Several sequences a row."""
    row = st.lists(st.integers(1, longest), min_size=1, max_size=sequences)
    return st.lists(row, min_size=1, max_size=rows)


def ids_of(keep: int, starts: int, S: int) -> list[int]:
    """A row of segment ids from two bit patterns: which places are real, and where a new sequence begins."""
    ids, label = [], 0
    for place in range(S):
        real = keep >> place & 1
        label += real & (starts >> place & 1 | (label == 0))
        ids.append(label * real)
    return ids


@st.composite
def segment_ids(draw: st.DrawFn, *, rows: int = 3, width: int = 8, packed: bool = True) -> list[list[int]]:
    """Any ids at all: holes, gaps between sequences, rows of padding."""
    S = draw(st.integers(1, width))
    bits = st.integers(0, 2**S - 1)
    keeps = draw(st.lists(bits, min_size=1, max_size=rows))
    return [ids_of(keep, draw(bits) if packed else 0, S) for keep in keeps]


def sided(*, rows: int = 4, longest: int = 7, shortest: int = 1, extra: int = 3) -> st.SearchStrategy[Segments]:
    """One sequence a row, padded on one side, sometimes wider than the longest."""
    return st.builds(
        lambda lengths, more, side: Segments.from_lengths(lengths, max(lengths) + more, side),
        row_lengths(rows=rows, longest=longest, shortest=shortest),
        st.integers(0, extra),
        sides(),
    )


def packed(*, rows: int = 3, sequences: int = 3, longest: int = 4, extra: int = 3) -> st.SearchStrategy[Segments]:
    """Several sequences a row, padded on one side."""
    return st.builds(
        lambda lengths, more, side: Segments.from_lengths(lengths, max(map(sum, lengths)) + more, side),
        packed_lengths(rows=rows, sequences=sequences, longest=longest),
        st.integers(0, extra),
        sides(),
    )


def free(*, rows: int = 3, width: int = 8, packed: bool = True) -> st.SearchStrategy[Segments]:
    return segment_ids(rows=rows, width=width, packed=packed).map(lambda ids: Segments(torch.tensor(ids)))


def whole_rows() -> st.SearchStrategy[Segments]:
    """Rows that up to four ranks can share, in any layout: several sequences or one, padding on any side, holes."""
    kinds = packed(longest=20, extra=20), free(width=30), free(width=30, packed=False)
    wide = lambda drawn, ends: Segments(torch.nn.functional.pad(drawn.ids, [end * (-drawn.shape[1] % 8) for end in ends]))  # noqa: E731
    return st.builds(wide, st.one_of(kinds).filter(lambda drawn: drawn.num_tokens > 0), st.permutations((0, 1)))


def segments(*, rows: int = 3, width: int = 8) -> st.SearchStrategy[Segments]:
    """The ordinary and the strange alike."""
    return st.one_of(sided(rows=rows), packed(rows=rows), free(rows=rows, width=width))


def patterns(num_sequences: int, *, largest: int = 9) -> st.SearchStrategy[Pattern]:
    """Every class of the package: a new one is found by its fields, all of them sizes."""
    prefixes = st.lists(st.integers(0, 6), min_size=num_sequences, max_size=num_sequences).filter(bool)
    kinds = [kind for kind in Pattern.__subclasses__() if kind.__module__.startswith("collate_npu.") and kind is not Prefix]
    sizes = [st.builds(kind, *(st.integers(1, largest) for _ in fields(kind))) for kind in kinds]
    sizes += [prefixes.map(Pattern.prefix)] if num_sequences else []
    return st.one_of(*sizes, st.integers(0, 6).map(Pattern.prefix))


@st.composite
def attentions(draw: st.DrawFn, source: st.SearchStrategy[Segments] | None = None) -> tuple[Segments, Pattern]:
    """Segments and a pattern for them."""
    drawn = draw(source if source is not None else segments())
    return drawn, draw(patterns(drawn.num_sequences))


@st.composite
def features(
    draw: st.DrawFn, *, rows: int = 4, longest: int = 7, truth: Sequence[str] = ("none", "holes", "packed", "seq_lengths")
) -> list[dict[str, Any]]:
    """Ragged samples with labels and other per-token keys; `truth` says what they may tell of themselves.

    Token values count up through the whole batch, PAD among them, so that no two mistakes cancel.
    """
    lengths = draw(row_lengths(rows=rows, longest=longest))
    kind = draw(st.sampled_from(tuple(truth)))
    holds = draw(st.sampled_from(CONTAINERS))
    samples: list[dict[str, Any]] = []
    at = 1
    for L in lengths:
        ids = list(range(at, at + L))
        at += L
        if draw(st.booleans()):
            ids[draw(st.sampled_from((0, -1, L // 2)))] = PAD
        sample = {"input_ids": holds(ids), "loss_scale": holds([n / 2 for n in ids])} | _own_truth(draw, kind, L)
        samples.append(sample | {"labels": holds([x if n else -100 for x, n in zip(ids, own_ids(sample))])})
    return samples


def _own_truth(draw: st.DrawFn, kind: str, L: int) -> dict[str, Any]:
    if kind == "none":
        return {}
    bits = st.integers(1, 2**L - 1)
    if kind == "holes":
        return {"attention_mask": ids_of(draw(bits), 0, L)}
    if kind == "packed":
        return {"attention_mask": ids_of(draw(bits), draw(bits), L)}
    cut = draw(st.integers(0, L))
    return {"seq_lengths": [n for n in (cut, L - cut) if n]}


def own_ids(sample: dict[str, Any]) -> list[int]:
    """Segment ids `[L]` that a sample from `features` tells of itself, by its mask or lengths, never by its tokens."""
    L = len(sample["input_ids"])
    if "seq_lengths" in sample:
        return [n for n, length in enumerate(sample["seq_lengths"], start=1) for _ in range(length)]
    return list(sample.get("attention_mask", [1] * L))


def marked(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same samples, numbered from 1 under `sample`, and with a number for each token under `place`."""
    numbered = enumerate(samples, start=1)
    return [row | {"sample": b, "place": [100 * b + i for i in range(len(row["input_ids"]))]} for b, row in numbered]


def standing(samples: list[dict[str, Any]], place_BS: torch.Tensor) -> Segments:
    """The Segments of marked samples, by where their tokens stand in a batch."""
    ids = {100 * b + i: 100 * b * (n > 0) + n for b, row in enumerate(samples, start=1) for i, n in enumerate(own_ids(row))}
    return Segments.from_ids([[ids.get(place, 0) for place in row] for row in place_BS.tolist()])


def flat_collator(
    pad_token_id: int, *, model: Any = None, consumer: Any = None, pattern: Any = None, **settings: Any
) -> Any:
    """A collator of flat rows, whose sequences `pad_documents` then pads by the settings it takes."""
    own = {name: settings.pop(name, None) for name in ("multiple", "max_sequences")}
    padding = {name: value for name, value in own.items() if value is not None}
    read = {"model": model, "consumer": consumer, "pattern": pattern}
    if not padding:
        return PaddingCollator(pad_token_id=pad_token_id, padding_free=True, **read, **settings)
    collate = PaddingCollator(pad_token_id=pad_token_id, padding_free=True, pattern=pattern, **settings)
    adapter = BatchAdapter(padding_free=True, **read) if model is not None or consumer else dict
    return lambda features: adapter(pad_documents(collate(features), pad_token_id=pad_token_id, **padding)[0])
