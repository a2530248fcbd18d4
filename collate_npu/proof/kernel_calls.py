"""Kernel calls of one forward of a model, judged together, and the report of them.

A call is wrong if it contradicts what the batch says of its tokens, if its operator refuses or misreads its mask, or if its
window contradicts the config. What real tokens attend is judged, never what padding attends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.arrays import Array, entries
from collate_npu.consumers import model_traits
from collate_npu.consumers.adapter import KNOWN_BATCHES
from collate_npu.consumers.by_sequence import running
from collate_npu.consumers.labels_and_positions import check_starts
from collate_npu.consumers.mask_choice import Case, Model
from collate_npu.consumers.model_traits import consumer_of, pattern_of, text_config, unwrap
from collate_npu.errors import AmbiguousMaskError, CollateError, a_type, explain
from collate_npu.keys import KEYS, of_kind, with_role
from collate_npu.masks.batch_reader import agreed
from collate_npu.masks.patterns import Chunked, Pattern, Sliding
from collate_npu.masks.sources import Sources
from collate_npu.parallel import ContextParallel, query_rows
from collate_npu.proof import boundaries
from collate_npu.proof.boundaries import CallBoundaries, boundary_reason, shown
from collate_npu.proof.known_kernels import MODULES
from collate_npu.proof.measure import check_one_stack
from collate_npu.segments import Segments, ready

_LAYER = re.compile(r"attention|attn|delta|mamba|ssm|recurrent|kda|rwkv|shortconv|retention|lightning|mixer")
"""Names of classes that mix tokens."""
_NO_LAYER = re.compile(r"norm|mlp|expert|rotary|embedding|residual|output$")
_OF_ONE_TOKEN = re.compile(rf"{_NO_LAYER.pattern}|ffn|feed_?forward|moe|router|glu|activation|linear|dropout|identity|head$")
"""Names of classes that never look at another token."""
_CONTRADICTS = re.compile(r"(?s)errors#(sources-disagree|inverted-mask)$|bad row.*errors#padding-unknown$")
"""How an error ends if the keys of a batch contradict each other."""
CROSS = re.compile(r"cross|encdec|encoder_attn")
"""Names of layers of cross-attention."""
_FOREIGN = re.compile(rf"vision|visual|audio|image|{CROSS.pattern}")
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)(?=\.|$)")


def is_layer(module: nn.Module) -> bool:
    """Return True if a module of this class mixes tokens."""
    name = type(module).__name__.lower()
    return isinstance(module, nn.RNNBase) or (bool(_LAYER.search(name)) and not _NO_LAYER.search(name))


def _blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules of outermost module lists, if they may mix tokens."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not among(name, found):
            parts = {f"{name}.{key}".lstrip("."): each for key, each in module.named_children()}
            found |= {part: each for part, each in parts.items() if not _is_of_one_token(each)}
    return found


def _is_of_one_token(block: nn.Module) -> bool:
    own = [type(module) for module in block.modules() if not type(module).__module__.startswith("torch.nn.")]
    return all(_OF_ONE_TOKEN.search(each.__name__.lower()) for each in own) and not any(map(is_layer, block.modules()))


def among(name: str, layers: Collection[str]) -> bool:
    """Return True if `name` is one of these layers, inside one, or around one."""
    return any(name == each or name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in layers)


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One call of a kernel."""

    layer: str
    """The innermost layer around it, by its name in the model."""
    module: nn.Module | None = field(repr=False)
    kernel: str
    kind: str
    boundaries: CallBoundaries | None
    unread_reason: str = ""
    """Why it could not be read."""
    remedy: str = ""
    """What to do if the operator refuses or misreads the call, which is a fault for any batch; else ""."""
    empty_T: Array | None = field(default=None, repr=False)
    """bool: tokens of the batch whose embedding is zero, and zero still where this layer begins."""
    positions: Array | None = field(default=None, repr=False)
    """int64 `[B, S]`: what a rotary or a position embedding got."""
    rows: Segments | None = field(default=None, repr=False)
    """Those of its own rows, where an adapted model runs by sequence."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a call, and what to do."""

    layer: str
    kernel: str
    received: str
    """The boundaries or positions that the kernel got, in short."""
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.layer}, {self.kernel}: got {self.received}: {self.why.rstrip('.')}. {self.remedy}"


