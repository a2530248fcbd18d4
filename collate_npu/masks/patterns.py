"""Patterns: which keys of its own sequence a token attends, apart from padding and packing.

A pattern is one class, a frozen dataclass: `attends` is its definition, from which every form follows. What else the laws
need of it (`causal`, `cuts`, `settles`) it declares, and that is compared with the definition when it is made. A fast
`fill` and the readings of a mask that it explains (`explaining`) are optional, and tested to agree with the definition.
Legend: q, k the places of a query and a key, counted from the first token of their sequence; n the number of the
sequence in the batch; Q, K query and key rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, host_array, whole_number
from collate_npu.errors import CollateError, did_you_mean, explain
from collate_npu.segments import Segments
from collate_npu.validation import checked

Places = Any
"""Tensors, or numpy arrays."""


class Pattern:
    """Which keys of its own sequence a token attends. Use the constructors; `"causal"` and `"bidirectional"` are short.

    Distances are counted in the row, chunk and prefix from the sequence's first token (so left padding moves nothing)::

        causal      sliding(2)  chunked(2)  prefix(2)   bidirectional
        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ■ ■
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ■ ■
        ■ ■ ■ ⬚     ⬚ ■ ■ ⬚     ⬚ ⬚ ■ ⬚     ■ ■ ■ ⬚     ■ ■ ■ ■
        ■ ■ ■ ■     ⬚ ⬚ ■ ■     ⬚ ⬚ ■ ■     ■ ■ ■ ■     ■ ■ ■ ■

    >>> window = Pattern.sliding(2)
    >>> window.attends(q=np.array(3), k=np.arange(4), n=0).tolist()
    [False, False, True, True]
    >>> window.reaches(2), window.reaches(3)
    (False, True)
    >>> str(Pattern.of("causal")), str(Pattern.chunked(4)), str(Pattern.prefix([2, 3]))
    ('causal', 'chunked(4)', 'prefix(2, 3)')
    >>> Pattern.prefix([2, 3]).check(num_sequences=4)
    Traceback (most recent call last):
        ...
    collate_npu.errors.CollateError: prefix: got 2 lengths. The batch holds 4 sequences; a prefix is one length, or one
        for each. Pass one length per sequence.
    """

    name: ClassVar[str]
    causal: ClassVar[bool] = True
    """Does no token attend a later one?"""
    cuts: ClassVar[bool] = False
    """Does some token not attend the one before it? Then a mask shows pieces, as packing does, and a row is one sequence."""
    settles: ClassVar[bool] = False
    """Do queries behind the last token attend what the last token attends?"""

    def __post_init__(self) -> None:
        _check_declared(self)

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        """True where query q of sequence n attends key k of the same sequence; tensors or arrays that broadcast."""
        raise NotImplementedError

    def on(self, device: torch.device | str) -> Callable[[Tensor, Tensor, Tensor], Any]:
        """`attends` for tensors of this device, which makes no tensor itself: that compiles on no card."""
        return self.attends

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        """Write rows q0, q0 + 1, ... of sequence n, both counted from its first token, against all its keys."""
        Q, K = block_QK.shape
        seen = self.attends(np.arange(q0, q0 + Q)[:, None], np.arange(K)[None], np.array(n))
        np.copyto(block_QK, np.where(seen, allowed, forbidden))

    def reaches(self, longest: int) -> bool:
        """True if it differs from plain causal attention for sequences of up to `longest` places."""
        return True

    def check(self, num_sequences: int) -> None:
        """Raise where it does not fit a batch of N sequences."""

    @classmethod
    def explaining(cls, reach: int, prefixes: Sequence[int]) -> Pattern | None:
        """The pattern of this class that a mask could follow, by what it shows; None where it must be declared. `reach`: how
        far back any query that counts looks, in places of the row. `prefixes`: for each sequence, one more than the last key
        that some earlier query attends, 0 where none does."""
        return None

    @staticmethod
    @checked
    def sliding(window: int) -> Pattern:
        """Causal, and only the last `window` tokens, the token itself included (transformers' `sliding_window`)."""
        return Sliding(whole_number("window", window, least=1))

    @staticmethod
    @checked
    def chunked(size: int) -> Pattern:
        """Causal inside chunks of `size` tokens (transformers' `attention_chunk_size`)."""
        return Chunked(whole_number("chunk size", size, least=1))

    @staticmethod
    @checked
    def prefix(lengths: int | Sequence[int] | Tensor) -> Pattern:
        """Causal, but every token also sees the first `lengths` tokens of its sequence: one number, or one for each."""
        values = np.atleast_1d(host_array("prefix", lengths))
        if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu" or values.min() < 0:
            rule = "Prefix lengths are whole numbers, 0 or more."
            raise CollateError(explain("prefix", str(values.tolist()), rule, "Pass one or N of them."))
        return Prefix(tuple(values.tolist()))

    @staticmethod
    def of(pattern: str | Pattern) -> Pattern:
        """A `Pattern`, or the name of one that needs no size."""
        if isinstance(pattern, Pattern):
            return pattern
        if isinstance(pattern, str) and pattern in ("causal", "bidirectional"):
            return CAUSAL if pattern == "causal" else Bidirectional()
        rule = "Patterns by name are 'causal' and 'bidirectional'; the others carry a size."
        remedy = "Pass Pattern.sliding(window), Pattern.chunked(size) or Pattern.prefix(lengths)."
        near = did_you_mean(str(pattern), ("causal", "bidirectional"), remedy)
        raise CollateError(explain("pattern", repr(pattern), rule, near))

    @property
    def expression(self) -> str:
        """The Python expression that makes this pattern, for a remedy."""
        values = [list(value) if isinstance(value, tuple) else value for value in vars(self).values()]
        return f"Pattern.{self.name}({', '.join(map(str, values))})" if values else repr(self.name)

    def __str__(self) -> str:
        numbers = [n for value in vars(self).values() for n in np.atleast_1d(value).tolist()]
        more = ", ..." if len(numbers) > 4 else ""
        return f"{self.name}({', '.join(map(str, numbers[:4]))}{more})" if numbers else self.name


@dataclass(frozen=True)
class Causal(Pattern):
    """Every token attends itself and all tokens before it."""

    name: ClassVar[str] = "causal"
    settles: ClassVar[bool] = True

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return k <= q

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any, reach: int | None = None) -> None:
        """Keys up to each query; with `reach`, at most `reach - 1` places before it. Each row is the one above, moved right
        by one: a strided view of one vector, so every element is written once."""
        Q, K = block_QK.shape
        size = 1 << (max(q0 + Q, K - q0, 64) - 1).bit_length()
        band = _band(size, reach, block_QK.dtype, allowed, forbidden)
        step = band.itemsize
        np.copyto(block_QK, np.ndarray((Q, K), band.dtype, band, (size - q0) * step, (-step, step)))

    def reaches(self, longest: int) -> bool:
        return False

    @classmethod
    def explaining(cls, reach: int, prefixes: Sequence[int]) -> Pattern | None:
        return None if any(prefixes) else CAUSAL


