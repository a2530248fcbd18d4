"""Forward: the kernel calls of one forward of a model, judged together.

Four questions, and a call is wrong by any of them: against the batch, where the batch says which tokens are real; against
the other calls of the same forward, where it does not; against the contract of its operator; and by its window, against the
config of the model. Attention of padding is judged by whom real tokens attend, never by what padding does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from collate_npu.arrays import Array
from collate_npu.consumers.consumer import Case
from collate_npu.consumers.models import attention_windows, config_of, has_two_sides, layer_kinds, pattern_of, text_config
from collate_npu.errors import CollateError
from collate_npu.kernels.breach import Breach
from collate_npu.masks.patterns import Chunked, Pattern, Sliding
from collate_npu.proof.kernel_calls import MODULES
from collate_npu.proof.reading import why_row_wrong
from collate_npu.proof.told import Told, begins_elsewhere, places_in, why_counts_wrong, why_differs
from collate_npu.segments import Segments

LAYER = re.compile(r"attention|attn|delta|mamba|ssm|recurrent|kda|rwkv|shortconv|retention|lightning|mixer")
"""Names of classes that look at other tokens than their own."""
_STATE = re.compile(r"delta|mamba|ssm|kda|lightning")
"""Classes of layers that have a rule or a scan behind their convolution."""
_NO_LAYER = re.compile(r"norm|mlp|expert|rotary|embedding|residual|output$")
_CROSS = re.compile(r"cross|encdec|encoder_attn")
_FOREIGN = re.compile(rf"vision|visual|audio|image|{_CROSS.pattern}")
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)(?=\.|$)")


def is_layer(module: nn.Module) -> bool:
    """Does a module of this class look at other tokens than its own?"""
    name = type(module).__name__.lower()
    return bool(LAYER.search(name)) and not _NO_LAYER.search(name)


def keeps_state(models: Iterable[nn.Module]) -> str:
    """The class of a layer that carries a state from token to token; "" where there is none."""
    names = (type(module).__name__ for model in models for module in model.modules() if is_layer(module))
    return next((name for name in names if _STATE.search(name.lower())), "")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One call of a kernel."""

    layer: str
    """The innermost layer around it, by its name in the model."""
    module: nn.Module | None = field(repr=False)
    kernel: str
    kind: str
    told: Told | None
    unread: str = ""
    """Why it could not be read."""
    breaches: tuple[Breach, ...] = ()
    empty_T: Array | None = field(default=None, repr=False)
    """bool: tokens of the batch whose embedding is zero, and zero still where this layer begins."""
    positions: Array | None = field(default=None, repr=False)
    """Of a rotary embedding, or one of positions: int64 `[B, S]`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a call, and what to do."""

    layer: str
    kernel: str
    told: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.layer}, {self.kernel}: told {self.told}: {self.why.rstrip('.')}. {self.remedy}"