@dataclass
class Forward:
    """One forward of a root module, or of one layer of it that is computed again in the backward pass."""

    root: nn.Module
    number: int = 0
    step: int = 0
    training: bool = False
    ids: Tensor | None = field(default=None, repr=False)
    truth: Segments | None = None
    """The Segments of the batch, if it gives them."""
    skip_reason: str = ""
    """Why the batch gives none."""
    pattern: Pattern | None = None
    again: bool = False
    empty_T: Array | None = field(default=None, repr=False)
    """bool: tokens of the batch whose embedding is zero."""
    compiled: bool = False
    raised: str = ""
    """The error that ended it."""
    calls: list[RecordedCall] = field(default_factory=list)
    first_position: int = 0
    """The position of a sequence's first token in this model."""
    before: Sequence[RecordedCall] = field(default=(), repr=False)
    """If a layer is computed again: the calls of the first pass."""
    cp: ContextParallel | None = None
    """This rank's place, if ranks share the rows of `truth`."""
    plan_fault: str = ""
    """Why the plan by which an adapted model runs is not that of this batch."""

    def rows_here(self) -> Segments | None:
        """Return the Segments of the rows that run now by a plan, which is checked; None without one."""
        plan, bucket = running()
        if plan is None:
            return None
        if self.truth is not None:
            self.plan_fault = self.plan_fault or boundaries.plan_reason(plan, self.truth)
        return plan.rows_of(bucket)

    def judge_by(
        self, batch: Mapping[str, Any], *, segments: Segments | None = None, pattern: str | Pattern | None = None
    ) -> Case:
        """Set what calls are judged by, from this batch, and return it. Raises what `segments_from_batch` raises."""
        if not hasattr(batch, "items"):
            remedy = "Pass what the model is called with."
            raise CollateError(explain("batch", a_type(batch), "A batch is a dict of tensors.", remedy))
        batch = entries(batch)
        ids = batch.get("input_ids", batch.get("tokens"))
        self.ids = ids if isinstance(ids, Tensor) else None
        case = case_of(unwrap(self.root), batch, segments=segments, pattern=pattern)
        self.truth, self.first_position = case.segments, case.model.first_position
        self.pattern = None if of_kind(batch, "vision") else case.pattern  # with it positions are judged too
        return case

    def faults(self) -> dict[int, Fault]:
        """Return the faults by the number of the call; -1 is the batch itself."""
        wrong = {n: why for n, call in enumerate(self.calls) if (why := self._fault_reason(call)) is not None}
        right = {call.kind for n, call in enumerate(self.calls) if n not in wrong and self.judges(call)}
        some = {n for n, (_, remedy) in wrong.items() if self.calls[n].kind in right and _HAND in remedy}
        found = {}
        for n, (what, remedy) in wrong.items():
            call = self.calls[n]
            received = "positions" if call.positions is not None else str(call.boundaries or "what could not be read")
            found[n] = Fault(call.layer, call.kernel, received, what, _SOME if n in some else remedy)
        if _CONTRADICTS.search(self.skip_reason):
            what, _, rest = self.skip_reason.partition(": ")
            said = "keys that contradict each other", rest, "Correct it where the batch is made"
            found[-1] = Fault("(the batch)", what, *said)
        if self.plan_fault:
            said = "rows of other tokens", self.plan_fault, "Report this: adapt(model) laid out another batch"
            found[-2] = Fault("(the plan)", "by sequence", *said)
        return found

    def release(self) -> None:
        """Drop the tensors and modules that a call was given."""
        kept = [each.boundaries and replace(each.boundaries, allowed=None) for each in self.calls]
        self.calls = [replace(each, boundaries=one, module=None) for each, one in zip(self.calls, kept)]
        self.ids = None

    def _fault_reason(self, call: RecordedCall) -> tuple[str, str] | None:
        if call.rows is not None and self.truth is not None:
            return replace(self, truth=call.rows)._fault_reason(replace(call, rows=None))
        if call.remedy:
            return call.unread_reason, call.remedy
        if call.positions is not None and self.truth is not None and self.judges(call):
            embedded = None if call.kind == "rotary" else self.first_position
            why = boundaries.position_reason(call.positions.reshape(-1), self.truth, embedded)
            return (why, _REMEDIES["positions"]) if why else None
        if self.again:
            return self._recompute_reason(call)
        if call.boundaries is None or _FOREIGN.search(call.layer.lower()):
            return None
        if not call.boundaries.fits:
            why = "offsets must begin at 0, never fall, and end at the number of its tokens"
            return why, _REMEDIES[call.boundaries.kind]
        own = self._pattern_of(call) if call.boundaries.kind == "attention" else None
        if not self.judges(call) or self.truth is None:
            if not isinstance(own, (Sliding, Chunked)) or call.boundaries.reach <= own.size:
                return None
            return f"it attends {call.boundaries.reach} tokens back, and the config says {own}", _REMEDIES["attention"]
        own = own if self.pattern is not None else None
        given = self._of_whole_rows(call.boundaries)
        if given.allowed is None:
            why = boundary_reason(given, self.truth, call.empty_T) or _window_reason(given, own, self.truth)
        else:
            why = self._mask_reason(given, given.allowed, own, self.truth)
        return (f"{why}; the batch says {describe_segments(self.truth)}", _REMEDIES[given.kind]) if why else None

    def _of_whole_rows(self, given: CallBoundaries) -> CallBoundaries:
        """Return the boundaries of whole rows, if a causal call without boundaries has a rank's part of the rows."""
        if self.cp is None or self.truth is None or given.by or not given.causal:
            return given
        B, S = self.truth.shape
        if given.shape != (B, len(query_rows(S, self.cp))):
            return given
        return replace(given, shape=(B, S), first_T=boundaries.row_starts(B, S), neutral_T=np.zeros(B * S, bool))

    def layers(self) -> dict[str, nn.Module]:
        """Return, by name, the layers that mix tokens: innermost by class name, and blocks of module lists elsewhere."""
        named = {n: each for n, each in self.root.named_modules() if is_layer(each) and type(each).__name__ not in MODULES}
        held = {id(module) for module in named.values()}
        inner = {n: each for n, each in named.items() if not any(id(m) in held and m is not each for m in each.modules())}
        blocks = {n: each for n, each in _blocks(self.root).items() if not among(n, inner)}
        return {plain_name(name): module for name, module in (inner | blocks).items()}

    def layers_without_kernels(self) -> list[str]:
        """Return the layers in which no known kernel ran, or only a convolution and no recurrent rule after it."""
        ran = {call.layer for call in self.calls if call.positions is None}
        more = {call.layer for call in self.calls if call.positions is None and call.kind != "convolution"}
        layers = self.layers()
        silent = [name for name in layers if not among(name, ran)]
        unruled = [n for n, each in layers.items() if among(n, ran - more) and not among(n, more)]
        return silent + [f"{n} (its rule)" for n in unruled if "conv" not in type(layers[n]).__name__.lower()]

    def judged_layers(self) -> set[str]:
        """Return the layers of which every kernel was judged."""
        unruled = {name.removesuffix(" (its rule)") for name in self.layers_without_kernels()}
        calls = [call for call in self.calls if call.positions is None]
        unread = {call.layer for call in calls if not self.judges(call)}
        return {call.layer for call in calls} - unread - unruled

    def _recompute_reason(self, call: RecordedCall) -> tuple[str, str] | None:
        """Return what is wrong if a layer that is computed again gets other boundaries than in the first pass."""
        same = (each for each in self.before if (each.layer, each.kernel) == (call.layer, call.kernel))
        first = [each.boundaries for each in same if each.boundaries is not None]
        if call.boundaries is None or not first or any(map(call.boundaries.same, first)):
            return None
        return f"computed again for the backward pass; the first pass got {first[-1]}", _REMEDIES["again"]

    def judges(self, call: RecordedCall) -> bool:
        """Return True if this call is judged against the batch: it has the tokens of the batch."""
        if call.rows is not None and self.truth is not None:
            return replace(self, truth=call.rows).judges(replace(call, rows=None))
        if self.truth is None or _FOREIGN.search(call.layer.lower()):
            return False
        if call.positions is not None:
            return call.positions.shape == self.truth.shape and self.pattern is not None
        if call.boundaries is None:
            return False
        if call.boundaries.keys:
            Q = 0 if self.cp is None else len(query_rows(self.truth.shape[1], self.cp))
            return call.boundaries.shape == (self.truth.shape[0], Q) and call.boundaries.keys == self.truth.shape[1]
        return boundaries.places_in(self._of_whole_rows(call.boundaries), self.truth) is not None

    def _mask_reason(self, given: CallBoundaries, allowed: Any, own: Pattern | None, truth: Segments) -> str:
        if given.shape != truth.shape and not given.keys:
            return boundary_reason(given, truth)
        places_Q = query_rows(truth.shape[1], self.cp) if given.keys and self.cp is not None else None
        rows = (boundaries.attention_reason(truth, own, b, allowed(b), places_Q) for b in range(given.shape[0]))
        return next(filter(None, rows), "")

    def _pattern_of(self, call: RecordedCall) -> Pattern | None:
        """Return what this layer attends, by the config. None if that is not known: windows to both sides, layers that
        differ and no list says how, and an indexer that picks the keys (DeepSeek's and Qwen4's sparse attention)."""
        if call.module is not None and any("indexer" in name for name, _ in call.module.named_children()):
            return None
        config, at = text_config(model_traits.config_of(self.root)), getattr(call.module, "layer_idx", None)
        plain = self.pattern or Pattern.of(pattern_of(self.root) or "causal")
        try:
            known: Mapping[str, int | None] = model_traits.attention_windows(config)
        except (CollateError, AttributeError, TypeError):
            return plain
        kinds = model_traits.layer_kinds(config)
        kind = kinds[at] if isinstance(at, int) and at < len(kinds) else ""
        if (kind not in known and any(known.values())) or "local" in str(getattr(config, "attention_layers", "")):
            return None
        if (size := known.get(kind)) is None:
            return plain
        own = Pattern.chunked(size) if "chunk" in kind else Pattern.sliding(size)
        return own if plain.causal else None

    # --- words

    def report(self, faults: Mapping[int, Fault]) -> str:
        """Return `27 recurrent: convolution nothing ✘ · rule [0, 6, 11] ✔ · positions ✔`; no mark: not judged."""
        groups: dict[str, dict[tuple[str, str, str], set[str]]] = {"recurrent": {}, "attention": {}}
        for n, call in enumerate(self.calls):
            if call.positions is None:
                text = f"not read ({call.unread_reason})" if call.boundaries is None else str(call.boundaries)
                mark = " ✘" if n in faults else " ✔" if self.judges(call) else ""
                group = groups["attention" if call.kind == "attention" else "recurrent"]
                group.setdefault((call.kind, text, mark), set()).add(call.layer)
        parts = []
        for group_name, group in groups.items():
            layers = set().union(*group.values())
            texts = []
            for (kind, text, mark), names in sorted(group.items(), key=lambda item: item[0][0]):
                some = f" in {len(names)} of {len(layers)}" * (len(names) < len(layers))
                texts.append(f"{kind} {text}".removeprefix("attention ") + some + mark)
            parts += [f"{len(layers)} {group_name}: {' · '.join(texts)}"] * bool(layers)
        counted = [n for n, call in enumerate(self.calls) if call.positions is not None and self.judges(call)]
        if counted:
            parts.append("positions ✘" if any(n in faults for n in counted) else "positions ✔")
        elif parts:
            parts.append("positions not checked")
        return " · ".join(parts)

    def as_json(self, faults: Mapping[int, Fault]) -> dict[str, Any]:
        """Return the forward as a dict for JSON."""
        return {
            "step": self.step, "forward": self.number, "again": self.again, "training": self.training,
            "model": type(self.root).__name__, "judged": any(map(self.judges, self.calls)), "skip_reason": self.skip_reason,
            "kernels": dict(Counter(call.kernel for call in self.calls if call.positions is None)),
            "silent": [] if self.again else self.layers_without_kernels(),
            "faults": [asdict(each) for each in faults.values()],
        }  # fmt: skip

    def error(self, faults: Iterable[Fault]) -> CollateError:
        """Return one error that lists every layer with a fault, those with the same fault together."""
        faults = list(faults)
        known = self.pattern is None or consumer_of(self.root) in ("transformers", "megatron")
        attends = "" if known else f"; its attention is judged as {self.pattern}, pattern= names another"
        rule = f"Each layer must learn which tokens are real, in the form it reads{attends}."
        remedy = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
        return CollateError(explain("delivery", list_faults(faults), rule, f"{remedy}.", more="delivery"))

    def unseen_error(self) -> CollateError:
        """Return the error for a forward of which nothing was judged."""
        shapes = sorted({str(list(call.boundaries.shape)) for call in self.calls if call.boundaries is not None})
        got = f"calls of shape {', '.join(shapes)}" if shapes else f"no known kernel in {type(self.root).__name__}"
        tokens = None if self.truth is None else list(self.truth.shape)
        rule = f"Some kernel must get the batch, whose shape is {tokens}, or nothing is proved."
        remedy = "Pass the batch that the model gets, and a model with known kernels, or alone=True, which compares logits."
        return CollateError(explain("delivery", got, rule, remedy, more="delivery"))