@dataclass(frozen=True)
class Sliding(Pattern):
    """Causal, and at most `size` places back, the token's own included."""

    size: int
    name: ClassVar[str] = "sliding"

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return (k <= q) & (q - k < self.size)

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        CAUSAL.fill(block_QK, q0, n, allowed, forbidden, self.size)

    def reaches(self, longest: int) -> bool:
        return self.size < longest

    @classmethod
    def explaining(cls, reach: int, prefixes: Sequence[int]) -> Pattern | None:
        return None if any(prefixes) else Sliding(reach + 1)


@dataclass(frozen=True)
class Chunked(Pattern):
    """Causal inside chunks of `size` places, counted from the sequence's first token."""

    size: int
    name: ClassVar[str] = "chunked"
    cuts: ClassVar[bool] = True

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return (k <= q) & (q // self.size == k // self.size)

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        """Chunk by chunk, each a causal triangle."""
        Q, K = block_QK.shape
        block_QK[:] = forbidden
        for low in range(0, K, self.size):
            q_from, q_to = max(low - q0, 0), min(low + self.size - q0, Q)
            if q_from < q_to:
                part = block_QK[q_from:q_to, low : low + self.size]
                CAUSAL.fill(part, q0 + q_from - low, n, allowed, forbidden, self.size)

    def reaches(self, longest: int) -> bool:
        return self.size < longest


@dataclass(frozen=True)
class Bidirectional(Pattern):
    """Every token attends every token."""

    name: ClassVar[str] = "bidirectional"
    settles: ClassVar[bool] = True
    causal: ClassVar[bool] = False

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return q == q

    @classmethod
    def explaining(cls, reach: int, prefixes: Sequence[int]) -> Pattern | None:
        return Bidirectional() if any(prefixes) else None


@dataclass(frozen=True)
class Prefix(Pattern):
    """Causal, and the first tokens of the sequence for everyone: one length for all sequences, or one for each."""

    lengths: tuple[int, ...]
    name: ClassVar[str] = "prefix"
    settles: ClassVar[bool] = True
    causal: ClassVar[bool] = False

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        if isinstance(n, Tensor):
            return self.on(n.device)(q, k, n)
        return (k <= q) | (k < np.asarray(self.lengths)[n % len(self.lengths)])

    def on(self, device: torch.device | str) -> Callable[[Tensor, Tensor, Tensor], Any]:
        lengths = torch.tensor(self.lengths, device=device)
        return lambda q, k, n: (k <= q) | (k < lengths[n % len(lengths)])

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        CAUSAL.fill(block_QK, q0, n, allowed, forbidden)
        block_QK[:, : self.lengths[n % len(self.lengths)]] = allowed

    def reaches(self, longest: int) -> bool:
        return any(self.lengths)

    def check(self, num_sequences: int) -> None:
        if len(self.lengths) not in (1, num_sequences):
            rule = f"The batch holds {num_sequences} sequences; a prefix is one length, or one for each."
            raise CollateError(explain("prefix", f"{len(self.lengths)} lengths", rule, "Pass one length per sequence."))

    def of_each(self, num_sequences: int) -> tuple[int, ...]:
        """The prefix length of each of the N sequences."""
        self.check(num_sequences)
        return self.lengths * num_sequences if len(self.lengths) == 1 else self.lengths

    @classmethod
    def explaining(cls, reach: int, prefixes: Sequence[int]) -> Pattern | None:
        return Prefix(tuple(prefixes)) if any(prefixes) else None


@lru_cache(maxsize=256)
def _check_declared(pattern: Pattern) -> None:
    """Raise where a pattern's declared facts differ from its predicate, on the first tokens of a sequence."""
    L = 24
    seen_QK = np.asarray(pattern.attends(np.arange(2 * L)[:, None], np.arange(L)[None], np.array(0)))
    settles = not pattern.settles or bool((seen_QK[L:] == seen_QK[L - 1]).all())
    narrow = isinstance(pattern, Sliding)  # of one token: reading refuses it
    facts = [
        (seen_QK.diagonal().all(), "a token that does not attend itself", "A mask shows which tokens are real by this."),
        (not (pattern.causal and np.triu(seen_QK[:L], 1).any()), "causal=True", "A token attends a later one."),
        (pattern.cuts or narrow or seen_QK.diagonal(-1).all(), "cuts=False", "A token does not attend the one before it."),
        (settles, "settles=True", "Queries behind the last token attend other keys than the last token."),
    ]
    for right, name, rule in facts:
        if not right:
            remedy = "Declare what attends() does (causal, cuts, settles), and let every token attend itself."
            raise CollateError(explain(f"pattern {pattern.name}", name, rule, remedy))


CAUSAL = Causal()


@lru_cache(maxsize=8)
def _band(size: int, reach: int | None, dtype: Any, allowed: Any, forbidden: Any) -> Array:
    """`[2 * size]`, a row of a band: the query's own key is at `size`; never written to."""
    key_minus_query = np.arange(-size, size)
    near = key_minus_query > -reach if reach else True
    band: Array = np.where((key_minus_query <= 0) & near, allowed, forbidden).astype(dtype)
    return band


class Region(NamedTuple):
    """One sequence, as the n-th of the batch, and the query rows that show it; all places are those of the row."""

    n: int
    start: int
    end: int
    """Its first key, and one more than its last."""
    first: int
    last: int
    """Its query rows, `last` not among them: padding belongs to the sequence before it, leading padding to the first."""
    holes: Array | None
    """Which of its places are padding, bool; None where none is."""


def regions_of(segments: Segments) -> list[list[Region]]:
    """Return the sequences of each row of the batch; every query is in one region, unless the row is padding alone."""
    spans, lengths, (B, S) = segments.spans, segments.sequence_lengths, segments.shape
    rows: list[list[Region]] = [[] for _ in range(B)]
    for n, (b, start, end) in enumerate(spans):
        last = spans[n + 1][1] if n + 1 < len(spans) and spans[n + 1][0] == b else S
        holes = segments.array[b, start:end] == 0 if end - start > lengths[n] else None
        rows[b].append(Region(n, start, end, start if rows[b] else 0, last, holes))
    return rows


def fill_rows(out_QK: Array, low: int, regions: Sequence[Region], pattern: Pattern, allowed: Any, forbidden: Any) -> None:
    """Write the query rows low, low + 1, ... of one row of the batch: of each sequence those before, in and behind it."""
    high, S = low + len(out_QK), out_QK.shape[1]
    if not regions:
        out_QK[:] = forbidden
    at = bisect_right(regions, low, key=attrgetter("last")) if low else 0
    for n, start, end, first, last, holes in regions[at:] if at else regions:
        if first >= high:
            break
        q, stop = max(low, first), min(high, last)
        while q < stop:
            # A causal query of the sequence sees no key behind itself: keys behind the sequence need no care of their own.
            inside = pattern.causal and q < end
            to, keys = (min(end, stop), S) if inside else (stop, end)
            block_QK = out_QK[q - low : to - low]
            if start:
                block_QK[:, :start] = forbidden
            if keys < S:
                block_QK[:, keys:] = forbidden
            pattern.fill(block_QK[:, start:keys], q - start, n, allowed, forbidden)
            if holes is not None:
                np.copyto(block_QK[:, start:end], forbidden, where=holes)
            q = to
            if inside and pattern.settles and q < stop:
                out_QK[q - low : stop - low] = block_QK[-1]
                q = stop
