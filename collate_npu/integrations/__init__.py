"""Integrations: a thin file or folder for each trainer, imported only when used;
`PACKAGE, TESTED = "its package", "the release that was run"`, unless `releases` has both."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from collate_npu.releases import RUN_RELEASES

_LINE = re.compile(r'^PACKAGE, TESTED = "(.+)", "(.+)"$', flags=re.M)


@cache
def trainers() -> dict[str, str]:
    """Return each package that an integration is for, with the newest release that was run. Nothing is imported.

    >>> trainers()["ms-swift"]
    '4.6.0'
    """
    texts = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.rglob("*.py"))]
    named = {package: tested for text in texts for package, tested in _LINE.findall(text)}
    return {**named, **{package: newest for package, (_, newest) in RUN_RELEASES.items() if package != "torch"}}
