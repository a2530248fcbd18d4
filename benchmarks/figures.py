"""Figures of the guide's pages, as the benches measured them: sentences and tables for `python tests/lists.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collate_npu.releases import RUN_RELEASES

HERE = Path(__file__).parent
ROOT = HERE.parent


def between(page: str, **made: str) -> dict[Path, str]:
    """A page of the guide, or README, with what is made between the two comments of each name."""
    path = ROOT / page if page == "README.md" else ROOT / "collate_npu" / "guide" / f"{page}.md"
    text = path.read_text("utf-8")
    for name, lines in made.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, after = text.partition(start)[0], text.partition(end)[2]
        text = f"{before}{start}\n{lines}\n{end}{after}"
    return {path: text}


def measured(name: str = "results") -> list[dict[str, Any]]:
    """The rows of the bench's last whole run, or of its last one of `limits`: growth and long."""
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))["rows"]


def growth() -> str:
    """Return how time and memory grow, in a sentence: the largest exponents, and what grows as the square of the width."""
    rows = measured("limits")
    by: dict[str, dict[str, float]] = {}
    for row in (row for row in rows if row["group"] == "growth"):
        what, axis = row["case"].split(": ")
        of = by.setdefault(f"{axis} {'memory' if row['theirs'] is None else 'time'}", {})
        of[what.partition(",")[0]] = max(row["ratio"], of.get(what.partition(",")[0], row["ratio"]))
    most = {kind: max(max(by[f"{axis} {kind}"].values()) for axis in ("rows", "tokens")) for kind in ("time", "memory")}
    square = sorted(name for name, ratio in by["width memory"].items() if ratio > 1.3)
    rest = max(ratio for name, ratio in by["width time"].items() if name not in square)
    names = ", ".join(f"`{name}`" for name in square)
    held = next(row for row in rows if row["name"].startswith("resident memory"))
    return (
        "Time and memory grow linearly with rows and with tokens: "
        f"the largest exponents of {len(by['rows time'])} functions are {most['time']:.2f} and {most['memory']:.2f}. "
        f"With the width, these grow up to its square: {names}. They read or make a dense mask. "
        f"The time of all others has an exponent of at most {rest:.2f}. "
        f"After {held['case']}, resident memory was {held['ratio']:.1f} MiB larger."
    )


WAYS = {
    "ours, `adapt(model)`": "padded right, `adapt(model)`",
    "ours, adapted, padded left": "padded left, `adapt(model)`",
    "ours, adapted, rows sorted by length": "the same, rows sorted by length",
    "ours, adapted, packed rows": "packed rows, `adapt(model)`",
    "ours, adapted, one flat row": "one flat row, `adapt(model)`",
    "transformers Seq2Seq, left": "padded left, without `adapt`",
    "TRL": "TRL's collator",
    "ms-swift template": "ms-swift's template",
}
STEPS = {
    "qwen3_next 8x1024": "Qwen3-Next, 8 × 1024",
    "qwen3_next 4x4096": "Qwen3-Next, 4 × 4096",
    "qwen3_5_text 8x1024": "Qwen3.5, 8 × 1024",
    "llama 8x1024": "Llama, 8 × 1024",
    "llama 4x4096": "Llama, 4 × 4096",
    "qwen3_moe 8x1024": "Qwen3-MoE, 8 × 1024",
    "mistral 8x1024": "Mistral, 8 × 1024",
    "mistral-window-512 8x1024": "with a window of 512",
    "llama 4x128": "Llama, 4 × 128",
}


def speeds() -> dict[str, dict[str, float]]:
    """Return tokens a second of each way to train on the same rows, beside transformers' own collator, by case."""
    rows = measured()
    faster: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for case in STEPS:
        same = [row for row in rows if (row["group"], row["case"]) == ("step", f"{case}, cpu")]
        found = {row["name"]: row["facts"][1]["tokens"] / row["theirs"] for row in same}
        found["ours, `adapt(model)`"] = same[0]["facts"][0]["tokens"] / same[0]["ours"]
        for way in WAYS.keys() & found.keys():
            faster[way][case] = found[way] / found["transformers Seq2Seq"]
    return faster


def step_table() -> str:
    """Return a line for each way to train, with its speeds."""
    faster = speeds()
    lines = [f"| way | {' | '.join(STEPS.values())} |", "|" + "---|" * (1 + len(STEPS))]
    for way, words in WAYS.items():
        cells = (f"{faster[way][case]:.2f}" if case in faster[way] else "–" for case in STEPS)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


SHORT = "llama 4x128"


def padded_speeds(to: str) -> dict[str, str]:
    """Return the least and the greatest speed of padded rows with `adapt`, by family; short rows are one of their own."""
    faster, found = speeds(), {}
    padded = [faster[way] for way in WAYS if WAYS[way] in ("padded right, `adapt(model)`", "padded left, `adapt(model)`")]
    for name, family in {"Qwen3-Next": "qwen3_next ", "Llama": "llama ", SHORT: SHORT}.items():
        cases = [case for case in STEPS if case.startswith(family) and (case == SHORT) == (family == SHORT)]
        least, *_, most = sorted(each[case] for each in padded for case in cases)
        found[name] = f"{least:.1f}{to}{most:.1f}"
    return found


def releases_run(sentence: str = "The tests ran {}.", to: str = " to ", mark: str = ", ") -> str:
    """Return the oldest and the newest release of each package that the tests run, in a sentence."""
    return sentence.format(mark.join(f"{package} {to.join(ends)}" for package, ends in RUN_RELEASES.items()))


