"""Integrations: a thin file or folder for each trainer, imported only when used;
`PACKAGE, TESTED = "its package", "the release that was run"`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_SAID = re.compile(r'^PACKAGE, TESTED = "(.+)", "(.+)"$', flags=re.M)


@cache
def trainers() -> dict[str, tuple[str, str]]:
    """Module of an integration -> its package and the release that was run. Nothing is imported.

    >>> trainers()["swift"][0], trainers()["megatron.mcore_bridge"][0]
    ('ms-swift', 'mcore-bridge')
    """
    room, told = Path(__file__).parent, {}
    for path in sorted(room.rglob("*.py")):
        if found := _SAID.search(path.read_text("utf-8")):
            module = ".".join(path.relative_to(room).with_suffix("").parts)
            told[module.removesuffix(".__init__")] = (found[1], found[2])
    return told
