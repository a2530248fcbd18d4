"""Audit: batches of a model, padded on each side or packed, each beside its samples alone.

The models, tokenizer and device that it names are checked before any model is built. How a batch is compared, and what
passes, is `proof.invariance`. A folder may hold Python of its own (`auto_map`): it runs with `--trust-remote-code` alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu import __version__
from collate_npu.collate.collators import PaddingCollator
from collate_npu.consumers.model_traits import needs_mask_2d
from collate_npu.errors import CollateError, UnsupportedFormError, explain, printable
from collate_npu.integrations.adapt import adapt
from collate_npu.proof.invariance import Located, Reference, check_tolerance, check_unequal, collated, samples_of
from collate_npu.proof.measure import TIMES, Batch, predicts_next
from collate_npu.segments import Segments
from collate_npu.testing import hybrid_model_types, left_out
from collate_npu.tools import files, terminal
from collate_npu.tools.checkpoints import check_device, check_models, load_model
from collate_npu.tools.terminal import INTERRUPTED, RIGHT, UNPROVED, WRONG, number, terms
from collate_npu.tools.user_code import as_user_code, describe_error, find_callable, first_line, run_user_code

RowKind = Literal["left", "right", "packed"]
"""Padded on a side, or all samples of a batch in one flat row."""
OURS, DUMPED = "ours", "your batch"
DEFAULT = ("sdpa", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Batches of one collator on one model and side. Errors are None where it did not run; `note` says why, or what is
    wrong and what to change."""

    model: str
    attention: str
    side: RowKind
    by: str
    """"ours", the user's collator by name, or "your batch"."""
    logits: float | None = None
    """The largest difference of a logit at a real token."""
    loss: float | None = None
    gradient: float | None = None
    """Relative errors."""
    note: str = ""
    refused: bool = False
    """True for a clear refusal of this library, which is neither right nor wrong."""

    @property
    def right(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.logits is None else not self.note


@dataclass(slots=True, kw_only=True)
class Report:
    """All that an audit found. `left_out` was known not to be testable; `not_run` was meant to run, and did not."""

    settings: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    cannot_tell: list[str] = field(default_factory=list)
    """Models on which a batch without its mask would not be seen to be wrong."""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """130 before 1 before 2 before 0."""
        if self.interrupted:
            return INTERRUPTED
        if any(f.right is False or (f.right is None and not f.refused) for f in self.findings):
            return 1
        return 0 if any(f.right for f in self.findings) and not (self.not_run or self.cannot_tell) else 2

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines: `passed` first; numbers that are not finite are words."""
        findings = [{**asdict(f), "right": f.right} for f in self.findings]
        return terminal.verdict_json(self.exit_code, **{**asdict(self), "findings": findings})

    def drawn(self, *, verbose: bool = False) -> dict[str, Text | Table]:
        """Return, by heading, the verdict, what it rests on, a line for each model or (`verbose`) each case, and reasons."""
        ran = [f for f in self.findings if f.right is not None]
        said = f"{sum(bool(f.right) for f in ran)} of {len(ran)} cases are right" if ran else "nothing was measured"
        verdict = terminal.verdict_line(self.exit_code, f"{terminal.WORDS[self.exit_code]}: {said}.")
        where = f"{self.settings['device']}, {self.settings['dtype']}, torch {torch.__version__}"
        limit = self.settings["tolerance"] or f"{TIMES} times the rounding noise measured on each model"
        of = [", ".join(dict.fromkeys(getattr(f, name) for f in self.findings)) for name in ("attention", "side")]
        measured = f"{where}, transformers {transformers.__version__}"
        about = terms([("measured", measured), ("batches", "; ".join(of)), ("passes", f"up to {limit}")])
        notes = {(f.model, f.by, f.side): f.note for f in self.findings if f.note}
        signs = {place: "refused" if "refused" in note else "WRONG" for place, note in notes.items()}
        lines = [(signs[place], f"{', '.join(place)}: {note}") for place, note in notes.items()]
        lines += [("NOT RUN", f"{place}: {why}") for place, why in self.not_run.items()]
        lines += [("CANNOT TELL", f"{place}: a batch without its mask gives the same numbers") for place in self.cannot_tell]
        lines += [("left out", f"{place}: {why}") for place, why in self.left_out.items()]
        parts: dict[str, Text | Table] = {"Verdict": verdict, "What was measured": about}
        parts |= {"Cases": self._table(verbose), "Reasons": terms(lines)}
        return {heading: part for heading, part in parts.items() if isinstance(part, Text) or part.rows}

    def _table(self, verbose: bool) -> Table:
        drawn = terminal.ruled("", "model", "batches", numbers=("right", "logits", "loss", "gradient"))
        groups: dict[Any, list[Finding]] = {}
        for f in self.findings:
            groups.setdefault((f.model, f.by, *((f.attention, f.side) if verbose else ())), []).append(f)
        for found in groups.values():
            ran = [f for f in found if f.right is not None]
            sign = WRONG if any(f.right is False for f in found) else RIGHT if ran else UNPROVED
            case = found[0]
            errors = [[e for f in ran if (e := getattr(f, name)) is not None] for name in ("logits", "loss", "gradient")]
            numbers = (number(float(torch.tensor(each).max())) if each else "-" for each in errors)  # NaN stays
            cells = (Text(case.model), Text(f"{case.attention} {case.side} {case.by}" if verbose else case.by))
            drawn.add_row(Text(*sign), *cells, f"{sum(bool(f.right) for f in ran)} of {len(ran)}", *numbers)
        return drawn


# --- the user's collators

GIVEN = ("tokenizer", "processing_class", "model", "pad_token_id", "mlm")
"""What a class, or a function that makes a collator, is given by the names of its arguments; `mlm` is False, for tokens
masked at random cannot be compared."""
_A_COLLATOR = "Name a function of features, or what makes one: def mine(tokenizer, model): return ..."


_EXAMPLE = "transformers:DataCollatorForSeq2Seq"
named_collator = partial(find_callable, "--collator", example=_EXAMPLE, remedy=_A_COLLATOR)
"""The function or class of a name. Raises `CollateError`."""


def ready_collators(spec: str, sides: Sequence[str], *, tokenizer: Any, model: Any, pad_token_id: int) -> list[Any]:
    """Return the collator of a name: a function of features as it is, or what a class or a function of `GIVEN` makes; with a
    tokenizer one for each side."""
    found = named_collator(spec)
    with run_user_code("--collator", spec, "Its arguments say how it is made.", _A_COLLATOR):
        arguments = list(inspect.signature(found).parameters)
    taken = [name for name in arguments if name in GIVEN]
    ready: Any = partial(
        as_user_code, where="--collator", spec=spec, rule="It is called with features, a list of dicts.", remedy=_A_COLLATOR
    )
    if not inspect.isclass(found) and arguments and not taken:
        return [ready(found)]
    made = []
    for side in sides if tokenizer is not None and {"tokenizer", "processing_class"} & {*taken} else [None]:
        mine = copy.copy(tokenizer)
        if side:
            mine.padding_side = side
        given = dict(zip(GIVEN, (mine, mine, model, pad_token_id, False)))
        rule = f"It is called with {', '.join(taken) or 'nothing'}, by the names of its arguments."
        with run_user_code("--collator", spec, rule, _A_COLLATOR):
            made.append(ready(found(**{name: given[name] for name in taken})))
    return made


def candidates(names: Sequence[str], attentions: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return each name (default: every hybrid family) with each attention; and those known not to be testable."""
    known = {attn: {} if names or attn not in DEFAULT else left_out(attn) for attn in attentions}
    chosen = [(name, attn) for name in names or hybrid_model_types() for attn in attentions if name not in known[attn]]
    return chosen, {f"{name} ({attn})": why for attn in attentions for name, why in known[attn].items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its samples alone, and what is measured of it."""

    reference: Reference
    model: Any
    pad_token_id: int
    about: dict[str, Any]
    """The first fields of its findings."""

    def finding(self, side: RowKind, by: str, made: Callable[[], Sequence[Located]]) -> Finding:
        """Measure batches that are made here; whatever the model or their maker raises is the finding."""
        where: dict[str, Any] = {**self.about, "side": side, "by": by}
        adapted = by == OURS and side == "packed" and needs_mask_2d(self.model)
        try:
            with adapt(self.model) if adapted else nullcontext():
                errors, fault = self.reference.compare(made())
        except UnsupportedFormError as error:
            return Finding(**where, note=f"refused: {first_line(error)}", refused=True)
        except Exception as error:
            return Finding(**where, note=describe_error(error))
        return Finding(**where, logits=errors.largest, loss=errors.loss, gradient=errors.gradient, note=fault)

    def ours(self, side: RowKind) -> Finding:
        """Batches of this library's collator."""
        layout: dict[str, Any] = {"padding_free": True} if side == "packed" else {"padding_side": side}
        collator = partial(PaddingCollator, pad_token_id=self.pad_token_id, model=self.model, **layout)
        return self.finding(side, OURS, lambda: [collated(collator(), features) for features in self.reference.batches])

    def tells(self) -> bool:
        """True if batches that lost their mask are seen to be wrong."""
        lost = []
        for features in self.reference.batches:
            collator = PaddingCollator(pad_token_id=self.pad_token_id, padding_side="left", attention_mask="omit")
            ids = {key: value for key, value in collator(features).items() if key in ("input_ids", "labels")}
            segments = Segments.from_lengths([len(feature["input_ids"]) for feature in features], side="left")
            lost.append(Located.in_order(segments, ids, features))
        return self.reference.tells(lost)


def audit_all(
    *, models: Sequence[str], data: Path | None, batch: Path | None, tokenizer: Path | None, trust: bool,
    sides: Sequence[RowKind], attentions: Sequence[str], collators: Sequence[str], device: str, dtype: str, batch_size: int,
    batches: int, max_length: int, gradients: bool, tolerance: float | None, seed: int, console: Console,
) -> Report:  # fmt: skip
    """Check what is named, then audit it model by model. Raises `CollateError` where something named cannot be used."""
    settings = {key: str(x) if isinstance(x, Path) else x for key, x in locals().items() if key not in ("console", "trust")}
    check_tolerance(tolerance)
    for spec in collators:
        named_collator(spec)
    names, in_dtype = list(dict.fromkeys(models)), getattr(torch, dtype)
    dumped, rows = _dumped(batch, data, names), files.read_rows(data) if data else files.shipped_text()
    check_device(device, in_dtype)
    check_models(names, tokenizer, trust=trust)
    ids = [dumped["input_ids"].flatten().tolist()] if dumped else [r["input_ids"] for r in rows if isinstance(r, dict)]
    chosen, untestable = candidates(names, list(dict.fromkeys(attentions or DEFAULT)))
    report = Report(settings={**settings, "collate_npu": __version__}, left_out=untestable)
    how: dict[str, Any] = {"tokenizer": tokenizer, "device": device, "dtype": in_dtype, "trust": trust, "seed": seed}
    try:
        with terminal.progress(len(chosen), console) as show:
            for n, (name, attn) in enumerate(chosen):
                shown, began = printable(f"[{n + 1}/{len(chosen)}] {name} ({attn})"), monotonic()
                show(shown, n)
                with _noted(report, f"{name} ({attn})", named=bool(names and attentions)):
                    model, reader, pad = load_model(name, attn, **how, largest_id=max(map(max, ids), default=0))
                    given, size = None, batch_size * batches
                    if dumped is None:
                        drawn = files.samples_of_rows(rows, reader, count=size, max_length=max_length, seed=seed)
                        groups: Any = [drawn[i : i + batch_size] for i in range(0, size, batch_size)]
                    else:
                        given = samples_of(dumped, next_token=predicts_next(model))
                        groups = [given.features]
                    check_unequal(*groups)
                    reference = Reference(model, groups, gradients=gradients, tolerance=tolerance)
                    about = {"model": name, "attention": attn}
                    case = Subject(reference=reference, model=model, pad_token_id=pad, about=about)
                    _audit(report, case, sides, collators, given, reader)
                console.print(Text(f"{shown}: {monotonic() - began:.1f} s"), soft_wrap=True)
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _audit(
    report: Report, case: Subject, sides: Sequence[RowKind], collators: Sequence[str], given: Located | None, tokenizer: Any
) -> None:
    """Every case of one model."""
    if given and given.segments.packed:
        sides = ["packed"]
    report.findings += [case.ours(side) for side in sides]
    if not case.tells():
        report.cannot_tell.append(f"{case.about['model']} ({case.about['attention']})")
    if given:
        report.findings.append(case.finding(_kind_of([given]), DUMPED, lambda: [given]))
    how = {"tokenizer": tokenizer, "model": case.model, "pad_token_id": case.pad_token_id}
    for spec in collators:
        for collator in ready_collators(spec, [side for side in sides if side != "packed"], **how):
            made = [collated(collator, features) for features in case.reference.batches]
            where = _kind_of(made)
            report.findings.append(case.finding(where, spec.rpartition(":")[2], lambda made=made: made))  # type: ignore[misc]


def _kind_of(made: Sequence[Located]) -> RowKind:
    left = any(each.segments.padding_side == "left" for each in made)
    return "packed" if any(each.segments.packed for each in made) else "left" if left else "right"


def _dumped(batch: Path | None, data: Path | None, names: Sequence[str]) -> Batch | None:
    if batch is None:
        return None
    if data or not names:
        rule = "The samples of a dumped batch are in it, and it goes to a model as it is."
        got, remedy = ("--data too", "Leave --data out.") if data else ("no --model", "Name the model that it was made for.")
        raise CollateError(explain("--batch", got, rule, remedy))
    dumped = files.batch_of_file(batch)
    ids = dumped.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        rule = "A batch of samples has input_ids [B, S], whole numbers."
        raise CollateError(explain("--batch", f"{batch}: keys {', '.join(dumped)}", rule, files.RECIPE))
    return dumped


_ABSENT = ("does not support an attention implementation", "does not support Flash Attention", "in the place of")
"""How it is said that a model does not have an attention implementation."""


@contextmanager
def _noted(report: Report, place: str, *, named: bool) -> Iterator[None]:
    """The report notes what does not build, does not run alone or cannot be compared."""
    try:
        yield
    except (Exception, SystemExit) as error:  # code of a checkpoint's own may end the process
        why = " ".join(str(error).split()) if isinstance(error, CollateError) else describe_error(error)
        absent = any(words in why for words in _ABSENT) and not named
        (report.left_out if absent else report.not_run)[place] = why
