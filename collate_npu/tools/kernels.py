"""Kernels: which operators are run with our arguments, what follows from it (an exit code, JSON, the verdict in words), and
the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text

from collate_npu.errors import CollateError, explain
from collate_npu.proof.kernel_runs import KERNELS, Kernel, Run, interpreted, runs
from collate_npu.tools.console import WORDS
from collate_npu.tools.terminal import finite, listed, number, ruled
from collate_npu.tools.user_code import did_you_mean, refused


def _here() -> list[str]:
    """Return the devices that torch knows and finds."""
    found = [getattr(torch, name, None) for name in ("cuda", "npu")]
    return ["cpu", *(str(each.__name__).rpartition(".")[2] for each in found if each is not None and each.is_available())]


def check_device(device: str, dtype: torch.dtype) -> None:
    """Refuse a device that does not compute; a pretended one (CANN stand-ins) returns zeros: every case would pass."""
    here = f"Name a device of this machine: {', '.join(_here())}."
    with refused("--device", device, f"{dtype} does not compute there.", here):
        if device.startswith("npu"):
            import torch_npu  # noqa: F401
        two = (torch.ones(3, device=device, dtype=dtype) + 1).float().cpu()
    if not torch.equal(two, torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))


CARDS = ("cuda", "npu")
Dtype = Literal["float32", "bfloat16", "float16"]


def kernels_named(names: Sequence[str]) -> list[Kernel]:
    """Return the kernels of these names or packages; all where none is named. Raises `CollateError` for another name."""
    by = {name: [k for k in KERNELS if name in (k.name, k.name.rpartition(".")[2], k.package)] for name in names}
    if unknown := [name for name, found in by.items() if not found]:
        held = [each for k in KERNELS for each in (k.name, k.name.rpartition(".")[2])]
        remedy = did_you_mean(unknown, held, f"Name one of {', '.join(k.name for k in KERNELS)}.")
        raise CollateError(explain("--operator", ", ".join(unknown), "It is an operator or a package.", remedy))
    return [k for k in KERNELS if not names or any(k in found for found in by.values())]


def why_no_card(device: str, dtype: torch.dtype) -> str:
    """Why nothing can be measured there, "" where it can. Raises `CollateError` for what is no device that we know."""
    try:
        check_device(device, dtype)
    except CollateError as error:
        if device.partition(":")[0] not in CARDS:
            raise
        return str(error)
    return ""


def dtype_of(name: Dtype | None, device: str) -> torch.dtype:
    """The one that was named, else what training uses there."""
    found: torch.dtype = getattr(torch, name or ("float32" if device.startswith("cpu") else "bfloat16"))
    return found


def measured(kernels: Sequence[Kernel], device: str, dtype: torch.dtype, no_card: str) -> Iterator[Run]:
    """Each run. Without a card what would run there, and what fla's kernels give in Triton's interpreter."""
    if no_card:
        yield from runs(kernels, device=device, dtype=dtype, dry=True)
        also = interpreted()
        yield from runs([k for k in kernels if k.name in also], device="cpu", dtype=torch.float32, also=also)
    else:
        also = interpreted() if device.partition(":")[0] == "cpu" else ()
        yield from runs(kernels, device=device, dtype=dtype, also=also)


def exit_code(found: Sequence[Run], no_card: str = "", *, named: Sequence[str] = ()) -> int:
    """1 where something is wrong; 2 where nothing was measured, or not all that was named; else 0."""
    states = {run.state for run in found}
    if "wrong" in states:
        return 1
    lacking = [run for run in found if run.state in ("not installed", "not here") and _names(run.operator, named)]
    return 2 if no_card or lacking or "right" not in states or {"raised", "cannot tell"} & states else 0


def _names(operator: str, names: Sequence[str]) -> bool:
    """True if it is named itself, not by its package."""
    return operator in names or operator.rpartition(".")[2] in names


def headline(found: Sequence[Run], no_card: str, code: int) -> str:
    """The verdict, in one sentence after the word."""
    judged = [run for run in found if run.state in ("right", "wrong", "raised", "cannot tell")]
    right, of = [run for run in judged if run.state == "right"], f"of {len({run.operator for run in judged})} operators"
    said = f"{len(right)} of {len(judged)} calls {of} are right" if judged else "nothing was measured"
    if no_card:
        would = sum(run.state == "would run" for run in found)
        more = f"; in Triton's interpreter {said}" if judged else ""
        said = f"nothing was measured on the card; {would} calls would run there{more}"
    elif judged and code == 2:
        said += ", but not everything named could run"
    return f"{WORDS[code]}: {said}."


def notes(found: Sequence[Run], no_card: str, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """What is wrong, raised or missing, and why; each reason once. What was refused where `verbose`."""
    if no_card:
        yield "NOT RUN", no_card
    shown = [run for run in found if run.note and (verbose or run.state != "refused")]
    grouped: dict[tuple[str, str], list[str]] = {}
    for run in shown:
        where = f"{run.operator}, {run.truth} ({run.form})" if run.truth else run.operator
        grouped.setdefault((run.state, " ".join(run.note.split())), []).append(where)
    for (state, why), places in grouped.items():
        yield (state.upper() if state in ("wrong", "raised", "cannot tell") else state), f"{listed(places, 4)}: {why}"


LEGEND = (
    "truth: sequences and padding of the call; form: how the operator was told them; forward, backward: error of its output "
    "and of its worst gradient, from each sequence alone; passes: the largest of the output that is right"
)


def tables(found: Sequence[Run]) -> Iterator[Text | Table]:
    """A table of each operator with calls: a row a call; without numbers, calls that differ by their form share one. Then
    what the columns mean."""
    for (operator, version), same in groupby((run for run in found if run.truth), lambda run: (run.operator, run.version)):
        told = list(same)
        yield Text(f"\n{operator} {version or '(not installed)'}", "bold")
        titles = ["forward", "backward", "passes"] if any(run.forward is not None for run in told) else []
        drawn = ruled("truth", "form", numbers=(*titles, ""))
        for _, runs_of_row in groupby(told, _alike):
            row = list(runs_of_row)
            numbers = [row[0].forward, row[0].backward, row[0].passes] if titles else []
            cells = ["-" if x is None else number(x) for x in numbers]
            drawn.add_row(row[0].truth, " · ".join(run.form for run in row), *cells, _marked(row[0].state))
        yield drawn
    if any(run.truth for run in found):
        yield Text(f"\n{LEGEND}", "dim")


def _alike(run: Run) -> tuple[Any, ...]:
    """Return what runs of one row have in common; a measured one shares no row."""
    return run.truth, run.state, None if run.forward is None else run.form


def _marked(state: str) -> Text:
    sign, style = {"right": ("✔", "green"), "wrong": ("✘", "bold red")}.get(state, ("", "yellow"))
    return Text(f"{state} {sign}".rstrip(), style if state != "refused" else "dim")


def as_json(found: Sequence[Run], settings: dict[str, Any], no_card: str, code: int) -> dict[str, Any]:
    """Return the runs for machines: `passed` first, as the audit's. Numbers that are not finite are words."""
    told = {"passed": code == 0, "verdict": WORDS[code], "exit_code": code, "settings": settings, "not_run": no_card}
    return {**told, "runs": [finite(asdict(run)) for run in found]}
