"""Show: a batch in words, and its masks as a picture of `■` (attends, real) and `⬚` (blocked, padding).

For people: costs O(Q * K) characters for what is drawn, and reads tensors back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.derive import derive_segments
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.polarity import BLOCKED_BELOW, Polarity
from collate_npu.segments import Segments

KEEP, GONE = "■", "⬚"


def picture(shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, limit: int = 64) -> str:
    """A batch, its `Segments`, or a mask, drawn.

    Segments: one line a row of the batch, digits where a row holds several sequences. A 4D mask: one square for each row
    (or for `row`), side by side, True drawn as it attends where its polarity can be proved and as True where not. At
    most `limit` columns are drawn of each. A mask that is refused is drawn too, with the reason beside it.

        >>> print(picture(Segments.from_lengths([3, 5], side="left")))
        ⬚ ⬚ ■ ■ ■
        ■ ■ ■ ■ ■
    """
    if isinstance(shown, Segments):
        return _segments(shown, limit)
    if isinstance(shown, Tensor):
        return _alone(shown, row, limit)
    carried = shown.get("attention_mask")
    masks = {**carried} if isinstance(carried, Mapping) else {"attention_mask": carried}
    try:
        drawn = _segments(segments_from_batch(shown), limit)
        parts = [f"{KEEP_KEY if KEEP_KEY in shown else 'segments'}\n{drawn}"]
        least = 3  # what a 2D mask says is drawn already
    except CollateError as error:
        parts, least = [f"refused: {error}"], 2
        masks = {KEEP_KEY: shown.get(KEEP_KEY), **masks}
    drawable = {key: x for key, x in masks.items() if isinstance(x, Tensor) and least <= x.ndim <= 4}
    return "\n\n".join([*parts, *(f"{key}\n{_drawn(x, row, limit)}" for key, x in drawable.items())])


def _segments(segments: Segments, limit: int) -> str:
    def drawn(i: int) -> str:
        return GONE if not i else KEEP if not segments.packed else "123456789"[(i - 1) % 9]

    more = " ..." if segments.shape[1] > limit else ""
    return "\n".join(" ".join(map(drawn, ids[:limit])) + more for ids in segments.ids.tolist())


def _alone(x: Tensor, row: int | None, limit: int) -> str:
    """A mask without its batch: as a padding mask where it is one, else as it stands, with what speaks against it."""
    if not 2 <= x.ndim <= 4:
        raise CollateError(explain("mask", shape_of(x), "Masks have two to four dimensions.", "Pass one of them."))
    try:
        segments = derive_segments(x)
    except CollateError as error:
        return f"{_drawn(x, row, limit)}\n\nrefused: {error}"
    return _segments(segments, limit) if x.ndim == 2 else _drawn(x, row, limit)


def _drawn(x: Tensor, row: int | None, limit: int) -> str:
    """The rows of a 2D mask one below another, the squares of any other side by side."""
    attends = _attends(x)
    squares = attends[None] if x.ndim == 2 else attends.flatten(0, -3)
    chosen = squares if row is None else squares[row : row + 1]
    blocks = [_square(square[:limit, :limit], x.shape[-1] > limit) for square in chosen]
    return "\n".join("   ".join(lines) for lines in zip(*blocks))


def _attends(x: Tensor) -> Tensor:
    if x.is_floating_point() and bool((x <= BLOCKED_BELOW).any()):
        return x > BLOCKED_BELOW
    return x == 0 if _possible(x, "masked") and not _possible(x, "keep") else x != 0


def _possible(x: Tensor, polarity: Polarity) -> bool:
    try:
        derive_segments(x, polarity=polarity)
    except CollateError:
        return False
    return True


def _square(attends_QK: Tensor, cut: bool) -> list[str]:
    return [" ".join(KEEP if cell else GONE for cell in line) + (" ..." if cut else "") for line in attends_QK.tolist()]
