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
from collate_npu.consumers.model_traits import config_of, consumer_of, needs_mask_2d, text_config
from collate_npu.consumers.recurrent import keeps_apart
from collate_npu.errors import CollateError, UnsupportedFormError, did_you_mean, explain
from collate_npu.masks.forms import Verdict, none_is_exact
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.parallel.recurrent import RecurrentScheme
from collate_npu.segments import Segments

MaskForm = Literal["none", "keep_2d", "masked", "keep", "bias", "mapping", "block_mask"]

SPELLED: Mapping[MaskForm, str] = {
    "none": "None",
    "keep_2d": "the 2D mask, True or 1 = real",
    "masked": "4D, True is blocked",
    "keep": "4D, True attends",
    "bias": "4D, additive",
    "mapping": "a mask for each kind of layer",
    "block_mask": "a BlockMask",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which form the mask of one batch gets, whether `attention_mask_2d` stays, and why."""

    form: MaskForm
    keeps_mask_2d: bool
    why: str
    """Why this form."""


def describe_cost(form: MaskForm, segments: Segments) -> str:
    """`18 bytes`, `8.0 MiB`: what such a mask takes; "" where only the kernel's package knows."""
    B, S = segments.shape
    each = {"keep_2d": 1, "masked": S, "keep": S, "bias": 4 * S}
    return describe_bytes(each[form] * B * S) if form in each else ""


def describe_bytes(size: int) -> str:
    """The size in words, for a message."""
    return f"{size} bytes" if size < 2**20 else f"{size / 2**20:.1f} MiB"


def describe_cheapest(segments: Segments) -> str:
    """Return the cheapest form that is exact for plain causal attention on these rows, and the cost of the others."""
    dense, in_rows = describe_cost("keep", segments), describe_cost("keep_2d", segments)
    if segments.packed:
        offsets = describe_bytes(4 * (segments.num_sequences + 1))
        return f"offsets of a flat row, {offsets}; a dense 4D takes {dense}"
    if none_is_exact(segments):
        return f"None with a causal kernel; the 2D mask takes {in_rows}, the dense 4D that models make of it {dense}"
    return f"the 2D mask, {in_rows}; the dense 4D that models make of it takes {dense}"


def describe_shape(segments: Segments) -> str:
    """`2 rows of 5, one sequence each; padding on the left, 2 of 10 places (20%)`."""
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
    """What is known of the model before any batch: of a transformers model by the functions of `model_traits`
    (`position_rule`, `label_rule`, `pooling` ...), whose answers stand here under their names."""

    config: Any = None
    model_type: str = ""
    needs_mask_2d: bool | None = None
    """None where it is unknown."""
    attn_implementation: str = "sdpa"
    dtype: torch.dtype | None = None
    positions: model_traits.PositionRule = "places"
    first_position: int = 0
    says_causal: bool = False
    """True if its attention layers say that they are causal: such a layer needs no mask where None is exact."""
    pooling: model_traits.Pooling = ""
    labels: model_traits.LabelRule | None = None
    looks_ahead: tuple[str, ...] = ()
    """Inputs by which its own masks let tokens see later ones: "images", "types" (`token_type_ids`)."""
    boundaries_unread: str | None = None
    """Why its recurrent layers cannot read where a sequence of a flat row begins; "" where they can; None before the adapter
    knows, or without a module: a config does not know which kernels this process resolved."""
    keeps_apart: bool = False
    """True if it was adapted, so that its recurrent layers keep the sequences of any row apart."""
    at_model: bool = False
    """True if only the model reads this batch; then the mask may be left out. Trainers count tokens by a 2D mask (TRL)."""
    moves: Mapping[str, str] = field(default_factory=dict)
    """By form of rows (probe.py): why its sequences do not come out as alone. Forms that were not tried are missing."""

    @classmethod
    def of(
        cls,
        model: Any = None,
        *,
        model_type: str | None = None,
        needs_2d: bool | None = None,
        attn_implementation: str | None = None,
    ) -> Model:
        """Read it from a module, a config or a name in transformers' registry; arguments of the caller win."""
        config = None if model is None else config_of(model)
        text = None if config is None else text_config(config)
        if needs_2d is None and (model is not None or model_type is not None):
            needs_2d = needs_mask_2d(model if model is not None else model_type)
        read: dict[str, Any] = {}
        attention = attn_implementation or getattr(text, "_attn_implementation", None) or "sdpa"
        own_module, module = consumer_of(model) == "transformers", isinstance(model, torch.nn.Module)
        if own_module or type(config).__module__.startswith("transformers."):
            read = {
                "positions": model_traits.position_rule(model),
                "first_position": model_traits.first_position(model),
                "says_causal": model_traits.pattern_of(model) == "causal",
                "pooling": model_traits.pooling(model),
                "labels": model_traits.label_rule(model),
                "looks_ahead": tuple(by for by in ("images", "types") if model_traits.looks_ahead(model, by)),
            }
            if own_module and needs_2d and keeps_apart(model):
                read |= {"boundaries_unread": "", "keeps_apart": True}
        if not own_module and needs_2d and module:
            read["boundaries_unread"] = f"{type(model).__name__} is no transformers model, and its layers are unknown"
        if module:
            read["dtype"] = next((each.dtype for each in model.parameters()), None)
        return cls(
            config=config,
            model_type=getattr(text, "model_type", None) or model_type or "",
            needs_mask_2d=needs_2d,
            attn_implementation=attention,
            **read,
        )

    @property
    def named(self) -> Any:
        """The config, or what knows the model's type alone."""
        return SimpleNamespace(model_type=self.model_type) if self.config is None else self.config

    def option(self, name: str, call: Mapping[str, Any]) -> Any:
        """Return an option of this call, else of the config."""
        given = call.get(name)
        return getattr(self.text, name, None) if given is None else given

    @once
    def text(self) -> Any:
        """The language model's config, or what knows the model's type alone; options set on it later are seen."""
        part = text_config(self.named)  # of an encoder-decoder transformers returns a copy
        copied = type(part) is type(self.named) and hasattr(part, "get_text_config")
        return self.named if copied else part

    @once
    def windows(self) -> tuple[int, ...]:
        """The windows of its layers, ascending: reading a config takes longer than collating a row."""
        return () if self.config is None else model_traits.windows(self.config)

    @once
    def own_patterns(self) -> frozenset[Pattern]:
        """The patterns that a transformers model makes of a 2D mask in some of its layers: windows, or chunks."""
        found = model_traits.attention_windows(self.config).items() if self.windows else ()
        return frozenset(Pattern.chunked(n) if "chunk" in kind else Pattern.sliding(n) for kind, n in found if n)

    @once
    def width_limit(self) -> int | None:
        """The longest sequence whose keys do not depend on the width of the tensor; None: any."""
        return model_traits.width_dependence(self.named)

    @once
    def rope_limit(self) -> int | None:
        """The position from which its rotary frequencies change for the whole batch; None where they do not."""
        return model_traits.rope_limit(self.named)

    @once
    def calls_kda(self) -> bool:
        """True if its code calls the kernel of KDA."""
        return model_traits.calls_kda(self.named)

    @property
    def description(self) -> str:
        """`model qwen3_next on sdpa`."""
        own = self.config is not None and hasattr(self.text, "_attn_implementation")
        return f"model {self.model_type or 'not named'}{f' on {self.attn_implementation}' if own else ''}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch on one model: what a description decides on."""

    segments: Segments
    model: Model = Model()
    pattern: Pattern = CAUSAL
    padding_free: bool = False
    context_parallel: ContextParallel | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    """The batch and options that the model is called with; nothing where only the rows are known."""
    restarts: bool = True
    """True if its positions begin again with each sequence, and there alone."""

    @once
    def keys(self) -> Collection[str]:
        """Return the keys that the call holds, without those that are None."""
        return [key for key, value in self.call.items() if value is not None]

    @once
    def exact(self) -> Verdict:
        """True if `attention_mask=None` gives the same result, with the reason."""
        return none_is_exact(self.segments, self.pattern)

    @once
    def plain(self) -> bool:
        """True for plain causal attention with one sequence a row: a 2D mask is complete."""
        if self.segments.packed:
            return False
        return self.pattern is CAUSAL or not self.pattern.reaches(self.segments.longest_span)

    @once
    def recurrent(self) -> bool:
        """True if the model carries state from token to token; for a flat row also where it is unknown."""
        return self.model.needs_mask_2d is not False if self.padding_free else bool(self.model.needs_mask_2d)

    @once
    def learns_routing(self) -> bool:
        """True if this call, or the config, wants a router's loss."""
        return bool(self.model.option("output_router_logits", self.call))


Test = Callable[[Case], str | bool]
"""Why it applies; "" or False where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form the consumer reads, in words for the guide, and when it gets it; the first that applies is taken.

    >>> Form(form="keep", reads="bool [B, 1, S, S], True attends").when(Case(segments=Segments.from_lengths([3])))
    True
    """

    form: MaskForm
    reads: str
    when: Test = lambda case: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A kind of batch without a correct form: `of` describes it for the guide, and `rule` may hold the reason as `{why}`.

    >>> PACKED_RECURRENT.of
    'packed rows (several sequences in a padded row), in a hybrid model'
    """

    of: str
    when: Test
    rule: str
    remedy: str
    more: str = ""
    """As `errors.explain` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One model stack. Refusals are tried first, in order, then forms; a flat row without refusal needs no mask.

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
    """True if ranks can share a row, each with its queries of a dense mask."""
    recurrent_scheme: RecurrentScheme | None = None
    """How its recurrent layers get what this rank has not, where ranks share a row; None where no release does it right."""
    not_shared: str = "its stack exchanges nothing between ranks"
    """Why not, where there is no scheme."""
    opens_empty_rows: bool = False
    """True if its kernel fails on a query that sees no key. Such queries, all of them padding, then see themselves."""
    counts_positions: bool = False
    """True if the model counts positions by itself where they are left out."""
    masks_flat_row: Callable[[Case], bool] = lambda case: False
    """True if a flat row needs a mask beside its offsets."""
    uncached: Callable[[Case], bool] = lambda case: False
    """True if positions that restart separate its sequences, which a model with a cache does not look at."""
    reads_offsets: Callable[[Case], bool] = lambda case: False
    """True if this batch needs every key of a flat row, whichever of them arrived."""
    offsets_also: Callable[[Case], tuple[str, ...]] = lambda case: ()
    """Other names under which its kernels read `cu_seq_lens_q`."""
    patterns: Callable[[Case], Mapping[str, Pattern | None]] = lambda case: {"": case.pattern}
    """The pattern of each mask by kind of layer, None for the 2D mask; the kind "" where one mask serves all."""
    here: Callable[[], bool] = lambda: False
    """True if its stack is installed: `collate-npu env` then prints what it refuses."""
    source: str

    def __reduce__(self) -> Any:
        """Pickle it by name, for collators that go to workers: they have the files of this folder."""
        return (consumer_named, (self.name,)) if consumers().get(self.name) is self else super().__reduce__()

    def choose(self, case: Case) -> Choice:
        """Return the one form in which this batch is computed right. Raises `UnsupportedFormError` where there is none."""
        for refusal in self.refuses:
            if why := refusal.when(case):
                rule = refusal.rule.format(why=why)
                raise UnsupportedFormError(explain(self.key, repr(case.segments), rule, refusal.remedy, more=refusal.more))
        if case.padding_free and not self.masks_flat_row(case):
            return Choice(form="none", keeps_mask_2d=False, why="padding free: offsets carry the boundaries")
        form, reason = next((form, why) for form in self.forms if (why := form.when(case)))
        kept = case.recurrent if self.keeps_mask_2d == "recurrent" else self.keeps_mask_2d == "always"
        return Choice(form=form.form, keeps_mask_2d=kept, why=reason if isinstance(reason, str) else form.reads)


@cache
def consumers() -> Mapping[str, Consumer]:
    """Every consumer by name: those of the files in this folder."""
    import collate_npu.consumers as folder

    modules = [importlib.import_module(f"{folder.__name__}.{info.name}") for info in pkgutil.iter_modules(folder.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Consumer)]
    return MappingProxyType({consumer.name: consumer for consumer in found})


def consumer_named(name: str | Consumer) -> Consumer:
    """A consumer by its name, or as it is. Raises for a name that no file has."""
    if isinstance(name, Consumer):
        return name
    if not isinstance(name, str) or name not in consumers():
        rule, remedy = f"It is one of {', '.join(consumers())}.", did_you_mean(str(name), consumers(), "Name one of them.")
        raise CollateError(explain("consumer", repr(name), rule, remedy, more="consumer"))
    return consumers()[name]


def _packed_rows(case: Case) -> str:
    if case.padding_free or not (case.segments.packed and case.recurrent):
        return ""
    rows = [b for b, row in enumerate(case.segments.lengths) if len(row) > 1][:8]
    return "" if case.model.keeps_apart else f"rows {rows} hold several sequences"


PACKED_RECURRENT = Refusal(
    of="packed rows (several sequences in a padded row), in a hybrid model",
    when=_packed_rows,
    rule="A recurrent layer carries its state from one sequence of a row into the next, and no mask stops it: {why}.",
    remedy="Give each sequence its own row, or use padding_free=True where its recurrent layers read offsets.",
    more="packed-recurrent",
)


def _holes(case: Case) -> str:
    rows = list(case.segments.hole_rows)[:8]
    return f"rows {rows} have padding between their tokens" if rows and case.recurrent and not case.padding_free else ""


HOLES_RECURRENT = Refusal(
    of="padding inside a sequence, in a hybrid model",
    when=_holes,
    rule="The state of a recurrent layer decays over a hole, and its convolution reaches into it; {why}.",
    remedy="Move the padding to one side of the row, or remove it from the sample.",
)


def not_exact(case: Case) -> str:
    """Why None is wrong; "" where it is exact, or the row is flat."""
    return "" if case.padding_free or case.exact else case.exact.why
