"""Cases of the audit: a batch or a flat row, handed over in one way, beside each sample alone, on this model and device.

Every sample is run alone, without padding and without a mask; then batches of the same samples are run as this library
hands them over, and without the mask or the boundaries that they need. How they are run, found in a batch and compared, and
what passes, is `proof`. A tiny model costs about a second a case on one CPU core; a checkpoint costs one forward and
backward pass a case and batch, and as many a sample.

Dense masks are for eager and sdpa. Flash kernels and attention of other names read the 2D mask: a dense one would make
them read past their tensors, which on a card ends the process. flex_attention reads a BlockMask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import Case, Model
from collate_npu.consumers.model_traits import layer_masks, needs_mask_2d, pattern_of
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations.adapt import adapt
from collate_npu.masks.dense_mask import Polarity
from collate_npu.masks.forms import block_mask, dense
from collate_npu.masks.patterns import Pattern
from collate_npu.proof import invariance
from collate_npu.proof.forward import Fault, listed
from collate_npu.proof.invariance import Collator, Located, Samples
from collate_npu.proof.measure import Batch, Compared, Errors, Numbers, Yardstick, alone, measure, measure_noise, uncached
from collate_npu.proof.recorder import heard
from collate_npu.segments import Segments
from collate_npu.tools.user_code import describe_error, first_line
from collate_npu.validation import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = Literal["left", "right", "packed"]
"""Padded on a side, or all samples of a batch in one flat row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under audit, the way its batches are laid out, and what a mask must look like for its attention."""

    model: PreTrainedModel
    side: Layout
    pad_token_id: int

    @property
    def attn_implementation(self) -> str:
        """The attention implementation, by transformers' name."""
        return getattr(self.model.config, "_attn_implementation", None) or "sdpa"

    @property
    def reads_dense(self) -> bool:
        """True if its attention reads a dense mask."""
        return self.attn_implementation in ("eager", "sdpa")

    @property
    def pattern(self) -> str | None:
        """What is declared of its attention: that an encoder looks both ways, else nothing."""
        return "bidirectional" if pattern_of(self.model) == "bidirectional" else None

    def collator(self, **settings: Any) -> PaddingCollator:
        """This library's collator for the subject."""
        laid_out = {"padding_free": True} if self.side == "packed" else {"padding_side": self.side}
        return PaddingCollator(pad_token_id=self.pad_token_id, pattern=self.pattern, **laid_out, **settings)

    def truth(self, features: list[Batch]) -> Segments:
        """What is real, by the lengths alone."""
        lengths = [len(feature["input_ids"]) for feature in features]
        if self.side == "packed":
            return Segments.from_lengths([lengths])
        return Segments.from_lengths(lengths, side=self.side)

    def dense(self, features: list[Batch]) -> Tensor:
        """A correct 4D mask, in the form its attention takes."""
        polarity: Polarity = "bias" if self.attn_implementation == "eager" else "keep"
        return dense(self.truth(features), polarity=polarity, pattern=self.pattern or "causal")


Hand = Callable[[Subject, list[Batch]], Batch]


class Way(NamedTuple):
    """A way of handing over. Its name is the same in tables, in JSON and in `Finding.column`."""

    name: str
    """At most 20 letters."""
    meaning: str
    hand: Hand
    ours: bool = False
    dense: bool = False
    """Does it hand over a dense mask, whatever the attention reads?"""


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return subject.collator(consumer="transformers", model=subject.model)(features)


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """4D masked beside the 2D, or offsets, are the neutral wire form."""
    flat = subject.side == "packed"
    neutral = subject.collator(**({} if flat else {"attention_mask": "4d"}))(features)
    return BatchAdapter(subject.model, consumer="transformers", pattern=subject.pattern, padding_free=flat)(neutral)


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    theirs = partial(_flattened if subject.side == "packed" else _bare_4d, subject)
    return wrap_collator(theirs, consumer="transformers", model=subject.model, pattern=subject.pattern)(features)


def _by_mapping(subject: Subject, features: list[Batch]) -> Batch:
    """Nothing is made of a mask in a mapping: that of attention has the form which it takes."""
    kinds, keep = layer_masks(subject.model.config), subject.truth(features).keep
    full: Any = keep
    if subject.attn_implementation == "flex_attention":
        full = block_mask(subject.truth(features), pattern=subject.pattern or "causal")
    elif subject.reads_dense:
        full = subject.dense(features)
    masks = {key: full if kind == "attention" else keep for key, kind in kinds.items()}
    return {**_plain(subject, features), "attention_mask": masks}


def _bare_4d(subject: Subject, features: list[Batch]) -> Batch:
    return {**_plain(subject, features), "attention_mask": subject.dense(features)}


def _plain(subject: Subject, features: list[Batch]) -> Batch:
    batch = subject.collator(attention_mask="omit")(features)
    return {key: value for key, value in batch.items() if key != "attention_mask_2d"}


def _flattened(subject: Subject, features: list[Batch], **settings: bool) -> Batch:
    from transformers import DataCollatorWithFlattening

    batch: Batch = DataCollatorWithFlattening(**settings)(features)
    return batch


_COLLATOR = Way("collator", "PaddingCollator(model=model), for a row with padding_free=True", _by_collator, ours=True)
_ADAPTER = Way("collator + adapter", "a neutral batch, then BatchAdapter at the model", _by_adapter, ours=True)
_WRAPPED = Way("wrapped collator", "one of 4D masks alone, or of flat rows, inside wrap_collator", _by_wrapping, ours=True)
_MAPPING = Way("mask per layer kind", "a dict: 4D for attention layers, 2D for recurrent ones", _by_mapping, ours=True)
NO_MASK = Way("no mask", "attention_mask is left out", _plain)
DENSE_ALONE = Way("4D mask alone", "a correct 4D mask, and no 2D for the recurrent layers", _bare_4d, dense=True)
NO_BOUNDARIES = Way("no boundaries", "the tokens alone", partial(_flattened, return_position_ids=False))


def _by_name(*ways: Way) -> dict[str, Way]:
    return {way.name: way for way in ways}


PADDED = _by_name(_COLLATOR, _ADAPTER, _WRAPPED, _MAPPING, DENSE_ALONE, NO_MASK)
FLAT = _by_name(_COLLATOR, _ADAPTER, _WRAPPED, NO_BOUNDARIES)
WAYS: dict[Layout, dict[str, Way]] = {"left": PADDED, "right": PADDED, "packed": FLAT}


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
        """True if it is right by the yardstick, or each error is at most a tolerance, or it was refused."""
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

        Padded: None on the left (of an encoder on the right) and, if layers need the 2D, a bare 4D. Packed: a row without
        its boundaries.
        """
        columns = [NO_BOUNDARIES.name]
        if side != "packed":
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
    return {"note": first_line(error) if refused else describe_error(error), "refused": refused}


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
