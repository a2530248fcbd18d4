"""Cells of the guide's page of stacks: how far a stack's answers in a batch are off, left as it is and with ours.

A peer test gives two `run(samples)`, each lists of token ids to their log-probabilities, as `testing.conformance` asks for
them: the stack's own batch and forward, without and with the line that we add. What ours gives must be right or refused.
`COLLATE_NPU_CELLS=1` writes what was measured to `benchmarks/stacks/`; else it is held against what stands there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from operator import gt, lt
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from collate_npu.releases import numbers

Layout = Literal["padded right", "padded left", "packed", "packed, kernels there", "context parallel"]
Run = Callable[[list[list[int]]], Sequence[Any]]
Jobs = dict[str, Any]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""Packed rows twice: as a CPU and an NPU run them, and beside kernels that take boundaries (`recurrent_oracle`)."""
VOCAB, PAD = 120, 7
"""Ids are drawn from 3 up; PAD is text in a sample, too, and its embedding must not be zero."""
FOLDER = Path(__file__).parents[2] / "benchmarks" / "stacks"
_ERROR = re.compile(r".*\b(?=\w+Error: )")
"""What stands before the last error of a trace."""
_RIGHT, _WRONG = 1e-4, 1e-3
"""Nats in float32: a tiny model's rounding is 100 times less than the first, and a lost boundary 100 times the second."""


def samples() -> list[list[int]]:
    """Fresh ones for each caller; the longest neither first nor last, one begins and one ends with PAD."""
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCAB, (length,), generator=drawn).tolist() for length in (7, 16, 4, 11)]
    rows[2][0] = rows[3][-1] = PAD
    return rows