def _window_reason(given: CallBoundaries, own: Pattern | None, truth: Segments) -> str:
    if given.kind != "attention" or own is None or not own.causal:
        return ""
    if given.causal is False and truth.max_length > 1:
        return "it looks ahead, and the model is causal"
    span = truth.longest_span
    if isinstance(own, Chunked):  # without a mask no kernel knows of chunks
        return f"it attends the whole past, and the config says {own}" if span > own.size else ""
    size = own.size if isinstance(own, Sliding) else None
    if size == given.window or span <= min(size or 1 << 60, given.window or 1 << 60):
        return ""
    return f"its window is {given.window or 'the whole past'}, and the config says {size or 'the whole past'}"


_HAND = "Call the model with BatchAdapter(model)(batch), on Megatron with what gpt_batch returns"
_SOME = "Other layers of this kind got what the batch says: check the code that calls this layer"
_REMEDIES = {
    "attention": f"{_HAND}; if it gets these, check what the stack passes to this layer",
    "rule": f"{_HAND}; a stack of your own must pass this layer the boundaries (cu_seqlens), or states of zeros at padding",
    "positions": f"{_HAND}: there position_ids begin again with each sequence",
    "again": "Check what this layer reads beside its arguments: it changed between the passes",
    "convolution": f"{_HAND}; a stack of your own must pass this layer seq_idx or cu_seqlens, or states of zeros at padding",
}


