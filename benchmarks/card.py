"""Card: a card's first hour as one command, for CUDA, Ascend, or a dry run on a CPU.

`nox -s card`, or `python -m benchmarks.card [--device npu] [--minutes 60] [--quick] [--out build/card]`, installs nothing:
it runs what Python finds here. Each step is a process of its own, so that one that crashes ends no other. It writes all
that was found into DATE.json, and what to look at into DATE.html.

Exit code 0: each step ended as it should. 1: one did not: look at its row. What could not run here, or had no time left, is
named and does not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.planted import FAULTS, RIGHT

HERE = Path(__file__).resolve().parent
COMMAND = ("-m", "collate_npu")
SMALL = ("--batches", "1", "--batch-size", "3", "--max-length", "48")
MODELS = ("qwen3_next", "qwen3_5_text", "qwen3")


@dataclass
class Step:
    """What is run, and what came of it."""

    name: str
    asks: str
    command: tuple[str, ...]
    wanted: int = 0
    seconds: float = 0.0
    code: int | None = None
    state: str = "no time left"
    said: str = ""
    found: Any = None


Judge = Callable[[Step], str]
"""Puts what was found into words. Raises `WrongError` for what an exit code does not tell."""


class WrongError(Exception):
    """Something is wrong, in these words."""


def steps(device: str, quick: bool) -> Iterator[tuple[Step, Judge]]:
    on = ("--device", device)
    models = MODELS[:1] if quick else MODELS
    each = tuple(word for name in models for word in ("--model", name))
    audit = (*COMMAND, "audit", *on, *SMALL, "--json")
    yield Step("env", "What is installed and set?", (*COMMAND, "env", "--json")), of_env
    planted = tuple(f"--collator={HERE / 'planted.py'}:{name}" for name in (*RIGHT, *FAULTS))
    asks = "Are planted faults found, and right collators let pass?"
    yield Step("planted", asks, (*audit, "--packed", "--attn", "sdpa", "--model", MODELS[0], *planted), wanted=1), of_planted
    for dtype in ("bfloat16",) if quick else ("float32", "bfloat16"):
        asks = f"Padded and packed, is each token as alone in {dtype}?"
        yield Step(f"audit {dtype}", asks, (*audit, "--packed", "--dtype", dtype, *each)), of_audit
    asks = "Any layout under adapt, in training too?"
    yield Step("layouts", asks, ("-m", "benchmarks.layouts", *on, *models)), of_lines
    sizes = ("--samples", "16", "--rows", "4", "--longest", "64") if quick else ("--samples", "128", "--rows", "8")
    yield Step("planned", "What do planned batches save?", ("-m", "benchmarks.planned_steps", *on, *sizes)), of_lines
    asks = "Does each operator compute what its arguments mean?"
    yield Step("operators", asks, ("-m", "benchmarks.operators", *on, "--json")), of_operators
    if not quick:
        flex = (*audit, "--attn", "flex_attention", "--model", "qwen3")
        yield Step("audit flex", "And under FlexAttention?", flex), of_audit
        flash = (*audit, "--packed", "--attn", "flash_attention_2", "--dtype", "bfloat16", "--model", "qwen3")
        yield Step("audit flash", "And under FlashAttention 2?", flash), of_audit
        yield Step("all families", "Every hybrid family", (*audit, "--attn", "sdpa", "--packed", "--no-gradients")), of_audit


def of_env(step: Step) -> str:
    return "; ".join([step.found["devices"], *map(str, step.found["hazards"])])


def of_operators(step: Step) -> str:
    runs = step.found["runs"]
    states = sorted({run["state"] for run in runs})
    counted = ", ".join(f"{sum(run['state'] == state for run in runs)} {state}" for state in states)
    wrong = sorted({run["operator"] for run in runs if run["state"] == "wrong"})
    return f"{len({run['operator'] for run in runs})} operators: {counted}{': '.join(['', *wrong])}"


def of_audit(step: Step) -> str:
    ours = [each for each in step.found["findings"] if each["by"] == "ours"]
    worst = max((each["logits"] for each in ours if each["logits"] is not None), default=0.0)
    left = "; ".join(f"{name}: {why.splitlines()[0][:90]}" for name, why in step.found["not_run"].items())
    right = sum(bool(each["right"]) for each in ours)
    return f"{step.found['verdict']}: {right} of {len(ours)} right, logits up to {worst:.1e}" + (left and f"; {left}")


def of_planted(step: Step) -> str:
    if not step.found["findings"]:
        return of_audit(step)
    passed = {each["by"]: each["right"] for each in step.found["findings"] if each["by"] != "ours"}
    missed = [name for name in FAULTS if passed.get(name, True)]
    blamed = [name for name in RIGHT if not passed.get(name)]
    words = [f"{len(FAULTS) - len(missed)} of {len(FAULTS)} found"]
    words += [f"{what} {', '.join(names)}" for what, names in (("missed", missed), ("blamed", blamed)) if names]
    if missed or blamed:
        raise WrongError("; ".join(words))
    return words[0]


def of_lines(step: Step) -> str:
    return step.found[-1] if step.found else ""


def run(step: Step, judge: Judge, limit: float) -> None:
    """Run one step, in at most so many seconds, and put what came of it into it."""
    began = time.perf_counter()
    try:
        asked = subprocess.run(
            [sys.executable, *step.command], capture_output=True, text=True, timeout=limit, cwd=HERE.parent, check=False
        )
        step.code, out = asked.returncode, asked.stdout.strip()
        step.found = json.loads(out) if "--json" in step.command else out.splitlines()
        step.said = judge(step) or last_line(asked.stderr)
        step.state = {step.wanted: "as it should be", 2: "did not run"}.get(step.code, "LOOK")
    except subprocess.TimeoutExpired:
        step.state, step.said = "too slow", f"stopped after {limit:.0f} s"
    except WrongError as told:
        step.state, step.said = "LOOK", str(told)
    except (ValueError, LookupError, TypeError):  # nothing that can be read
        step.state, step.said = "LOOK", last_line(asked.stderr)
    step.seconds = round(time.perf_counter() - began, 1)


def last_line(text: str) -> str:
    return " ".join(text.strip().splitlines()[-1:])


def page_of(found: dict[str, Any], done: list[Step]) -> Console:
    """Return the table and what steps printed, on a console that has recorded it."""
    console = Console(record=True, width=None if sys.stdout.isatty() else 120)
    console.print(f"collate_npu on {found['name']} ({found['device']}), {found['date']}, commit {found['commit']}\n")
    table = Table("step", "asks", "s", "state", "found")
    for step in done:
        table.add_row(step.name, step.asks, f"{step.seconds:.0f}", step.state, step.said)
    console.print(table)
    for step in done:
        if isinstance(step.found, list):
            console.print(f"\n{step.name}", *step.found, sep="\n", markup=False, highlight=False, soft_wrap=True)
    return console


def card() -> torch.device:
    return (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser("card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=card().type, help="default: the card that torch finds, else cpu")
    parser.add_argument("--minutes", type=float, default=60, help="for all steps together, a third for each at most")
    parser.add_argument("--quick", action="store_true", help="one model, small sizes")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "card")
    given = parser.parse_args()
    now, end = datetime.now(timezone.utc), time.perf_counter() + 60 * given.minutes
    module = getattr(torch, given.device.partition(":")[0], None)
    name = module.get_device_name() if hasattr(module, "get_device_name") else given.device
    found = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "commit": commit(), "device": given.device, "name": name}
    done = []
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{now:%Y-%m-%d-%H%M}.json"
    for step, judge in steps(given.device, given.quick):
        if (left := end - time.perf_counter()) > 10:
            print(f"{step.name} ...", file=sys.stderr, flush=True)
            run(step, judge, min(left, 20 * given.minutes))
            if step.state == "too slow" and left < 20 * given.minutes:
                step.state = "no time left"
        done.append(step)
        file.write_text(json.dumps({**found, "steps": [asdict(each) for each in done]}, indent=1) + "\n", "utf-8")
    page_of(found, done).save_html(str(file.with_suffix(".html")))
    print(f"\nwritten: {file}, {file.with_suffix('.html').name}")
    sys.exit(any(step.state in ("LOOK", "too slow") for step in done))


if __name__ == "__main__":
    main()
