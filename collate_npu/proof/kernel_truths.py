"""Kernel truths: the batches that kernels are run on, and what each of their sequences gives alone, in float64.

A truth is Segments and a pattern; every token has inputs, padding too, so that what leaks from there shows. Each sequence
is taken out of its row and run by a reference of this package, forward and backward: no boundary, no padding, no mask of
the batch takes part. Rounding the inputs to the kernel's dtype moves that result: the noise, input by input.
Legend: B rows, S width, L tokens of one sequence, N query heads, H key heads, D channels and head size, W taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from collate_npu.kernels.fusion_attention import reference_fusion_attention
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.segments import Segments

HEADS, KEY_HEADS, D, W, CHUNK = 4, 2, 32, 4, 64
SHARED = frozenset({"weight", "bias", "A"})
"""Inputs that all tokens have in common; the others are `[B, S, ...]`."""
KEPT_WIDE = frozenset({"g", "A", "dt"})
"""Decays: kernels take them in float32, whatever the dtype of the rest."""
Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """A batch. `few`: it is among the few that the audit runs. Tokens of an empty row are padding."""

    name: str
    segments: Segments
    pattern: Pattern = CAUSAL
    few: bool = False


_of = Segments.from_lengths
TRUTHS = (
    Truth("padded right", _of([5, 70, 33])),
    Truth("padded left", _of([5, 70, 33], side="left"), few=True),
    Truth("padded on both sides", Segments.from_ids([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])),
    Truth("no padding", _of([40, 40])),
    Truth("a hole", Segments.from_ids([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]])),
    Truth("packed rows", _of([[3, 70, 1], [64, 10]], width=80), few=True),
    Truth("one flat row and its tail", _of([[64, 1, 65, 2]], width=140), few=True),
    Truth("an empty row", _of([5, 0, 9])),
    Truth("an empty row, padded left", _of([5, 0, 9], side="left")),
    Truth("one token", _of([[1]])),
    Truth("chunk edges", _of([63, 64, 65])),
    Truth("chunk edges, packed", _of([[127, 128, 129]])),
    Truth("window", _of([40, 70]), Pattern.sliding(7), few=True),
    Truth("window, packed", _of([[40, 70, 3]]), Pattern.sliding(7)),
    Truth("window, padded left", _of([40, 70], side="left"), Pattern.sliding(7)),
    Truth("prefix", _of([30, 50]), Pattern.prefix([3, 20]), few=True),
    Truth("prefix, packed", _of([[30, 50]]), Pattern.prefix([3, 20])),
    Truth("prefix, padded left", _of([30, 50], side="left"), Pattern.prefix([3, 20])),
    Truth("chunks", _of([30, 50]), Pattern.chunked(16)),
    Truth("chunks, padded left", _of([30, 50], side="left"), Pattern.chunked(16)),
    Truth("full attention", _of([30, 0, 50], side="left"), Pattern.of("bidirectional")),
    Truth("full attention, packed", _of([[30, 50]]), Pattern.of("bidirectional")),
)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What a kernel computes. `shapes`: of each input behind `[B, S]`, or as a whole; `alone`: one sequence `[1, L, ...]`,
    where its tokens stand (from its first), its number and the pattern."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    alone: Callable[[Inputs, Tensor, int, Pattern], Tensor]
    recurrent: bool = True

    def draw(self, segments: Segments) -> Inputs:
        """Inputs in float64: unit keys, decays of at most 1, and nothing at padding that is zero."""
        draw = torch.Generator().manual_seed(0)
        sizes = {name: (() if name in SHARED else segments.shape) + tail for name, tail in self.shapes.items()}
        found = {name: torch.randn(size, generator=draw, dtype=torch.float64) for name, size in sizes.items()}
        for name in {"g", "A"} & found.keys():
            found[name] = -found[name].sigmoid()
        for name in {"beta", "dt"} & found.keys():
            found[name] = found[name].sigmoid()
        if "beta" in found:
            found["k"] = normalize(found["k"], dim=-1)
        return found


@dataclass(frozen=True, slots=True)
class Expected:
    """What each sequence gives alone, and how far rounding the inputs moves it."""

    weights: Tensor
    """`[B, S, ...]` of the loss, which is their product with the output, at real tokens."""
    out: Tensor
    gradients: Inputs
    noise: Mapping[str, float]
    """Of `out` and of each gradient by its input."""


@lru_cache(maxsize=64)
def expected(problem: Problem, truth: Truth, dtype: torch.dtype) -> Expected:
    """What a kernel in this dtype should give."""
    drawn = problem.draw(truth.segments)
    rounded = in_dtype(drawn, dtype)
    found = {name: x.double() for name, x in rounded.items()}
    with torch.enable_grad():  # whoever asks
        (out, gradients), (exact, exacts) = (_each_alone(problem, truth, x) for x in (found, _summed(drawn)))
    noise = apart(truth.segments, {"out": out, **gradients}, {"out": exact, **exacts})
    return Expected(weights_of(out), out, gradients, noise)


def in_dtype(drawn: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs as the kernel gets them."""
    return {name: x.to(torch.float32 if name in KEPT_WIDE else dtype) for name, x in drawn.items()}


