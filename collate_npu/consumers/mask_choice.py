"""Mask choice: a `Consumer` says what one model stack reads, what it refuses, and where that is written.

The adapter runs it, and the guide's table is generated from it. A new stack is one file beside this one that holds a
`Consumer`; nothing else lists them. Legend: B batch, S width.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch

from collate_npu.arrays import once
from collate_npu.consumers import model_traits
from collate_npu.consumers.by_sequence import runs_by_sequence
from collate_npu.consumers.model_traits import config_of, consumer_of, needs_mask_2d, text_config
from collate_npu.errors import CollateError, UnsupportedFormError, did_you_mean, explain
from collate_npu.masks.forms import Verdict, none_is_exact
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.segments import Segments

MaskForm = Literal["none", "keep_2d", "masked", "keep", "bias", "mapping", "block_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The form that the mask of one batch gets, whether `attention_mask_2d` stays, and why this form."""

    form: MaskForm
    keeps_mask_2d: bool
    why: str


def describe_shape(segments: Segments) -> str:
    """Return the rows in words: `2 rows of 5, one sequence each; padding on the left, 2 of 10 places (20%)`."""
    (B, S), N = segments.shape, segments.num_sequences
    sequences = f"{N} sequence{'s' * (N != 1)}" if segments.packed or segments.empty_rows else "one sequence each"
    padded, side = B * S - segments.num_tokens, segments.padding_side
    where = {"none": "no padding", "mixed": "padding before, between or behind tokens"}.get(side, f"padding on the {side}")
    share = f", {padded} of {B * S} places ({100 * padded / max(B * S, 1):.0f}%)" if padded else ""
    return f"{B} row{'s' if B != 1 else ''} of {S}, {sequences}; {where}{share}"


