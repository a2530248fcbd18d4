"""Patterns: which keys of its own sequence a token attends, apart from padding and packing.

A pattern is one class: `attends` is its definition, from which every form follows. A fast `fill` and the readings of a
mask that it explains (`explaining`) are optional, and tested to agree with the definition.

Legend: q, k the places of a query and a key, counted from the first token of their sequence; n the number of the
sequence in the batch; Q, K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain
from collate_npu.host import Array, host_array, whole_number

PatternName = Literal["causal", "bidirectional"]
Places = Any
"""Tensors, or numpy arrays."""


class Shown(Protocol):
    """What a square mask shows of its pattern, once its sequences are known."""

    @property
    def reach(self) -> int:
        """How far back any query that counts looks, in places of the row."""

    @property
    def sees_future(self) -> bool:
        """Does a real query attend a key after it?"""

    @property
    def prefixes(self) -> Sequence[int]:
        """For each sequence, one more than the last key that some earlier query attends."""


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
    """Does it part a sequence into pieces that do not meet, as packing does? Then a mask alone never shows it."""
    settles: ClassVar[bool] = False
    """Do queries behind the last token attend what the last token attends?"""

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        """True where query q of sequence n attends key k of the same sequence; tensors or arrays that broadcast."""
        raise NotImplementedError

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        """Write rows q0, q0 + 1, ... of sequence n, both counted from its first token, against all its keys."""
        Q, K = block_QK.shape
        seen = self.attends(np.arange(q0, q0 + Q)[:, None], np.arange(K)[None], np.array(n))
        np.copyto(block_QK, np.where(seen, allowed, forbidden))

    def reaches(self, longest: int) -> bool:
        """Is it more than plain causal attention, for sequences of up to `longest` places?"""
        return True

    def check(self, num_sequences: int) -> None:
        """Raise where it does not fit a batch of N sequences."""

    @classmethod
    def explaining(cls, shown: Shown) -> Iterator[Pattern]:
        """The patterns of this class that a mask could follow, by what it shows; none where it must be declared."""
        return iter(())

    @staticmethod
    def sliding(window: int) -> Pattern:
        """Causal, and only the last `window` tokens, the token itself included (transformers' `sliding_window`)."""
        return Sliding(_at_least_one("window", window))

    @staticmethod
    def chunked(size: int) -> Pattern:
        """Causal inside chunks of `size` tokens (transformers' `attention_chunk_size`)."""
        return Chunked(_at_least_one("chunk size", size))

    @staticmethod
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
        if pattern in ("causal", "bidirectional"):
            return CAUSAL if pattern == "causal" else Bidirectional()
        rule = "Patterns by name are 'causal' and 'bidirectional'; the others carry a size."
        remedy = "Pass Pattern.sliding(window), Pattern.chunked(size) or Pattern.prefix(lengths)."
        raise CollateError(explain("pattern", repr(pattern), rule, remedy))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Causal(Pattern):
    """Every token attends itself and all tokens before it."""

    name: ClassVar[str] = "causal"
    settles: ClassVar[bool] = True

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return k <= q

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        fill_band(block_QK, q0, None, allowed, forbidden)

    def reaches(self, longest: int) -> bool:
        return False

    @classmethod
    def explaining(cls, shown: Shown) -> Iterator[Pattern]:
        if not shown.sees_future:
            yield CAUSAL


@dataclass(frozen=True)
class Sliding(Pattern):
    """Causal, and at most `size` places back, the token's own included."""

    size: int
    name: ClassVar[str] = "sliding"

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return (k <= q) & (q - k < self.size)

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        fill_band(block_QK, q0, self.size, allowed, forbidden)

    def reaches(self, longest: int) -> bool:
        return self.size < longest

    @classmethod
    def explaining(cls, shown: Shown) -> Iterator[Pattern]:
        if not shown.sees_future:
            yield Sliding(shown.reach + 1)

    def __str__(self) -> str:
        return f"sliding({self.size})"


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
                fill_band(part, q0 + q_from - low, self.size, allowed, forbidden)

    def reaches(self, longest: int) -> bool:
        return self.size < longest

    def __str__(self) -> str:
        return f"chunked({self.size})"


@dataclass(frozen=True)
class Bidirectional(Pattern):
    """Every token attends every token."""

    name: ClassVar[str] = "bidirectional"
    settles: ClassVar[bool] = True
    causal: ClassVar[bool] = False

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        return q == q

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        block_QK[:] = allowed

    @classmethod
    def explaining(cls, shown: Shown) -> Iterator[Pattern]:
        if shown.sees_future:
            yield Bidirectional()


@dataclass(frozen=True)
class Prefix(Pattern):
    """Causal, and the first tokens of the sequence for everyone: one length for all sequences, or one for each."""

    lengths: tuple[int, ...]
    name: ClassVar[str] = "prefix"
    settles: ClassVar[bool] = True
    causal: ClassVar[bool] = False

    def attends(self, q: Places, k: Places, n: Places) -> Places:
        if isinstance(n, Tensor):
            return (k <= q) | (k < torch.tensor(self.lengths, device=n.device)[n % len(self.lengths)])
        return (k <= q) | (k < np.asarray(self.lengths)[n % len(self.lengths)])

    def fill(self, block_QK: Array, q0: int, n: int, allowed: Any, forbidden: Any) -> None:
        fill_band(block_QK, q0, None, allowed, forbidden)
        block_QK[:, : self.lengths[n % len(self.lengths)]] = allowed

    def reaches(self, longest: int) -> bool:
        return any(self.lengths)

    def check(self, num_sequences: int) -> None:
        if len(self.lengths) not in (1, num_sequences):
            rule = f"The batch holds {num_sequences} sequences; a prefix is one length, or one for each."
            remedy = "Pass one length per sequence."
            raise CollateError(explain("prefix", f"{len(self.lengths)} lengths", rule, remedy))

    def of_each(self, num_sequences: int) -> tuple[int, ...]:
        """The prefix length of each of the N sequences."""
        self.check(num_sequences)
        return self.lengths * num_sequences if len(self.lengths) == 1 else self.lengths

    @classmethod
    def explaining(cls, shown: Shown) -> Iterator[Pattern]:
        if shown.sees_future:
            yield Prefix(tuple(shown.prefixes))

    def __str__(self) -> str:
        return f"prefix({', '.join(map(str, self.lengths[:4]))}{', ...' if len(self.lengths) > 4 else ''})"


CAUSAL = Causal()


def explanations(shown: Shown) -> Iterator[Pattern]:
    """Every pattern that a mask could follow, plain causal first."""
    for kind in Pattern.__subclasses__():
        yield from kind.explaining(shown)


def fill_band(block_QK: Array, q0: int, reach: int | None, allowed: Any, forbidden: Any) -> None:
    """Keys up to each query, with `reach` at most `reach - 1` before it, for queries q0, q0 + 1, ...

    Each row is the one above, moved right by one: a strided view of one vector, so every element is written once.
    """
    K = block_QK.shape[1]
    if q0 < 0:  # queries before the sequence see none of its keys
        block_QK[:-q0] = forbidden
        block_QK, q0 = block_QK[-q0:], 0
    Q = len(block_QK)
    size = 1 << (max(q0 + Q, K, 64) - 1).bit_length()
    np.copyto(block_QK, _shifted(size, reach, block_QK.dtype, allowed, forbidden)[q0 : q0 + Q, :K])


_SMALL = 1 << 18
"""Bytes of a square that is kept whole, so that its rows are copied all at once."""


@lru_cache(maxsize=8)
def _shifted(size: int, reach: int | None, dtype: Any, allowed: Any, forbidden: Any) -> Array:
    """`[size, size]`, every band of up to that size, in 2 * size elements; read-only."""
    key_minus_query = np.arange(-size, size)
    near = key_minus_query > -reach if reach else True
    band = np.where((key_minus_query <= 0) & near, allowed, forbidden).astype(dtype)
    item = band.itemsize
    shifted = np.lib.stride_tricks.as_strided(band[size:], (size, size), (-item, item), writeable=False)
    return shifted.copy() if shifted.nbytes <= _SMALL else shifted


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, int) and value < 1:
        raise CollateError(explain(name, str(value), f"A {name} is at least 1.", "Use 'causal' for no limit."))
    return whole_number(name, value, least=1)
