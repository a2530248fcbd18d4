"""Guide: the pages that ship with the package, as text; a section of one, or those that have some words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, takewhile
from pathlib import Path
from textwrap import wrap
from typing import Any

from collate_npu.errors import CollateError, explain
from collate_npu.tools.user_code import did_you_mean

COLUMNS = 80
"""Of a page: longer lines of what was printed go on in the next."""


def as_markdown(path: Path) -> str:
    """Return a notebook as Markdown: text as it is, code and what it printed as blocks."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def printed(cell: Mapping[str, Any]) -> str:
    """Return what a cell printed, and the text of its last line; not what libraries print of themselves."""
    outputs = cell.get("outputs", ())
    texts = [each["text"] for each in outputs if each.get("name") == "stdout"]
    texts += [each["data"].get("text/plain", "") for each in outputs if "data" in each]
    return "\n".join("".join(text).strip("\n") for text in texts)


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
        return
    yield f"```python\n{text}\n```"
    if output := printed(cell):
        lines = (wrap(line, COLUMNS) if len(line) > COLUMNS else [line] for line in output.splitlines())
        yield "\n".join(["```text", *chain.from_iterable(lines), "```"])


GUIDE = Path(__file__).parents[1] / "guide"
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')


def list_pages() -> str:
    """Return every page with one line, under the headings of index.md, which is the list."""
    pages = read_page("index").partition("\n## ")[2]
    return re.sub(r"\[[^\]]+\]\((\S+)\.(?:md|ipynb)\)", r"`\1`", f"## {pages}\n`collate-npu guide NAME` shows one.\n")


def read_page(name: str) -> str:
    """Return the text of a page, of its section `page#section`, or of the sections with these words.

    Raises `CollateError` where there is none, with the nearest.
    """
    pages = sorted((*GUIDE.rglob("*.md"), *GUIDE.glob("*.ipynb")))
    names = {path.relative_to(GUIDE).with_suffix("").as_posix(): path for path in pages}
    wanted, hashed, anchor = name.lower().partition("#")
    wanted = wanted.removesuffix(".md")
    if wanted in names:
        if names[wanted].suffix == ".ipynb":
            return f"{as_markdown(names[wanted])}\nTo run it: {names[wanted]}\n"
        text = names[wanted].read_text(encoding="utf-8")
        return _section(wanted, text, anchor) if hashed else text
    if sections := _sections_with(name):
        return sections
    rule = "It is the name of a page, or words that a page has."
    raise CollateError(explain("guide", name, rule, did_you_mean([wanted], names, "`collate-npu guide` lists them.")))


def _section(name: str, text: str, anchor: str) -> str:
    """Return a section, from its heading to the next that is no lower."""
    parts = re.split(r"^(?=##+ )", text, flags=re.M)
    at = {name: n for n, part in reversed([*enumerate(parts)]) for name in _names(part.partition("\n")[0])}
    if anchor not in at:
        rule, whole = "It is the name of a section of that page.", f"`collate-npu guide {name}` shows the whole page."
        raise CollateError(explain("guide", f"{name}#{anchor}", rule, did_you_mean([anchor], at, whole)))
    first, *below = parts[at[anchor] :]
    level = first.partition(" ")[0]
    kept = takewhile(lambda part: part.startswith(f"{level}#"), below)
    return _ANCHOR.sub("", "".join([first, *kept])).strip() + "\n"


def _names(heading: str) -> list[str]:
    """Return what links call it: its own anchor, or its words as a site writes them."""
    words = re.sub(r"[^\w\s-]", "", _ANCHOR.sub("", heading)).strip().lower()
    return [*_ANCHOR.findall(heading), re.sub(r"\s+", "-", words)]


def _sections_with(words: str) -> str:
    """Return the sections that have these words, or an error that the words name: the page of errors first, each under its
    page's name. Numbers may be others than the page's.
    """
    sections = []
    for path in sorted(GUIDE.glob("*.md"), key=lambda path: (path.stem != "errors", path.stem)):
        if path.stem not in ("changelog", "contributing", "index"):  # what explains nothing to a user
            parts = re.split(r"^(?=##)", path.read_text(encoding="utf-8"), flags=re.M)
            sections += [(path.stem, part) for part in parts]
    for read in (_plain, _without_numbers):
        wanted = read(words)
        hits = [(stem, part) for stem, part in sections if wanted in read(part) or _names_error_in(wanted, part, read)]
        if wanted and hits:
            return "\n".join(f"# {stem}\n\n{part.strip()}\n" for stem, part in hits)
    return ""


def _names_error_in(log: str, section: str, read: Callable[[str], str]) -> bool:
    """True if a section names an error, of nine letters or more, that stands in this line of a log."""
    says = re.search(r"^\*\*Says:\*\* (.+)$", section, flags=re.M)
    return any(len(error) > 8 and read(error) in log for error in re.findall(r"`+(.+?)`+", says[1] if says else ""))


def _plain(text: str) -> str:
    """Return the text in small letters, as typed from memory: no quotes of code, no `<class ...>` around a name."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text.replace("`", "").replace("’", "'"))
    return " ".join(text.casefold().split())


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", _plain(text))
