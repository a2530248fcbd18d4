"""Blocks of Markdown, and the output shown below them. Imports nothing: the environment of `nox -s package` has no torch."""

import re
from itertools import pairwise


def blocks_of(text: str) -> list[tuple[str, str, str]]:
    """Each block: its language, what it holds, and the line before it."""
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S)
    return [(m[1], m[2], text[: m.start()].rstrip().rpartition("\n")[2]) for m in found]


def shown_in(text: str, language: str) -> list[tuple[str, str, str]]:
    """Blocks of a language: what they hold, the output shown below ("" where none is), and the paragraph before."""
    pairs = pairwise([*blocks_of(text), ("", "", "")])
    return [(code, after * (kind == "text"), before) for (name, code, before), (kind, after, _) in pairs if name == language]


def assert_shown(output: str, printed: str) -> None:
    """`...` stands for what may differ; spaces at the end of a line are not seen."""
    lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
    wanted = ".*".join(map(re.escape, re.split(r"\n?\.\.\.\n?", output.rstrip())))
    assert re.fullmatch(wanted, lines, flags=re.S), printed
