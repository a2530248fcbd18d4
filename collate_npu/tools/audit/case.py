"""The audit: does a padded batch, or a flat row, give the same numbers as each sample alone, on this model and device?

Every sample is run alone, without padding and without a mask; then batches of the same samples are run as this library
hands them over, and as they are handed over elsewhere (`handover`, `flat`). Each result is compared with the samples alone
(`measure`), and judged by how far apart right results are here (`yardstick`). A tiny model costs about a second a case on
one CPU core; a checkpoint costs one forward and backward pass a case and batch, and as many a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from collate_npu.consumers.models import needs_mask_2d, pattern_of
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.segments import Segments
from collate_npu.testing.invariance import Collator, Given, Samples, check_one_stack, collated, features_of, layout_of
from collate_npu.testing.located import Located
from collate_npu.testing.measure import Batch, Errors, Numbers, alone, by_position, errors, run, worst
from collate_npu.testing.yardstick import Yardstick, measure_noise
from collate_npu.tools.audit.flat import FLAT_OTHERS, FLAT_OURS, check_packed, flat_truth, no_kernel
from collate_npu.tools.audit.handover import OTHERS, OURS, Handover, Subject, others_on

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


Layout = Literal["left", "right", "packed"]
"""Padded on a side, or all samples of a batch in one flat row."""
Whose = Literal["ours", "yours", "elsewhere"]
"""Who hands over: this library, the collator that was given to the audit, or the ways seen elsewhere."""


DUMPED = "your batch"
"""The column of a dumped batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way of handing over, on one model and side. Errors are None where the case did not run; `note` says why.

    `refused` marks this library's own clear refusal, `no_kernel` that of a model that has no kernel for it here; any
    other exception is the model's.
    """

    model: str
    attn_implementation: str
    side: str
    """A `Layout`, or "cp 2": right padding shared out between two ranks."""
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
    """What is not right by the yardstick: `logits`, `loss`, `gradient`."""
    note: str = ""
    refused: bool = False
    no_kernel: bool = False
    by_position: tuple[tuple[float, ...], ...] = ()
    """The largest difference of a logit at each token of each sample."""

    @property
    def ours(self) -> bool:
        """Does this library hand over?"""
        return self.whose == "ours"

    def within(self, tolerance: float | None) -> bool:
        """Is it right by the yardstick, or with a tolerance: is every error measured at most that? Or was it refused?"""
        if self.logits is None:
            return self.refused
        if tolerance is None:
            return bool(self.right)
        measured = (self.logits, self.loss, self.gradient)
        return all(error is None or error <= tolerance for error in measured)


class Audit:
    """A model, its samples alone, and the yardstick for both; cases are measured when asked for, once each."""

    def __init__(
        self, model: PreTrainedModel, samples: Samples, *, name: str, pad_token_id: int, batch_size: int,
        gradients: bool, sides: Sequence[Layout] = ("left", "right"), handovers: Sequence[tuple[str, Collator]] = (),
        dumped: Given | None = None,
    ) -> None:  # fmt: skip
        check_one_stack(model)
        self._batches = batches_of(samples, batch_size, sides)
        check_vocabulary(model, self._batches)
        self._handovers, self._dumped, self.sides = handovers, dumped, sides
        model.eval()
        self._model, self._gradients = model, gradients
        self._looks_both_ways = pattern_of(model) == "bidirectional"
        attention = getattr(model.config, "_attn_implementation", None) or "sdpa"
        self._about: dict[str, Any] = {"name": name, "attn_implementation": attention, "pad_token_id": pad_token_id}
        self._alone = [alone(model, batch, gradients) for batch in self._batches]
        self._found: dict[tuple[Layout, str], Errors | Exception] = {}
        self._positions: dict[tuple[Layout, str], list[tuple[float, ...]]] = {}
        self._noise: Errors | None = None

    @property
    def name(self) -> str:
        """Of the model."""
        return str(self._about["name"])

    @property
    def causal(self) -> bool:
        """Does the model look back alone?"""
        return not self._looks_both_ways

    def columns(self, side: Layout) -> list[str]:
        """The ways of handing over that can be tried on this side and attention."""
        if side == "packed":
            return [*FLAT_OURS, *FLAT_OTHERS]
        return [*OURS, *others_on(self._about["attn_implementation"])]

    @property
    def given(self) -> list[tuple[str, Collator | None]]:
        """The collators that were given, by name, and the batch that was dumped, with none."""
        return [*self._handovers, *([(DUMPED, None)] if self._dumped else [])]

    def yardstick(self, side: Layout = "left") -> Yardstick:
        """What passes here, and what of the wrong is smallest.

        Padded: None on the left (of an encoder on the right) and, if layers need the 2D, a bare 4D. Packed: a row of
        which nothing is told, and every
        other way that is not right.
        """
        noise = self._measured_noise()
        if side == "packed":
            astray = [column for column in FLAT_OTHERS if not self.finding(side, column).right]
            columns, side = {"nothing", *astray}, "packed"
        else:
            bare = ["bare 4D"] if needs_mask_2d(self._model) else []
            columns, side = {"None", *bare} & set(self.columns(side)), "right" if self._looks_both_ways else "left"
        wrong = [found for column in columns if isinstance(found := self.errors(side, column), Errors)]
        smallest = min(wrong, key=lambda found: found.logits if math.isfinite(found.logits) else math.inf, default=None)
        return Yardstick(noise, smallest)

    def finding(self, side: Layout, column: str) -> Finding:
        """One case: measured, refused or raised."""
        found = self.errors(side, column)
        subject = self._subject(side)
        where: dict[str, Any] = {"model": subject.name, "attn_implementation": subject.attn_implementation, "side": side}
        where |= {"column": column, "whose": "ours" if column in _ways(side)[0] else "elsewhere"}
        if isinstance(found, Exception):
            return Finding(**where, **_said(found, self._model.device.type))
        where["by_position"] = tuple(self._positions[side, column])
        return judged(where, found, Yardstick(self._measured_noise()), gradients=self._gradients)

    def yours(self, column: str, collator: Collator | None) -> Finding:
        """The batches of a collator that was given (or the batch dumped), judged like ours; they tell their side themselves.

        Raises `CollateError` where they cannot be compared: other tokens than the samples.
        """
        if collator is not None:
            cases = [Given(*collated(collator, features), features) for features in self._batches]
        else:
            cases = [self._dumped] if self._dumped else []
        side: Layout = layout_of([case.located.segments for case in cases])
        where: dict[str, Any] = {"model": self._about["name"], "attn_implementation": self._about["attn_implementation"]}
        where |= {"side": side, "column": column, "whose": "yours"}
        try:
            found: list[Errors] = []
            positions: list[tuple[float, ...]] = []
            for case, known in zip(cases, self._alone):
                reference = case.reference(self._model, known, self._gradients)
                numbers = case.numbers(self._model, self._gradients)
                found.append(errors(numbers, reference))
                positions += by_position(numbers, reference)
        except Exception as error:  # as above
            return Finding(**where, **_said(error, self._model.device.type))
        yardstick = Yardstick(self._measured_noise())
        where["by_position"] = tuple(positions)
        finding = judged(where, worst(found), yardstick, gradients=self._gradients)
        wrong = next((n for n, each in enumerate(found) if not yardstick.passes(each)), None)
        if wrong is None or finding.note:
            return finding
        return replace(finding, note=cases[wrong].advice(self._model, found[wrong], yardstick))

    def errors(self, side: Layout, column: str) -> Errors | Exception:
        """The errors of a case over all batches, or what it raised."""
        if (side, column) not in self._found:
            self._found[side, column] = self._case(side, column)
        return self._found[side, column]

    def truth(self, side: Layout) -> Segments:
        """What is real in the first batch."""
        return self._truth(side, self._batches[0])

    def _truth(self, side: Layout, features: list[Batch]) -> Segments:
        return flat_truth(features) if side == "packed" else self._subject(side).truth(features)

    def _subject(self, side: Layout) -> Subject:
        return Subject(model=self._model, side="left" if side == "left" else "right", **self._about)

    def _measured_noise(self) -> Errors:
        if self._noise is None:
            self._noise = measure_noise(self._model, self._batches, self._alone, gradients=self._gradients)
        return self._noise

    def _case(self, side: Layout, column: str) -> Errors | Exception:
        ours, others = _ways(side)
        subject, handover = self._subject(side), {**ours, **others}[column]
        try:
            found: list[Errors] = []
            positions: list[tuple[float, ...]] = []
            for features, reference in zip(self._batches, self._alone):
                numbers = self._run(handover(subject, features), self._truth(side, features))
                found.append(errors(numbers, reference))
                positions += by_position(numbers, reference)
            self._positions[side, column] = positions
            return worst(found)
        except Exception as error:  # whatever the model raises is the finding: it refused, and says so
            return error

    def _run(self, batch: Batch, truth: Segments) -> Numbers:
        located = Located(truth, tuple(range(truth.num_sequences)))

        def rows(scores: Tensor) -> list[Tensor]:
            if scores.ndim == 2 and truth.padding_side == "left" and self._looks_both_ways:
                rule = "The head of an encoder reads the first place of a row, which is padding here."
                raise UnsupportedFormError(explain("model", "one answer a row", rule, "Pad right."))
            return located.rows(scores)

        return run(self._model, batch, rows, self._gradients)


def batches_of(samples: Samples, batch_size: int, sides: Sequence[str]) -> list[list[Batch]]:
    """The samples as batches of features. Raises `CollateError` where a comparison would prove nothing."""
    features = features_of(samples)
    batches = [features[i : i + batch_size] for i in range(0, len(features), batch_size)]
    if "packed" in sides:
        check_packed(batches)
    padded = any(side != "packed" for side in sides)
    if padded and not any(len({len(feature["input_ids"]) for feature in batch}) > 1 for batch in batches):
        rule = "Without padding every mask is right, and the audit would prove nothing."
        raise CollateError(explain("samples", "batches of equal lengths", rule, "Give samples of unequal lengths."))
    return batches


def check_vocabulary(model: PreTrainedModel, batches: Sequence[Sequence[Batch]]) -> None:
    """Refuse token ids that the model has no embedding for; on a card they end the process."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(max(feature["input_ids"]) for batch in batches for feature in batch)
    if largest >= rows:
        remedy = "Name the model that the tokens were made for, and its tokenizer."
        raise CollateError(explain("samples", f"token id {largest}", f"This model has ids 0 to {rows - 1}.", remedy))


