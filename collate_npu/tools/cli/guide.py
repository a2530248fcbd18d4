"""`collate-npu guide`: the pages that ship with the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from collate_npu.errors import CollateError, explain
from collate_npu.tools.cli.console import needs
from collate_npu.tools.paper import screen

GUIDE = Path(__file__).parents[2] / "guide"

EXAMPLES = (
    "Examples:\n\n`collate-npu guide` — the list\n\n`collate-npu guide ms-swift`\n\n`collate-npu guide masked_select`\n\n"
    "`collate-npu guide zh/index`"
)


@needs()
def guide_command(
    name: Annotated[list[str] | None, typer.Argument(help="A page, or words of an error; else the list.")] = None,
) -> None:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means."""
    text, console = page(" ".join(name)) if name else listed(), screen()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text, nl=False)


def listed() -> str:
    """Every page with one line, under the headings of index.md, which is the list."""
    pages = page("index").partition("\n## ")[2]
    return re.sub(r"\[[^\]]+\]\((\S+)\.md\)", r"`\1`", f"## {pages}\n`collate-npu guide NAME` shows one.\n")


def page(name: str) -> str:
    """The text of a page, or the sections with these words. Raises where there is none, with the nearest page."""
    names = {path.relative_to(GUIDE).with_suffix("").as_posix(): path for path in sorted(GUIDE.rglob("*.md"))}
    wanted = name.removesuffix(".md").lower()
    if wanted not in names:
        if sections := found(name):
            return sections
        near = "".join(f"Did you mean {one}? " for one in get_close_matches(wanted, names, n=1))
        rule = "It is the name of a page, or words that a page has."
        raise CollateError(explain("guide", name, rule, f"{near}`collate-npu guide` lists them."))
    return names[wanted].read_text(encoding="utf-8")


def found(words: str) -> str:
    """The sections that have these words, or an error that the words tell: symptoms first, each under its page's name.

    Numbers may be others than the page's.
    """
    sections = []
    for path in sorted(GUIDE.glob("*.md"), key=lambda path: (path.stem != "troubleshooting", path.stem)):
        parts = re.split(r"^(?=##)", path.read_text(encoding="utf-8"), flags=re.M)
        if path.stem != "changelog":
            kept = parts[1:] if path.stem == "troubleshooting" else parts  # without its table
            sections += [(path.stem, part) for part in kept]
    for read in (_plain, _without_numbers):
        sought = read(words)
        hits = [(stem, part) for stem, part in sections if sought in read(part) or _tells(sought, part, read)]
        if sought and hits:
            return "\n".join(f"# {stem}\n\n{part.strip()}\n" for stem, part in hits)
    return ""


def _tells(sought: str, section: str, read: Callable[[str], str]) -> bool:
    """Are the words a whole line of a log, with an error in it that this section names?"""
    said = re.search(r"^\*\*Says:\*\* (.+)$", section, flags=re.M)
    return any(len(error) > 8 and read(error) in sought for error in re.findall(r"`+(.+?)`+", said[1] if said else ""))


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").casefold().split())


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", _plain(text))