ConsumerName = Literal[
    "megatron", "mindspeed", "mindspeed_dense", "mindspeed_llm", "torchtitan", "transformer_engine",
    "transformer_engine_npu", "transformers", "verl", "verl_npu",
]  # fmt: skip
"""The names of `consumers()`, for type checkers: a misspelt one is an error before anything runs."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of the model before any batch. Of a transformers model, `model_traits` has a function for each field
    (`position_rule`, `label_rule`, `pooling` ...), which says what the values mean."""

    config: Any = None
    model_type: str = ""
    needs_mask_2d: bool | None = None
    """None where it is unknown."""
    attn_implementation: str = "sdpa"
    dtype: torch.dtype | None = None
    positions: model_traits.PositionRule = "places"
    first_position: int = 0
    pooling: model_traits.Pooling = ""
    labels: model_traits.LabelRule | None = None
    looks_ahead: tuple[str, ...] = ()
    """Inputs by which its own masks let tokens see later ones: "images", "types" (`token_type_ids`)."""
    image_types: tuple[str, ...] = ()
    """The key that tells its layers which tokens are images, and the names in its config of the ids of these tokens."""
    by_sequence: bool = False
    """True if `adapt` runs it by sequence: any rows are right."""
    leaks: Mapping[str, str] = field(default_factory=dict)
    """By form of rows that was tried (probe.py): why padding or another sequence changes its tokens; "" where none does."""

    @classmethod
    def of(
        cls,
        model: Any = None,
        *,
        model_type: str | None = None,
        needs_2d: bool | None = None,
        attn_implementation: str | None = None,
    ) -> Model:
        """Return what a module, a config or a name in transformers' registry tells. The caller's arguments win."""
        config = None if model is None else config_of(model)
        text = None if config is None else text_config(config)
        if needs_2d is None and (model is not None or model_type is not None):
            needs_2d = needs_mask_2d(model if model is not None else model_type)
        attention = attn_implementation or getattr(text, "_attn_implementation", None) or "sdpa"
        read: dict[str, Any] = {"config": config, "needs_mask_2d": needs_2d, "attn_implementation": attention}
        read["model_type"] = getattr(text, "model_type", None) or model_type or ""
        own_module = consumer_of(model) == "transformers"
        if own_module or type(config).__module__.startswith("transformers."):
            read |= {name: getattr(model_traits, name)(model) for name in ("first_position", "pooling", "image_types")}
            read |= {"positions": model_traits.position_rule(model), "labels": model_traits.label_rule(model)}
            read["looks_ahead"] = tuple(by for by in ("images", "types") if model_traits.looks_ahead(model, by))
            read["by_sequence"] = own_module and runs_by_sequence(model)
        if isinstance(model, torch.nn.Module):
            read["dtype"] = next((each.dtype for each in model.parameters()), None)
        return cls(**read)

    @property
    def named(self) -> Any:
        """Return the config, or an object that has the model's type alone."""
        return SimpleNamespace(model_type=self.model_type) if self.config is None else self.config

    def option(self, name: str, call: Mapping[str, Any]) -> Any:
        """Return an option of this call, else of the config."""
        given = call.get(name)
        return getattr(self.text, name, None) if given is None else given

    @once
    def text(self) -> Any:
        """Return the language model's config, or an object that has the model's type alone."""
        return text_config(self.named)

    @once
    def windows(self) -> tuple[int, ...]:
        """Return the windows of its layers, ascending; kept, since to read a config takes longer than to collate a row."""
        return () if self.config is None else model_traits.windows(self.config)

    @once
    def own_patterns(self) -> Mapping[str, Pattern]:
        """Return the pattern that each kind of attention layer has of its own; the kind "" means one mask for all."""
        found = {"": None} if self.config is None else model_traits.attention_windows(self.config)
        made = {kind: Pattern.chunked if "chunk" in kind else Pattern.sliding for kind in found}
        return {kind: made[kind](size) if size else CAUSAL for kind, size in found.items()}

    @once
    def width_limit(self) -> int | None:
        """Return the longest sequence whose keys do not depend on the width of the tensor; None: any."""
        return model_traits.width_dependence(self.named)

    @once
    def rope_limit(self) -> int | None:
        """Return the position from which its rotary frequencies change for the whole batch; None where they do not."""
        return model_traits.rope_limit(self.named)

    @property
    def description(self) -> str:
        """Return the model in words: `model qwen3_next on sdpa`."""
        own = self.config is not None and hasattr(self.text, "_attn_implementation")
        return f"model {self.model_type or 'not named'}{f' on {self.attn_implementation}' if own else ''}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch on one model: what a `Consumer` chooses a form by."""

    segments: Segments
    model: Model = Model()
    pattern: Pattern = CAUSAL
    padding_free: bool = False
    context_parallel: ContextParallel | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    """The keys and options that the model is called with; empty where only the rows are known."""
    apart: bool = False
    """True if the model runs these rows by sequence."""

    @once
    def keys(self) -> Collection[str]:
        """Return the keys that the call holds, without those that are None."""
        return [key for key, value in self.call.items() if value is not None]

    @once
    def exact(self) -> Verdict:
        """Return whether `attention_mask=None` gives the same result, with the reason."""
        return none_is_exact(self.segments, self.pattern)

    @once
    def plain(self) -> bool:
        """Return True if a 2D mask says everything: plain causal attention, and one sequence a row."""
        if self.segments.packed:
            return False
        return self.pattern is CAUSAL or not self.pattern.reaches(self.segments.longest_span)

    @once
    def recurrent(self) -> bool:
        """Return True if the model has recurrent layers. Of a flat row also True where nobody knows."""
        return self.model.needs_mask_2d is not False if self.padding_free else bool(self.model.needs_mask_2d)


