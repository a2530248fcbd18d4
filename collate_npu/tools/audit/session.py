"""Session: all that one `collate-npu audit` measures. What it names is checked before any model is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.text import Text

from collate_npu import __version__
from collate_npu.consumers.model_traits import pattern_of
from collate_npu.errors import CollateError, explain, printable
from collate_npu.proof.invariance import samples_of
from collate_npu.proof.kernel_rows import KERNELS
from collate_npu.proof.kernel_runs import runs
from collate_npu.proof.measure import Batch, predicts_next
from collate_npu.tools.audit.candidates import (
    DEFAULT,
    build,
    candidates,
    check_named,
    named_collator,
    place_of,
    ready_collators,
    resolved_kernels,
)
from collate_npu.tools.audit.case import DUMPED, Audit
from collate_npu.tools.audit.data import read_rows, samples_of_rows, shipped_text
from collate_npu.tools.audit.handover import Layout
from collate_npu.tools.audit.report import Report, shortened
from collate_npu.tools.refusals import said
from collate_npu.tools.saved import RECIPE, batch_of_file


def audit_all(
    *, models: Sequence[str], data: Path | None, tokenizer: Path | None, sides: Sequence[Layout], attentions: Sequence[str],
    device: str, dtype: str, batch_size: int, batches: int, max_length: int, gradients: bool, tolerance: float | None,
    seed: int, console: Console, collators: Sequence[str] = (), batch: Path | None = None, trust: bool = False,
) -> Report:  # fmt: skip
    """Check what is named, then audit it model by model, on a card its kernels first. Raises `CollateError` where something
    named cannot be used."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise CollateError(explain("--tolerance", str(tolerance), "An error is 0 or more.", "Give such a number, or none."))
    names, implementations = list(dict.fromkeys(models)), list(dict.fromkeys(attentions or DEFAULT))
    for spec in collators:
        named_collator(spec)
    dumped = _dumped(batch, data, names)
    rows = read_rows(data) if data else shipped_text()
    how: dict[str, Any] = {"tokenizer": tokenizer, "device": device, "dtype": getattr(torch, dtype), "trust": trust}
    check_named(names, implementations, **how)
    tokens = [dumped["input_ids"].flatten().tolist()] if dumped else [r["input_ids"] for r in rows if isinstance(r, dict)]
    how |= {"seed": seed, "largest_id": max(map(max, tokens), default=0)}
    chosen, left_out = candidates(names, implementations)
    settings = {"device": device, "dtype": dtype, "batch_size": batch_size, "batches": batches, "max_length": max_length}
    settings |= {"seed": seed, "data": str(batch or data or "shipped with the package")}
    settings |= {"collate_npu": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = Report(settings=settings, tolerance=tolerance, left_out=left_out)
    session = _Session(
        report, partial(build, **how), sides, collators, dumped, how={"batch_size": batch_size, "gradients": gradients},
        drawn=partial(samples_of_rows, rows, count=batch_size * batches, max_length=max_length, seed=seed),
    )  # fmt: skip
    try:
        if device.partition(":")[0] != "cpu":
            with console.status("kernels"):
                report.operators += runs(KERNELS, device=device, dtype=how["dtype"], few=True)
        for n, (name, attn) in enumerate(chosen, 1):
            session.audit(name, attn, f"[{n}/{len(chosen)}] ", console)
    except KeyboardInterrupt:
        report.interrupted = True
    for name, attn in chosen:  # an attention that a model has not is forgiven where another ran, or no model was named
        absent = any(words in report.not_run.get(place_of(name, attn), "") for words in _ABSENT)
        if absent and (not names or name in {finding.model for finding in report.findings}):
            report.left_out[place_of(name, attn)] = report.not_run.pop(place_of(name, attn))
    return report


_ABSENT = ("does not support an attention implementation", "does not support Flash Attention", "in the place of")


def _dumped(batch: Path | None, data: Path | None, names: Sequence[str]) -> Batch | None:
    if batch is None:
        return None
    rule = "The samples of a dumped batch are in it, and it goes to a model as it is."
    if data:
        raise CollateError(explain("--batch", f"--data {data} too", rule, "Leave --data out."))
    if not names:
        raise CollateError(explain("--batch", "no --model", rule, "Name the model that it was made for."))
    dumped = batch_of_file(batch)
    ids = dumped.get("input_ids")
    dense = isinstance(ids, torch.Tensor) and ids.layout == torch.strided and not ids.is_nested
    if ids is None or not dense or ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        rule = "A batch of samples has input_ids [B, S], whole numbers."
        raise CollateError(explain("--batch", f"{batch}: keys {', '.join(dumped)}", rule, RECIPE))
    return dumped


@dataclass(frozen=True)
class _Session:
    """What is asked of every candidate, and the report it goes to."""

    report: Report
    build: partial[tuple[Any, Any, int]]  # a model, by its name and attention
    sides: Sequence[Layout]
    collators: Sequence[str]  # by name
    dumped: Batch | None
    how: dict[str, Any]  # batch_size and gradients
    drawn: partial[list[Batch]]  # samples by a tokenizer

    def audit(self, name: str, attn: str, count: str, console: Console) -> None:
        """Every case of one: its name turns on a terminal meanwhile, and a line says how long it took."""
        place, began = place_of(name, attn), monotonic()
        shown = printable(f"{count}{shortened(place, 60)}")
        with console.status(Text(shown)), self._told(place):
            model, tokenizer, pad_token_id = self.build(name, attn)
            self._audit(name, place, model, tokenizer, pad_token_id)
        console.print(Text(f"{shown}: {monotonic() - began:.1f} s"), soft_wrap=True)

    def _audit(self, name: str, place: str, model: Any, tokenizer: Any, pad_token_id: int) -> None:
        padded = [side for side in self.sides if side != "packed"]
        about = {"name": name, "pad_token_id": pad_token_id, "sides": self.sides, **self.how}
        if self.dumped is None:
            samples = self.drawn(tokenizer)
        else:  # beside batches laid out as it is: rows of several samples beside flat rows
            given = samples_of(self.dumped, pattern_of(model), next_token=predicts_next(model))
            samples = list(given.features)
            about |= {"batch_size": len(samples), "sides": ["packed"] if given.segments.packed else padded}
        case = Audit(model, samples, **about)
        for side in case.sides:
            self._side(case, side, place + (" packed" if side == "packed" else ""))
        if self.dumped is not None:
            self.report.findings.append(case.of_given(DUMPED, [given]))
        for spec in self.collators:
            column = spec.rpartition(":")[2]
            with self._told(f"{place} {column}"):
                for collator in ready_collators(spec, padded, tokenizer=tokenizer, model=model, pad_token_id=pad_token_id):
                    self.report.findings.append(case.of_collator(column, collator))
        if "packed" in case.sides and (resolved := resolved_kernels(model)):
            self.report.kernels[name] = resolved

    def _side(self, case: Audit, side: Layout, place: str) -> None:
        first = len(self.report.findings)
        for column in case.columns(side):
            self.report.findings.append(case.finding(side, column))
        found = self.report.findings[first:]
        if all(f.logits is None and not f.refused for f in found):
            del self.report.findings[first:]
            self.report.not_run[place] = found[0].note  # it raises whatever is handed over
        elif not all(f.refused for f in found if f.whose == "ours"):
            self.report.yardsticks[place] = case.yardstick(side)

    @contextmanager
    def _told(self, place: str) -> Iterator[None]:
        """What does not build, does not run alone or cannot be compared is told in the report."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # code of a checkpoint's own may end the process
            ours = isinstance(error, CollateError)
            self.report.not_run[place] = " ".join(str(error).split()) if ours else said(error)
