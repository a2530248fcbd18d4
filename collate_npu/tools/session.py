"""Session: all that one `collate-npu audit` measures. What it names is checked before any model is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from collate_npu import __version__
from collate_npu.errors import CollateError, explain
from collate_npu.segments import Side
from collate_npu.tools.audit import Audit, read_text, sample_ids, shipped_text
from collate_npu.tools.candidates import Candidate, candidates, check_named, first_line
from collate_npu.tools.handover import OTHERS, OURS
from collate_npu.tools.report import Report

COLUMNS = (*OURS, *OTHERS)


def audit_all(
    *, models: Sequence[str], data: Path | None, tokenizer: Path | None, sides: Sequence[Side], attentions: Sequence[str],
    device: str, dtype: str, batch_size: int, batches: int, max_length: int, gradients: bool, tolerance: float | None,
    seed: int, console: Console,
) -> Report:  # fmt: skip
    """Check what is named, then audit it model by model. Raises `CollateError` where something named cannot be used."""
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise CollateError(explain("--tolerance", str(tolerance), "An error is 0 or more.", "Give such a number, or none."))
    names, torch_dtype = list(dict.fromkeys(models)), getattr(torch, dtype)
    check_named(names, tokenizer, device, torch_dtype)
    text = read_text(data) if data else shipped_text()
    settings = {"device": device, "dtype": dtype, "batch_size": batch_size, "batches": batches, "max_length": max_length}
    settings |= {"seed": seed, "data": str(data or "shipped with the package"), **_versions()}
    report = Report(settings=settings, tolerance=tolerance)
    chosen, excluded = candidates(names, attentions, tokenizer=tokenizer, device=device, dtype=torch_dtype, seed=seed)
    report.left_out |= {f"{name} ({attn})": why for (name, attn), why in excluded.items()}
    drawn = {"text": text, "count": batch_size * batches, "max_length": max_length, "seed": seed}
    layout = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*layout, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(chosen) * len(sides) * len(COLUMNS))
        for candidate in chosen:
            progress.update(task, description=_label(candidate))
            _audit_one(candidate, report, sides, drawn, {"batch_size": batch_size, "gradients": gradients}, progress, task)
    _forgive_absent_attention(report, chosen)
    return report


def _audit_one(
    candidate: Candidate, report: Report, sides: Sequence[Side], drawn: dict[str, Any], how: dict[str, Any],
    progress: Progress, task: TaskID,
) -> None:  # fmt: skip
    goal = progress.tasks[0].completed + len(sides) * len(COLUMNS)
    try:
        model, tokenizer = candidate.build()
        samples = sample_ids(tokenizer=tokenizer, **drawn)
        case = Audit(model, samples, name=candidate.name, pad_token_id=tokenizer.pad_token_id, **how)
        for side in sides:
            for column in COLUMNS:
                report.findings.append(case.finding(side, column))
                progress.advance(task)
        report.yardsticks[_label(candidate)] = case.yardstick()
    except CollateError:
        raise
    except Exception as error:  # it does not build, or does not run alone: the report says so
        report.not_run[_label(candidate)] = f"{type(error).__name__}: {first_line(error)}"
    progress.update(task, completed=goal)


def _forgive_absent_attention(report: Report, chosen: Sequence[Candidate]) -> None:
    """A model that ran under one attention and has not the other (transformers raises ValueError) was audited."""
    ran = {finding.model for finding in report.findings}
    for candidate in chosen:
        label = _label(candidate)
        why = report.not_run.get(label, "")
        if candidate.name in ran and why.startswith("ValueError") and "does not support an attention implementation" in why:
            report.left_out[label] = report.not_run.pop(label)


def _label(candidate: Candidate) -> str:
    return f"{candidate.name} ({candidate.attn})"


def _versions() -> dict[str, str]:
    return {"collate_npu": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
