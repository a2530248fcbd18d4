"""Delivery: proof, at the first batch, that every kernel got what the batch says, and that no layer reads more.

What a collator emits need not reach the model: another library may replace the collator, a trainer drop a key, a forward
ignore it, and nothing says so. So the kernels are recorded, in any module. A layer with code of its own calls none of them:
what padding and the other sequences embed is replaced, and no real token may move, whatever is between. With `alone=True`
the two sequences with most before them in their row are run by themselves, and in another width with tokens after them.

A check costs four forward passes without gradients, in the mode the model is in, without dropout, and `alone` four or six
with one row, as many on every rank; the guard looks at the trainer's own.
Legend: B rows, S width, T = B * S tokens, L tokens of one sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import Case, consumer_named
from collate_npu.consumers.megatron import kernel_of, start_problem
from collate_npu.consumers.model_traits import consumer_of, has_two_sides, is_compiled, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import of_kind
from collate_npu.masks.forms import dense
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.proof.forward import Forward, among, block, case_of, crosses, few, listed
from collate_npu.proof.measure import OF_THE_LOSS, apart, called, check_noise, like, noise_limit, scores_of, widened
from collate_npu.proof.recorder import record_calls
from collate_npu.releases import say_outside
from collate_npu.segments import Segments
from collate_npu.validation import check_model, checked

__all__ = ["Alone", "Delivery", "check_delivery", "guard_first_batch"]


@dataclass(frozen=True, slots=True)
class Alone:
    """Relative errors of the logits of some sequences: in the batch against each sequence alone."""

    errors: Mapping[int, float]
    """By number of the sequence in the batch."""
    limit: float
    """What passes: `TIMES` the noise of this model, dtype and device."""

    def __str__(self) -> str:
        each = ", ".join(f"sequence {n}: {error:.2g}" for n, error in self.errors.items())
        return f"relative error of the logits against alone (up to {self.limit:.2g} is rounding): {each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The result of `check_delivery`."""

    layers: Mapping[str, str]
    """What the kernels of each layer that was judged got: `"convolution zeros [1, 3], rule zeros [1, 3]"`."""
    report: str
    """The same of all layers, as `watch` prints it; "" where none was judged."""
    unchecked: tuple[str, ...]
    """Layers of which nothing was judged, and what else was not."""
    leak_free: bool
    """True if padding and other sequences were replaced, and no real token moved."""
    alone: Alone | None
    """How far two sequences are from themselves alone; None without `alone=True`."""

    @property
    def verdict(self) -> str:
        """What was proved, in one sentence."""
        if not self.layers:
            return "no known kernel ran, and no tokens leak" if self.leak_free else "NOT JUDGED: no kernel was compared"
        every = "every layer" if self.leak_free else "every layer with a known kernel"
        return f"{'these layers' if self.unchecked else every} got what the batch says"

    def facts(self) -> list[str]:
        """What was found beside the kernels' arguments: leaks, what was not looked at, and the numbers of `alone`."""
        unchecked = f"not checked: {few(self.unchecked)}" * bool(self.unchecked)
        still = "what padding and other sequences hold moves no real token" * self.leak_free
        return [*filter(None, [still, unchecked, "" if self.alone is None else str(self.alone)])]

    def __str__(self) -> str:
        return f"collate_npu: {self.verdict}: {'; '.join([*filter(None, [self.report]), *self.facts()])}"

    __repr__ = __str__  # as the last line of a cell


