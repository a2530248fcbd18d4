"""Shared rows: of rows whose parts stand on several ranks, a mixer computes what it would of the whole rows.

A mixer that exchanges tokens itself, as the attention of stacks does, runs as it is. Any other gets whole sequences, dealt
out so that ranks have about as many tokens, and sends back what came out. Gated DeltaNet, if its heads divide, keeps its
tokens: as pieces of sequences, each with the few tokens before it that the convolution reads, and around its rule ranks
trade heads for tokens. Any kernel is right that is right on rows of one sequence. An exchange's backward is the one back.
Legend: B rows, S width, s of a rank's part, T real tokens of all rows in order, t of these on a rank, P ranks, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from threading import local
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from collate_npu.arrays import Array, dims, once
from collate_npu.consumers.by_sequence import (
    BySequence,
    MixerPlan,
    from_places,
    plan_of,
    run_bucket,
    to_places,
    without_masks,
)
from collate_npu.consumers.model_traits import recurrent_heads
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.sources import Sources
from collate_npu.parallel import ContextParallel, gather_sequence, token_runs
from collate_npu.segments import Segments


@dataclass(frozen=True, eq=False)
class Route:
    """One exchange: the rows that this rank sends, how many to each rank and from each, and the order of those that come."""

    send: Tensor
    to: list[int]
    come: list[int]
    order: Tensor
    group: Any

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows that came for `x [n, ...]`, in order."""
        came: Tensor = _Trade.apply(x, self)  # type: ignore[no-untyped-call]
        return came.index_select(0, self.order)


