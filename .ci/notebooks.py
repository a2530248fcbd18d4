"""Runs the guide's notebooks in a kernel, as a reader does: an output that is not the one they hold is an error.

`python .ci/notebooks.py --write` puts what came out into them.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def printed(cell: Any) -> str:
    """Return what a cell printed, and the text of its last line; not what it wrote to stderr."""
    outputs = cell.get("outputs", ())
    texts = [each["text"] for each in outputs if each.get("name") == "stdout"]
    texts += [each["data"].get("text/plain", "") for each in outputs if "data" in each]
    return "\n".join("".join(text).strip("\n") for text in texts)


def main(write: bool) -> int:
    wrong = 0
    for path in sorted((ROOT / "collate_npu" / "guide").glob("*.ipynb")):
        held = nbformat.read(path, as_version=4)
        ran = NotebookClient(copy.deepcopy(held), timeout=120, record_timing=False).execute()
        for n, (before, now) in enumerate(zip(held.cells, ran.cells), 1):
            if now.cell_type == "code" and printed(before) != printed(now):
                wrong += 1
                print(f"{path.name}, cell {n} holds:\n{printed(before)}\nand printed:\n{printed(now)}")
        if write:
            for cell in ran.cells:  # what libraries say on stderr differs from one machine to the next
                cell.get("outputs", [])[:] = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
            ran.metadata = held.metadata
            nbformat.write(ran, path)
    return 0 if write else min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
