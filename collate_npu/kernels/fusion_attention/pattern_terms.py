"""A pattern in the operator's terms: the one place of this room that asks what kind of pattern it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collate_npu.kernels.fusion_attention.geometry import UNLIMITED
from collate_npu.masks.patterns import Bidirectional, Chunked, Pattern, Prefix, Sliding
from collate_npu.segments import Segments

CompressedName = Literal["full", "triangle", "band", "prefix", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternTerms:
    """How the operator can compute one pattern over one batch."""

    what: str
    """The pattern in words."""
    compressed: CompressedName | None
    """The form that is exact where nothing but the pattern blocks, and its sparse mode; None where only a mask says it."""
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
    """The terms of the simplest pattern that is the same attention over this batch; a dense mask for one unknown here."""
    if not pattern.reaches(segments.longest_span):
        return PatternTerms(what="causal", compressed="triangle", compressed_mode=causal_mode, dense_mode=0)
    if isinstance(pattern, Bidirectional):
        return PatternTerms(what="full attention", compressed="full", compressed_mode=0)
    if isinstance(pattern, Prefix):
        prefixes = pattern.of_each(segments.num_sequences)
        return PatternTerms(what="prefix", compressed="prefix", compressed_mode=6, dense_mode=5, prefixes=prefixes)
    if isinstance(pattern, Sliding):
        what, before = f"sliding window of {pattern.size}", pattern.size - 1
        return PatternTerms(what=what, compressed="band", compressed_mode=4, dense_mode=0, before=before, counts_places=True)
    if isinstance(pattern, Chunked) and tnd:
        what = f"chunks of {pattern.size} are sequences of their own"
        return PatternTerms(what=what, compressed="triangle", compressed_mode=causal_mode, chunk=pattern.size)
    if isinstance(pattern, Chunked):
        what, before = f"chunks of {pattern.size} in one matrix for all rows", pattern.size - 1
        return PatternTerms(what=what, compressed="shared", compressed_mode=0, dense_mode=0, before=before)
    return PatternTerms(what=str(pattern), compressed=None, compressed_mode=1)
