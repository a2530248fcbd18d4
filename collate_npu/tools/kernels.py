"""Kernels: operators called with this library's arguments, and what follows: an exit code, JSON, a verdict, a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu import __version__
from collate_npu.errors import CollateError, did_you_mean, explain
from collate_npu.proof.kernel_runs import KERNELS, Kernel, Run, runs
from collate_npu.tools.terminal import WORDS, join_names, number, progress, put, ruled, terms, verdict_json, verdict_line
from collate_npu.tools.user_code import refused

CARDS = ("cuda", "npu")


def check_device(device: str, dtype: torch.dtype) -> None:
    """Refuse a device that does not compute; a pretended one (CANN stand-ins) returns zeros: every case would pass."""
    here = ["cpu", *(card for card in CARDS if hasattr(torch, card) and getattr(torch, card).is_available())]
    rule, remedy = f"{dtype} does not compute there.", f"Name a device of this machine: {', '.join(here)}."
    if device.startswith("npu"):
        with refused("--device", device, "An NPU needs torch_npu.", "Install it: collate-npu guide install."):
            import torch_npu  # noqa: F401
    with refused("--device", device, rule, remedy):
        two = (torch.ones(3, device=device, dtype=dtype) + 1).float().cpu()
    if not torch.equal(two, torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of operators on a device."""

    named: Sequence[str]
    """Operators and packages, as the user named them."""
    device: str
    dtype: torch.dtype
    no_card: str
    """Why nothing can be measured on the device, "" where it can."""
    runs: Sequence[Run]

    @property
    def exit_code(self) -> int:
        """1 where something is wrong; 2 where nothing was measured, or not all that was named; else 0."""
        states = {run.state for run in self.runs}
        if "wrong" in states:
            return 1
        lacking = {run.operator for run in self.runs if run.state in ("not installed", "not here")}
        not_run = {*self.named} & {name for each in lacking for name in (each, each.rpartition(".")[2])}
        return 2 if self.no_card or not_run or "right" not in states or {"raised", "cannot tell"} & states else 0

    @property
    def verdict(self) -> str:
        """A word, and a sentence."""
        judged = [run for run in self.runs if run.state in ("right", "wrong", "raised", "cannot tell")]
        right = sum(run.state == "right" for run in judged)
        found = f"{right} of {len(judged)} calls of {len({run.operator for run in judged})} operators are right"
        if self.no_card:
            would = sum(run.state == "would run" for run in self.runs)
            found = f"nothing was measured on the card; {would} calls would run there"
        elif not judged:
            found = "nothing was measured"
        elif self.exit_code == 2:
            found += ", but not everything named could run"
        return f"{WORDS[self.exit_code]}: {found}."

    def as_json(self) -> dict[str, Any]:
        """The calls for machines."""
        settings = {"device": self.device, "dtype": str(self.dtype).removeprefix("torch."), "collate_npu": __version__}
        runs = [asdict(run) for run in self.runs]
        return verdict_json(self.exit_code, settings=settings, not_run=self.no_card, runs=runs)

    def notes(self, *, verbose: bool) -> Iterator[tuple[str, str]]:
        """Yield what is wrong, raised or missing, and why; each reason once. What was refused where `verbose`."""
        if self.no_card:
            yield "NOT RUN", self.no_card
        places: dict[tuple[str, str], list[str]] = {}
        for run in self.runs:
            if run.note and (verbose or run.state != "refused"):
                where = f"{run.operator}, {run.truth} ({run.form})" if run.truth else run.operator
                places.setdefault((run.state, " ".join(run.note.split())), []).append(where)
        for (state, why), found in places.items():
            loud = state in ("wrong", "raised", "cannot tell")
            yield state.upper() if loud else state, f"{join_names(found, 4)}: {why}"


def measure_operators(names: Sequence[str], device: str, dtype: str | None) -> Calls:
    """Call the operators of these names or packages, all where none is named, in `dtype` or as training there does.

    Without a card: what would run there. Raises `CollateError` for names and devices that are not known.
    """
    kernels = _kernels_of(names)
    kind = device.partition(":")[0]
    in_dtype = getattr(torch, dtype or ("float32" if kind == "cpu" else "bfloat16"))
    no_card = ""
    try:
        check_device(device, in_dtype)
    except CollateError as error:
        if kind not in CARDS:
            raise
        no_card = str(error)
    found: list[Run] = []
    with progress(len(kernels)) as show:
        for run in runs(kernels, device=device, dtype=in_dtype, dry=bool(no_card)):
            found.append(run)
            show(f"{run.operator}: {run.truth}", len({each.operator for each in found}) - 1)
    return Calls(named=names, device=device, dtype=in_dtype, no_card=no_card, runs=found)


def _kernels_of(names: Sequence[str]) -> list[Kernel]:
    by = {name: [k for k in KERNELS if name in (k.name, k.name.rpartition(".")[2], k.package)] for name in names}
    if unknown := [name for name, found in by.items() if not found]:
        held = [each for k in KERNELS for each in (k.name, k.name.rpartition(".")[2])]
        remedy = did_you_mean(unknown, held, f"Name one of {', '.join(k.name for k in KERNELS)}.")
        raise CollateError(explain("--operator", ", ".join(unknown), "It is an operator or a package.", remedy))
    return [k for k in KERNELS if not names or any(k in found for found in by.values())]


def print_calls(console: Console, calls: Calls, *, verbose: bool) -> None:
    """Print the verdict, what is wrong or missing, and a table for each operator."""
    put(console, verdict_line(calls.exit_code, calls.verdict), terms(calls.notes(verbose=verbose)), *tables(calls.runs))


LEGEND = (
    "truth: sequences and padding of the call; form: how the operator receives them; forward, backward: error of its output "
    "and of its worst gradient, from each sequence alone; passes: the largest of the output that is right"
)


def tables(found: Sequence[Run]) -> Iterator[Text | Table]:
    """Yield a table for each operator with calls, a row a call; without numbers, calls that differ by their form share one.
    Then what the columns mean."""
    for (operator, version), same in groupby((run for run in found if run.truth), lambda run: (run.operator, run.version)):
        calls = list(same)
        yield Text(f"\n{operator} {version or '(not installed)'}", "bold")
        titles = ["forward", "backward", "passes"] if any(run.forward is not None for run in calls) else []
        drawn = ruled("truth", "form", numbers=(*titles, ""))
        for _, row in groupby(calls, lambda run: (run.truth, run.state, None if run.forward is None else run.form)):
            first, *others = row
            numbers = [first.forward, first.backward, first.passes] if titles else []
            cells = ["-" if x is None else number(x) for x in numbers]
            forms = " · ".join(run.form for run in (first, *others))
            drawn.add_row(first.truth, forms, *cells, Text.assemble(_marked(first.state)))
        yield drawn
    if any(run.truth for run in found):
        yield Text(f"\n{LEGEND}", "dim")


def _marked(state: str) -> tuple[str, str]:
    sign, style = {"right": ("✔", "green"), "wrong": ("✘", "bold red"), "refused": ("", "dim")}.get(state, ("", "yellow"))
    return f"{state} {sign}".rstrip(), style
