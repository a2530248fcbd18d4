"""`collate-npu guide`: the pages that ship with the package."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from collate_npu.errors import CollateError, explain
from collate_npu.tools.cli.console import needs
from collate_npu.tools.paper import screen

GUIDE = Path(__file__).parents[2] / "guide"

EXAMPLES = "Examples:\n\n`collate-npu guide` — the list\n\n`collate-npu guide ms-swift`\n\n`collate-npu guide zh/index`"


@needs()
def guide_command(name: Annotated[str, typer.Argument(help="A page; without one: the list of pages.")] = "") -> None:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means."""
    text, console = page(name) if name else listed(), screen()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text, nl=False)


def listed() -> str:
    """Every page with one line, under the headings of index.md, which is the list."""
    pages = page("index").partition("\n## ")[2]
    return re.sub(r"\[[^\]]+\]\((\S+)\.md\)", r"`\1`", f"## {pages}\n`collate-npu guide NAME` shows one.\n")


def page(name: str) -> str:
    """The text of a page. Raises where there is none of that name, with the nearest one."""
    names = {path.relative_to(GUIDE).with_suffix("").as_posix(): path for path in sorted(GUIDE.rglob("*.md"))}
    wanted = name.removesuffix(".md").lower()
    if wanted not in names:
        near = "".join(f"Did you mean {one}? " for one in get_close_matches(wanted, names, n=1))
        rule = "Pages are named as in the list."
        raise CollateError(explain("guide", name, rule, f"{near}`collate-npu guide` lists them."))
    return names[wanted].read_text(encoding="utf-8")
