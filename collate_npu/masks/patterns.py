"""Patterns: which keys of its own sequence a token attends, apart from padding and packing.

Legend: q, k the places of a query and a key, counted from the first token of their sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from collate_npu.errors import CollateError, explain

Kind = Literal["causal", "sliding", "chunked", "bidirectional", "prefix"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which keys of its own sequence a token attends. Use the constructors; `"causal"` and `"bidirectional"` are short.

    Distances are counted in the row, chunk and prefix from the sequence's first token (so left padding moves nothing)::

        causal      sliding(2)  chunked(2)  prefix(2)   bidirectional
        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ■ ■
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚     ■ ■ ■ ■
        ■ ■ ■ ⬚     ⬚ ■ ■ ⬚     ⬚ ⬚ ■ ⬚     ■ ■ ■ ⬚     ■ ■ ■ ■
        ■ ■ ■ ■     ⬚ ⬚ ■ ■     ⬚ ⬚ ■ ■     ■ ■ ■ ■     ■ ■ ■ ■
    """

    kind: Kind
    size: int = 0
    """Window or chunk, in tokens."""
    lengths: tuple[int, ...] = ()
    """Prefix tokens of each of the N sequences, or one number for all."""

    @classmethod
    def sliding(cls, window: int) -> Pattern:
        """Causal, and only the last `window` tokens, the token itself included (transformers' `sliding_window`)."""
        return cls("sliding", size=_at_least_one("window", window))

    @classmethod
    def chunked(cls, size: int) -> Pattern:
        """Causal inside chunks of `size` tokens (transformers' `attention_chunk_size`)."""
        return cls("chunked", size=_at_least_one("chunk size", size))

    @classmethod
    def prefix(cls, lengths: int | Sequence[int]) -> Pattern:
        """Causal, but every token also sees the first `lengths` tokens of its sequence: one number, or one for each."""
        values = (lengths,) if isinstance(lengths, int) else tuple(int(n) for n in lengths)
        if not values or min(values) < 0:
            raise CollateError(explain("prefix", str(values), "Prefix lengths are 0 or more.", "Pass one or N of them."))
        return cls("prefix", lengths=values)

    @classmethod
    def of(cls, pattern: str | Pattern) -> Pattern:
        """A `Pattern`, or the name of one that needs no size."""
        if isinstance(pattern, Pattern):
            return pattern
        if pattern in ("causal", "bidirectional"):
            return cls(cast(Kind, pattern))
        rule = "Patterns by name are 'causal' and 'bidirectional'; the others carry a size."
        remedy = "Pass Pattern.sliding(window), Pattern.chunked(size) or Pattern.prefix(lengths)."
        raise CollateError(explain("pattern", repr(pattern), rule, remedy))

    def __str__(self) -> str:
        inner = str(self.size) if self.size else ", ".join(map(str, self.lengths[:4]))
        return f"{self.kind}({inner})" if inner else self.kind

    def prefixes(self, num_sequences: int) -> tuple[int, ...]:
        """The prefix length of each of the N sequences, 0 for patterns without one."""
        lengths = self.lengths * num_sequences if len(self.lengths) == 1 else self.lengths or (0,) * num_sequences
        if len(lengths) != num_sequences:
            rule = f"The batch holds {num_sequences} sequences; a prefix is one length, or one for each."
            raise CollateError(explain("prefix", f"{len(lengths)} lengths", rule, "Pass one length per sequence."))
        return lengths


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise CollateError(explain(name, str(value), f"A {name} is at least 1.", "Use 'causal' for no limit."))
    return int(value)
