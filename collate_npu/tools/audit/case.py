"""Cases of the audit: a batch or a flat row, handed over in one way, beside each sample alone, on this model and device.

Every sample is run alone, without padding and without a mask; then batches of the same samples are run as this library
hands them over, and in one way in which the mask or the boundaries are lost. How they are run and compared, and what
passes, is `proof`. A tiny model costs about a second a case on one CPU core; a checkpoint costs one forward and backward
pass a case and batch, and as many a sample.
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
from collate_npu.consumers.model_traits import needs_mask_2d, pattern_of, text_config
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations.adapt import adapt
from collate_npu.masks.dense_mask import Polarity
from collate_npu.masks.forms import dense
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

    @property
    def lost(self) -> str:
        """The way of other code by which a mask or a boundary is lost here, and no error says so.

        Only eager and sdpa read a dense mask: a flash kernel would read past its tensors, which on a card ends the process.
        """
        if self.side == "packed":
            return "no boundaries"
        reads_dense = self.attention in ("eager", "sdpa") and hasattr(text_config(self.model.config), "num_attention_heads")
        return "4D mask alone" if reads_dense and needs_mask_2d(self.model) else "no mask"


# --- ways of handing over


class Way(NamedTuple):
    """A way of handing over a batch."""

    meaning: str
    hand: Callable[[Subject, list[Batch]], Batch]
    whose: Whose = "ours"


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return subject.collator(consumer="transformers", model=subject.model)(features)


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """4D masks beside the 2D, or offsets, are the neutral wire form."""
    flat = subject.side == "packed"
    neutral = subject.collator(**({} if flat else {"attention_mask": "4d"}))(features)
    return BatchAdapter(subject.model, consumer="transformers", pattern=subject.pattern, padding_free=flat)(neutral)


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    collator: Callable[[list[Batch]], Batch] = partial(_bare_4d, subject)
    if subject.side == "packed":
        from transformers import DataCollatorWithFlattening

        collator = DataCollatorWithFlattening()
    return wrap_collator(collator, consumer="transformers", model=subject.model, pattern=subject.pattern)(features)


def _bare_4d(subject: Subject, features: list[Batch]) -> Batch:
    """A correct dense mask, as attention layers read it, and no 2D mask."""
    batch = subject.collator(attention_mask="omit")(features)
    polarity: Polarity = "bias" if subject.attention == "eager" else "keep"
    full = dense(subject.truth(features), polarity=polarity, pattern=subject.pattern or "causal")
    return {**{key: value for key, value in batch.items() if key != "attention_mask_2d"}, "attention_mask": full}


def _tokens_alone(subject: Subject, features: list[Batch]) -> Batch:
    """Without position_ids too, in which transformers finds where sequences begin."""
    batch = subject.collator(attention_mask="omit")(features)
    return {key: batch[key] for key in ("input_ids", "labels")}


_BOTH = {
    "collator": Way("PaddingCollator(model=model), for a row with padding_free=True", _by_collator),
    "collator + adapter": Way("a neutral batch, then BatchAdapter at the model", _by_adapter),
    "wrapped collator": Way("one of 4D masks alone, or of flat rows, inside wrap_collator", _by_wrapping),
}
PADDED: dict[str, Way] = {
    **_BOTH,
    "4D mask alone": Way("a correct 4D mask, and no 2D for the recurrent layers", _bare_4d, "elsewhere"),
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
    """What is not right: `logits`, `loss`, `gradient` by the yardstick, or by a given tolerance; `labels` that are not those
    of the samples; and `kernels` whose arguments contradict the batch."""
    note: str = ""
    refused: bool = False
    by_position: tuple[tuple[float, ...], ...] = ()
    """The largest difference of a logit at each token of each sample."""

    @property
    def right(self) -> bool | None:
        """True if nothing is `astray`; None where nothing was measured."""
        return None if self.logits is None else not self.astray


class Audit:
    """A model, its samples alone, and the yardstick for both; cases are measured when asked for, once each."""

    def __init__(
        self, model: PreTrainedModel, samples: Samples, *, name: str, pad_token_id: int, batch_size: int, gradients: bool,
        sides: Sequence[Layout] = ("left", "right"), tolerance: float | None = None,
    ) -> None:  # fmt: skip
        check_model(model)
        invariance.check_one_stack(model)
        self._batches = _batches_of(samples, batch_size, sides)
        invariance.check_vocabulary(model, self._batches)
        self.name, self.sides, self._gradients, self._tolerance = name, sides, gradients, tolerance
        self._subject = Subject(model=model, side="right", pad_token_id=pad_token_id)
        self._alone = [alone(model, batch, gradients) for batch in self._batches]
        self._found: dict[tuple[Layout, str], Finding] = {}

    def columns(self, side: Layout) -> list[str]:
        """The ways of this library, and the one that is wrong here."""
        lost = replace(self._subject, side=side).lost
        return [name for name, way in WAYS[side].items() if way.whose == "ours" or name == lost]

    def yardstick(self, side: Layout = "left") -> Yardstick:
        """What passes here, and the error of what is wrong: on the side on which padding stands before what reads it."""
        if side != "packed":
            side = "right" if self._subject.pattern else "left"
        return Yardstick(self._noise, _errors_of(self.finding(side, replace(self._subject, side=side).lost)))

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
                numbers = [self._numbers(each, faults) for each in batches]
                compared = Compared.of(zip(numbers, self._alone))
        except Exception as error:  # whatever the model raises is the finding
            refused = isinstance(error, UnsupportedFormError)
            return Finding(**where, note=first_line(error) if refused else describe_error(error), refused=refused)
        worst = compared.worst
        astray = [*self._astray(worst)]
        faults = [] if whose == "elsewhere" else faults
        astray += ["labels"] * any(located.label_fault() for located in batches) + ["kernels"] * bool(faults)
        return Finding(
            **where, logits=worst.largest, relative=worst.logits, loss=worst.loss,
            gradient=worst.gradient if self._gradients else None, astray=tuple(astray),
            note=" ".join(filter(None, [self._advice(compared, batches, whose), listed(faults)])),
            by_position=compared.by_position,
        )  # fmt: skip

    def _astray(self, found: Errors) -> tuple[str, ...]:
        """Which of logits, loss and gradient do not pass."""
        if self._tolerance is None:
            return Yardstick(self._noise).astray(found)
        errors = {"logits": found.largest, "loss": found.loss, "gradient": found.gradient}
        return tuple(name for name, error in errors.items() if not error <= self._tolerance)

    def _numbers(self, located: Located, faults: list[Fault]) -> Numbers:
        """What the model makes of a batch; `faults` gets what its kernels got wrong."""
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
            astray = self._astray(errors)
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
    tolerance: float | None = None,
) -> Iterator[Finding]:
    """Findings for each side and column, as they are measured.

    `samples` are token ids, or dicts of `input_ids` and `labels`; the model stays as it is. `columns`: the ways of
    handing over, by default all that the side and the attention implementation have. What passes is six times the noise
    that is measured, or with `tolerance` an absolute difference of a logit and a relative one of loss and gradient.

    >>> from collate_npu.tools.audit import audit
    >>> from collate_npu.testing import tiny_model
    >>> samples = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> found = audit(tiny_model("llama", vocab_size=257), samples, pad_token_id=256, sides=["left"])
    >>> [(finding.column, finding.right) for finding in found if finding.column in ("collator", "no mask")]
    [('collator', True), ('no mask', False)]
    """
    settings: dict[str, Any] = {"batch_size": batch_size, "gradients": gradients, "sides": sides, "tolerance": tolerance}
    case = Audit(model, samples, name=name, pad_token_id=pad_token_id, **settings)
    for side in sides:
        for column in case.columns(side) if columns is None else columns:
            yield case.finding(side, column)
