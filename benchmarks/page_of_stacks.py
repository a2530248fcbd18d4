"""`python -m benchmarks.page_of_stacks`: the guide's page of stacks, from what the peers sessions measured.

`COLLATE_NPU_CELLS=1 nox -s SESSION` writes `benchmarks/stacks/STACK.json` (tests/peers/cells.py), `nox -s upstream` what
stands last; by hand only what stands before the tables, in `head.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "collate_npu" / "guide" / "stacks.md"
NEWER = HERE / "upstream.json"
LAYOUTS = ("padded right", "padded left", "packed", "packed, kernels there", "context parallel")
WORST = ("wrong", "refused", "not run", "right")


def page() -> str:
    """The whole page."""
    stacks = [json.loads(path.read_text("utf-8")) for path in sorted((HERE / "stacks").glob("*.json"))]
    head = (HERE / "stacks" / "head.md").read_text("utf-8")
    first = table("stack", [(_linked(each["stack"]), each["cells"]) for each in stacks])
    return "\n\n".join([head.strip(), first, *map(_section, stacks), newer(json.loads(NEWER.read_text("utf-8")))]) + "\n"


def _section(stack: dict[str, Any]) -> str:
    cells, releases = stack["cells"], ", ".join(f"{name} {release}" for name, release in stack["releases"].items())
    families = dict.fromkeys(cell["family"] for cell in cells)
    lines = dict.fromkeys(cell["line"] for cell in cells)
    rows = table("family", [(name, [cell for cell in cells if cell["family"] == name]) for name in families])
    said = [f"`{stack['command']}`; {releases}. Our line: {', '.join(f'`{line}`' for line in lines)}."]
    return "\n\n".join([f"## {stack['stack']}", *said, rows, *_reasons(cells)])


def _reasons(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Why something was refused or not run, each reason once."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for who in ("alone", "ours"):
            if why := cell[who].get("why"):
                where = f"{cell['family']} {cell['layout']}{'' if who == 'alone' else ' with ours'}"
                found.setdefault(_short(why), []).append(where)
    return ["\n".join(f"* {', '.join(dict.fromkeys(places))}: {why}" for why, places in found.items())] if found else []


def _short(why: str) -> str:
    """Its first sentences, without what differs by batch."""
    kind, _, rest = why.partition(": got ")
    text = why if not rest else f"{kind}: {rest.partition('. ')[2] or rest}"
    cut = text if len(text) <= 200 else text[:200].rpartition(" ")[0] + " …"
    return cut.replace("|", "\\|").replace("<", "&lt;")


def table(first: str, rows: Iterable[tuple[str, list[dict[str, Any]]]], layouts: tuple[str, ...] = LAYOUTS) -> str:
    """A line a row, a column a layout, the worst of its cells in each."""
    lines = [(first, *layouts), ("---",) * (1 + len(layouts))]
    for name, cells in rows:
        lines.append((name, *(_text([cell for cell in cells if cell["layout"] == layout]) for layout in layouts)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(cells: list[dict[str, Any]]) -> str:
    if not cells:
        return "–"
    alone, ours = (min((cell[who] for cell in cells), key=_rank) for who in ("alone", "ours"))
    one, other = _word(alone), _word(ours)
    return one if one == other else f"{one} → {other}"


def _rank(verdict: dict[str, Any]) -> tuple[int, float]:
    return WORST.index(verdict["verdict"]), -verdict.get("error", 0.0)


def _word(verdict: dict[str, Any]) -> str:
    words = {"right": "✔", "wrong": f"✘ {verdict.get('error', 0):.2g}", "refused": "refused", "not run": "–"}
    return words[verdict["verdict"]]


def newer(found: dict[str, Any]) -> str:
    """What the tests say beside newer releases than those above, a line an environment."""
    said = ["## Newer releases", "`nox -s upstream` runs the tests of the stacks once more, beside newer releases."]
    lines = ["| environment | newer | tests | what changed |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(_newer(session, one))} |" for session, one in found.items() if one["newer"] or one["waiting"]]
    same = ", ".join(session for session, one in found.items() if not (one["newer"] or one["waiting"]))
    return "\n\n".join([*said, "\n".join(lines), *([f"Nothing is newer for {same}."] if same else [])])


def _newer(session: str, one: dict[str, Any]) -> tuple[str, ...]:
    red: dict[str, list[str]] = {}
    for test, said in one.get("failed", {}).items():
        red.setdefault(_short(said), []).append(test.rpartition("/")[2])
    changed = [f"{len(tests)} × {said} ({tests[0].replace('|', '/')})" for said, tests in red.items()]
    ahead = [f"{name} {old} → {new}" for name, (old, new) in one["newer"].items()]
    newer = ", ".join([*ahead, *(f"not taken: {why}" for why in one["waiting"])])
    if "passed" not in one:
        return session, newer, f"{one['date']}: not run", "–"
    told = f"{one['date']}: {one['passed']} of {one['passed'] + len(one['failed'])} pass, {one['skipped']} skipped"
    return session, newer, told, "<br>".join(changed) or "nothing"


def _linked(name: str) -> str:
    anchor = "".join(letter for letter in name.lower() if letter.isalnum() or letter in " -").replace(" ", "-")
    return f"[{name}](#{anchor})"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"{PAGE.name}: {len(page().splitlines())} lines")