@checked
def check_delivery(
    model: Any,
    batch: Mapping[str, Any],
    *,
    alone: bool = False,
    segments: Segments | None = None,
    pattern: str | Pattern | None = None,
    context_parallel: ContextParallel | None = None,
    forward: Callable[..., Any] | None = None,
) -> Delivery:
    """Run `model(**batch)` and check that each kernel gets the padding and the boundaries of the batch.

    Raises `CollateError` where a kernel gets others, where padding or another sequence moves a real token, or nothing
    was checked. `batch` is what the model, any module, is called with. `segments`, of the whole rows, default to what
    the batch itself says; give them under context parallelism (with `context_parallel`) and where nothing in the batch
    marks padding. `pattern` is that of the model's attention. With `alone=True` two sequences of a model of
    transformers or Megatron run again alone and must give the same logits, or last states. Where ranks compute a
    forward together (FSDP, ZeRO-3, experts) every rank calls it, with its own batch. `forward(**batch) -> logits [B, S,
    V]` stands for `model(**batch)` where the model is called otherwise; it must run the modules of `model`.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> batch = {"input_ids": torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), "attention_mask": keep}
    >>> check_delivery(model, batch).layers["model.layers.0.linear_attn"]
    'convolution zeros [2, 4], rule zeros [2, 4]'
    """
    inner = _known(model)
    if forward is None and "FullyShardedDataParallel" in type(model).__name__:
        forward = model  # what no part of it holds is whole in its own forward alone
    if forward is None and not (getattr(inner, "pre_process", True) and getattr(inner, "post_process", True)):
        rule = "A stage of a pipeline runs only in its schedule."
        remedy = "Pass forward=, or check the model with pipeline size 1."
        raise UnsupportedFormError(explain("check_delivery", "a pipeline stage", rule, remedy))
    case = case_of(inner, batch, segments=segments, pattern=pattern)
    eager: Any = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    with torch.no_grad(), eager:
        record = _forward_of(inner, batch, case, context_parallel)
        with record_calls(record):
            given = _seeded(inner, batch, forward)
        _check_faults(record, case)
        leak, untested = ("", "a rank") if context_parallel else find_leak(inner, batch, case, given, forward)
        if leak:
            rule = "Neither padding nor another sequence moves a real token."
            suspects = few(record.layers_without_kernels()) or "its layers"
            remedy = f"Every known kernel got the right masks: check what the code of {suspects} does with the mask."
            raise CollateError(explain("delivery", f"real tokens move when {leak}", rule, remedy, more="delivery"))
        found = _proof(record, case, measured=alone, untested=untested)
        return replace(found, alone=check_alone(inner, batch, case, given, forward)) if alone else found


