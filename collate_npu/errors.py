"""The errors a user can meet. Every message says: key and row, what arrived, the rule, the remedy."""

from __future__ import annotations

from collections.abc import Iterable

REMEDY_CARRY_2D = "Carry attention_mask_2d (with segment_ids, where rows are packed) from the collator beside it."
REMEDY_DECLARE_POLARITY = "Pass polarity='keep' (True attends), 'masked' (True is blocked) or 'bias' (additive)."
RULE_SAME_TOKENS = "All masks of a batch describe the same tokens."


class CollateError(ValueError):
    """A batch, a mask or a setting that cannot be read one way only; nothing was guessed."""


class PolarityError(CollateError):
    """True could mean "attend" or "blocked" and the tensor itself does not tell."""


class AmbiguousMaskError(CollateError):
    """Two different paddings or packings give exactly this tensor."""


class UnsupportedFormError(CollateError):
    """The consumer has no form in which this batch would be computed correctly."""


def explain(where: str, got: str, rule: str, remedy: str) -> str:
    """One line of four facts, in the order a reader asks for them."""
    return f"{where}: got {got}. {rule} {remedy}"


def explain_rows(key: str, rows: Iterable[tuple[int, str]], rule: str, remedy: str) -> str:
    """Like `explain`, for every bad row of one key at once."""
    listed = sorted(rows)
    head = f"{key}: {len(listed)} bad row{'s' if len(listed) != 1 else ''}."
    return "\n".join([head, *(f"  row {row}: got {got}" for row, got in listed), rule, remedy])


def shape_of(tensor: object) -> str:
    """`int64 [2, 8]`: what arrived, in the words of an error message."""
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    return f"{dtype} {list(getattr(tensor, 'shape', []))}"
