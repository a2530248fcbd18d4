"""`collate-npu guide`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

from collate_npu.tools.cli.console import Option
from collate_npu.tools.guide import listed, page

EXAMPLES = (
    "Examples:\n\n`collate-npu guide` — the list\n\n`collate-npu guide ms-swift`\n\n`collate-npu guide errors#polarity`\n\n"
    "`collate-npu guide masked_select` — the words of an error\n\n`collate-npu guide zh/index`"
)


def guide_command(
    name: Annotated[list[str] | None, Option("A page, page#section, words of an error; or the list.", ("name",))] = None,
) -> int:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means."""
    text = page(" ".join(name)) if name else listed()
    if find_spec("rich"):
        from collate_npu.tools.paper import Page, screen

        if screen().is_terminal:
            screen().print(Page(text))
            return 0
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0
