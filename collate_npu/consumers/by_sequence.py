"""By sequence: a model runs one flat row of real tokens, and each of its mixers runs the sequences of that row as rows.

A mixer is a layer that reads other tokens than its own: attention, Gated DeltaNet, Mamba, a short convolution. It is called
as a whole, once for each bucket: rows of one sequence each, padded right, of nearly one length. Every causal kernel is right
on such rows, so that no function, release or form of mask is a case. The plan of a batch is held for the thread that runs
the model, and goes with a checkpointed layer into its recomputation. A wrapped mixer without a plan runs as it is.
Legend: T tokens of the flat row, N sequences, n rows of a bucket and L its width, R places of all buckets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import local
from types import MethodType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from collate_npu.arrays import Array, once
from collate_npu.consumers.model_traits import unwrap
from collate_npu.segments import Segments, of_lengths

MaskKind = Literal["causal", "sliding_window_causal", "chunked_causal", "2d"]
Buckets = Literal["few", "even", "one"]
"""Buckets by cost, or one for each length, or one for all: where ranks compute a layer together, each calls it once."""
FlatMask = Literal["all", "ones"]
"""What a flat row has where a mask stands: `[1, 1, 1, 1]`, which transformers hands on as it is, or `[1, T]`."""


@dataclass(frozen=True)
class Way:
    """How a model runs its batches: by sequence, with these classes as mixers; or the padded way, and why."""

    why_padded: str = ""
    mixers: dict[type, int] = field(default_factory=dict)
    """Class of mixer: how many dimensions the mask has that it is given; 0: none."""
    buckets: Buckets = "few"
    mask: FlatMask = "all"
    explicit: bool = False
    """True if its attention needs a mask where torch's kernel needs none."""
    windows: bool = True
    """False if its masks leave out the window that its config names."""
    ruled: frozenset[type] = frozenset()
    """Mixers whose gated delta rule may run on some heads of whole sequences, the rest on pieces of them."""
    looked_at: frozenset[type] = frozenset()
    """The classes of the modules of the copy that was asked."""


CALL_COST = 64
"""A call of a mixer costs about as much as so many tokens."""
_UNITS = 32
"""Lengths are told apart in so many steps of the longest."""


@dataclass(frozen=True, eq=False)
class MixerPlan:
    """Where each token of a flat row stands in the rows of all buckets, one bucket behind the other."""

    lengths: tuple[int, ...]
    """Of each sequence, in the order of the flat row."""
    buckets: tuple[tuple[int, ...], ...]
    """The sequences of each bucket, a row each."""
    place_T: Tensor
    at_T: Tensor | None = None
    """The place of each token in the batch `[B * S]`."""
    part: bool = False
    """True if it has what one of several ranks computes: some sequences, or pieces of them."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """What the model's own functions made for the rows of a bucket."""

    @once
    def shapes(self) -> list[tuple[int, int]]:
        """Return `(n, L)` of each bucket."""
        return [(len(rows), max(self.lengths[each] for each in rows)) for rows in self.buckets]

    @once
    def total(self) -> int:
        """Return T."""
        return len(self.place_T)

    @once
    def starts(self) -> Array:
        """Return where each sequence begins in the flat row."""
        return np.cumsum(self.lengths) - self.lengths

    def lay(self, x: Tensor) -> list[Tensor]:
        """Return `x [1, T, ...]` as the rows `[n, L, ...]` of each bucket, with zeros at padding."""
        laid_R = to_places(x[0], self.place_T, sum(n * L for n, L in self.shapes))
        parts = torch.split(laid_R, [n * L for n, L in self.shapes])
        return [part.view(*shape, *x.shape[2:]) for part, shape in zip(parts, self.shapes)]

    def back(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the rows `[n, L, ...]` of all buckets as `[1, T, ...]`."""
        rows_R = torch.cat([each.flatten(0, 1) for each in rows]) if len(rows) > 1 else rows[0].flatten(0, 1)
        return from_places(rows_R, self.place_T)[None]

    def run(self, mixer: BySequence, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what this mixer, called as `own`, gives for the flat row: a call for each bucket."""
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 2)
        if all(x.shape[:2] != (1, self.total) for x in tensors):
            return own(*args, **kwargs)
        args, kwargs = without_masks(own, args, kwargs)
        values, spec = tree_flatten((args, {name: value for name, value in kwargs.items() if name != "attention_mask"}))
        laid, outs = [_laid(value, self) for value in values], []
        for bucket in range(len(self.buckets)):
            rows = [value if each is None else each[bucket] for value, each in zip(values, laid)]
            mask = {"attention_mask": mixer.row_mask(self, bucket, rows)} if "attention_mask" in kwargs else {}
            given, named_rows = tree_unflatten(rows, spec)
            outs.append(run_bucket(self, bucket, own, *given, **named_rows, **mask))
        if isinstance(outs[0], tuple):  # attention maps, or a state that nobody reads, stand behind
            return self.back([each[0] for each in outs]), *outs[0][1:]
        return self.back(outs)

    def rows_of(self, bucket: int | None) -> Segments:
        """Return the Segments of the rows of this bucket; None: of the flat row."""
        if bucket is None:
            return of_lengths([self.lengths], self.total)
        return of_lengths([[self.lengths[each]] for each in self.buckets[bucket]], self.shapes[bucket][1])