def describe_segments(segments: Segments) -> str:
    """Return the boundaries or lengths of a batch as short text."""
    if segments.packed or segments.shape[0] == 1:
        starts = segments.indices[[*segments.cu_seqlens_host[:-1]]].tolist()
        return shown([*starts, int(segments.indices[-1]) + 1])
    return f"{shown(segments.keep.sum(dim=1).tolist())} tokens a row, padding: {segments.padding_side}"


def plain_name(name: str) -> str:
    """Return a module's name without the names of wrappers around it."""
    return _WRAPPERS.sub("", name).lstrip(".") or "(model)"


def list_faults(faults: Iterable[Fault]) -> str:
    """Return each layer with what is wrong there, those with the same faults together."""
    kernels: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        kernels.setdefault((fault.layer, f"got {fault.received}: {fault.why}"), []).append(fault.kernel)
    whys: dict[str, list[str]] = {}
    for (layer, what), names in kernels.items():
        whys.setdefault(layer, []).append(f"{' and '.join(dict.fromkeys(names))} {what}")
    layers: dict[str, list[str]] = {}
    for name, each in whys.items():
        layers.setdefault("; ".join(each), []).append(name)
    return "; ".join(f"{first_names(names)}: {why}" for why, names in layers.items())


def first_names(names: Sequence[str]) -> str:
    """Return the first eight names, and how many more there are."""
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


