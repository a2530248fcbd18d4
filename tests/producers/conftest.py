"""A table at the end of the run: for each producer and style, how many batches were right, refused and failed."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

KINDS = ("right", "refused", "unfair", "raw", "wrong")
"""`unfair`: refused although nothing is ambiguous."""
_SEEN: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)


@pytest.fixture(scope="session")
def summary() -> Iterator[dict[tuple[str, str, str], Counter[str]]]:
    """Counts by producer, style and entry."""
    yield _SEEN
    if path := os.environ.get("COLLATE_NPU_PRODUCERS_JSON"):
        with open(path, "w") as file:
            json.dump([[*key, dict(counts)] for key, counts in _SEEN.items()], file)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _SEEN:
        return
    write = terminalreporter.write_line
    terminalreporter.section("producers: " + " / ".join(KINDS))
    styles = sorted({style for _, style, _ in _SEEN})
    for name in dict.fromkeys(name for name, _, _ in _SEEN):
        write(f"{name:34}" + "  ".join(f"{style} {_cell(name, style)}" for style in styles if _cell(name, style)))
    write("")
    for entry in dict.fromkeys(entry for _, _, entry in _SEEN):
        write(f"{entry:30}" + _total(entry=entry))
    write(f"{'all':30}" + _total())


def _cell(name: str, style: str) -> str:
    counts = sum((seen for (n, s, _), seen in _SEEN.items() if (n, s) == (name, style)), Counter())
    return "/".join(str(counts[kind]) for kind in KINDS) if counts else ""


def _total(entry: str | None = None) -> str:
    counts = sum((seen for (_, _, e), seen in _SEEN.items() if entry in (None, e)), Counter())
    return "  ".join(f"{kind} {counts[kind]}" for kind in KINDS)
