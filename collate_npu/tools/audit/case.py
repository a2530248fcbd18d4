"""The audit: does a padded batch, or a flat row, give the same numbers as each sample alone, on this model and device?

Every sample is run alone, without padding and without a mask; then batches of the same samples are run as this library
hands them over, and as they are handed over elsewhere (`handover`). How they are run, found in a batch and compared, and
what passes, is `proof`. A tiny model costs about a second a case on one CPU core; a checkpoint costs one forward and
backward pass a case and batch, and as many a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from collate_npu.consumers.mask_routing import Case, Model
from collate_npu.consumers.model_traits import needs_mask_2d
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations.adapt import adapt
from collate_npu.masks.patterns import Pattern
from collate_npu.proof import invariance
from collate_npu.proof.forward import Fault, listed
from collate_npu.proof.invariance import Collator, Located, Samples
from collate_npu.proof.measure import Batch, Compared, Errors, Numbers, Yardstick, alone, measure, measure_noise, uncached
from collate_npu.proof.recorder import heard
from collate_npu.segments import Segments
from collate_npu.tools.audit.handover import DENSE_ALONE, FLAT, NO_BOUNDARIES, NO_MASK, WAYS, Layout, Subject
from collate_npu.tools.refusals import first_line, said
from collate_npu.validation import check_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Whose = Literal["ours", "yours", "elsewhere"]
"""Who hands over: this library, what was given to the audit, or the ways seen elsewhere."""
DUMPED = "your batch"
"""The column of a dumped batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way of handing over, on one model and side. Errors are None where the case did not run; `note` says why.

    `refused` marks this library's own clear refusal; any other exception is the model's.
    """

    model: str
    attention: str
    side: Layout
    column: str
    whose: Whose
    logits: float | None = None
    """The largest difference of a logit at a real token."""
    relative: float | None = None
    """|x - y| / |y| over the logits of all real tokens."""
    loss: float | None = None
    gradient: float | None = None
    right: bool | None = None
    """By the yardstick; None where nothing was measured."""
    astray: tuple[str, ...] = ()
    """What is not right by the yardstick: `logits`, `loss`, `gradient`; `labels` that are not those of the samples; and
    `kernels` that were told something else than the batch says."""
    note: str = ""
    refused: bool = False
    by_position: tuple[tuple[float, ...], ...] = ()
    """The largest difference of a logit at each token of each sample."""

    @property
    def meaning(self) -> str:
        """What is handed over that way."""
        way = WAYS[self.side].get(self.column) if self.whose != "yours" else None
        return way.meaning if way else "as you gave it to the audit"

    def within(self, tolerance: float | None) -> bool:
        """Is it right by the yardstick, or with a tolerance: is every error measured at most that? Or was it refused?"""
        if self.logits is None:
            return self.refused
        if tolerance is None or {"labels", "kernels"} & {*self.astray}:
            return bool(self.right)
        measured = (self.logits, self.loss, self.gradient)
        return all(error is None or error <= tolerance for error in measured)


class Audit:
    """A model, its samples alone, and the yardstick for both; cases are measured when asked for, once each."""

    def __init__(
        self, model: PreTrainedModel, samples: Samples, *, name: str, pad_token_id: int, batch_size: int, gradients: bool,
        sides: Sequence[Layout] = ("left", "right"),
    ) -> None:  # fmt: skip
        check_model(model)
        invariance.check_one_stack(model)
        self._batches = batches_of(samples, batch_size, sides)
        invariance.check_vocabulary(model, self._batches)
        self.name, self.sides, self._gradients = name, sides, gradients
        self.subject = Subject(model=model, side="right", pad_token_id=pad_token_id)
        self._alone = [alone(model, batch, gradients) for batch in self._batches]
        self._found: dict[tuple[Layout, str], Compared | Exception] = {}
        self._told: dict[tuple[Layout, str], list[Fault]] = {}

    def columns(self, side: Layout) -> list[str]:
        """The ways of handing over that can be tried on this side and attention."""
        return [name for name, way in WAYS[side].items() if self.subject.reads_dense or not way.dense]

    def yardstick(self, side: Layout = "left") -> Yardstick:
        """What passes here, and what of the wrong is smallest.

        Padded: None on the left (of an encoder on the right) and, if layers need the 2D, a bare 4D. Packed: a row of which
        nothing is told, and every other way that is not right.
        """
        if side == "packed":
            others = [column for column, way in FLAT.items() if not way.ours]
            columns = [column for column in others if column == NO_BOUNDARIES.name or not self.finding(side, column).right]
        else:
            bare = needs_mask_2d(self.subject.model) and self.subject.reads_dense
            columns = [NO_MASK.name, *([DENSE_ALONE.name] if bare else [])]
            side = "right" if self.subject.pattern else "left"
        wrong = [found.worst for column in columns if isinstance(found := self._compared(side, column), Compared)]
        return Yardstick(self._noise, min(wrong, key=lambda found: size(found.logits), default=None))

    def finding(self, side: Layout, column: str) -> Finding:
        """One case: measured, refused or raised."""
        whose: Whose = "ours" if WAYS[side][column].ours else "elsewhere"
        found = self._judged(side, column, whose, self._compared(side, column))
        return _with_kernels(found, self._told[side, column])

    def of_collator(self, column: str, collator: Collator) -> Finding:
        """The batches of a collator that was given. Raises `CollateError` where they hold other tokens than the samples."""
        return self.of_given(column, [invariance.collated(collator, features) for features in self._batches])

    def of_given(self, column: str, cases: Sequence[Located]) -> Finding:
        """Batches that were given, judged like ours; they tell their side themselves."""
        asked = (self.subject.model, self._gradients)
        given = [case.segments for case in cases]
        with heard(self.subject.model, self._cases(given)) as told:
            found = _tried(zip((case.numbers(*asked) for case in cases), self._alone))
        left: Layout = "left" if any(segments.padding_side == "left" for segments in given) else "right"
        finding = self._judged("packed" if any(segments.packed for segments in given) else left, column, "yours", found)
        if mislabelled := [case for case in cases if case.label_fault()]:
            finding = replace(finding, right=False, astray=(*finding.astray, "labels"))
        if finding.right is False and not finding.note and isinstance(found, Compared):
            yardstick = Yardstick(self._noise)
            pairs = [pair for pair in zip(cases, found.each) if not yardstick.passes(pair[1]) or pair[0] in mislabelled]
            wrong, each = pairs[0]
            finding = replace(finding, note=invariance.advice(wrong, self.subject.model, yardstick.astray(each)))
        return _with_kernels(finding, told)

    def _cases(self, truths: Iterable[Segments]) -> Iterator[Case]:
        model, pattern = Model.of(self.subject.model), Pattern.of(self.subject.pattern or "causal")
        return (Case(segments=each, model=model, pattern=pattern) for each in truths)

    def _compared(self, side: Layout, column: str) -> Compared | Exception:
        """The errors of a case over all batches, or what it raised."""
        if (side, column) not in self._found:
            hand, subject = WAYS[side][column].hand, replace(self.subject, side=side)
            truths = [subject.truth(features) for features in self._batches]
            runs = (self._run(hand(subject, features), truth) for features, truth in zip(self._batches, truths))
            with ExitStack() as held:
                ours = WAYS[side][column].ours
                if ours and side == "packed" and needs_mask_2d(subject.model):
                    held.enter_context(adapt(subject.model))
                self._told[side, column] = held.enter_context(heard(subject.model, self._cases(truths))) if ours else []
                self._found[side, column] = _tried(zip(runs, self._alone))
        return self._found[side, column]

    @cached_property
    def _noise(self) -> Errors:
        return measure_noise(self.subject.model, self._batches, self._alone, gradients=self._gradients)

    def _run(self, batch: Batch, truth: Segments) -> Numbers:
        def rows(scores: Tensor) -> list[Tensor]:
            if scores.ndim == 2 and truth.padding_side == "left" and self.subject.pattern:
                rule = "The head of an encoder reads the first place of a row, which is padding here."
                raise UnsupportedFormError(explain("model", "one answer a row", rule, "Pad right."))
            return Located.in_order(truth).rows(scores)

        batch = uncached(self.subject.model, batch) if truth.packed else batch
        return measure(self.subject.model, batch, rows, self._gradients)

    def _judged(self, side: Layout, column: str, whose: Whose, found: Compared | Exception) -> Finding:
        where: dict[str, Any] = {"model": self.name, "attention": self.subject.attn_implementation}
        where |= {"side": side, "column": column, "whose": whose}
        if isinstance(found, Exception):
            return Finding(**where, **raised(found))
        worst, yardstick = found.worst, Yardstick(self._noise)
        finite = math.isfinite(worst.logits) and math.isfinite(worst.loss) and math.isfinite(worst.gradient)
        return Finding(
            **where, logits=worst.largest, relative=worst.logits, loss=worst.loss,
            gradient=worst.gradient if self._gradients else None, right=yardstick.passes(worst),
            astray=yardstick.astray(worst), by_position=found.by_position,
            note="" if finite else "a number in the batch, or of a sample alone, is not finite",
        )  # fmt: skip


def _with_kernels(finding: Finding, faults: Sequence[Fault]) -> Finding:
    """A case in which a kernel was told something else than the batch says is wrong, whatever its numbers."""
    if not faults or finding.logits is None:
        return finding
    note = f"{finding.note} {listed(faults)}".strip()
    return replace(finding, right=False, astray=(*finding.astray, "kernels"), note=note)


def _tried(pairs: Iterable[tuple[Numbers, Numbers]]) -> Compared | Exception:
    try:
        return Compared.of(pairs)
    except Exception as error:  # whatever the model raises is the finding: it refused, and says so
        return error


def raised(error: Exception) -> dict[str, Any]:
    """What a case raised, in one line, and whose refusal that is."""
    refused = isinstance(error, UnsupportedFormError)
    return {"note": first_line(error) if refused else said(error), "refused": refused}


def batches_of(samples: Samples, batch_size: int, sides: Sequence[str]) -> list[list[Batch]]:
    """The samples as batches of features. Raises `CollateError` where a comparison would prove nothing."""
    features = invariance.features_of(samples)
    batches = [features[i : i + batch_size] for i in range(0, len(features), batch_size)]
    if "packed" in sides and any(len(batch) < 2 for batch in batches):
        rule = "A row of one sequence has no boundary to keep, and a comparison with itself alone proves nothing."
        raise CollateError(explain("--packed", "a row of one sequence", rule, "Give a --batch-size of 2 or more."))
    if any(side != "packed" for side in sides):
        invariance.check_unequal(*batches)
    return batches


def size(error: float) -> float:
    """What is not finite is larger than any."""
    return error if math.isfinite(error) else math.inf


def audit(
    model: PreTrainedModel,
    samples: Samples,
    *,
    name: str = "",
    pad_token_id: int,
    sides: Sequence[Layout] = ("left", "right"),
    batch_size: int = 4,
    columns: Sequence[str] | None = None,
    gradients: bool = True,
) -> Iterator[Finding]:
    """Findings for each side and column, as they are measured.

    `samples` are token ids, or dicts of `input_ids` and `labels`; the model stays as it is. `columns`: the ways of
    handing over, by default all that the side and the attention implementation have.

    >>> from collate_npu.tools.audit import audit
    >>> from collate_npu.testing import tiny_model
    >>> samples = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> found = audit(tiny_model("llama", vocab_size=257), samples, pad_token_id=256, sides=["left"])
    >>> [(finding.column, finding.right) for finding in found if finding.column in ("collator", "no mask")]
    [('collator', True), ('no mask', False)]
    """
    settings: dict[str, Any] = {"batch_size": batch_size, "gradients": gradients, "sides": sides}
    case = Audit(model, samples, name=name, pad_token_id=pad_token_id, **settings)
    for side in sides:
        for column in case.columns(side) if columns is None else columns:
            yield case.finding(side, column)