def _summed(drawn: Inputs) -> Inputs:
    """With decays as differences of their sums over a chunk of the row, in float32: what is small beside a sum is lost."""
    if "g" not in drawn:
        return drawn
    sums = [chunk.cumsum(1).float().double() for chunk in torch.split(drawn["g"], CHUNK, 1)]
    return drawn | {"g": torch.cat([each.diff(dim=1, prepend=torch.zeros_like(each[:, :1])) for each in sums], 1)}


def weights_of(out: Tensor) -> Tensor:
    """Those of `Expected`."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _each_alone(problem: Problem, truth: Truth, inputs: Inputs) -> tuple[Tensor, Inputs]:
    """`[B, S, ...]`, zero at padding, and the gradients of the loss."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    segments, parts = truth.segments, []
    for n, indices in enumerate(torch.split(segments.indices, list(segments.sequence_lengths))):
        taken = {name: x if name in SHARED else x.flatten(0, 1)[indices][None] for name, x in leaves.items()}
        parts.append(problem.alone(taken, indices - indices[0], n, truth.pattern)[0])
    real = torch.cat(parts)
    out = real.new_zeros(segments.array.size, *real.shape[1:]).index_put((segments.indices,), real)
    out = out.reshape(*segments.shape, *real.shape[1:])
    torch.autograd.backward((out * weights_of(out)).sum())
    return out.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def apart(segments: Segments, mine: Inputs, theirs: Inputs) -> dict[str, float]:
    """The error of each: of the worst real token over the size of an average one, of shared inputs as a whole.

    One wrong token counts whole, however many are right. Where the right one is zero throughout, the size is that of the
    largest of the others. NaN stays NaN.
    """

    def rows(held: Inputs, name: str) -> Tensor:
        x = held[name].detach().cpu().double()
        return x.reshape(1, -1) if name in SHARED else x[segments.keep].flatten(1)

    sizes = {name: float(rows(theirs, name).square().sum(-1).mean().sqrt()) for name in theirs}
    found = {}
    for name, size in sizes.items():
        off = (rows(mine, name) - rows(theirs, name)).square().sum(-1).sqrt().amax()
        found[name] = float(off) / (size or max(sizes.values()) or 1.0)
    return found


# --- each kind of kernel


def _attend(x: Inputs, places: Tensor, n: int, pattern: Pattern) -> Tensor:
    at = places.numpy()
    blocked = torch.from_numpy(~np.asarray(pattern.attends(at[:, None], at[None], np.array(n))))
    blocked = blocked.expand(len(at), len(at)).contiguous()
    q, k, v = x["q"], x["k"], x["v"]
    return reference_fusion_attention(q, k, v, q.shape[2], "BSND", atten_mask=blocked, scale=D**-0.5)[0]


def _rule(x: Inputs, *_: object) -> Tensor:
    return reference_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def _convolve(x: Inputs, *_: object) -> Tensor:
    return reference_causal_conv1d(x["x"], x["weight"], x["bias"], "silu")


def _scan(x: Inputs, *_: object) -> Tensor:
    """Mamba's second scan: `h = h exp(dt A) + dt x B`, `y = C h` (Dao and Gu, arXiv 2405.21060)."""
    h, outs = x["x"].new_zeros(1, *x["x"].shape[2:], D), []
    for t in range(x["x"].shape[1]):
        dt, b, c = x["dt"][:, t, :, None, None], x["B"][:, t, :, None], x["C"][:, t, :, None]
        h = h * (dt * x["A"][:, None, None]).exp() + dt * x["x"][:, t, :, :, None] * b
        outs.append((h * c).sum(-1))
    return torch.stack(outs, 1)


_HEAD, _VALUE = (KEY_HEADS, D), (HEADS, D)
ATTENTION = Problem("attention", {"q": _VALUE, "k": _HEAD, "v": _HEAD}, _attend, recurrent=False)
RULE = Problem("rule", {"q": _HEAD, "k": _HEAD, "v": _VALUE, "g": (HEADS,), "beta": (HEADS,)}, _rule)
KDA = Problem("kda", {"q": _HEAD, "k": _HEAD, "v": _HEAD, "g": _HEAD, "beta": (KEY_HEADS,)}, _rule)
CONVOLUTION = Problem("convolution", {"x": (D,), "weight": (D, W), "bias": (D,)}, _convolve)
SCAN = Problem("scan", {"x": _VALUE, "dt": (HEADS,), "A": (HEADS,), "B": (1, D), "C": (1, D)}, _scan)