@checked
def guard_first_batch(
    model: Any,
    *,
    alone: bool = False,
    report: Callable[[Delivery], object] = print,
    only: Callable[[Mapping[str, Any]], bool] | None = None,
    segments: Segments | None = None,
    pattern: str | Pattern | None = None,
    context_parallel: ContextParallel | None = None,
    forward: Callable[..., Any] | None = None,
) -> Callable[[], None]:
    """Check the next forward of `model`, whoever calls it, as soon as it has run.

    Costs no forward of its own, so that any stage of a pipeline can be watched; with `alone=True` it costs five, and
    every rank must guard. The other settings are those of `check_delivery`. With the Segments of one batch,
    `only(arguments)` says whether a forward is of that batch. `report` is called with the result, and the guard is
    removed. The returned function removes it earlier.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> remove = guard_first_batch(model)
    >>> logits = model(input_ids=torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), attention_mask=keep).logits
    collate_npu: every layer with a known kernel got what the batch says: 2 recurrent: convolution zeros [2, 4] ✔ ·
        rule zeros [2, 4] ✔ · 1 attention: mask [2, 4] ✔ · positions ✔
    """
    inner = _known(model)
    refuse_compiled(model)
    if (stack := consumer_of(model)) in ("transformers", "megatron"):
        say_outside("megatron-core" if stack == "megatron" else "transformers")
    names = list(inspect.signature(inner.forward).parameters)
    held = ExitStack()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Listen to this forward, or with `alone` check its batch now."""
        batch = {**dict(zip(names, args)), **kwargs}
        if only is not None and not only(batch):
            return
        if alone:
            held.close()
            settings: dict[str, Any] = {"segments": segments, "pattern": pattern, "context_parallel": context_parallel}
            report(check_delivery(inner, batch, alone=True, forward=forward, **settings))
            return
        case = case_of(inner, batch, segments=segments, pattern=pattern)
        record = _forward_of(inner, batch, case, context_parallel)
        behind.close()
        running.enter_context(record_calls(record))
        behind.callback(inner.register_forward_hook(partial(judge, record, case), always_call=True).remove)

    def judge(record: Forward, case: Case, module: nn.Module, args: Any, output: Any) -> None:
        running.close()
        if output is not None:  # None: it raised, torch walks its hooks, and the next forward is looked at
            held.close()
            _check_faults(record, case)
            report(_proof(record, case))

    running, behind = held.enter_context(ExitStack()), held.enter_context(ExitStack())
    held.callback(inner.register_forward_pre_hook(before, with_kwargs=True).remove)
    return held.close


def refuse_compiled(model: nn.Module, *, compiled: bool = False) -> None:
    """Raise where a forward of this model is compiled code, in part at least."""
    if compiled or is_compiled(model):
        rule = "The layers and kernels of compiled code cannot be recorded."
        remedy = "Run check_delivery(model, batch) before training: it runs the model uncompiled."
        raise UnsupportedFormError(explain("guard", f"a compiled {type(unwrap(model)).__name__}", rule, remedy))


def _known(model: Any) -> nn.Module:
    inner: nn.Module = unwrap(model)
    check_model(inner)
    if consumer_of(model) == "megatron" and (late := start_problem()):
        rule = "Ascend's patches must be applied before any module imports Megatron's functions."
        raise CollateError(explain("start", late, rule, "Correct the order of imports, and start again."))
    return inner


def _forward_of(model: nn.Module, batch: Mapping[str, Any], case: Case, cp: ContextParallel | None) -> Forward:
    """The forward of this batch, which comes next."""
    ids = batch.get("input_ids", batch.get("tokens"))
    forward = Forward(root=model, ids=ids if isinstance(ids, Tensor) else None, cp=cp)
    forward.judge_by(case, whole=not of_kind(batch, "vision"))
    return forward


def _check_faults(record: Forward, case: Case) -> None:
    """Raise one error that lists every layer, those with the same fault together."""
    if faults := record.faults().values():
        known = consumer_of(record.root) in ("transformers", "megatron")
        attends = "" if known else f"; pattern= names the pattern of its attention ({case.pattern} here)"
        rule = f"Each layer gets which tokens are real, in the form it reads{attends}."
        remedy = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
        raise CollateError(explain("delivery", listed(faults), rule, f"{remedy}.", more="delivery"))


def _proof(record: Forward, case: Case, *, measured: bool = False, untested: str = "a guard") -> Delivery:
    """What a forward without faults proves. Raises where nothing was judged, unless the numbers are `measured`, or this is
    a rank. `untested`: why no tokens were replaced, to see whether they leak."""
    layers, judged = record.layers(), _judged_layers(record)
    if not (judged or measured or not untested or record.cp):
        shapes = sorted({str(list(call.boundaries.shape)) for call in record.calls if call.boundaries is not None})
        got = f"calls of {', '.join(shapes)} tokens" if shapes else f"no known kernel in {type(record.root).__name__}"
        rule = f"Some kernel must get the batch's tokens {list(case.segments.shape)}, or nothing is proved."
        remedy = "Pass the batch of these Segments, and a model with known kernels; alone=True compares logits."
        raise CollateError(explain("delivery", got, rule, remedy, more="delivery"))
    unchecked = [name for name in layers if not among(name, judged) and (not crosses(name) or has_two_sides(record.root))]
    unchecked += [f"{call.layer} ({call.unread_reason})" for call in record.calls if call.unread_reason]
    unchecked += [] if judged else ["positions"]
    unchecked += ["layers whose classes have no name of attention or a recurrence"] if untested and not layers else []
    got_by: dict[str, dict[str, None]] = {name: {} for name in sorted(judged)}
    for call in record.calls:
        if call.layer in got_by and record.judges(call) and call.boundaries:
            got_by[call.layer][f"{call.kind} {call.boundaries}".removeprefix("attention ")] = None
    return Delivery(
        layers={name: ", ".join(each) for name, each in got_by.items()}, report=block(record, {}) if judged else "",
        unchecked=tuple(dict.fromkeys(unchecked)), leak_free=not untested, alone=None,
    )  # fmt: skip


def _judged_layers(record: Forward) -> set[str]:
    """Layers of which every kernel was judged."""
    unruled = {name.removesuffix(" (its rule)") for name in record.layers_without_kernels()}
    calls = [call for call in record.calls if call.positions is None]
    unread = {call.layer for call in calls if not record.judges(call)}
    return {call.layer for call in calls} - unread - unruled


# --- leaks: what padding and the other sequences embed is replaced, and no real token may move


def find_leak(
    model: nn.Module, batch: Mapping[str, Any], case: Case, given: Any, forward: Callable[..., Any] | None
) -> tuple[str, str]:
    """Return whose tokens move real ones of other sequences, "" for nobody's, and why that could not be tested.

    `given` is what it gave for the batch. Three forwards on every rank, whatever its rows hold: ranks may compute together.
    """
    if has_two_sides(model):
        return "", "an encoder-decoder has two sequences"
    ids = case.segments.ids
    turn_T = torch.where(ids > 0, (ids + torch.arange(len(ids))[:, None]) % 2, -1).flatten()  # sequences take turns
    real_T = turn_T >= 0
    first_T, second_T = turn_T == 0, turn_T == 1
    replacements = [("padding", real_T, ~real_T)]
    replacements += [("another sequence", *turns) for turns in ((first_T, second_T), (second_T, first_T))]
    replacing = _Replacing(model, batch, case.segments, forward)
    try:
        base = replacing.by_token(given)
        moved = [replacing.run(others_T) for _, _, others_T in replacements]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:  # it ran once: what we changed it is
        return "", f"{type(error).__name__}: {str(error)[:80]}"
    if not bool(base[real_T].isfinite().all()):
        return "", "its numbers are not finite"
    if not replacing.replaced:
        return "", "no embedding of its tokens was found"
    limit = noise_limit(0.0, like(model))
    for (whose, mine_T, _), found in zip(replacements, moved):
        if not (size := apart([found[mine_T]], [base[mine_T]])) <= limit:
            return f"{whose} is replaced (a relative error of {size:.2g}, where up to {limit:.1g} is rounding)", ""
    something = any(mine_T.any() and others_T.any() for _, mine_T, others_T in replacements)
    return "", "" if something else "the batch has one sequence and no padding"


@dataclass
class _Replacing:
    """Forwards of a batch in which some of its tokens embed something else."""

    model: nn.Module
    batch: Mapping[str, Any]
    segments: Segments
    forward: Callable[..., Any] | None
    replaced: int = 0
    """Embeddings that were replaced."""

    def run(self, others_T: Tensor) -> Tensor:
        """`[T, 4]`: what the model gives for each token, in short, with these replaced."""
        batch, hook = dict(self.batch), self._hook(others_T)
        for key, x in self.batch.items():  # states in the place of tokens
            if getattr(x, "ndim", 0) == 3 and x.shape[:2] == self.segments.shape and x.is_floating_point():
                batch[key] = self._with_others(x, others_T)
        with ExitStack() as held:
            for module in self.model.modules():
                if module is not self.model:
                    held.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            return self.by_token(_seeded(self.model, batch, self.forward))

    def by_token(self, given: Any) -> Tensor:
        """`[T, 4]`: what the model gave for each token, in short, zero where it gave none."""
        (B, S), n = self.segments.shape, self.segments.num_tokens
        parts = [getattr(given, name, None) for name in ("logits", "last_hidden_state")] + [given]
        parts += [*given.values()] if isinstance(given, Mapping) else [*given] if isinstance(given, (tuple, list)) else []
        for x in parts:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                continue
            if x.ndim > 2 and x.shape[:2] in ((B, S), (S, B)):
                return _in_short((x if x.shape[:2] == (B, S) else x.transpose(0, 1)).flatten(0, 1))
            flat = x[0] if x.ndim > 2 and len(x) == 1 else x
            if flat.ndim > 1 and len(flat) in (B * S, n):
                places = slice(None) if len(flat) == B * S else self.segments.indices
                found = torch.zeros(B * S, 4)
                found[places] = _in_short(flat)
                return found
            if x.ndim == 2 and len(x) == B and not self.segments.packed:
                return _in_short(x).repeat_interleave(S, 0)
        raise CollateError("its output is not logits of these tokens")

    def _with_others(self, x: Tensor, others_T: Tensor) -> Tensor:
        self.replaced += 1
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        drawn *= x.float().square().mean().sqrt().to(x)
        return torch.where(others_T.reshape(*x.shape[:-1], 1).to(x.device), drawn, x)

    def _hook(self, others_T: Tensor) -> Callable[..., Any]:
        """What a part gives that is called with the tokens of the batch, all or those that are real: an embedding."""
        ids = next((x for key in ("input_ids", "tokens") if isinstance(x := self.batch.get(key), Tensor)), torch.zeros(0))
        at = self.segments.indices

        def look(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            whole = any(isinstance(each, (nn.ModuleList, nn.Sequential)) for each in module.modules())
            if whole or not isinstance(out, Tensor) or not out.is_floating_point():
                return None
            for x in (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and out.shape[:-1] == x.shape):
                if x.shape == ids.shape and torch.equal(x, ids):
                    return self._with_others(out, others_T)
                if x.numel() == len(at) < ids.numel() and torch.equal(x.flatten(), ids.flatten()[at.to(ids.device)]):
                    return self._with_others(out, others_T[at])
            return None

        return look


def _seeded(model: nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any] | None) -> Any:
    """What the model gives for a batch; what it draws is the same each time."""
    kind = like(model).device.type
    with torch.random.fork_rng(device_type=kind) if kind != "cpu" else torch.random.fork_rng([]):
        torch.manual_seed(0)
        return called(model, batch, forward)


def _in_short(states: Tensor) -> Tensor:
    """`[T, 4]`: the states of each token, projected."""
    x = states.flatten(1)
    drawn = torch.randn(x.shape[1], 4, generator=torch.Generator().manual_seed(3)).to(x.device)
    return torch.cat([part.float() @ drawn for part in torch.split(x, 1024)]).cpu()


# --- two sequences by themselves


@torch.no_grad()
def check_alone(
    model: nn.Module, batch: Mapping[str, Any], case: Case, given: Any, forward: Callable[..., Any] | None
) -> Alone:
    """Raise `CollateError` unless two sequences of the batch have the logits, or last states, that they have alone."""
    if consumer_of(model) is None:
        rule = "alone=True can run only models of transformers and Megatron."
        remedy = "Leave alone= out, and compare the numbers with collate_npu.testing.conformance."
        raise UnsupportedFormError(explain("alone", type(model).__name__, rule, remedy))
    if vision := of_kind(batch, "vision"):
        rule = "The images of a batch cannot be divided by row."
        raise UnsupportedFormError(explain("alone", ", ".join(vision), rule, "Check a batch of text, or leave alone= out."))
    logits, below = scores_of(given), getattr(model, "base_model", None)
    if logits.ndim < 3 and forward is None and isinstance(below, nn.Module):  # a model that pools: its states
        model, logits = below, scores_of(called(below, batch))
    if logits.ndim < 3 or tuple(logits.shape[:2]) != case.segments.shape:
        rule = f"The batch is {list(case.segments.shape)} (rows, width), and each of its tokens has logits."
        raise CollateError(explain("logits", shape_of(logits), rule, "Pass forward= that gathers the whole rows."))
    errors, noise = {}, 0.0
    for n, places_L in _most_at_risk(case.segments):
        L = len(places_L)
        width = max(case.segments.shape[1], L + 1) if case.pattern.causal else L
        once, again = (_sequence(model, batch, places_L[widened(L, each)], case.pattern) for each in (L, width))
        own = scores_of(called(model, once, forward))[0]
        errors[n] = apart([logits.flatten(0, 1)[places_L.to(logits.device)]], [own])
        for same in (again, once) if model.training else (again,):  # what trains may draw
            noise = max(noise, apart([scores_of(called(model, same, forward))[0, :L]], [own]))
    check_noise(model, noise)
    found = Alone(errors, noise_limit(noise, like(model)))
    if any(not error <= found.limit for error in errors.values()):  # NaN is wrong
        rule = "A sequence gives the same logits in a batch as alone."
        remedy = "Look at what the layers received (check_delivery without alone=), then at `collate-npu audit --model`."
        raise CollateError(explain("alone", str(found), rule, remedy))
    return found


def _most_at_risk(segments: Segments) -> list[tuple[int, Tensor]]:
    """The two sequences with most before them in their row, as places in the flat batch `[B * S]`: one twice, where there
    is but one, for ranks that compute together run as many forwards."""
    S, places = segments.shape[1], torch.split(segments.indices, list(segments.sequence_lengths))
    first = sorted(range(len(places)), key=lambda n: (int(places[n][0]) % S, len(places[n])), reverse=True)
    return [(n, places[n]) for n in sorted((first * 2)[:2])]


def _sequence(model: nn.Module, batch: Mapping[str, Any], places_L: Tensor, pattern: Pattern) -> dict[str, Any]:
    """A batch of one row without padding, as this model takes it."""
    tokens = {
        key: value.flatten(0, 1)[places_L.to(value.device)][None]
        for key in of_kind(batch, "tokens")
        if isinstance(value := batch[key], Tensor) and key not in OF_THE_LOSS
    }
    segments = Segments.from_lengths([len(places_L)])
    if consumer_of(model) != "megatron":
        return BatchAdapter(model, pattern=pattern).render(tokens, segments, padding_free=False)
    device = tokens["input_ids"].device
    # GPTModel counts no positions; its local kernels always read a dense mask (megatron-core core/transformer/utils.py:33)
    reads_dense = any(form.form == "masked" for form in consumer_named(kernel_of(unwrap(model))).forms)
    mask = dense(segments, polarity="masked", device=device) if reads_dense else None
    return {**tokens, "position_ids": segments.position_ids.to(device), "attention_mask": mask}