class _Trade(torch.autograd.Function):
    """One exchange. Its backward gives each row's gradient to the rank that it came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route, ctx.rows = route, len(x)
        return _exchanged(x.index_select(0, route.send), route.to, route.come, route.group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        route = ctx.route
        back = _exchanged(grads[0], route.come, route.to, route.group)
        return back.new_zeros(ctx.rows, *back.shape[1:]).index_add_(0, route.send, back), None


def _exchanged(x: Tensor, to: list[int], come: list[int], group: Any) -> Tensor:
    if group is None:  # one rank
        return x
    out = x.new_empty(sum(come), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), come, to, group=group)
    return out


@dataclass(frozen=True, eq=False)
class _Work:
    """What this rank computes of the whole rows: one flat row of tokens that come by `route`."""

    route: Route
    plan: MixerPlan
    home: Route | Tensor
    """The way back of what comes out, or the places of this rank's own tokens in it."""
    heads: tuple[Route, Route] | None = None
    """Heads for tokens around the rule, and back."""

    def laid(self, x: Tensor) -> Tensor:
        """Return `x [n, ...]` of this rank as `[1, W, ...]`; one place of zeros where no token comes, so that each rank
        computes, and takes part in the backward."""
        came = self.route(x)
        return (came if len(came) else to_places(came, self.route.order, 1))[None]

    def brought(self, out: Tensor) -> Tensor:
        """Return what came out, `[1, W, ...]`, for this rank's own tokens `[t, ...]`."""
        return from_places(out[0], self.home) if isinstance(self.home, Tensor) else self.home(out[0])


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Where each real token of the whole rows stands: the plan of a forward on one of the ranks that share them."""

    whole: MixerPlan
    """Of the sequences of the whole rows, one behind the other."""
    owner_T: Array
    """The rank that has each token."""
    local_T: Array
    """Its place in that rank's part `[B * s]`."""
    segments: Segments
    cp: ContextParallel
    attention: MixerPlan | None = None
    """By which mixers without a rule run where a copy is asked, on one rank."""
    most: int = 0
    """The longest piece of a sequence; 0: the one with which a rank computes least."""
    works: dict[Any, _Work] = field(default_factory=dict)
    """What was made for a mixer's reach."""

    @classmethod
    def of(cls, segments: Segments, cp: ContextParallel, device: torch.device, **settings: Any) -> SharedPlan:
        """Return the plan of this rank. Raises `CollateError` for a width that these ranks cannot share."""
        S = segments.shape[1]
        owner_S, local_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
        for rank in range(cp.size):
            held = np.concatenate([np.arange(*run) for run in token_runs(S, cp.with_rank(rank))])
            owner_S[held], local_S[held] = rank, np.arange(len(held))
        rows_T, at_T = np.nonzero(segments.array)
        local_T = rows_T * (S // cp.size) + local_S[at_T]
        whole = plan_of(segments.sequence_lengths, device)
        return cls(whole, owner_S[at_T], local_T, segments, cp, **settings)

    @property
    def part(self) -> tuple[int, int]:
        """Return B and s."""
        return self.segments.shape[0], self.segments.shape[1] // self.cp.size

    def run(self, mixer: BySequence, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what this mixer computes of the whole rows at this rank's places, with zeros at padding: its own output, if
        the stack lets it exchange tokens, which its first call shows."""
        if self.attention is not None and not mixer.ruled:
            return self.attention.run(mixer, own, args, kwargs)
        if all(x.shape[:2] != self.part for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)):
            rule = f"{self.cp.size} ranks share rows of this model, and it cuts its parts {list(self.part)} again, inside."
            remedy = "Let each rank have whole rows: ulysses_size or sequence_parallel_size of 1."
            raise UnsupportedFormError(explain("input_ids", type(mixer.mixer).__name__, rule, remedy))
        if mixer.exchanges is None and self.cp.size > 1:
            collectives = _Collectives(self.cp.group)
            with torch.no_grad(), collectives, suppress(RuntimeError):  # of a mask for whole rows
                run_bucket(None, None, own, *args, **kwargs)
            mixer.exchanges = collectives.seen
        if mixer.exchanges:
            self._check_exchange(mixer)
            return own(*args, **kwargs)
        by_heads = mixer.ruled and recurrent_heads(mixer.config)[-1] % self.cp.size == 0
        work = self._work(reach_of(mixer.mixer) if by_heads else -1)
        given = without_masks(own, args, kwargs)  # a rank without padding may have no mask
        laid = tree_map_only(Tensor, lambda x: work.laid(x.flatten(0, 1)) if x.shape[:2] == self.part else x, given)
        if by_heads:
            _let_trade(mixer.mixer)
        before, _HERE.work = getattr(_HERE, "work", None), (self, work) if by_heads else None
        try:
            out = work.plan.run(mixer, own, *laid)
        finally:
            _HERE.work = before
        states = out[0] if isinstance(out, tuple) else out
        own_t = self._tensor(self.local_T[self.tokens[self.cp.rank]])
        placed = to_places(work.brought(states), own_t, self.part[0] * self.part[1]).view(*self.part, *states.shape[2:])
        return (placed, *out[1:]) if isinstance(out, tuple) else placed

    def _check_exchange(self, mixer: BySequence) -> None:
        """Raise if a stack's own attention needs a mask and is no flash attention, which is told where sequences begin: what
        stands in the place of torch's kernels (DeepSpeed's Ulysses, torch's context parallelism) drops masks."""
        named = getattr(mixer.config, "_attn_implementation", None)
        if named not in ("sdpa", "eager") or mixer.kind in (None, "2d"):
            return
        exact, window = none_is_exact(self.segments), getattr(mixer.config, "sliding_window", None) or 0
        why, remedy = "" if exact else exact.why, "Pad right with one sequence a row."
        if mixer.kind != "causal" and window < self.segments.longest_span:
            why, remedy = ("this layer has a window", "Use flash attention, which takes windows, or no sharing.")
        if why:
            rule = f"The {named} attention by which these ranks share rows drops every mask, and {why}."
            raise UnsupportedFormError(explain("attention_mask", repr(self.segments), rule, remedy))

    @once
    def tokens(self) -> list[Array]:
        """Return the tokens of each rank, counted through the whole rows."""
        return [np.flatnonzero(self.owner_T == rank) for rank in range(self.cp.size)]

    def _work(self, reach: int) -> _Work:
        if reach not in self.works:
            self.works[reach] = self._dealt() if reach < 0 else self._cut(reach)
        return self.works[reach]

    def _dealt(self) -> _Work:
        """Whole sequences, longest first, each to the rank that has the fewest tokens by then."""
        lengths_N, loads = np.array(self.whole.lengths), [0] * self.cp.size
        rank_N = np.zeros(len(lengths_N), np.int64)
        for n in np.argsort(-lengths_N, kind="stable").tolist():
            rank_N[n] = min(range(self.cp.size), key=loads.__getitem__)
            loads[rank_N[n]] += lengths_N[n]
        rank_T = np.repeat(rank_N, lengths_N)
        wanted = [np.flatnonzero(rank_T == rank) for rank in range(self.cp.size)]
        place_T = np.zeros_like(rank_T)
        for tokens in wanted:
            place_T[tokens] = np.arange(len(tokens))
        home = self._route(self.tokens, rank_T, place_T)
        lengths = lengths_N[rank_N == self.cp.rank].tolist() or [1]
        plan = replace(plan_of(lengths, self.whole.place_T.device), part=True)
        return _Work(self._route(wanted, self.owner_T, self.local_T), plan, home)

    def _cut(self, reach: int) -> _Work:
        """Pieces of sequences: of this rank's own tokens, each behind the tokens that a convolution looks back to."""
        cut = [self._pieces_of(tokens, reach) for tokens in self.tokens]
        wanted = [np.concatenate([np.arange(start, end) for start, _, end in pieces] or [_NONE]) for pieces in cut]
        mine = cut[self.cp.rank]
        home = np.flatnonzero(np.concatenate([np.arange(start, end) >= first for start, first, end in mine] or [_NONE > 0]))
        lengths = [end - start for start, _, end in mine] or [1]
        plan = replace(plan_of(lengths, self.whole.place_T.device, "one"), part=True)
        counts, together = [*map(len, self.tokens)], np.concatenate(self.tokens)
        own = [counts[self.cp.rank]] * self.cp.size
        out = Route(self._tensor(np.arange(sum(own))), own, counts, self._tensor(np.argsort(together)), self.cp.group)
        back = Route(self._tensor(together), counts, own, self._tensor(np.arange(sum(own))), self.cp.group)
        route = self._route(wanted, self.owner_T, self.local_T)
        return _Work(route, plan, self._tensor(home), (out, back))

    def _pieces_of(self, tokens: Array, reach: int) -> list[tuple[int, int, int]]:
        """Return for each piece where it begins, its first own token, and its end. Long ones are cut, so that rows of one
        width have little padding."""
        sequence_T = np.repeat(np.arange(len(self.whole.lengths)), self.whole.lengths)
        first = np.flatnonzero((np.diff(tokens, prepend=-2) != 1) | (np.diff(sequence_T[tokens], prepend=-1) != 0))
        starts, ends = tokens[first], np.append(tokens[first[1:] - 1], tokens[-1:]) + 1
        lengths = ends - starts
        widths = sorted({-(-int(lengths.max()) // parts) for parts in range(1, 33)}) if len(first) else [1]
        most = self.most or min(widths, key=lambda width: (width + reach) * int((-(-lengths // width)).sum()))
        spans = zip(self.whole.starts[sequence_T[starts]].tolist(), starts.tolist(), ends.tolist())
        cuts = ((begin, at, end) for begin, start, end in spans for at in range(start, end, most))
        return [(max(at - reach, begin), at, min(at + most, end)) for begin, at, end in cuts]

    def _route(self, wanted: Sequence[Array], owner_T: Array, local_T: Array) -> Route:
        """Return the exchange in which each rank gets the tokens that it wants, in order. `local_T`: their rows there."""
        rank, mine = self.cp.rank, wanted[self.cp.rank]
        send = [local_T[tokens[owner_T[tokens] == rank]] for tokens in wanted]
        order = np.argsort(np.argsort(owner_T[mine], kind="stable"))
        come = np.bincount(owner_T[mine], minlength=self.cp.size).tolist()
        return Route(self._tensor(np.concatenate(send)), list(map(len, send)), come, self._tensor(order), self.cp.group)

    def _tensor(self, places: Array) -> Tensor:
        return torch.from_numpy(places).to(self.whole.place_T.device, non_blocking=True)

    def exchanged(self, work: _Work, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the rule's output `[n, L, H, ...]` for rows of pieces: each rank runs some heads of the whole sequences."""
        assert work.heads is not None
        assert isinstance(work.home, Tensor)
        query, key, value, *others = args
        (n, L), P = value.shape[:2], self.cp.size
        if key.shape[2] % P:  # value heads divide, key heads do not
            query, key = (x.repeat_interleave(value.shape[2] // key.shape[2], dim=2) for x in (query, key))
        values, spec = tree_flatten(((query, key, value, *others), kwargs))
        traded = [m for m, x in enumerate(values) if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == (n, L)]
        place_t = work.plan.place_T[work.home]
        parts = self._by_token([from_places(values[m].flatten(0, 1), place_t) for m in traded], work.heads[0])
        laid, outs = [self.whole.lay(part[None]) for part in parts], []
        for bucket in range(len(self.whole.buckets)):
            for m, rows in zip(traded, laid):
                values[m] = rows[bucket]
            given, named = tree_unflatten(values, spec)
            outs.append(run_bucket(self.whole, bucket, rule, *given, **named)[0])
        out_T = self.whole.back(outs)[0]
        came = work.heads[1](out_T).view(P, len(place_t), *out_T.shape[1:])
        return to_places(came.movedim(0, 1).flatten(1, 2), place_t, n * L).view(n, L, -1, *out_T.shape[2:]), None

    def _by_token(self, xs: list[Tensor], route: Route) -> list[Tensor]:
        """Return `[t, H, ...]` of each rank as `[T, H / P, ...]`: one exchange for all of a dtype."""
        P, found = self.cp.size, dict[int, Tensor]()
        for dtype in dict.fromkeys(x.dtype for x in xs):
            held = {m: x.view(len(x), P, x.shape[1] // P, *x.shape[2:]) for m, x in enumerate(xs) if x.dtype == dtype}
            came = route(torch.cat([x.flatten(2) for x in held.values()], 2).movedim(1, 0).flatten(0, 1))
            sizes = [x.shape[2:].numel() for x in held.values()]
            found |= {m: y.view(-1, *x.shape[2:]) for (m, x), y in zip(held.items(), torch.split(came, sizes, 1))}
        return [found[m] for m in range(len(xs))]


def whole_rows(batch: Sources, cp: ContextParallel, offsets: Mapping[str, Any]) -> Sources:
    """Return what tells of the sequences in whole rows: tokens, positions, masks and targets of all ranks, by one exchange,
    and the offsets, which each rank has. Rows of which nothing tells are whole: their stack drops all masks."""
    (B, s), names = batch.shape(), [each for role in _OF_TOKENS for each in batch.named[role]]
    held = {name: batch[name] for name in names if dims(batch[name]) == (B, s)} or {"attention_mask": torch.ones(B, s)}
    held |= {"shift_labels": batch["shift_labels"]} if dims(batch.get("shift_labels")) == (B, s) else {}
    joined_KBS = gather_sequence(torch.stack([x.long() for x in held.values()]), cp, dim=2).cpu()
    whole = Sources({**dict(zip(held, joined_KBS)), **offsets})
    told = B == 1 or whole.masks or any(whole.named[role] for role in ("keep", "segment_ids"))
    return whole if told else whole | {"attention_mask": torch.ones(joined_KBS.shape[1:], dtype=torch.long)}


_OF_TOKENS: tuple[Any, ...] = ("tokens", "positions", "mask", "keep", "segment_ids")
_NONE = np.zeros(0, np.int64)


_HERE = local()
"""Its `work`, if any, is of the mixer of shared rows that runs in this thread by heads."""


def rule_of(mixer: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return where a mixer looks its gated delta rule up, and by which name: on itself before transformers 5.19, in its
    module since. None without one."""
    forward: Any = inspect.unwrap(type(mixer).forward)
    for held in (vars(mixer), forward.__globals__):
        for name in ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"):
            if name in forward.__code__.co_names and callable(held.get(name)):
                return held, name
    return None


def _let_trade(mixer: nn.Module) -> None:
    """Let this mixer's rule trade heads for tokens wherever a plan says so; what stands in its place is inert else."""
    held, name = rule_of(mixer) or ({}, "")
    if hasattr(rule := held[name], "traded"):
        return

    @wraps(rule)
    def called(*args: Any, **kwargs: Any) -> Any:
        work = getattr(_HERE, "work", None)
        return rule(*args, **kwargs) if work is None else work[0].exchanged(work[1], rule, *args, **kwargs)

    called.traded = rule  # type: ignore[attr-defined]
    held[name] = called


def reach_of(mixer: nn.Module) -> int:
    """Return how many tokens before its own a mixer's convolutions read."""
    return max((each.kernel_size[0] - 1 for each in mixer.modules() if isinstance(each, nn.Conv1d)), default=0)


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a collective of these ranks, or of some of them, runs; not one of tensor parallelism."""

    def __init__(self, group: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.ranks, self.seen = group.group_name, {*dist.get_process_group_ranks(group)}, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:  # a DTensor runs its collectives itself, and they are seen then
            return NotImplemented
        self.seen = self.seen or ("c10d" in function.namespace and any(map(self._is_of_ranks, args)))
        return function(*args, **(kwargs or {}))

    def _is_of_ranks(self, given: Any) -> bool:
        if isinstance(given, torch.ScriptObject) and "ProcessGroup" in str(given):
            return self.ranks.issuperset(dist.get_process_group_ranks(dist.ProcessGroup.unbox(given)))
        return isinstance(given, str) and given == self.name
