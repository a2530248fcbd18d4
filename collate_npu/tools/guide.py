"""Guide: the pages that ship with the package, as text; a section of one, or those that have some words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

from collate_npu.errors import CollateError, explain

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


GUIDE = Path(__file__).parents[1] / "guide"
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')


def listed() -> str:
    """Every page with one line, under the headings of index.md, which is the list."""
    pages = page("index").partition("\n## ")[2]
    return re.sub(r"\[[^\]]+\]\((\S+)\.(?:md|ipynb)\)", r"`\1`", f"## {pages}\n`collate-npu guide NAME` shows one.\n")


def page(name: str) -> str:
    """The text of a page, of its section `page#section`, or of the sections with these words. Raises where there is none,
    with the nearest."""
    pages = sorted((*GUIDE.rglob("*.md"), *GUIDE.glob("*.ipynb")))
    names = {path.relative_to(GUIDE).with_suffix("").as_posix(): path for path in pages}
    wanted, hashed, anchor = name.lower().partition("#")
    wanted = wanted.removesuffix(".md")
    if wanted in names:
        if names[wanted].suffix == ".ipynb":
            return f"{as_markdown(names[wanted])}\nTo run it: {names[wanted]}\n"
        text = names[wanted].read_text(encoding="utf-8")
        return _section(wanted, text, anchor) if hashed else text
    if sections := found(name):
        return sections
    rule = "It is the name of a page, or words that a page has."
    raise CollateError(explain("guide", name, rule, f"{_near(wanted, names)}`collate-npu guide` lists them."))


def _section(name: str, text: str, anchor: str) -> str:
    """Return a section, from its heading to the next that is no lower."""
    parts = re.split(r"^(?=##+ )", text, flags=re.M)
    at = {name: n for n, part in reversed([*enumerate(parts)]) for name in _names(part.partition("\n")[0])}
    if anchor not in at:
        rule = "It is the name of a section of that page."
        remedy = f"{_near(anchor, at)}`collate-npu guide {name}` shows the whole page."
        raise CollateError(explain("guide", f"{name}#{anchor}", rule, remedy))
    kept, *below = parts[at[anchor] :]
    level = kept.partition(" ")[0]
    for part in below:
        if not part.startswith(f"{level}#"):
            break
        kept += part
    return _ANCHOR.sub("", kept).strip() + "\n"


def _names(heading: str) -> list[str]:
    """What links call it: its own anchor, or its words as a site writes them."""
    words = re.sub(r"[^\w\s-]", "", _ANCHOR.sub("", heading)).strip().lower()
    return [*_ANCHOR.findall(heading), re.sub(r"\s+", "-", words)]


def _near(name: str, known: Iterable[str]) -> str:
    return "".join(f"Did you mean {one}? " for one in get_close_matches(name, known, n=1))


def found(words: str) -> str:
    """The sections that have these words, or an error that the words tell: the page of errors first, each under its page's
    name. Numbers may be others than the page's.
    """
    sections = []
    for path in sorted(GUIDE.glob("*.md"), key=lambda path: (path.stem != "errors", path.stem)):
        parts = re.split(r"^(?=##)", path.read_text(encoding="utf-8"), flags=re.M)
        if path.stem not in ("changelog", "index"):  # the list names pages, and tells nothing
            sections += [(path.stem, part) for part in parts]
    for read in (_plain, _without_numbers):
        sought = read(words)
        hits = [(stem, part) for stem, part in sections if sought in read(part) or _tells(sought, part, read)]
        if sought and hits:
            return "\n".join(f"# {stem}\n\n{part.strip()}\n" for stem, part in hits)
    return ""


def _tells(sought: str, section: str, read: Callable[[str], str]) -> bool:
    """True if the words are a line of a log with an error in it that this section names."""
    said = re.search(r"^\*\*Says:\*\* (.+)$", section, flags=re.M)
    return any(len(error) > 8 and read(error) in sought for error in re.findall(r"`+(.+?)`+", said[1] if said else ""))


def _plain(text: str) -> str:
    """Return the text in small letters, as typed from memory: no quotes of code, no `<class ...>` around a name."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text.replace("`", "").replace("’", "'"))
    return " ".join(text.casefold().split())


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", _plain(text))
