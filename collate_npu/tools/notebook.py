"""Notebook: one of the guide as a page of Markdown, with what its cells printed. Needs nothing of Jupyter's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

COLUMNS = 80
"""Of a page: longer lines of what was printed go on in the next."""


def as_markdown(path: Path) -> str:
    """Its cells in order: text as it is, code and what it printed as blocks."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def printed(cell: Mapping[str, Any]) -> str:
    """What a cell printed, and the text of its last line; not what libraries say of themselves."""
    outputs = cell.get("outputs", ())
    said = [each["text"] for each in outputs if each.get("name") == "stdout"]
    said += [each["data"].get("text/plain", "") for each in outputs if "data" in each]
    return "\n".join("".join(text).strip("\n") for text in said)


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
        return
    yield f"```python\n{text}\n```"
    if said := printed(cell):
        lines = (wrap(line, COLUMNS) if len(line) > COLUMNS else [line] for line in said.splitlines())
        yield "\n".join(["```text", *chain.from_iterable(lines), "```"])
