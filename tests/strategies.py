"""What the tests draw: rows, lengths, segment ids with holes and gaps, patterns, ragged features, and the containers, dtypes
and masks that producers use. Small values, plain functions. The night draws twenty times as many (`nox -s fuzz`).

Legend: B rows, S width, N sequences, L tokens of one sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import given, settings, strategies as st

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
        samples.append(sample | {"labels": holds(oracle.alone(ids, own_ids(sample)))})
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
    own = {name: settings.pop(name, None) for name in ("multiple", "max_sequences", "cp")}
    padding = {name: value for name, value in own.items() if value is not None}
    read = {"model": model, "consumer": consumer, "pattern": pattern}
    if not padding:
        return PaddingCollator(pad_token_id=pad_token_id, padding_free=True, **read, **settings)
    collate = PaddingCollator(pad_token_id=pad_token_id, padding_free=True, pattern=pattern, **settings)
    adapter = BatchAdapter(padding_free=True, **read) if model is not None or consumer else dict
    return lambda features: adapter(pad_documents(collate(features), pad_token_id=pad_token_id, **padding)[0])


# --- laws that draw choices one after another

SIDES = ("right", "left")
PATTERNS = ("causal", "causal", "causal", "sliding", "chunked", "bidirectional", "prefix")
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HOLDERS = (
    list, tuple, torch.tensor, np.array,
    *(lambda xs, dtype=dtype: torch.tensor(xs, dtype=dtype) for dtype in (torch.int32, torch.int16)),
    *(lambda xs, dtype=dtype: np.array(xs, dtype) for dtype in (np.int32, np.uint16, ">i4")),
    lambda xs: np.array(xs[::-1])[::-1],
)  # fmt: skip


class Drawn:
    """Choices, one after another; the first of each is the simplest."""

    def __init__(self, draw):
        self.draw = draw

    def below(self, n: int) -> int:
        return self.draw(st.integers(0, n - 1))

    def pick(self, choices):
        return choices[self.below(len(choices))]

    def chance(self) -> bool:
        return bool(self.below(2))

    def many(self, n: int, below: int) -> list[int]:
        return self.draw(st.lists(st.integers(0, below - 1), min_size=n, max_size=n))


def law(check: Callable[[Drawn], None]) -> Callable[..., None]:
    """The test of what holds for whatever is drawn, with four times the examples of other tests."""

    def test(data):
        check(Drawn(data.draw))

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(test, name, getattr(check, name))
    return settings(max_examples=4 * settings.default.max_examples)(given(st.data())(test))


STYLES = ("right", "left", "none", "mixed", "holes", "packed", "packed_right", "packed_gaps", "packed_holes", "empty_row")
SIDED, ONE_SEQUENCE = ("none", "right", "left"), ("right", "left", "none", "mixed", "holes")


def one_row(drawn: Drawn, style: str, S: int) -> list[int]:
    """Segment ids, at least one of them real."""
    real = S if style in ("none", "packed", "packed_gaps") else 1 + drawn.below(S)
    before = {"left": S - real, "mixed": drawn.below(S - real + 1) if style == "mixed" else 0}.get(style, 0)
    row = [0] * before + [1] * real + [0] * (S - real - before)
    if style.startswith("packed") or style == "holes":
        starts = drawn.many(S, 2 if drawn.chance() else 5) if style != "holes" else [0] * S
        labels = np.cumsum([start == 1 for start in starts]).tolist()
        lost = {label for label in {*labels} if drawn.below(3) == 2} if style == "packed_gaps" else ()
        gone = drawn.many(S, 8) if style.endswith("holes") else [1] * S
        row = [(label + 1) * (n > 0 and hole > 0 and label not in lost) for label, n, hole in zip(labels, row, gone)]
    return oracle.numbered(row) if any(row) else [1, *row[1:]]


def rows_of(drawn: Drawn, styles=(*ONE_SEQUENCE, "packed_right", "packed_holes"), *, width=12, rows=3) -> list[list[int]]:
    """Segment ids `[B, S]`, all rows in one style."""
    style, S = drawn.pick(styles), 1 + drawn.below(width)
    made = [one_row(drawn, style, S) for _ in range(1 + drawn.below(rows))]
    return [[0] * S, *made[1:]] if style == "empty_row" else made


def tokens_of(drawn: Drawn, rows) -> list[list[int]]:
    """Ordinary tokens, PAD among them, and PAD at padding."""
    return [[drawn.below(10) if n else PAD for n in row] for row in rows]


def pattern_of(drawn: Drawn) -> tuple[str, int, Pattern | str]:
    """Its name, its size, and the pattern itself."""
    name, size = drawn.pick(PATTERNS), 1 + drawn.below(4)
    return name, size, getattr(Pattern, name)(size) if name in ("sliding", "chunked", "prefix") else name


def held(drawn: Drawn, values):
    """Whole numbers as some producer holds them."""
    return drawn.pick(HOLDERS)(values)


def two_dims(drawn: Drawn, keep_BS):
    """A keep mask `[B, S]` as producers write it."""
    kind = drawn.pick(("tensor", "tensor", "numpy", "lists", "bools"))
    if kind == "lists":
        return [[int(x) for x in row] for row in keep_BS]
    if kind == "numpy":
        made = np.array(keep_BS).astype(drawn.pick((bool, np.int64, np.uint8, np.float32)))
        return made[:, ::-1].copy()[:, ::-1] if drawn.chance() else made
    return torch.tensor(keep_BS).to(torch.bool if kind == "bools" else drawn.pick((*WHOLE, *FLOATS)))


def four_dims(drawn: Drawn, keep_B1SS, polarity: str):
    """A keep matrix `[B, 1, S, S]` as producers write it, for one head or several."""
    keep_B1SS = torch.as_tensor(keep_B1SS)
    if polarity == "bias":
        dtype = drawn.pick(FLOATS)
        blocked = drawn.pick((torch.finfo(dtype).min, -torch.inf, -1e4))
        made = torch.zeros(keep_B1SS.shape, dtype=dtype).masked_fill_(~keep_B1SS, blocked)
    else:
        made = (keep_B1SS if polarity == "keep" else ~keep_B1SS).to(drawn.pick((torch.bool, torch.bool, *WHOLE, *FLOATS)))
    return drawn.pick((lambda x: x, lambda x: x[:, 0], lambda x: x.expand(-1, 2, -1, -1)))(made)