def judged(where: dict[str, Any], found: Errors, yardstick: Yardstick, *, gradients: bool) -> Finding:
    """The finding of a case that ran."""
    finite = math.isfinite(found.logits) and math.isfinite(found.loss) and math.isfinite(found.gradient)
    return Finding(
        **where,
        logits=found.largest,
        relative=found.logits,
        loss=found.loss,
        gradient=found.gradient if gradients else None,
        right=yardstick.passes(found),
        astray=yardstick.astray(found),
        note="" if finite else "a number in the batch, or of a sample alone, is not finite",
    )


def _said(error: Exception, device: str) -> dict[str, Any]:
    """What a case raised, in one line, and whose refusal that is."""
    if why := no_kernel(error, device):
        return {"note": why, "no_kernel": True}
    note = (str(error).splitlines() or [""])[0][:400]
    refused = isinstance(error, UnsupportedFormError)
    return {"note": note if refused else f"{type(error).__name__}: {note}", "refused": refused}


def _ways(side: Layout) -> tuple[dict[str, Handover], dict[str, Handover]]:
    return (FLAT_OURS, FLAT_OTHERS) if side == "packed" else (OURS, OTHERS)


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
    handovers: Mapping[str, Collator] | None = None,
) -> Iterator[Finding]:
    """Findings for each side and column, as they are measured, then for each collator of `handovers`.

    `samples` are token ids, or dicts of `input_ids` and `labels`; the model stays as it is. `columns`: the ways of
    handing over, by default all that the side and the attention implementation have.

    `handovers` are your own collators by name. Each is called with features, dicts of `input_ids`, `labels` and
    `attention_mask` (lists of ints), and its batch goes to the model as it is. The samples are found in it by their
    tokens, so it may pad on any side, permute and pack; the finding's side says what it did. Raises `CollateError` where
    its batch cannot be compared, because other tokens are in it.

    >>> from transformers import DataCollatorForSeq2Seq
    >>> from collate_npu.tools.audit import audit
    >>> from collate_npu.testing import byte_tokenizer, tiny_model
    >>> model, mine = tiny_model("llama", vocab_size=257), DataCollatorForSeq2Seq(byte_tokenizer())
    >>> samples = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> found = list(audit(model, samples, pad_token_id=256, sides=["right"], handovers={"mine": mine}))
    >>> [(finding.column, finding.side, finding.right) for finding in found if finding.whose == "yours"]
    [('mine', 'right', True)]
    """
    settings: dict[str, Any] = {"batch_size": batch_size, "gradients": gradients, "sides": sides}
    settings["handovers"] = [*(handovers or {}).items()]
    case = Audit(model, samples, name=name, pad_token_id=pad_token_id, **settings)
    for side in sides:
        for column in case.columns(side) if columns is None else columns:
            yield case.finding(side, column)
    for column, collator in case.given:
        yield case.yours(column, collator)