@dataclass
class Forward:
    """One forward of a root module, or of one layer of it that is computed again in the backward pass."""

    root: nn.Module
    number: int
    step: int
    training: bool
    ids: Tensor | None = field(default=None, repr=False)
    truth: Segments | None = None
    """What the batch says, where it says it."""
    unsaid: str = ""
    """Why the batch does not say it."""
    pattern: Pattern | None = None
    again: bool = False
    """Computed again: by activation checkpointing."""
    empty_T: Array | None = field(default=None, repr=False)
    """bool: tokens of the batch whose embedding is zero."""
    compiled: bool = False
    raised: str = ""
    """The error that ended it."""
    calls: list[Seen] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Layers in which no known kernel ran."""
    first_position: int = 0
    """What the model embeds for a sequence's first token."""
    before: Sequence[Seen] = field(default=(), repr=False)
    """Of a layer that is computed again: the calls of this step's forwards."""

    def judge_by(self, case: Case, *, whole: bool = True) -> None:
        """Judge calls against this batch; with `whole` positions and the pattern of attention too."""
        self.truth, self.first_position = case.segments, case.model.first_position
        self.pattern = case.pattern if whole else None

    def faults(self) -> dict[int, Fault]:
        """By the number of the call."""
        found: dict[int, Fault] = {}
        for n, seen in enumerate(self.calls):
            if why := self._why_wrong(seen):
                found[n] = _fault(seen, *why)
        for n, why in () if self.again else self._apart():
            found.setdefault(n, _fault(self.calls[n], *why))
        return found

    def let_go(self) -> None:
        """Of what a call was given, tensors and modules, nothing is held any longer."""
        told = [each.told and replace(each.told, allowed=None) for each in self.calls]
        self.calls = [replace(each, told=one, module=None) for each, one in zip(self.calls, told)]
        self.ids = None

    def _why_wrong(self, seen: Seen) -> tuple[str, str] | None:
        if seen.breaches:
            first = seen.breaches[0]
            return f"[{first.rule}] {first.where}: {first.got}. {first.says}", f"{first.remedy} ({first.source})"
        if seen.positions is not None and self.truth is not None and self.judges(seen):
            embedded = None if seen.kind == "rotary" else self.first_position
            why = why_counts_wrong(seen.positions.reshape(-1), self.truth, embedded)
            return (why, _REMEDIES["positions"]) if why else None
        if self.again:
            return self._why_other_again(seen)
        if seen.told is None or _FOREIGN.search(seen.layer.lower()):
            return None
        if not seen.told.fits:
            return "they begin at 0, never fall, and end with its tokens", _REMEDIES[seen.told.kind]
        own = self._pattern_of(seen) if seen.told.kind == "attention" else None
        if not self.judges(seen) or self.truth is None:
            if not isinstance(own, (Sliding, Chunked)) or seen.told.reach <= own.size:
                return None
            return f"it reaches over {seen.told.reach} tokens, and the config says {own}", _REMEDIES["attention"]
        own = own if self.pattern is not None else None
        if seen.told.allowed is None:
            why = why_differs(seen.told, self.truth, seen.empty_T) or self._why_width_wrong(seen.told, own)
        else:
            why = self._why_attends_wrong(seen.told, own)
        return (why, _REMEDIES[seen.told.kind]) if why else None

    def layers(self) -> dict[str, nn.Module]:
        """The innermost layers of the model that look at other tokens, by name."""
        named = {
            short(name): module
            for name, module in self.root.named_modules()
            if is_layer(module) and type(module).__name__ not in MODULES
        }
        held = {id(module) for module in named.values()}
        return {
            name: module
            for name, module in named.items()
            if not any(id(each) in held and each is not module for each in module.modules())
        }

    def layers_without_kernels(self) -> list[str]:
        """Those in which no known kernel ran, or a convolution and no rule behind it."""
        ran = {id(seen.module) for seen in self.calls}
        ruled = {id(seen.module) for seen in self.calls if seen.kind == "rule"}
        inner = self.layers()
        silent = [name for name, module in inner.items() if id(module) not in ran]
        stateful = [name for name, module in inner.items() if _STATE.search(type(module).__name__.lower())]
        return silent + [f"{name} (its rule)" for name in stateful if id(inner[name]) in ran - ruled]

    def _why_other_again(self, seen: Seen) -> tuple[str, str] | None:
        """Activation checkpointing computes with what the first pass was told, or its gradients are of another batch."""
        mine = seen.told
        told = [each.told for each in self.before if each.layer == seen.layer and each.kernel == seen.kernel and each.told]
        if mine is None or not told or any(map(mine.same, told)):
            return None
        return f"computed again for the backward pass; the first pass was told {told[-1]}", _REMEDIES["again"]

    def judges(self, seen: Seen) -> bool:
        """Is this call judged against the batch? Not where it is of other tokens, nor where these are another model's."""
        if self.truth is None or _FOREIGN.search(seen.layer.lower()):
            return False
        if seen.positions is not None:
            return seen.positions.shape == self.truth.shape and self.pattern is not None
        if seen.told is None:
            return False
        if "decoder" in seen.layer and has_two_sides(self.root):
            return False
        return places_in(seen.told, self.truth) is not None

    def _why_attends_wrong(self, told: Told, own: Pattern | None) -> str:
        assert self.truth is not None
        assert told.allowed is not None
        if told.shape != self.truth.shape:
            return why_differs(told, self.truth)
        for b in range(told.shape[0]):
            if why := why_row_wrong(self.truth, own, b, torch.arange(told.shape[1]), told.allowed(b)):
                return why
        return ""

    def _why_width_wrong(self, told: Told, own: Pattern | None) -> str:
        assert self.truth is not None
        if told.kind != "attention" or own is None or not own.causal:
            return ""
        if told.causal is False and self.truth.max_length > 1:
            return "it looks ahead, and the model is causal"
        span = self.truth.longest_span
        if isinstance(own, Chunked):  # no kernel is told of chunks without a mask
            return f"it attends the whole past, and the config says {own}" if span > own.size else ""
        size = own.size if isinstance(own, Sliding) else None
        if size == told.window or span <= min(size or 1 << 60, told.window or 1 << 60):
            return ""
        return f"its window is {told.window or 'the whole past'}, and the config says {size or 'the whole past'}"

    def _pattern_of(self, seen: Seen) -> Pattern | None:
        """What this layer attends by the config; None where that is not known: of windows to both sides, where layers
        differ and nothing says how, and where an indexer picks the keys (DeepSeek's sparse attention, Qwen4's)."""
        if seen.module is not None and any("indexer" in name for name, _ in seen.module.named_children()):
            return None
        config, at = text_config(config_of(self.root)), getattr(seen.module, "layer_idx", None)
        plain = self.pattern or Pattern.of(pattern_of(self.root) or "causal")
        try:
            known: Mapping[str, int | None] = attention_windows(config)
        except (CollateError, AttributeError, TypeError):
            return plain
        kinds = layer_kinds(config)
        kind = kinds[at] if isinstance(at, int) and at < len(kinds) else ""
        if (kind not in known and any(known.values())) or "local" in str(getattr(config, "attention_layers", "")):
            return None
        if (size := known.get(kind)) is None:
            return plain
        own = Pattern.chunked(size) if "chunk" in kind else Pattern.sliding(size)
        return own if plain.causal else None

    def beside(self) -> set[int]:
        """Numbers of the calls that nothing judges but the others of this forward."""
        most = self._told_most()
        told = None if most is None else self.calls[most].told
        mine = {} if told is None else {n: self.calls[n].told for n in self._left() if n != most}
        found = {n for n, each in mine.items() if each and told and begins_elsewhere(each, told) is not None}
        return found | ({most} if found and most is not None else set())

    def _left(self) -> list[int]:
        """Calls that the batch does not judge."""
        if has_two_sides(self.root):
            return []
        left = [n for n, seen in enumerate(self.calls) if seen.told is not None and not self.judges(seen)]
        left = [n for n in left if self.calls[n].kind != "attention" or self._pattern_of(self.calls[n]) is not None]
        return [n for n in left if not _FOREIGN.search(self.calls[n].layer.lower())]

    def _told_most(self) -> int | None:
        most = max(self._left(), key=lambda n: _says(self.calls[n].told), default=None)
        return most if most is not None and _says(self.calls[most].told) else None

    def _apart(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Calls that begin sequences elsewhere than the one that was told most."""
        most = self._told_most()
        for n in [] if most is None else self._left():
            mine, other = self.calls[n].told, self.calls[most or 0].told
            assert mine is not None
            assert other is not None
            at = begins_elsewhere(mine, other)
            if at is not None and len(at):
                teller = self.calls[most or 0]
                others = f"{teller.kernel} of {teller.layer} was told {other}, and it begins elsewhere at token {at[0]}"
                yield n, (others, _REMEDIES[mine.kind])


def _says(told: Told | None) -> int:
    """How much a call was told: sequences it keeps apart, and padding it knows."""
    return 0 if told is None or not told.by else int(told.begins_T.sum()) + int(told.neutral_T.sum())


def _fault(seen: Seen, why: str, remedy: str) -> Fault:
    told = "positions" if seen.positions is not None else "what could not be read" if seen.told is None else str(seen.told)
    return Fault(layer=seen.layer, kernel=seen.kernel, told=told, why=why, remedy=remedy)


_REMEDIES = {
    "attention": "Hand the model BatchAdapter(model)(batch), or the arguments of fusion_attention_kwargs(segments)",
    "rule": "Hand the rule cu_seqlens of gated_delta_kwargs(segments), or rows with attention_mask_2d",
    "positions": "Hand the model the position_ids of BatchAdapter(model)(batch)",
    "again": "Look at what the layer takes from outside its arguments between the passes",
    "convolution": "Hand the convolution seq_idx or cu_seqlens of gated_delta_kwargs(segments), or zeros at padding",
}


def crosses(name: str) -> bool:
    """Does a layer of this name look at another row than its own?"""
    return bool(_CROSS.search(name.lower()))


def short(name: str) -> str:
    """A module's name without those of wrappers around it."""
    return _WRAPPERS.sub("", name).lstrip(".") or "(model)"
