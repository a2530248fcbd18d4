"""Cases of the audit: a batch or a flat row, handed over in one way, beside each sample alone, on this model and device.

Every sample is run alone, without padding and without a mask; then batches of the same samples are run as this library
hands them over, and without the mask or the boundaries that they need. How they are run and compared, and what passes, is
`proof`. A tiny model costs about a second a case on one CPU core; a checkpoint costs one forward and backward pass a case
and batch, and as many a sample.

Dense masks are for eager and sdpa. Flash kernels and attention of other names read the 2D mask: a dense one would make
them read past their tensors, which on a card ends the process. flex_attention reads a BlockMask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import Case, Model
from collate_npu.consumers.model_traits import layer_masks, needs_mask_2d, pattern_of
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations.adapt import adapt
from collate_npu.masks.forms import block_mask, dense
from collate_npu.masks.patterns import Pattern
from collate_npu.proof import invariance
from collate_npu.proof.forward import Fault, Forward, listed
from collate_npu.proof.invariance import Collator, Located, Samples
from collate_npu.proof.measure import Batch, Compared, Errors, Numbers, Yardstick, alone, measure_noise
from collate_npu.proof.recorder import record_calls
from collate_npu.segments import Segments
from collate_npu.tools.user_code import describe_error, first_line
from collate_npu.validation import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = Literal["left", "right", "packed"]
"""Padded on a side, or all samples of a batch in one flat row."""
Whose = Literal["ours", "yours", "elsewhere"]
"""Who hands over: this library, the user's collator or batch, or other code."""
DUMPED = "your batch"
"""The column of a dumped batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under audit, the layout of its batches, and the id that they are padded with."""

    model: PreTrainedModel
    side: Layout
    pad_token_id: int

    @property
    def attention(self) -> str:
        """The attention implementation, by transformers' name."""
        return getattr(self.model.config, "_attn_implementation", None) or "sdpa"

    @property
    def reads_dense(self) -> bool:
        """True if its attention reads a dense mask."""
        return self.attention in ("eager", "sdpa")

    @property
    def pattern(self) -> str | None:
        """The pattern of an encoder, which looks both ways; None for a causal model."""
        return "bidirectional" if pattern_of(self.model) == "bidirectional" else None

    def collator(self, **settings: Any) -> PaddingCollator:
        """This library's collator for the subject."""
        layout = {"padding_free": True} if self.side == "packed" else {"padding_side": self.side}
        return PaddingCollator(pad_token_id=self.pad_token_id, pattern=self.pattern, **layout, **settings)

    def truth(self, features: list[Batch]) -> Segments:
        """The Segments of a batch, from the lengths alone."""
        lengths = [len(feature["input_ids"]) for feature in features]
        if self.side == "packed":
            return Segments.from_lengths([lengths])
        return Segments.from_lengths(lengths, side=self.side)

    def full_mask(self, features: list[Batch]) -> Any:
        """A correct mask of attention layers, in the form that they read: 4D, a BlockMask or 2D."""
        truth, pattern = self.truth(features), self.pattern or "causal"
        if self.attention == "flex_attention":
            return block_mask(truth, pattern=pattern)
        if not self.reads_dense:
            return truth.keep
        return dense(truth, polarity="bias" if self.attention == "eager" else "keep", pattern=pattern)


# --- ways of handing over


class Way(NamedTuple):
    """A way of handing over a batch."""

    meaning: str
    hand: Callable[[Subject, list[Batch]], Batch]
    whose: Whose = "ours"
    dense: bool = False
    """True if it hands over a dense mask, whatever the attention reads."""


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return subject.collator(consumer="transformers", model=subject.model)(features)


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """4D masks beside the 2D, or offsets, are the neutral wire form."""
    flat = subject.side == "packed"
    neutral = subject.collator(**({} if flat else {"attention_mask": "4d"}))(features)
    return BatchAdapter(subject.model, consumer="transformers", pattern=subject.pattern, padding_free=flat)(neutral)


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    collator = partial(_flattened if subject.side == "packed" else _bare_4d, subject)
    return wrap_collator(collator, consumer="transformers", model=subject.model, pattern=subject.pattern)(features)


def _by_mapping(subject: Subject, features: list[Batch]) -> Batch:
    full, keep = subject.full_mask(features), subject.truth(features).keep
    kinds = layer_masks(subject.model.config)
    masks = {key: full if kind == "attention" else keep for key, kind in kinds.items()}
    return {**_without_mask(subject, features), "attention_mask": masks}


def _bare_4d(subject: Subject, features: list[Batch]) -> Batch:
    return {**_without_mask(subject, features), "attention_mask": subject.full_mask(features)}


def _without_mask(subject: Subject, features: list[Batch]) -> Batch:
    batch = subject.collator(attention_mask="omit")(features)
    return {key: value for key, value in batch.items() if key != "attention_mask_2d"}