def scores(logits_TV: Tensor, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of a sample's tokens but the first, of the logits of its places."""
    return logits_TV[: len(ids) - 1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def alone(model: Any) -> Run:
    """Each sample by itself, on a model of transformers."""
    return lambda rows: [scores(model(input_ids=torch.tensor([ids])).logits[0], ids) for ids in rows]


@dataclass(frozen=True)
class Stack:
    """One stack: its name, the packages whose releases are told, and the nox session that measures it."""

    name: str
    packages: tuple[str, ...]
    session: str

    @property
    def file(self) -> Path:
        return FOLDER / f"{re.sub('[^a-z0-9]+', '-', self.name.lower())}.json"

    def cell(self, family: str, layout: Layout, *, truth: Run, alone: Run, ours: Run, line: str) -> None:
        """Measure one cell. `truth([sample])` is the sample by itself; `line` what a user adds. A run that raises has
        refused."""
        wanted = [_numbers(truth([ids])[0]) for ids in samples()]
        self.tell(family, layout, alone=_measured(alone, wanted), ours=_measured(ours, wanted), line=line)

    def tell(self, family: str, layout: Layout, *, alone: dict[str, Any] | None, ours: dict[str, Any], line: str) -> None:
        """The same of what a test measured by itself, each made by `verdict`; `alone` None: it stands as it was recorded."""
        told = {"family": family, "layout": layout, "line": line, "alone": alone, "ours": ours}
        assert ours["verdict"] != "wrong", told
        if os.environ.get("COLLATE_NPU_CELLS"):
            self._write(told)
        elif not self._here(lt):
            self._held_against(told)

    def _here(self, than: Callable[[Any, Any], bool]) -> bool:
        """Is a release here before those measured, or after? Alone it may do other things; with ours none is wrong."""
        return any(than(numbers(version(name)), numbers(release)) for name, release in self._read()[0].items())

    def tell_jobs(self, found: dict[str, Any], *, line: str) -> None:
        """The same of many cells: family -> layout -> who -> its jobs, or a text that says why they were not run."""
        for family, layouts in found.items():
            for layout, jobs in layouts.items():
                alone, ours = (jobs[who] and worst_of(jobs[who]) for who in ("alone", "ours"))
                self.tell(family, layout, alone=alone, ours=ours, line=line)

    def tell_both(self, own: Jobs | None, ours: Jobs, cells: dict[tuple[str, Layout], str], *, line: str) -> None:
        """The same of two runs of the same jobs, the stack as it is and with ours: family and layout -> job."""
        for (family, layout), job in cells.items():
            assert ours[job].get("compared", 4) >= 4 or ours[job]["refused"], ours[job]
            self.tell(family, layout, alone=own and of_job(own[job]), ours=of_job(ours[job]), line=line)

    def _write(self, told: dict[str, Any]) -> None:
        releases = {name: version(name).partition("+")[0] for name in sorted({*self.packages, "torch"})}
        cells = (self._read()[1] | {(told["family"], told["layout"]): told}).values()
        cells = sorted(cells, key=lambda each: (each["family"], LAYOUTS.index(each["layout"])))
        whole = {"stack": self.name, "command": f"nox -s {self.session}", "releases": releases, "cells": cells}
        self.file.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")

    def _read(self) -> tuple[dict[str, str], dict[tuple[str, Layout], dict[str, Any]]]:
        held = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {"releases": {}, "cells": []}
        return held["releases"], {(each["family"], each["layout"]): each for each in held["cells"]}

    def _held_against(self, told: dict[str, Any]) -> None:
        """Verdicts and the line; how far a wrong one is off may differ by machine. A later release may be right."""
        known = self._read()[1].get((told["family"], told["layout"]), {"line": ""})
        assert known["line"] == told["line"], f"{self.file.name} has no such cell: run it with COLLATE_NPU_CELLS=1 ({told})"
        judged = [who for who in ("alone", "ours") if told[who] and not (told[who]["verdict"] == "right" and self._here(gt))]
        assert [who for who in judged if not agree(known[who], told[who])] == []


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True for one verdict, and one on the gradient: which job of a cell is the worst, and measured it, rounding says."""
    words = {_word(each["gradient"]) for each in (one, other) if "gradient" in each}
    return one["verdict"] == other["verdict"] and len(words) < 2


def verdict(error: float | None = None, *, gradient: float | None = None, refused="", not_run="") -> dict[str, Any]:
    """What a cell holds of one run: how far it is off, as nats or relative, or why it gave nothing.

    `gradient` is `gradient_error` where a test measures it: the one number that is the same measure in every stack.
    """
    if error is None:
        why = " ".join((refused or not_run).split())
        return {"verdict": "refused" if refused else "not run", "why": _ERROR.split(why)[-1][:300]}
    return with_gradient({"verdict": _word(error), "error": float(f"{error:.1e}")}, gradient)


def with_gradient(one: dict[str, Any], gradient: float | None) -> dict[str, Any]:
    if gradient is None:
        return one
    return {**one, "gradient": float(f"{gradient:.1e}"), "verdict": max(one["verdict"], _word(gradient))}


def _word(error: float) -> str:
    assert error <= _RIGHT or not error < _WRONG, f"neither right nor wrong: {error}"
    return "right" if error <= _RIGHT else "wrong"


def gradient_error(found: Sequence[Tensor], alone: Sequence[Tensor]) -> float:
    """The relative error of a gradient, in norm over all parameters, against that of each sample alone."""
    off = torch.stack([(x - y).norm() for x, y in zip(found, alone, strict=True)]).norm()
    return float(off / torch.stack([each.norm() for each in alone]).norm())


def of_job(found: dict[str, Any]) -> dict[str, Any]:
    """The same of a job of `processes.run_jobs`."""
    if found["refused"]:
        return verdict(refused=found["refused"])
    return with_gradient(verdict(found["error"]), found.get("gradient"))


def split_by(found: dict[str, Any], *ends: str) -> list[dict[str, Any]]:
    """Jobs by their last word, without it: `own, ours = split_by(found, "own", "ours")`."""
    return [{job.removesuffix(f" {end}"): one for job, one in found.items() if job.endswith(f" {end}")} for end in ends]


def check_job(found: dict[str, Any]) -> None:
    """Each sequence of a job, and its gradient, is as alone; four or more were compared."""
    assert of_job(found)["verdict"] == "right", found
    assert found["compared"] >= 4, found


def worst_of(jobs: Iterable[dict[str, Any]] | str) -> dict[str, Any]:
    """The same of several jobs that share one cell, or of a text in their place."""
    return verdict(not_run=jobs) if isinstance(jobs, str) else worst(map(of_job, jobs))


def worst(verdicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rank = ("right", "refused", "wrong").index
    return max(verdicts, key=lambda one: (rank(one["verdict"]), one.get("error", 0.0)))


def _measured(run: Run, wanted: list[Tensor]) -> dict[str, Any]:
    try:
        found = [_numbers(each) for each in run(samples())]
    except Exception as error:
        return verdict(refused=f"{type(error).__name__}: {error}")
    assert [len(x) for x in found] == [len(y) for y in wanted], "a sample of L tokens has L - 1 log-probabilities"
    return verdict(float(torch.stack([(x - y).abs().max() for x, y in zip(found, wanted)]).max()))  # torch's max keeps NaN


def _numbers(row: Any) -> Tensor:
    return torch.as_tensor(row).detach().double().reshape(-1)