class ForwardPlan(Protocol):
    """By which a wrapped mixer runs: a `MixerPlan`, or where ranks share rows a `SharedPlan`."""

    def run(self, mixer: BySequence, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...


def plan_of(
    lengths: Sequence[int], device: torch.device | str = "cpu", buckets: Buckets = "few", call_cost: int | None = None
) -> MixerPlan:
    """Return the plan of a flat row of sequences with these lengths.

    >>> plan = plan_of([2, 1])
    >>> [rows.tolist() for rows in plan.lay(torch.tensor([[5, 6, 7]]))]
    [[[7, 0], [5, 6]]]
    """
    lengths_N = np.asarray(lengths, np.int64)
    order = np.argsort(lengths_N, kind="stable")
    made = np.split(order, _cuts(lengths_N[order], buckets, CALL_COST if call_cost is None else call_cost)[:-1])
    starts_N, first_N, at = np.cumsum(lengths_N) - lengths_N, np.empty_like(lengths_N), 0
    for rows in made:
        width = int(lengths_N[rows].max())
        first_N[rows] = at + width * np.arange(len(rows))
        at += width * len(rows)
    place_T = np.arange(lengths_N.sum()) + np.repeat(first_N - starts_N, lengths_N)
    places = torch.from_numpy(place_T).to(device, non_blocking=True)
    return MixerPlan(tuple(lengths_N.tolist()), tuple(tuple(rows.tolist()) for rows in made), places)


def _cuts(ascending_N: Array, buckets: Buckets, call_cost: int) -> list[int]:
    """Return the ends of the buckets in this order of lengths: those with which rows, padding and calls cost least."""
    unit = 1 if buckets == "even" else max(1, -(-int(ascending_N[-1]) // _UNITS))
    _, first_K = np.unique(-(-ascending_N // unit), return_index=True)
    ends_K = [*first_K[1:].tolist(), len(ascending_N)]
    if buckets == "one":
        return ends_K[-1:]
    if buckets == "even":
        return ends_K
    starts, best, cut = [0, *ends_K], [0.0], [0]
    for j, width in enumerate(ascending_N[np.array(ends_K) - 1].tolist(), start=1):
        costs = [best[i] + width * (starts[j] - starts[i] + 1) + call_cost for i in range(j)]
        cut.append(min(range(j), key=costs.__getitem__))
        best.append(costs[cut[-1]])
    found, j = [], len(ends_K)
    while j:
        found.append(starts[j])
        j = cut[j]
    return found[::-1]


def to_places(x_T: Tensor, place_T: Tensor, R: int) -> Tensor:
    """Return `x [T, ...]` at these places of `[R, ...]`, zeros elsewhere."""
    placed: Tensor = _Move.apply(x_T, place_T, R)  # type: ignore[no-untyped-call]
    return placed


def from_places(x_R: Tensor, place_T: Tensor) -> Tensor:
    """Return what stands at these places of `x [R, ...]`."""
    found: Tensor = _Move.apply(x_R, place_T, None)  # type: ignore[no-untyped-call]
    return found


class _Move(torch.autograd.Function):
    """Either, and the other backward. Torch's own backward of a gather adds, token by token; no two places are the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place_T: Tensor, R: int | None) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.R = len(x) if R is None else None
        return _moved(x, place_T, R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _moved(grads[0], ctx.saved_tensors[0], ctx.R), None, None


def _moved(x: Tensor, place_T: Tensor, R: int | None) -> Tensor:
    return x.index_select(0, place_T) if R is None else x.new_zeros(R, *x.shape[1:]).index_copy_(0, place_T, x)


# --- the plan of the forward that runs


class _Here(local):
    """What this thread runs: the plan of a forward, and the bucket of a mixer's call."""

    plan: ForwardPlan | None = None
    bucket: int | None = None
    heard: bool = True


_HERE = _Here()


def running() -> tuple[MixerPlan | None, int | None]:
    """Return the plan of the forward that runs one flat row in this thread, and the bucket of the mixer's call."""
    return _HERE.plan if isinstance(_HERE.plan, MixerPlan) else None, _HERE.bucket


def is_heard() -> bool:
    """False in a call of a mixer whose output nobody reads."""
    return _HERE.heard


def run_bucket(plan: ForwardPlan | None, bucket: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, which runs the rows of this bucket; without one, its output is read by nobody."""
    before = _HERE.plan, _HERE.bucket, _HERE.heard
    _HERE.plan, _HERE.bucket, _HERE.heard = plan, bucket, bucket is not None
    try:
        return function(*args, **kwargs)
    finally:
        _HERE.plan, _HERE.bucket, _HERE.heard = before


def begin(plan: ForwardPlan | None) -> ForwardPlan | None:
    """Let this thread's model run by this plan from now on, and return the one before."""
    before, _HERE.plan = _HERE.plan, plan
    return before


def run_under(plan: ForwardPlan | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, by this plan."""
    before = begin(plan)
    try:
        return function(*args, **kwargs)
    finally:
        begin(before)


class _Carrying:
    """A checkpoint function that computes its layer again by the plan of the first time, in whatever thread."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = _HERE.plan
        planned: Any = lambda *given, **named: run_under(plan, function, *given, **named)  # noqa: E731
        # it names its module as a method does: LLaMA-Factory 0.9.5 asks (checkpointing.py:87)
        planned.__self__ = getattr(getattr(function, "func", function), "__self__", None)
        return self.checkpoint(planned, *args, **kwargs)


def carry(model: nn.Module) -> None:
    """Let the checkpointed layers of a model carry the plan: transformers' own, and those in torch's CheckpointWrapper."""
    for module in model.modules():
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
            held = vars(module).get(name)
            if held is not None and not isinstance(held, _Carrying):
                setattr(module, name, _Carrying(held))


def runs_by_sequence(model: Any, *, shared: bool = False) -> bool:
    """Return True if `adapt` runs this transformers module by sequence, and with `shared` the rows that ranks share."""
    modules = [*unwrap(model).modules()] if isinstance(model, nn.Module) else []
    hooks = ((module, hook) for module in modules for hook in module._forward_pre_hooks.values())
    return any(getattr(hook, "by_sequence", False) and (not shared or hook.share(each) is not None) for each, hook in hooks)


# --- mixers


class BySequence:
    """Stands as `forward` on a mixer. It is copied and pickled with it, and inert without a plan."""

    def __init__(self, mixer: nn.Module, config: Any, kind: MaskKind | None, explicit: bool, ruled: bool) -> None:
        self.mixer, self.config, self.kind, self.explicit = mixer, config, kind, explicit
        self.before = vars(mixer).get("forward")
        """What stood there already: a hook of accelerate, a forward of the hub."""
        self.ruled = ruled
        self.exchanges: bool | None = None
        """Whether ranks that share its rows may trade its heads for tokens; whether it was seen to exchange tokens."""

    @property
    def _own(self) -> Callable[..., Any]:  # read outside of a graph: in one, torch.compile would trace the rows of a bucket
        return self.before or MethodType(type(self.mixer).forward, self.mixer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, own = _HERE.plan, self._own
        return own(*args, **kwargs) if plan is None else plan.run(self, own, args, kwargs)

    def row_mask(self, plan: MixerPlan, bucket: int, rows: Sequence[Any]) -> Any:
        """Return the mask that the model's own functions make for rows of this width without padding."""
        if self.kind is None:
            return None
        x = next(each for each in rows if isinstance(each, Tensor) and each.is_floating_point())
        if (key := (id(self.config), self.kind, bucket, x.dtype)) not in plan.masks:
            plan.masks[key] = _mask_of_rows(self.config, x if self.explicit else x[:1], self.kind, self.explicit)
        return plan.masks[key]


def without_masks(own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a mixer's arguments without what told of the row that came: offsets and labels are gone, its mask is None."""
    if args and "attention_mask" in (named := [*inspect.signature(own).parameters][: len(args)]):
        args, kwargs = (), {**dict(zip(named, args)), **kwargs}
    masked = {"attention_mask": None} if "attention_mask" in kwargs else {}
    return args, {k: x for k, x in kwargs.items() if k not in ("cu_seq_lens_q", "cu_seq_lens_k", "shift_labels")} | masked


def _mask_of_rows(config: Any, x_nLD: Tensor, kind: MaskKind, explicit: bool) -> Any:
    """Return what transformers makes for rows of L tokens (5.23 masking_utils.py): None where its kernel needs no mask, or
    with `explicit` the mask itself."""
    from transformers import masking_utils

    if kind == "2d":
        return x_nLD.new_ones(x_nLD.shape[:2], dtype=torch.bool)
    reach = "sliding_window" if kind == "sliding_window_causal" else "attention_chunk_size"
    if x_nLD.shape[1] <= (getattr(config, reach, None) or 0):
        kind = "causal"  # transformers makes a mask for rows that just fill a window
    make = getattr(masking_utils, f"create_{kind}_mask")
    known = {"config": config, **dict.fromkeys(("inputs_embeds", "input_embeds"), x_nLD)}
    known |= {"cache_position": torch.arange(x_nLD.shape[1], device=x_nLD.device)}
    known |= {"and_mask_function": lambda b, h, q, k: q >= 0} if explicit else {}
    taken = inspect.signature(make).parameters.items()
    return make(**{name: known.get(name) for name, each in taken if name in known or each.default is each.empty})


def _laid(value: Any, plan: MixerPlan) -> list[Tensor] | None:
    """Return a mixer's argument for each bucket: tensors `[1, T, ...]`, `[axes, 1, T, ...]` and places `[T]` as rows; None
    for one that is the same for all."""
    shape, T = tuple(getattr(value, "shape", ())), plan.total
    if not isinstance(value, Tensor) or T not in shape[:3]:
        return None
    if shape[:2] == (1, T):
        return plan.lay(value)
    if shape[1:3] == (1, T):
        return [torch.stack(each) for each in zip(*(plan.lay(axis) for axis in value))]
    return [torch.arange(L, device=value.device) for _, L in plan.shapes] if shape == (T,) else None  # where a cache stands
