"""Pictures: a batch, its Segments or a mask, drawn with `■` (attends, real) and `⬚` (blocked, padding).

For people: what is wide is folded by blocks, which costs O(Q * K) time for each square, and tensors are read back to the
host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from collate_npu.segments import Segments
from collate_npu.tools.show.sheet import Sheet, sheet_of
from collate_npu.tools.show.text import plain


class Picture(str):
    """Text to print; in a notebook a page in colours, which `html` holds and `save` writes."""

    __slots__ = ("sheet",)
    sheet: Sheet

    @property
    def html(self) -> str:
        """One self-contained page: figures and a table of tokens. Needs matplotlib."""
        from collate_npu.tools.show.saving import html_of

        return html_of(self.sheet)

    def save(self, path: str | Path) -> None:
        """Write `.png`, `.svg` or `.html`, by the name's ending. Needs matplotlib. Raises for any other ending."""
        from collate_npu.tools.show.saving import save

        save(self.sheet, Path(path))

    def _repr_html_(self) -> str | None:
        """For notebooks; without matplotlib they show the text."""
        from collate_npu.tools.show.figure import has_matplotlib

        return self.html if has_matplotlib() else None


def picture(
    shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, limit: int = 64, tokenizer: Any = None
) -> Picture:
    """A batch, its `Segments`, or a mask, drawn.

    Segments: one line a row of the batch, digits where a row holds several sequences. A 4D mask: one square for each row
    (or for `row`), side by side, True drawn as it attends where its polarity can be proved and as True where not. A mask
    that is refused is drawn too, with the reason: `+` attends where it ought not to, `-` is blocked where it ought to
    attend. What is wider than `limit` places is folded: a cell stands for a block of places, `◧` where only some of them
    attend. With a `tokenizer` the page in a notebook names the tokens.

        >>> print(picture(Segments.from_lengths([3, 5], side="left")))
        ⬚ ⬚ ■ ■ ■
        ■ ■ ■ ■ ■
    """
    sheet = sheet_of(shown, row=row, tokenizer=tokenizer)
    drawn = Picture(plain(sheet, limit))
    drawn.sheet = sheet
    return drawn
