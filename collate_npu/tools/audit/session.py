"""Session: all that one `collate-npu audit` measures. What it names is checked before any model is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from collate_npu import __version__
from collate_npu.errors import CollateError, explain
from collate_npu.testing.measure import Batch
from collate_npu.tools.audit.attentions import check_attentions, first_line, import_plugins, named
from collate_npu.tools.audit.candidates import OF_ATTENTION_ALONE, Candidate, candidates, check_named
from collate_npu.tools.audit.case import Audit, Finding, Layout
from collate_npu.tools.audit.data import read_rows, shipped_text
from collate_npu.tools.audit.dumped import of_batch, read_batch
from collate_npu.tools.audit.flat import Kernels, kernels_for, resolved_kernels
from collate_npu.tools.audit.named_collators import column_of, named_collator, ready_collators
from collate_npu.tools.audit.progress import Steps
from collate_npu.tools.audit.ranks import RanksError
from collate_npu.tools.audit.report import FirstBatch, Report
from collate_npu.tools.audit.samples import Drawing
from collate_npu.tools.audit.sharded import audit_sharded, check_ranks
from collate_npu.tools.audit.verdict import told


def audit_all(
    *, models: Sequence[str], data: Path | None, tokenizer: Path | None, sides: Sequence[Layout], attentions: Sequence[str],
    device: str, dtype: str, batch_size: int, batches: int, max_length: int, gradients: bool, tolerance: float | None,
    seed: int, console: Console, ranks: int = 0, kernels: Kernels = "installed", plugins: Sequence[str] = (),
    seconds: float = 600.0, collators: Sequence[str] = (), batch: Path | None = None, trust: bool = False,
) -> Report:  # fmt: skip
    """Check what is named, then audit it model by model. Raises `CollateError` where something named cannot be used."""
    names, torch_dtype, implementations = list(dict.fromkeys(models)), getattr(torch, dtype), named(attentions)
    _check_numbers(tolerance, batch_size, sides)
    import_plugins(plugins)
    for spec in collators:
        named_collator(spec)
    _check_batch(batch, data, names, ranks)
    dumped = read_batch(batch) if batch else None
    rows = read_rows(data) if data else shipped_text()
    drawing = Drawing(rows=rows, count=batch_size * batches, max_length=max_length, seed=seed)
    tokenized = drawing.tokenized or dumped is not None
    largest_id = int(dumped["input_ids"].max()) if dumped else drawing.largest_id
    check_named(names, tokenizer, device, torch_dtype, tokenized=tokenized, trust=trust)
    check_attentions(implementations, device, torch_dtype, gradients=gradients)
    if ranks:
        check_ranks(ranks, device, implementations)
    settings = {"device": device, "dtype": dtype, "batch_size": batch_size, "batches": batches, "max_length": max_length}
    settings |= {"seed": seed, "data": str(batch or data or "shipped with the package"), "kernels": kernels, **_versions()}
    report = Report(settings=settings, tolerance=tolerance)
    more = OF_ATTENTION_ALONE if ranks or "packed" in sides else ()
    built = {"tokenizer": tokenizer, "device": device, "dtype": torch_dtype, "seed": seed, "trust": trust}
    built |= {"tokenized": tokenized, "largest_id": largest_id}
    chosen, excluded = candidates(names, implementations, more=more, **built)
    report.left_out |= {f"{name} ({attn})": why for (name, attn), why in excluded.items()}
    session = _Session(
        report=report, sides=sides, ranks=ranks, how={"batch_size": batch_size, "gradients": gradients}, kernels=kernels,
        seconds=seconds, plugins=plugins, drawing=drawing, collators=collators, dumped=dumped,
    )  # fmt: skip
    try:
        _audit_each(session, chosen, console)
    except KeyboardInterrupt:
        report.interrupted = True
    _forgive_absent_attention(report, chosen, named=bool(names))
    return report


def _check_batch(batch: Path | None, data: Path | None, names: Sequence[str], ranks: int) -> None:
    if batch is None:
        return
    rule = "The samples of a dumped batch are in it, and it goes to a model as it is."
    for option, given in (("--data", data), ("--cp", ranks)):
        if given:
            raise CollateError(explain("--batch", f"{option} {given} too", rule, f"Leave {option} out."))
    if not names:
        raise CollateError(explain("--batch", "no --model", rule, "Name the model that it was made for."))


def _audit_each(session: _Session, chosen: Sequence[Candidate], console: Console) -> None:
    with Steps(console, len(chosen), len(session.sides) + bool(session.ranks)).shown() as steps:
        for candidate in chosen:
            before = len(session.report.findings)
            with steps.model(label(candidate), lambda: told(session.report, label(candidate), before)):  # noqa: B023 (called at once)
                session.audit(candidate, steps.advance)
                if session.ranks and candidate.attn == "sdpa":
                    session.share_out(candidate)


def _check_numbers(tolerance: float | None, batch_size: int, sides: Sequence[str]) -> None:
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise CollateError(explain("--tolerance", str(tolerance), "An error is 0 or more.", "Give such a number, or none."))
    if batch_size < 2:
        what = "neither padded nor packed" if "packed" in sides else "not padded"
        rule = f"One sequence in a batch is {what}: it would be compared with itself, which proves nothing."
        raise CollateError(explain("--batch-size", str(batch_size), rule, "Give 2 or more."))


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What is asked of every candidate, and the report it goes to."""

    report: Report
    sides: Sequence[Layout]
    ranks: int
    how: dict[str, Any]
    """`batch_size` and `gradients`."""
    kernels: Kernels
    seconds: float
    plugins: Sequence[str]
    drawing: Drawing
    collators: Sequence[str]
    """By name."""
    dumped: Batch | None

    def audit(self, candidate: Candidate, advance: Any) -> None:
        """Every case of this process."""
        with self._told(label(candidate)):
            model, tokenizer = candidate.build()
            with kernels_for(model, self.kernels):
                case = self._case(candidate, model, tokenizer)
                for side in case.sides:
                    self._side(case, side, label(candidate) + (" packed" if side == "packed" else ""))
                    advance()
                self._yours(case, label(candidate))
            if "packed" in case.sides and self.kernels == "installed" and (resolved := resolved_kernels(model)):
                self.report.kernels[candidate.name] = resolved

    def _side(self, case: Audit, side: Layout, place: str) -> None:
        found: list[Finding] = []
        self.report.batches.setdefault(side, FirstBatch(case.name, case.truth(side), case.causal))
        try:
            for column in case.columns(side):
                found.append(case.finding(side, column))
        except KeyboardInterrupt:
            self.report.findings += found
            raise
        if all(f.logits is None and not f.refused and not f.no_kernel for f in found):
            self.report.not_run[place] = found[0].note  # it raises whatever is handed over
            return
        self.report.findings += found
        if not all(f.refused or f.no_kernel for f in found if f.ours):
            self.report.yardsticks[place] = case.yardstick(side)

    def _case(self, candidate: Candidate, model: Any, tokenizer: Any) -> Audit:
        pad_token_id = candidate.pad_token_id(model, tokenizer)
        ready = {"tokenizer": tokenizer, "model": model, "pad_token_id": pad_token_id}
        padded = [side for side in self.sides if side != "packed"]
        given = [(column_of(spec), each) for spec in self.collators for each in ready_collators(spec, padded, **ready)]
        about = {"name": candidate.name, "pad_token_id": pad_token_id, "sides": self.sides, "handovers": given, **self.how}
        if self.dumped is not None:
            return of_batch(model, self.dumped, **about)
        return Audit(model, self.drawing.samples(tokenizer), **about)

    def _yours(self, case: Audit, place: str) -> None:
        """What was given. A batch that cannot be compared, or a collator that raises, did not run."""
        for column, collator in case.given:
            with self._told(f"{column} on {place}", refused=True):
                self.report.findings.append(case.yours(column, collator))

    def share_out(self, candidate: Candidate) -> None:
        """The cases of context parallelism, in processes of their own."""
        place = f"{label(candidate)} cp {self.ranks}"
        with self._told(place):
            late: dict[str, Any] = {"seconds": self.seconds, "plugins": self.plugins}
            found, yardstick = audit_sharded(candidate, self.drawing, size=self.ranks, **self.how, **late)
            self.report.findings += found
            if yardstick is not None:
                self.report.yardsticks[place] = yardstick

    @contextmanager
    def _told(self, place: str, *, refused: bool = False) -> Iterator[None]:
        """A model that does not build, does not run alone or loses a rank is told in the report."""
        try:
            yield
        except CollateError as error:
            if not refused:
                raise
            self.report.not_run[place] = " ".join(str(error).split())
        except RanksError as error:
            self.report.not_run[place] = str(error)
        except Exception as error:
            self.report.not_run[place] = f"{type(error).__name__}: {first_line(error)}"


def _forgive_absent_attention(report: Report, chosen: Sequence[Candidate], *, named: bool) -> None:
    """An attention that a model has not (transformers raises ValueError) where another ran, or no model was named."""
    ran = {finding.model for finding in report.findings}
    for candidate in chosen:
        why = report.not_run.get(label(candidate), "")
        absent = why.startswith("ValueError") and any(words in why for words in _ABSENT)
        if absent and (candidate.name in ran or not named):
            report.left_out[label(candidate)] = report.not_run.pop(label(candidate))


_ABSENT = ("does not support an attention implementation", "does not support Flash Attention", "in the place of")


def label(candidate: Candidate) -> str:
    """A model and its attention, as the report names them."""
    return f"{candidate.name} ({candidate.attn})"


def _versions() -> dict[str, str]:
    return {"collate_npu": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