def readme() -> dict[str, str]:
    """Return what README has of these."""
    fast = [f"{name.replace(SHORT, 'short rows (4 × 128)')} {times}" for name, times in padded_speeds(" to ").items()]
    said = f"On a CPU, a step is so many times as fast as the padded one of transformers: {', '.join(fast)}."
    return {"ran": releases_run(), "fast": said}


def chinese() -> dict[str, str]:
    """Return what the Chinese page has of these."""
    fast = [f"* {name.replace(SHORT, '短行（4 × 128）')}：{times} 倍。" for name, times in padded_speeds(" 到 ").items()]
    return {"ran": releases_run("运行过的版本：{}。", " 到 ", "、"), "fast": "\n".join(fast)}


def planned_table() -> str:
    """Two tables: a way to batch and what it gains; the samples and ranks of a plan, and how it comes out."""
    held = json.loads((HERE / "planned.json").read_text("utf-8"))
    columns = [(family, ranks) for family in ("qwen3_next", "llama") for ranks in (1, 2)]
    found = {(row["family"], row["ranks"], row["way"]): row["ratio"] for n in (1, 2) for row in held[f"steps, {n}"]}
    spoken = {"qwen3_next": "Qwen3-Next", "llama": "Llama"}
    names = [f"{spoken[family]}, {n} rank{'s' * (n > 1)}" for family, n in columns]
    lines = [f"| tokens a second | {' | '.join(names)} |", "|" + "---|" * (1 + len(names))]
    for way in ("sorted", "planned", "planned, packed rows", "planned, one flat row"):
        lines.append(f"| {way} | {' | '.join(f'{found[(*column, way)]:.2f}' for column in columns)} |")
    plans = {(row["lengths"], row["samples"], row["ranks"], row["way"]): row for row in held["plans"]}
    lines += ["", "| samples, ranks | seconds | padding | level | of packed rows | length-grouped: padding | level |"]
    lines += ["|" + "---|" * 7]
    for power, ranks in ((4, 8), (5, 8), (5, 64), (6, 64), (6, 256), (7, 256)):
        padded, packed, grouped = (
            plans["instruction", 10**power, ranks, way] for way in ("planned", "packed", "length-grouped")
        )
        mine = f"{padded['seconds']:.2f} | {padded['padding']:.1%} | {padded['level']:.3f} | {packed['level']:.3f}"
        lines.append(f"| 10^{power}, {ranks} | {mine} | {grouped['padding']:.1%} | {grouped['level']:.3f} |")
    return "\n".join(lines)


PEERS = ("transformers Seq2Seq", "TRL", "ms-swift template")
BATCHES = ("lists 4x512", "lists 32x4096", "numpy 32x4096", "torch 4x512", "torch 32x4096", "lists 32x4096, left")


def speed_table() -> str:
    """Return a line for each batch: how many times as fast the collator is as each peer's."""
    rows = measured()
    lines = ["| features | than transformers | than TRL | than ms-swift |", "|---|---|---|---|"]
    found = {(row["case"], row["name"]): row["ratio"] for row in rows if row["group"] == "collate"}
    for case in BATCHES:
        cells = (f"{found[case, peer]:.{int(found[case, peer] < 10)}f}" if (case, peer) in found else "–" for peer in PEERS)
        lines.append(f"| {case.replace('x', ' × ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


COLUMNS = ("python", "torch", "transformers", "numpy")
"""What a row of `nox -s elsewhere` says was there; "" where it was not installed."""


def elsewhere_table(rows: dict[str, dict[str, Any]] | None = None) -> str:
    """Return a line for each row of `nox -s elsewhere`: what was there, what the quick tests said, and when."""
    rows = json.loads((HERE / "elsewhere.json").read_text("utf-8")) if rows is None else rows
    lines = ["| Python | torch | transformers | numpy | tests | run on |", "|---|---|---|---|---|---|"]
    for row in rows.values():
        cells = (row.get(name, "").partition("+")[0] or "none" for name in COLUMNS)
        when = (row["date"], row.get("platform", "").partition(",")[0], f"commit {row['commit']}")
        lines.append(f"| {' | '.join(cells)} | {_tests(row)} | {', '.join(filter(None, when))} |")
    return "\n".join(lines)


def nights(held: list[dict[str, Any]] | None = None) -> str:
    """Return a line for each of the last whole nights: when, on which source, what ran, and what was red."""
    held = json.loads((HERE / "nightly.json").read_text("utf-8")) if held is None else held
    lines = ["| ended | source, seed | tests passed | planted faults seen | mutants killed | red |", "|" + "---|" * 6]
    for night in [each for each in held if each["ended"] and not each["some"]][:3]:
        found = night["sessions"].values()
        total = {name: sum(each.get(name, 0) for each in found) for name in _COUNTED}
        seen = f"{total['seen']} of {total['faults planted']}" if total["faults planted"] else "not planted"
        killed = next((each["share of all"] for each in found if "share of all" in each), "not counted")
        red = sum(len(each["failed"]) for each in found)
        cells = (night["ended"], f"{night['source']}, {night['seed']}", f"{total['passed']:,}", seen, killed, f"{red}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_COUNTED = ("passed", "seen", "faults planted")


def _tests(row: dict[str, Any]) -> str:
    """How many passed, in words, or why none ran."""
    if why := row.get("reason"):
        return f"not run: {why}".replace("|", r"\|")
    failed = len(row["failed"])
    drawn = f", of a random {row['share']:.0%}" if row["share"] < 1 else ""
    return f"{row['passed']:,} pass, {f'**{failed} fail**' if failed else '0 fail'}, {row['skipped']:,} skipped{drawn}"
