"""Guide: the pages that ship with the package, as text; a section of one, or those that have some words; what was measured
of one stack."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, takewhile
from pathlib import Path
from textwrap import wrap
from typing import Any

from collate_npu.errors import CollateError, did_you_mean, explain

COLUMNS = 80
"""Of a page: longer lines of what was printed go on in the next."""


def as_markdown(path: Path) -> str:
    """Return a notebook as Markdown: text as it is, code and what it printed as blocks. A script is one block."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"```python\n{text}```\n"
    cells = json.loads(text)["cells"]
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


MOST = 24
"""Lines of a list of sections."""
NOT_SEARCHED = ("index", "changelog", "contributing", "extending")
"""Pages that name others, or are for who works on this package."""
GUIDE = Path(__file__).parents[1] / "guide"
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')


def pages() -> dict[str, Path]:
    """Return the file of each page by its name."""
    found = sorted((*GUIDE.rglob("*.md"), *GUIDE.glob("*.ipynb"), *GUIDE.glob("examples/*.py")))
    return {path.relative_to(GUIDE).with_suffix("").as_posix(): path for path in found}


def list_pages() -> str:
    """Return every page with one line, under the headings of index.md, which has the list among its text."""
    lines = re.findall(r"^(?:## .+|\* \[.+\]\(\S+\): .+)$", read_page("index"), flags=re.M)
    kept = [line for line, after in zip(lines, [*lines[1:], "#"]) if line[0] == "*" or after[0] == "*"]
    listed = re.sub(r"\[[^\]]+\]\((\S+)\.(?:md|ipynb|py)\)", r"`\1`", "\n".join(kept))
    return re.sub(r"^(## .+)", r"\n\1\n", listed, flags=re.M).strip() + "\n\n`collate-npu guide NAME` shows one.\n"


def read_page(name: str) -> str:
    """Return the text of a page, of its section `page#section`, or what `_sections_with` finds.

    Raises `CollateError` where there is none, with the nearest.
    """
    names = pages()
    wanted, hashed, anchor = name.lower().partition("#")
    wanted = wanted.removesuffix(".md").removesuffix(".py")
    if wanted == "examples":
        first = {name: path.read_text("utf-8").partition("\n")[0] for name, path in names.items() if path.suffix == ".py"}
        return "".join(f"* `{name}`: {line[3:]}\n" for name, line in first.items())
    if wanted in names and names[wanted].suffix != ".md":
        return f"{as_markdown(names[wanted])}\nTo run it: {names[wanted]}\n"
    if wanted in names:
        text = names[wanted].read_text(encoding="utf-8")
        return _section(wanted, text, anchor) if hashed else text
    if sections := _sections_with(name):
        return sections
    rule, otherwise = "It is the name of a page, or words that a page has.", "`collate-npu guide` lists them."
    known = [*names, *(word for _, text in _parts_of_pages() for word in re.findall(r"[\w-]{5,}", text))]
    raise CollateError(explain("guide", name, rule, did_you_mean(wanted, known, otherwise)))


STACKS = Path(__file__).parent / "data" / "stacks.json"


def read_stacks(name: str = "") -> str:
    """Return the table of stacks, or for one stack its families, releases, line and reasons.

    Raises `CollateError` if no stack has these words, with the nearest.
    """
    if not name:
        return read_page("stacks")
    texts = json.loads(STACKS.read_text(encoding="utf-8"))
    legend, wanted = texts.pop(""), _plain(name)
    found = [text for each, text in texts.items() if _plain(each) == wanted]
    if found := found or [text for each, text in texts.items() if wanted in _plain(each)]:
        return "\n\n".join([legend, *found]) + "\n"
    rule, whole = "It is the name of a stack.", f"They are {', '.join(texts)}."
    raise CollateError(explain("stacks", name, rule, did_you_mean(name, texts, whole)))


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
    """Return the section that has these words, or the sections of errors that they name; of other sections a list, best
    first: words in the title, then how often. Numbers may be others than the page's.
    """
    parts = [*_parts_of_pages("zh/" if max(words, default="") >= "\u4e00" else "")]
    for read in (_plain, lambda text: re.sub(r"\d+", "0", _plain(text))):
        wanted = read(words)
        held = [part for part in parts if wanted and wanted in read(part[1])]
        if named := [(page, text) for page, text in parts if page == "errors" and _is_error(wanted, text, read)]:
            return "\n".join(f"# {page}\n\n{text.strip()}\n" for page, text in named)
        held = held or [part for part in parts if wanted and all(word in read(part[1]) for word in wanted.split())]
        if len(held) == 1:
            return f"# {held[0][0]}\n\n{held[0][1].strip()}\n"
        if held:
            counted = [(read(text).count(wanted), page, text) for page, text in held]
            counted.sort(key=lambda one: (wanted not in read(one[2].partition("\n")[0]), -one[0]))
            lines = [_line(page, text, times or 1) for times, page, text in counted]
            more = f"\n... {len(lines) - MOST} more" if len(lines) > MOST else ""
            return "\n".join(lines[:MOST]) + f"{more}\n\n`collate-npu guide PAGE#SECTION` shows one.\n"
    return ""


def _parts_of_pages(folder: str = "") -> Iterator[tuple[str, str]]:
    """Yield each section with the name of its page."""
    for page, path in pages().items():
        start, _, name = page.rpartition("/")
        if path.suffix == ".md" and name not in NOT_SEARCHED and start == folder.rstrip("/"):
            yield from ((page, part) for part in re.split(r"^(?=##+ )", path.read_text(encoding="utf-8"), flags=re.M))


def _line(page: str, text: str, times: int) -> str:
    """Return a line of the list: what to type, the title, and how often the words stand there."""
    heading = text.partition("\n")[0]
    place = f"{page}#{_names(heading)[0]}" if heading.startswith("##") else page
    return f"* `{place}`: {_ANCHOR.sub('', heading).lstrip('# ')} ({times})"


def _is_error(log: str, section: str, read: Callable[[str], str]) -> bool:
    """True if the section says these words, or names an error that stands in this line of a log, of nine letters or more."""
    says = re.search(r"^\*\*Says:\*\* (.+)$", section, flags=re.M)
    errors = [read(error) for error in re.findall(r"`+(.+?)`+", says[1] if says else "")]
    return any((len(error) > 8 and error in log) or (len(log) > 8 and log in error) for error in errors)


def _plain(text: str) -> str:
    """Return the text in small letters, as typed from memory: no quotes of code, no `<class ...>` around a name."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text.replace("`", "").replace("’", "'"))
    return " ".join(text.casefold().split())