def _tokens_alone(subject: Subject, features: list[Batch]) -> Batch:
    """Without position_ids too, in which transformers finds where sequences begin."""
    batch = subject.collator(attention_mask="omit")(features)
    return {key: batch[key] for key in ("input_ids", "labels")}


def _flattened(subject: Subject, features: list[Batch]) -> Batch:
    from transformers import DataCollatorWithFlattening

    batch: Batch = DataCollatorWithFlattening()(features)
    return batch


_BOTH = {
    "collator": Way("PaddingCollator(model=model), for a row with padding_free=True", _by_collator),
    "collator + adapter": Way("a neutral batch, then BatchAdapter at the model", _by_adapter),
    "wrapped collator": Way("one of 4D masks alone, or of flat rows, inside wrap_collator", _by_wrapping),
}
PADDED: dict[str, Way] = {
    **_BOTH,
    "mask per layer kind": Way("a dict: 4D for attention layers, 2D for recurrent ones", _by_mapping),
    "4D mask alone": Way("a correct 4D mask, and no 2D for the recurrent layers", _bare_4d, "elsewhere", dense=True),
    "no mask": Way("the tokens alone", _tokens_alone, "elsewhere"),
}
FLAT: dict[str, Way] = {**_BOTH, "no boundaries": Way("the tokens alone", _tokens_alone, "elsewhere")}
WAYS: dict[Layout, dict[str, Way]] = {"left": PADDED, "right": PADDED, "packed": FLAT}
"""By layout and name, of at most 20 letters: the same in tables, in JSON and in `Finding.column`."""


# --- findings


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
    astray: tuple[str, ...] = ()
    """What is not right: by the yardstick `logits`, `loss`, `gradient`; `labels` that are not those of the samples; and
    `kernels` whose arguments contradict the batch."""
    note: str = ""
    refused: bool = False
    by_position: tuple[tuple[float, ...], ...] = ()
    """The largest difference of a logit at each token of each sample."""

    @property
    def right(self) -> bool | None:
        """True if nothing is `astray`; None where nothing was measured."""
        return None if self.logits is None else not self.astray

    def beyond(self, tolerance: float | None) -> tuple[str, ...]:
        """What is `astray`, with the errors of a tolerance in the place of the yardstick's."""
        if tolerance is None:
            return self.astray
        errors = {"logits": self.logits, "loss": self.loss, "gradient": self.gradient}
        larger = [name for name, error in errors.items() if error is not None and not error <= tolerance]
        return (*larger, *(name for name in self.astray if name not in errors))

    def within(self, tolerance: float | None) -> bool:
        """True if nothing is beyond the yardstick, or a tolerance, or if it was refused."""
        return self.refused if self.logits is None else not self.beyond(tolerance)


