"""A pattern in the operator's terms: the one place of this room that asks what kind of pattern it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.kernels.fusion_attention.geometry import UNLIMITED
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

CompressedName = Literal["full", "triangle", "band", "prefix", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternTerms:
    """How the operator can compute one pattern over one batch."""

    what: str
    """The pattern in words."""
    compressed: CompressedName
    """The form that is exact where nothing but the pattern blocks, and its sparse mode."""
    compressed_mode: int
    dense_mode: int = 1
    """The sparse mode of a dense mask, for everything else."""
    before: int = UNLIMITED
    """Tokens before a query that it attends at most: `pre_tockens` of the modes that read it."""
    prefixes: tuple[int, ...] = ()
    """Prefix of each of the N sequences; empty without prefixes."""
    chunk: int = 0
    """Under TND every `chunk` places of a sequence are a sequence of their own; 0 for the whole sequence."""
    counts_places: bool = False
    """Distances count places of the row, so that TND, which closes holes, would change them."""


def pattern_terms(segments: Segments, pattern: Pattern, *, tnd: bool, causal_mode: int) -> PatternTerms:
    """The terms of the simplest pattern that is the same attention over this batch; raises for an unknown kind."""
    if pattern.kind == "bidirectional":
        return PatternTerms(what="full attention", compressed="full", compressed_mode=0)
    prefixes = pattern.prefixes(segments.num_sequences)
    if any(prefixes):
        return PatternTerms(what="prefix", compressed="prefix", compressed_mode=6, dense_mode=5, prefixes=prefixes)
    size, longest = pattern.size, max((end - start for _, start, end in segments.spans), default=0)
    if pattern.kind in ("causal", "prefix") or size >= longest:
        return PatternTerms(what="causal", compressed="triangle", compressed_mode=causal_mode, dense_mode=0)
    if pattern.kind == "sliding":
        what = f"sliding window of {size}"
        return PatternTerms(
            what=what, compressed="band", compressed_mode=4, dense_mode=0, before=size - 1, counts_places=True
        )
    if pattern.kind != "chunked":
        rule, remedy = "No form of the operator is known for it.", "Pass dense(segments, polarity='masked', pattern=...)."
        raise UnsupportedFormError(explain("pattern", str(pattern), rule, remedy))
    if tnd:
        what = f"chunks of {size} are sequences of their own"
        return PatternTerms(what=what, compressed="triangle", compressed_mode=causal_mode, chunk=size)
    what = f"chunks of {size} in one matrix for all rows"
    return PatternTerms(what=what, compressed="shared", compressed_mode=0, dense_mode=0, before=size - 1)