# --- what a batch says of its tokens, to the model that is called with it


def case_of(
    model: nn.Module, batch: Mapping[str, Any], *, segments: Segments | None = None, pattern: str | Pattern | None = None
) -> Case:
    """Return the Case: the Segments, given or read from the batch, and what is known of the model.

    A layer that is called with hidden states `[B, S, D]` and no tokens is treated as a model with `inputs_embeds`.
    Raises what `segments_from_batch` raises, and for an encoder-decoder.
    """
    check_one_stack(model)
    about = Model.of(model) if consumer_of(model) in ("transformers", "megatron") else Model()
    declared = pattern or ("bidirectional" if pattern_of(model) == "bidirectional" else None)
    sources = _of_all_ranks(_with_tokens(Sources.of(batch)), about.config)
    if segments is None and running()[0] is not None:  # what came is a flat row already
        segments = KNOWN_BATCHES.running.get(get_ident())
    if segments is None and (ids := sources.get("input_ids", sources.get("tokens"))) is not None:
        segments = KNOWN_BATCHES.find(ids)
    if segments is None:
        held = _held(sources)
        truths = (sources.named[role] for role in ("mask", "keep", "segment_ids", "offsets", "lengths"))
        by_positions = not any(truths)
        keeps = {key: held[key] for key in with_role(held, "keep", "segment_ids") if by_positions}
        try:
            segments = _agreed(_without_windows(sources) | keeps, declared, about)
            segments = _without_zeros(segments) if by_positions and not keeps else segments
        except AmbiguousMaskError:
            known = KNOWN_BATCHES.running.get(get_ident())
            if not held and (known is None or known.shape != sources.shape()):
                raise
            segments = _agreed(sources | held, declared, about) if held or known is None else known
        else:
            check_starts(sources, segments)
    flat = len(segments.ids) == 1 and any(sources[key] is not None for key in of_kind(sources, "offsets"))
    return Case(segments=segments, model=about, pattern=Pattern.of(declared or "causal"), padding_free=flat)


