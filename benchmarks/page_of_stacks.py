"""`python -m benchmarks.page_of_stacks`: what was measured of each stack, into the guide: the page of stacks, and the
section "Measured" of each stack's own page.

`COLLATE_NPU_CELLS=1 nox -s SESSION` writes `benchmarks/stacks/STACK.json` (tests/peers/cells.py), `nox -s upstream` the
lines about newer releases. The rest of each page is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.figures import between

HERE = Path(__file__).parent
NEWER = HERE / "upstream.json"
PAGES = {
    "llamafactory-axolotl": ("axolotl", "llama-factory"),
    "ms-swift": ("ms-swift", "ms-swift-megatron", "ms-swift-newest-megatron", "twinkle-megatron"),
    "nemo": ("megatron-bridge", "nemo-automodel"),
    "rl-stacks": ("openrlhf", "skyrl"),
    "torchtitan": ("torchtitan",),
    "transformers": ("transformers-trainer", "transformers-trainer-sp"),
    "trl": ("trl-sfttrainer",),
    "veomni-xtuner": ("veomni",),
    "verl": ("verl-fsdp", "verl-megatron", "verl-newest-megatron"),
}
"""The page of each stack, by the name of its file."""
LAYOUTS = ("padded right", "padded left", "packed", "packed, kernels there", "context parallel")
TITLES = {"packed, kernels there": "packed, with fla's kernels"}
WORST = ("wrong", "refused", "not run", "right")
LEGEND = (
    "Before the arrow: the stack alone. After the arrow: with the line. A number is the largest error, of a log-probability "
    "or of the gradient (relative). Models are tiny and random, in float32 on a CPU. [What the words mean](stacks.md)."
)


def written() -> dict[Path, str]:
    """Return each page of the guide that says what was measured, as it should be."""
    pages = between("stacks", stacks=_table_of_all())
    for name in PAGES:
        pages |= between(name, measured=_section(name))
    return pages


def write() -> None:
    for path, text in written().items():
        path.write_text(text, "utf-8")


def _table_of_all() -> str:
    """Return a line for each stack: the worst of its families."""
    stacks = ((page, _stack(name)) for page, names in PAGES.items() for name in names)
    rows = [(f"[{each['stack']}]({page}.md#measured)", each["cells"]) for page, each in stacks]
    rows.sort(key=lambda row: row[0].casefold())
    return table("stack: alone → with collate_npu", rows, numbers=False)


def _section(page: str) -> str:
    """Return what was measured of the stacks of a page, and what newer releases of them change."""
    stacks, ahead = [*map(_stack, PAGES[page])], json.loads(NEWER.read_text("utf-8"))
    sessions = dict.fromkeys(stack["command"].rpartition(" ")[2] for stack in stacks)
    later = [f"`nox -s {session}`: {newer(ahead[session])}" for session in sessions if session in ahead]
    return "\n\n".join(["## Measured", LEGEND, *map(_measured, stacks), *later])


def _stack(name: str) -> dict[str, Any]:
    return dict(json.loads((HERE / "stacks" / f"{name}.json").read_text("utf-8")))


def _measured(stack: dict[str, Any]) -> str:
    cells, releases = stack["cells"], ", ".join(f"{name} {release}" for name, release in stack["releases"].items())
    families = dict.fromkeys(cell["family"] for cell in cells)
    lines = ", or ".join(f"`{line}`" for line in dict.fromkeys(cell["line"] for cell in cells))
    rows = table("family", [(name, [cell for cell in cells if cell["family"] == name]) for name in families])
    said = f"The line: {lines}. Measured by `{stack['command']}` with {releases}."
    return "\n\n".join([f"### {stack['stack']}", said, rows, *_reasons(cells)])


def _reasons(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Return why something was refused or not run: each reason once, with its layouts and families."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        alone, ours = (cell[who].get("why") for who in ("alone", "ours"))
        for why, where in ((alone, cell["layout"]), (ours, cell["layout"] + ", with the line" * (ours != alone))):
            families = found.setdefault(_short(why), {}).setdefault(where, []) if why else []
            families += [cell["family"]] * (cell["family"] not in families)
    reasons = (
        (why, "; ".join(f"{where} ({', '.join(of)})" for where, of in places.items())) for why, places in found.items()
    )
    return ["\n".join(f"* {places}: {why}" for why, places in reasons)] if found else []


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
    largest = max(verdict.get(name) or 0.0 for name in ("error", "gradient"))
    return f"wrong: {largest:.2g}" if numbers and verdict["verdict"] == "wrong" else str(verdict["verdict"])


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
    passed = f"{one['passed']} of {one['passed'] + len(one['failed'])} tests pass, {one['skipped']} skipped"
    return f"{said} With them {passed}."


if __name__ == "__main__":
    write()