class Audit:
    """A model, its samples alone, and the yardstick for both; cases are measured when asked for, once each."""

    def __init__(
        self, model: PreTrainedModel, samples: Samples, *, name: str, pad_token_id: int, batch_size: int, gradients: bool,
        sides: Sequence[Layout] = ("left", "right"),
    ) -> None:  # fmt: skip
        check_model(model)
        invariance.check_one_stack(model)
        self._batches = _batches_of(samples, batch_size, sides)
        invariance.check_vocabulary(model, self._batches)
        self.name, self.sides, self._gradients = name, sides, gradients
        self._subject = Subject(model=model, side="right", pad_token_id=pad_token_id)
        self._alone = [alone(model, batch, gradients) for batch in self._batches]
        self._found: dict[tuple[Layout, str], Finding] = {}

    def columns(self, side: Layout) -> list[str]:
        """The ways of handing over that can be tried on this side and attention."""
        return [name for name, way in WAYS[side].items() if self._subject.reads_dense or not way.dense]

    def yardstick(self, side: Layout = "left") -> Yardstick:
        """What passes here, and the smallest error of what is wrong.

        Padded: no mask on the left (of an encoder on the right) and, if layers need the 2D, a bare 4D. Packed: a row
        without its boundaries.
        """
        columns = ["no boundaries"]
        if side != "packed":
            bare_4d = self._subject.reads_dense and needs_mask_2d(self._subject.model)
            columns = ["no mask", *["4D mask alone"] * bare_4d]
            side = "right" if self._subject.pattern else "left"
        wrong = [errors for column in columns if (errors := _errors_of(self.finding(side, column)))]
        return Yardstick(self._noise, min(wrong, key=lambda found: size(found.logits), default=None))

    def finding(self, side: Layout, column: str) -> Finding:
        """One way of handing over: measured, refused or raised."""
        if (side, column) not in self._found:
            way, subject = WAYS[side][column], replace(self._subject, side=side)
            triples = ((subject.truth(each), way.hand(subject, each), each) for each in self._batches)
            self._found[side, column] = self._judged(side, column, way.whose, starmap(Located.in_order, triples))
        return self._found[side, column]

    def of_collator(self, column: str, collator: Collator) -> Finding:
        """The batches of the user's collator. Raises `CollateError` where they hold other tokens than the samples."""
        return self.of_given(column, [invariance.collated(collator, features) for features in self._batches])

    def of_given(self, column: str, batches: Sequence[Located]) -> Finding:
        """The user's batches, whose side is read off them."""
        rows = [located.segments for located in batches]
        side: Layout = "left" if any(segments.padding_side == "left" for segments in rows) else "right"
        return self._judged("packed" if any(segments.packed for segments in rows) else side, column, "yours", batches)

    def _judged(self, side: Layout, column: str, whose: Whose, batches: Iterable[Located]) -> Finding:
        """All batches of one way beside the samples alone. Kernels are not judged where other code hands over."""
        model = self._subject.model
        adapted = whose == "ours" and side == "packed" and needs_mask_2d(model)
        where: dict[str, Any] = {"model": self.name, "attention": self._subject.attention, "side": side}
        where |= {"column": column, "whose": whose}
        faults: list[Fault] = []
        try:
            with ExitStack() as held:
                if adapted:
                    held.enter_context(adapt(model))
                batches = list(batches)
                numbers = [self._numbers(each, side, faults) for each in batches]
                compared = Compared.of(zip(numbers, self._alone))
        except Exception as error:  # whatever the model raises is the finding
            refused = isinstance(error, UnsupportedFormError)
            return Finding(**where, note=first_line(error) if refused else describe_error(error), refused=refused)
        worst, yardstick = compared.worst, Yardstick(self._noise)
        astray = [*yardstick.astray(worst)]
        faults = [] if whose == "elsewhere" else faults
        astray += ["labels"] * any(located.label_fault() for located in batches) + ["kernels"] * bool(faults)
        return Finding(
            **where, logits=worst.largest, relative=worst.logits, loss=worst.loss,
            gradient=worst.gradient if self._gradients else None, astray=tuple(astray),
            note=" ".join(filter(None, [self._advice(compared, batches, whose), listed(faults)])),
            by_position=compared.by_position,
        )  # fmt: skip

    def _numbers(self, located: Located, side: Layout, faults: list[Fault]) -> Numbers:
        """What the model makes of a batch; `faults` gets what its kernels got wrong."""
        pools = [len(logits) for logits in self._alone[0].logits] != [len(each["input_ids"]) for each in self._batches[0]]
        if pools and side == "left" and self._subject.pattern:
            rule = "The head of an encoder reads the first place of a row, which is padding here."
            raise UnsupportedFormError(explain("model", "one answer a row", rule, "Pad right."))
        model, pattern = self._subject.model, Pattern.of(self._subject.pattern or "causal")
        forward = Forward.of(model, Case(segments=located.segments, model=Model.of(model), pattern=pattern))
        with record_calls(forward):
            numbers = located.numbers(model, self._gradients)
        faults += forward.faults().values()
        return numbers

    def _advice(self, compared: Compared, batches: Sequence[Located], whose: Whose) -> str:
        """What is not finite, else what to change in the first of the user's batches that is wrong."""
        worst = compared.worst
        if not all(map(math.isfinite, (worst.logits, worst.loss, worst.gradient))):
            return "a number in the batch, or of a sample alone, is not finite"
        for located, errors in zip(batches, compared.each):
            astray = Yardstick(self._noise).astray(errors)
            if whose == "yours" and (astray or located.label_fault()):
                return invariance.advice(located, self._subject.model, astray)
        return ""

    @cached_property
    def _noise(self) -> Errors:
        return measure_noise(self._subject.model, self._batches, self._alone, gradients=self._gradients)


def _batches_of(samples: Samples, batch_size: int, sides: Sequence[str]) -> list[list[Batch]]:
    """The samples as batches of features. Raises `CollateError` where a comparison would prove nothing."""
    features = invariance.features_of(samples)
    batches = [features[i : i + batch_size] for i in range(0, len(features), batch_size)]
    if "packed" in sides and any(len(batch) < 2 for batch in batches):
        rule = "A row of one sequence has no boundary to keep, and a comparison with itself alone proves nothing."
        raise CollateError(explain("--packed", "a row of one sequence", rule, "Give a --batch-size of 2 or more."))
    if any(side != "packed" for side in sides):
        invariance.check_unequal(*batches)
    return batches


def _errors_of(finding: Finding) -> Errors | None:
    """The measured errors of a finding; None where it did not run."""
    if finding.logits is None or finding.relative is None or finding.loss is None:
        return None
    return Errors(finding.logits, finding.relative, finding.loss, finding.gradient or 0.0)


def size(error: float) -> float:
    """An error by which findings are ordered: what is not finite is larger than any."""
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
