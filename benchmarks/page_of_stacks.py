"""`python -m benchmarks.page_of_stacks`: the guide's page of stacks and the data of `collate-npu stacks`, as measured.

`COLLATE_NPU_CELLS=1 nox -s SESSION` writes `benchmarks/stacks/STACK.json` (tests/peers/cells.py), `nox -s upstream` the
lines about newer releases; only the text before the page's table, `head.md`, is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "collate_npu"
PAGE, DATA = PACKAGE / "guide" / "stacks.md", PACKAGE / "tools" / "data" / "stacks.json"
NEWER = HERE / "upstream.json"
LAYOUTS = ("padded right", "padded left", "packed", "packed, kernels there", "context parallel")
TITLES = {"packed, kernels there": "packed, with fla's kernels"}
WORST = ("wrong", "refused", "not run", "right")
LEGEND = (
    "Before the arrow: the stack alone. After the arrow: with the line. A number is the largest error, of a log-probability "
    "or of the gradient (relative). Models are tiny and random, in float32 on a CPU; no Ascend card was available."
)


def page() -> str:
    """The whole page: the worst family of each stack."""
    rows = [(each["stack"], each["cells"]) for each in _stacks()]
    head = (HERE / "stacks" / "head.md").read_text("utf-8")
    measured = table("stack: alone → with collate_npu", rows, numbers=False)
    return f"{head.strip()}\n\n<!-- stacks -->\n{measured}\n<!-- /stacks -->\n"


def data() -> str:
    """A text for each stack, which `collate-npu stacks NAME` prints, and what its cells mean under ""."""
    ahead = json.loads(NEWER.read_text("utf-8"))
    texts = {"": LEGEND} | {each["stack"]: _section(each, ahead) for each in _stacks()}
    return json.dumps(texts, ensure_ascii=False, indent=0) + "\n"


def write() -> None:
    PAGE.write_text(page(), "utf-8")
    DATA.write_text(data(), "utf-8")


def _stacks() -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted((HERE / "stacks").glob("*.json"))]


def _section(stack: dict[str, Any], ahead: dict[str, Any]) -> str:
    cells, releases = stack["cells"], ", ".join(f"{name} {release}" for name, release in stack["releases"].items())
    families = dict.fromkeys(cell["family"] for cell in cells)
    lines = ", or ".join(f"`{line}`" for line in dict.fromkeys(cell["line"] for cell in cells))
    rows = table("family", [(name, [cell for cell in cells if cell["family"] == name]) for name in families])
    session = stack["command"].rpartition(" ")[2]
    said = [f"The line: {lines}.", f"Measured by `{stack['command']}` with {releases}."]
    said += [newer(ahead[session])] if session in ahead else []
    return "\n\n".join([f"## {stack['stack']}", *said, rows, *_reasons(cells)])


def _reasons(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Why something was refused or not run, each reason once."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for who in ("alone", "ours"):
            if why := cell[who].get("why"):
                where = f"{cell['family']} {cell['layout']}{'' if who == 'alone' else ', with the line'}"
                found.setdefault(_short(why), []).append(where)
    return ["\n".join(f"* {', '.join(dict.fromkeys(places))}: {why}" for why, places in found.items())] if found else []


def _short(why: str) -> str:
    """Its first sentences, without what differs by batch."""
    kind, _, rest = why.partition(": got ")
    text = why if not rest else f"{kind}: {rest.partition('. ')[2] or rest}"
    return text if len(text) <= 200 else text[:200].rpartition(" ")[0] + " …"


def table(first: str, rows: Iterable[tuple[str, list[dict[str, Any]]]], *, numbers: bool = True) -> str:
    """A line a row, a column a layout, the worst of its cells in each."""
    lines = [(first, *(TITLES.get(layout, layout) for layout in LAYOUTS)), ("---",) * (1 + len(LAYOUTS))]
    for name, cells in rows:
        lines.append((name, *(_text([cell for cell in cells if cell["layout"] == each], numbers) for each in LAYOUTS)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(cells: list[dict[str, Any]], numbers: bool) -> str:
    if not cells:
        return "not run"
    alone, ours = (min((cell[who] for cell in cells), key=_rank) for who in ("alone", "ours"))
    one, other = _word(alone, numbers), _word(ours, numbers)
    return one if one == other else f"{one} → {other}"


def _word(verdict: dict[str, Any], numbers: bool) -> str:
    return f"wrong: {verdict['error']:.2g}" if numbers and verdict["verdict"] == "wrong" else str(verdict["verdict"])


def _rank(verdict: dict[str, Any]) -> tuple[int, float]:
    return WORST.index(verdict["verdict"]), -verdict.get("error", 0.0)


def newer(one: dict[str, Any]) -> str:
    """What the tests say beside newer releases than those that were measured."""
    ahead = [f"{name} {old} → {new}" for name, (old, new) in one["newer"].items()]
    ahead += [f"not taken: {why}" for why in one["waiting"]]
    if not ahead:
        return f"Newer releases on {one['date']}: none."
    said = f"Newer releases on {one['date']}: {', '.join(ahead)}."
    if "passed" not in one:
        return f"{said} They were not run."
    red: dict[str, list[str]] = {}
    for test, why in one["failed"].items():
        red.setdefault(_short(why), []).append(test.rpartition("/")[2])
    changed = "; ".join(f"{len(tests)} × {why} ({tests[0]})" for why, tests in red.items())
    passed = f"{one['passed']} of {one['passed'] + len(one['failed'])} tests pass, {one['skipped']} skipped"
    return f"{said} With them {passed}.{f' What fails: {changed}.' if changed else ''}"


if __name__ == "__main__":
    write()
    print(f"{PAGE.name}: {len(page().splitlines())} lines, {DATA.name}: {len(data())} characters")