Test = Callable[[Case], str | bool]
"""Why it applies; "" or False where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form that the consumer reads, in words for the guide, and when it gets this form. The first that applies is chosen.

    >>> Form(form="keep", reads="bool [B, 1, S, S], True attends").when(Case(segments=Segments.from_lengths([3])))
    True
    """

    form: MaskForm
    reads: str
    when: Test = lambda case: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A kind of batch without a correct form. `of` describes it for the guide; `{why}` in `rule` becomes the reason.

    >>> PACKED_RECURRENT.of
    'packed rows (several sequences in a padded row), in a hybrid model'
    """

    of: str
    when: Test
    rule: str
    remedy: str
    more: str = ""
    """As `errors.explain` takes it."""
    always: bool = False
    """True if it holds for a model that runs by sequence, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """What one model stack reads. Refusals are tried in order, then forms; a flat row that is not refused needs no mask.

    >>> consumer = Consumer(
    ...     name="our_stack",
    ...     forms=(Form(form="keep_2d", reads="bool [B, S]"),),
    ...     refuses=(PACKED_RECURRENT,),
    ...     source="our_model.py:12",
    ... )
    >>> left, recurrent = Segments.from_lengths([3, 5], side="left"), Model(needs_mask_2d=True)
    >>> consumer.choose(Case(segments=left, model=recurrent))
    Choice(form='keep_2d', keeps_mask_2d=True, why='bool [B, S]')
    """

    name: str
    forms: tuple[Form, ...]
    refuses: tuple[Refusal, ...] = ()
    key: str = "attention_mask"
    keep_dtype: torch.dtype = torch.bool
    """dtype of a 2D mask under `key`."""
    keeps_mask_2d: Literal["recurrent", "always", "never"] = "recurrent"
    splits_rows: bool = True
    """True if ranks can share a row: each rank then gets the rows of a dense mask for its own queries."""
    shares_recurrent: bool = False
    """True if its recurrent layers get the tokens of other ranks of a shared row, as Megatron's do."""
    not_shared: str = "its stack exchanges nothing between ranks"
    """Why they do not."""
    opens_empty_rows: bool = False
    """True if its kernel fails on a query that sees no key. Such a query is padding, and then sees itself."""
    counts_positions: bool = False
    """True if the model counts positions itself where the batch has none, and shifts labels: a transformers model."""
    masks_flat_row: Callable[[Case], bool] = lambda case: False
    """True if a flat row needs a mask beside its offsets."""
    reads_offsets: Callable[[Case], bool] = lambda case: False
    """True if the model must get every offset key of a flat row, also those that the batch has not."""
    patterns: Callable[[Case], Mapping[str, Pattern]] = lambda case: {"": case.pattern}
    """The pattern of each mask by kind of layer. The kind "" means one mask for all layers."""
    source: str

    def __reduce__(self) -> Any:
        """Pickle it by its name: a worker that gets a collator has the files of this folder."""
        return (consumer_named, (self.name,)) if consumers().get(self.name) is self else super().__reduce__()

    def choose(self, case: Case) -> Choice:
        """Return the one form in which this batch is computed right. Raises `UnsupportedFormError` where there is none."""
        for refusal in self.refuses:
            if (refusal.always or not case.apart) and (why := refusal.when(case)):
                rule = refusal.rule.format(why=why)
                raise UnsupportedFormError(explain(self.key, repr(case.segments), rule, refusal.remedy, more=refusal.more))
        if case.apart and not case.padding_free:
            return Choice(form="keep_2d", keeps_mask_2d=False, why="adapt(model) runs each sequence by itself")
        if case.padding_free and (case.apart or not self.masks_flat_row(case)):
            return Choice(form="none", keeps_mask_2d=False, why="padding free: offsets carry the boundaries")
        form, reason = next((form, why) for form in self.forms if (why := form.when(case)))
        kept = case.recurrent if self.keeps_mask_2d == "recurrent" else self.keeps_mask_2d == "always"
        return Choice(form=form.form, keeps_mask_2d=kept, why=reason if isinstance(reason, str) else form.reads)


@cache
def consumers() -> Mapping[str, Consumer]:
    """Return every consumer in the files of this folder, by name."""
    import collate_npu.consumers as folder

    modules = [importlib.import_module(f"{folder.__name__}.{info.name}") for info in pkgutil.iter_modules(folder.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Consumer)]
    return MappingProxyType({consumer.name: consumer for consumer in found})


def consumer_named(name: str | Consumer) -> Consumer:
    """Return the consumer of this name; a `Consumer` as it is. Raises for a name that no file has."""
    if isinstance(name, Consumer):
        return name
    if not isinstance(name, str) or name not in consumers():
        rule, remedy = f"It is one of {', '.join(consumers())}.", did_you_mean(str(name), consumers(), "Name one of them.")
        raise CollateError(explain("consumer", repr(name), rule, remedy, more="consumer"))
    return consumers()[name]


def packed_reason(case: Case) -> str:
    """Return which rows hold several sequences, in a hybrid model."""
    if not (case.segments.packed and case.recurrent):
        return ""
    return f"rows {[b for b, row in enumerate(case.segments.lengths) if len(row) > 1][:8]} hold several sequences"


PACKED_RECURRENT = Refusal(
    of="packed rows (several sequences in a padded row), in a hybrid model",
    when=lambda case: "" if case.padding_free else packed_reason(case),
    rule="A recurrent layer carries its state from one sequence of a row into the next, and no mask stops it: {why}.",
    remedy="Give each sequence its own row, or use padding_free=True where its recurrent layers read offsets.",
    more="packed-recurrent",
)


HOLES_RECURRENT = Refusal(
    of="padding inside a sequence, in a hybrid model",
    when=lambda case: (
        bool(case.segments.hole_rows and case.recurrent and not case.padding_free)
        and (f"rows {list(case.segments.hole_rows)[:8]} have padding between their tokens")
    ),
    rule="Padding inside a sequence changes the state of a recurrent layer, and its convolution reads it; {why}.",
    remedy="Move the padding to one side of the row, or remove it from the sample.",
)


def not_exact(case: Case) -> str:
    """Return why None is wrong; "" where it is exact, and for a flat row."""
    return "" if case.padding_free or case.exact else case.exact.why