def _agreed(sources: Sources, declared: str | Pattern | None, model: Model) -> Segments:
    row = sources.shape()[0] == 1
    flat = row and bool(sources.offsets or sources.lengths or sources.named["positions"])
    own = model.own_patterns.values() if model.model_type else ()
    return ready(agreed(sources, polarity=None, pattern=declared, padding_free=flat, own=own))


def _without_zeros(segments: Segments) -> Segments:
    """Return the Segments without the sequences of one token at the ends of a row: position 0 stands at padding too."""
    ids_BS = segments.ids.clone()
    for row_S in ids_BS:
        longer = (torch.bincount(row_S)[row_S] > 1).nonzero().flatten().tolist() or [0, len(row_S)]
        row_S[: longer[0]] = row_S[longer[-1] + 1 :] = 0
    return Segments.from_ids(ids_BS)


def _without_windows(sources: Sources) -> Sources:
    """Return the sources without masks of windows and chunks, if there are offsets: such masks show no sequences."""
    masks = sources.get("attention_mask")
    if not isinstance(masks, Mapping) or not sources.offsets:
        return sources
    whole = {kind: each for kind, each in masks.items() if not any(word in kind for word in ("chunk", "sliding", "window"))}
    return sources | {"attention_mask": whole or None}


def _of_all_ranks(sources: Sources, config: Any) -> Sources:
    """Return the sources of the whole flat row if Megatron's ranks share it: its offsets count the whole row."""
    ranks, held = getattr(config, "context_parallel_size", 1) or 1, _held(sources)
    S = ranks * sources.shape()[1]
    ends = {int(held[key][-1]) for key in with_role(held, "offsets", "padded_offsets") if len(held[key])}
    if ranks == 1 or sources.shape()[0] != 1 or S not in ends:
        return sources
    return Sources.of({**held, "input_ids": torch.arange(S)[None]})


def _held(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return offsets and masks in objects of the batch: Megatron's `packed_seq_params`, NeMo RL's `flash_attn_kwargs`,
    mcore-bridge's `extra_block_kwargs`."""
    held: dict[str, Any] = {}
    for value in batch.values():
        if not isinstance(value, (Tensor, str, list, tuple)):
            fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            keys = with_role(fields, "offsets", "padded_offsets", "keep", "segment_ids")
            held |= {key: fields[key] for key in keys if fields[key] is not None}
    return held


def _with_tokens(sources: Sources) -> Sources:
    """Return the sources with torchtitan's `positions` as `position_ids`; without tokens, hidden states are embeddings."""
    if sources.get("position_ids") is None and isinstance(sources.get("positions"), Tensor):
        sources = sources | {"position_ids": sources["positions"]}
    if sources.named["tokens"]:
        return sources
    values = (value for key, value in sources.items() if key not in KEYS and isinstance(value, Tensor))
    states = next((value for value in values if value.ndim == 3 and value.is_floating_point()), None)
    return sources if states is None else sources | {"inputs_embeds": states}
