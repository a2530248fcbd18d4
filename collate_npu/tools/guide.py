"""Guide: a page that ships with the package, as text, a section of it, or the sections that have some words."""

from __future__ import annotations

import re
from itertools import takewhile
from math import log
from pathlib import Path

from collate_npu.errors import CollateError, did_you_mean, explain

GUIDE = Path(__file__).parents[1] / "guide"
NOT_SEARCHED = ("index", "changelog", "contributing", "extending")
"""Pages that list others, or are for people who work on this package."""
MOST_HITS = 24  # lines of a list of sections
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')


def pages() -> dict[str, Path]:
    """Return the file of each page by its name."""
    found = sorted((*GUIDE.rglob("*.md"), *GUIDE.glob("*.ipynb"), *GUIDE.glob("examples/*.py")))
    return {path.relative_to(GUIDE).with_suffix("").as_posix(): path for path in found}


def read_page(name: str) -> str:
    """Return the text of a page, of its section `page#section`, or the sections that have these words.

    Raises `CollateError` if there is none, with the nearest names.
    """
    names = pages()
    wanted, hashed, anchor = re.sub(r"\.(md|py)(?=#|$)", "", name.lower()).partition("#")
    if (path := names.get(wanted)) is not None:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            return _section(wanted, text, anchor) if hashed else text
        return f"```python\n{text}```\n\n" * (path.suffix == ".py") + f"To run it: {path}\n"
    if found := _search(name):
        return found
    rule, otherwise = "It is the name of a page, or words that a page has.", "`collate-npu guide` shows the first page."
    raise CollateError(explain("guide", name, rule, did_you_mean(wanted, names, otherwise)))


def _section(page: str, text: str, anchor: str) -> str:
    """Return a section, from its heading to the next that is no lower."""
    parts = _split(text)
    at = {name: n for n, part in reversed([*enumerate(parts)]) for name in _anchors(part)}
    if anchor not in at:
        rule, whole = "It is the name of a section of that page.", f"`collate-npu guide {page}` shows the whole page."
        raise CollateError(explain("guide", f"{page}#{anchor}", rule, did_you_mean([anchor], at, whole)))
    first, *below = parts[at[anchor] :]
    kept = takewhile(lambda part: part.startswith(f"{first.partition(' ')[0]}#"), below)
    return _ANCHOR.sub("", "".join([first, *kept])).strip() + "\n"


def _split(text: str) -> list[str]:
    return re.split(r"^(?=##+ )", text, flags=re.M)


def _anchors(section: str) -> list[str]:
    """Return the names by which links call a section: its own anchors, and its heading as a site writes it."""
    heading = section.partition("\n")[0]
    words = re.sub(r"[^\w\s-]", "", _ANCHOR.sub("", heading)).strip().lower()
    return [*_ANCHOR.findall(heading), re.sub(r"\s+", "-", words)]


def _search(words: str) -> str:
    """Return the section that has these words; of several a list, best first: words in the title, then how often. A line of
    a log finds the section of `errors` that names its error: the numbers in it may differ. An error of ours finds the
    section that it names; of other words no section has, those that share most of them are listed."""
    if pointed := re.search(r"collate-npu guide (errors#[\w-]+)", words):
        return read_page(pointed[1])
    folder, wanted = GUIDE / "zh" if max(words, default="") >= "\u4e00" else GUIDE, _plain(words)
    searched = {name: path for name, path in pages().items() if path.suffix == ".md" and name not in NOT_SEARCHED}
    texts = {name: path.read_text(encoding="utf-8") for name, path in searched.items() if path.parent == folder}
    parts = [(page, part, _plain(part)) for page, text in texts.items() for part in _split(text)]
    named = [part for part in parts if part[0] == "errors" and _names_error(part[1], words)]
    held = named or [part for part in parts if wanted and wanted in part[2]]
    held.sort(key=lambda part: (wanted not in _plain(part[1].partition("\n")[0]), -part[2].count(wanted)))
    nearest = [] if held else _ranked(parts, _words(wanted))
    held = held or [part for part in nearest if _words(wanted) <= _words(part[2])] or nearest[: 5 * (" " in wanted)]
    if named or len(held) < 2:
        return "\n".join(f"# {page}\n\n{text.strip()}\n" for page, text, _ in held)
    more = f"\n... {len(held) - MOST_HITS} more" if len(held) > MOST_HITS else ""
    heads = [(page, text.partition("\n")[0]) for page, text, _ in held[:MOST_HITS]]
    places = (f"{page}#{_anchors(head)[0]}" if head.startswith("##") else page for page, head in heads)
    lines = [f"* `{place}`: {_ANCHOR.sub('', head).lstrip('# ')}" for place, (_, head) in zip(places, heads)]
    return "\n".join(lines) + f"{more}\n\n`collate-npu guide PAGE#SECTION` shows one.\n"


def _ranked(parts: list[tuple[str, str, str]], words: set[str]) -> list[tuple[str, str, str]]:
    """Return the sections that have some of these words, best first: rare words, short sections and `errors` count more."""
    texts = [_words(f"{page.replace('-', ' ')} {text}") for page, _, text in parts]
    rare = {word: log(1 + len(parts) / n) for word in words if (n := sum(word in text for text in texts))}
    found = [sum(rare[w] * (1 + 2 * (w in page)) for w in rare.keys() & text) for (page, *_), text in zip(parts, texts)]
    shares = [(1 + (page == "errors")) * n / (99 + len(text)) for (page, *_), n, text in zip(parts, found, texts)]
    best = sorted(range(len(parts)), key=lambda at: -shares[at])
    return [parts[at] for at in best if shares[at]]


def _words(text: str) -> set[str]:
    """Return the words of a text, without the ending of plurals."""
    return {re.sub(r"(?<=ch)es$|(?<=...)'?s$", "", word) for word in re.findall(r"\w[\w'-]*", text)}


def _names_error(section: str, log: str) -> bool:
    """Return True if the section's **Says** has these words, or an error that stands in them, of nine letters or more."""
    says = re.search(r"^\*\*Says:\*\* (.+)$", section, flags=re.M)
    log, *errors = (re.sub(r"\d+", "0", _plain(text)) for text in (log, *re.findall(r"`+(.+?)`+", says[1] if says else "")))
    return any((len(error) > 8 and error in log) or (len(log) > 8 and log in error) for error in errors)


def _plain(text: str) -> str:
    """Return the text as typed from memory: in small letters, without quotes of code and without `<class ...>`."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text.replace("`", "").replace("’", "'"))
    return " ".join(text.casefold().split())
