"""Kernel rows: the batches that kernels are run on, what each sequence gives alone, and how each operator is called.

Every token of a batch has inputs, padding too, so that what leaks from there shows. Each sequence is taken out of its row
and run by a reference of this package, in float64: no boundary, no padding, no mask of the batch takes part.

A row's `call` takes inputs `[B, S, ...]`, puts them in the operator's layout, asks for the mask arguments or boundaries that
this library gives, and brings the output back to `[B, S, ...]`: gradients come back the same way. It calls the operator
through `ask`, by the names of its arguments, so that each call can be judged before it is made.
Legend: B rows, S width, T tokens, N query heads, H key heads, D head size or channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs, reference_fusion_attention
from collate_npu.kernels.gated_delta import gated_delta_kwargs, reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.masks.forms import block_mask, dense, varlen
from collate_npu.masks.patterns import CAUSAL, Bidirectional, Pattern, Sliding
from collate_npu.outputs import repad, unpad
from collate_npu.releases import installed
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


def _rule_alone(x: Inputs, *_: object) -> Tensor:
    return reference_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def _convolve(x: Inputs, *_: object) -> Tensor:
    return reference_causal_conv1d(x["x"], x["weight"], x["bias"], "silu")


def _scan_alone(x: Inputs, *_: object) -> Tensor:
    """Mamba's second scan: `h = h exp(dt A) + dt x B`, `y = C h` (Dao and Gu, arXiv 2405.21060)."""
    h, outs = x["x"].new_zeros(1, *x["x"].shape[2:], D), []
    for t in range(x["x"].shape[1]):
        dt, b, c = x["dt"][:, t, :, None, None], x["B"][:, t, :, None], x["C"][:, t, :, None]
        h = h * (dt * x["A"][:, None, None]).exp() + dt * x["x"][:, t, :, :, None] * b
        outs.append((h * c).sum(-1))
    return torch.stack(outs, 1)


_HEAD, _VALUE = (KEY_HEADS, D), (HEADS, D)
ATTENTION = Problem("attention", {"q": _VALUE, "k": _HEAD, "v": _HEAD}, _attend, recurrent=False)
RULE = Problem("rule", {"q": _HEAD, "k": _HEAD, "v": _VALUE, "g": (HEADS,), "beta": (HEADS,)}, _rule_alone)
KDA = Problem("kda", {"q": _HEAD, "k": _HEAD, "v": _HEAD, "g": _HEAD, "beta": (KEY_HEADS,)}, _rule_alone)
CONVOLUTION = Problem("convolution", {"x": (D,), "weight": (D, W), "bias": (D,)}, _convolve)
SCAN = Problem("scan", {"x": _VALUE, "dt": (HEADS,), "A": (HEADS,), "B": (1, D), "C": (1, D)}, _scan_alone)


Ask = Callable[..., Any]
"""`ask(form, **arguments)` judges the call, makes it, and gives what the operator gives."""
HALF = (torch.bfloat16, torch.float16)
_ANY, _CARDS, _NPU = ("cpu", "cuda", "npu"), ("cuda", "npu"), ("npu",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """An operator. `positional`: its arguments that are passed without names; the others go by theirs."""

    name: str
    """As `kernels.check` knows it, where it has a contract."""
    module: str
    problem: Problem
    call: Callable[[Ask, Truth, Inputs, str], Tensor]
    positional: tuple[str, ...]
    forms: tuple[str, ...] = ("offsets",)
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    backward: tuple[str, ...] = _ANY
    """Devices on which it has one."""
    compiled: bool = False
    """Is it meant to be compiled on a card?"""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def version(self) -> str:
        """Of its package, "" where that is not installed."""
        return installed(self.package)

    def function(self, kind: str) -> Callable[..., Any]:
        """The operator itself, for a kind of device. Raises what its package raises."""
        found: Callable[..., Any] = getattr(import_module(self.module), self.name.rpartition(".")[2])
        if self.compiled and kind != "cpu":
            return torch.compile(found, dynamic=False)
        return inspect.unwrap(found) if self.package == "transformers" else found  # else it gives way to fla's


# --- attention


def _fusion(ask: Ask, truth: Truth, x: Inputs, form: str, operator: str) -> Tensor:
    layout, _, mode = form.partition(", causal by mode ")
    kwargs = fusion_attention_kwargs(
        truth.segments, pattern=truth.pattern, layout=cast(Any, layout), operator=cast(Any, operator),
        causal_mode=cast(Any, int(mode or 3)), keep_tail=_has_tail(truth), device=x["q"].device,
    )  # fmt: skip
    laid = {name: _laid(x[short], truth, layout) for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}
    shown = f"{layout}, mode {kwargs.get('sparse_mode', 0)}" + ", empty rows" * ("inner_precise" in kwargs)
    out = ask(shown, **laid, head_num=HEADS, scale=D**-0.5, **kwargs)[0]
    if layout == "TND":
        return out[None] if _has_tail(truth) else repad(out, truth.segments)
    out = out.transpose(0, 1) if layout == "SBH" else out
    out = out.transpose(1, 2) if layout == "BNSD" else out
    return cast(Tensor, out.unflatten(2, (HEADS, D)) if out.ndim == 3 else out)


def _has_tail(truth: Truth) -> bool:
    return truth.segments.shape[0] == 1 and truth.segments.padding_side == "right"


def _laid(x: Tensor, truth: Truth, layout: str) -> Tensor:
    if layout == "TND":
        return x[0] if _has_tail(truth) else unpad(x, truth.segments)
    if layout == "BNSD":
        return x.transpose(1, 2).contiguous()
    x = x if layout == "BSND" else x.flatten(2)
    return x.transpose(0, 1).contiguous() if layout == "SBH" else x


def _sdpa(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    dtype = q.dtype if form == "bias" else None
    mask = dense(truth.segments, polarity=cast(Any, form), pattern=truth.pattern, dtype=dtype, device=q.device)
    return cast(Tensor, ask(f"dense, {form}", query=q, key=k, value=v, attn_mask=mask, enable_gqa=True)).transpose(1, 2)


def _flex(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    blocks = block_mask(truth.segments, pattern=truth.pattern, device=q.device)
    return cast(Tensor, ask(form, query=q, key=k, value=v, block_mask=blocks, enable_gqa=True)).transpose(1, 2)


def _window(truth: Truth) -> tuple[int, int]:
    """Of kernels that take offsets: tokens before and after, -1 for all. Raises where they have no such pattern."""
    pattern = truth.pattern
    if not pattern.reaches(truth.segments.longest_span):
        return -1, 0
    if isinstance(pattern, Bidirectional):
        return -1, -1
    if isinstance(pattern, Sliding) and not truth.segments.hole_rows:
        return pattern.size - 1, 0
    rule, remedy = "A kernel of offsets attends causally, in a window, or fully.", "Use a dense mask, or a BlockMask."
    raise UnsupportedFormError(explain("pattern", f"{pattern} over {truth.segments!r}", rule, remedy))


def _torch_varlen(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    window, flat, device = _window(truth), varlen(truth.segments), x["q"].device
    q, k, v = (unpad(x[name], truth.segments) for name in "qkv")
    ends, longest = flat.cu_seqlens.to(device), flat.max_length
    told = {"cu_seq_q": ends, "cu_seq_k": ends, "max_q": longest, "max_k": longest, "window_size": window}
    return repad(ask(form, query=q, key=k, value=v, **told, enable_gqa=True), truth.segments)


def _flash(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    window, flat, device = _window(truth), varlen(truth.segments), x["q"].device
    q, k, v = (unpad(x[name], truth.segments) for name in "qkv")
    ends, longest = flat.cu_seqlens.to(device), flat.max_length
    told: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return repad(ask(form, q=q, k=k, v=v, **told, causal=window[1] == 0, window_size=window), truth.segments)


# --- recurrent layers: one flat row


def _flat(x: Tensor, truth: Truth) -> Tensor:
    return x if truth.segments.shape[0] == 1 else unpad(x, truth.segments)[None]


def _back(out: Tensor, truth: Truth) -> Tensor:
    return out if truth.segments.shape[0] == 1 else repad(out[0], truth.segments)


def _told(truth: Truth, kernel: str, x: Inputs) -> dict[str, Any]:
    return gated_delta_kwargs(truth.segments, kernel=cast(Any, kernel), device=next(iter(x.values())).device)


def _rule(ask: Ask, truth: Truth, x: Inputs, form: str, kernel: str = "fla") -> Tensor:
    flat = {name: _flat(each, truth) for name, each in x.items()}
    return _back(ask(form, **flat, **_told(truth, kernel, x))[0], truth)


def _plain_rule(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """Padded rows, written zero at padding, as transformers' layers do it by the 2D mask."""
    keep = _told(truth, "transformers", x).get("attention_mask")
    if truth.segments.packed:
        rule, remedy = "The plain torch rule reads no boundaries.", "Give each sequence its own row, or install fla."
        raise UnsupportedFormError(explain("segments", repr(truth.segments), rule, remedy))
    if keep is not None:
        x = x | {name: x[name] * keep[..., None, None].to(x[name].dtype) for name in ("k", "v")}
    q, k = (x[name].repeat_interleave(HEADS // KEY_HEADS, 2) for name in "qk")
    return cast(Tensor, ask(form, query=q, key=k, value=x["v"], g=x["g"], beta=x["beta"])[0])


def _npu_rule(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """It takes tokens first, and states of every sequence."""
    told = _told(truth, "torch_npu", x)
    names = {"q": "query", "k": "key", "v": "value"}
    flat = {names.get(name, name): _flat(each, truth)[0] for name, each in x.items()}
    states = x["v"].new_zeros(len(told["actual_seq_lengths"]), HEADS, D, D)
    return _back(ask(form, **flat, initial_state=states, scale=D**-0.5, **told)[0][None], truth)


def _fla_convolution(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    out = ask(form, **x | {"x": _flat(x["x"], truth)}, activation="silu", **_told(truth, "fla_conv", x))
    return _back(out[0] if isinstance(out, tuple) else out, truth)


def _convolution(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """Channels last: the channels of one token lie together."""
    flat = _flat(x["x"], truth).contiguous().transpose(1, 2)
    out = ask(form, **x | {"x": flat}, activation="silu", **_told(truth, "causal_conv1d", x))
    return _back(out.transpose(1, 2), truth)


def _npu_convolution(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    told, flat = _told(truth, "fla_npu_conv", x), _flat(x["x"], truth)[0].contiguous()
    states = flat.new_zeros(len(told["query_start_loc"]) - 1, W - 1, D)
    out = ask(form, x=flat, weight=x["weight"].T.contiguous(), bias=x["bias"], conv_states=states, **told, activation_mode=0)
    return _back(silu(out)[None], truth)


def _scan(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    flat = {name: each if name == "A" else _flat(each, truth) for name, each in x.items()}
    return _back(ask(form, **flat, chunk_size=64, **_told(truth, "causal_conv1d", x)), truth)


# --- rows

_LAYOUTS = ("BSND", "BNSD", "BSH", "SBH", "TND", "BSND, causal by mode 2", "TND, causal by mode 2")
_QKV, _LONG = ("q", "k", "v"), ("query", "key", "value")
_FUSIONS = tuple(
    Kernel(
        name=f"torch_npu.{name}", module="torch_npu", problem=ATTENTION, call=partial(_fusion, operator=name),
        positional=(*_LONG, "head_num"), forms=_LAYOUTS, devices=_NPU,
    )
    for name in ("npu_fusion_attention", "npu_fusion_attention_v3")
)  # fmt: skip
KERNELS = (
    Kernel(name="torch.scaled_dot_product_attention", module="torch.nn.functional", problem=ATTENTION, call=_sdpa,
           positional=_LONG, forms=("keep", "bias"), devices=_ANY),
    Kernel(name="torch.flex_attention", module="torch.nn.attention.flex_attention", problem=ATTENTION, call=_flex,
           positional=_LONG, forms=("BlockMask",), devices=("cpu", "cuda"), backward=("cuda",), compiled=True),
    Kernel(name="torch.varlen_attn", module="torch.nn.attention.varlen", problem=ATTENTION, call=_torch_varlen,
           positional=_LONG, dtypes=HALF),
    Kernel(name="flash_attn.flash_attn_varlen_func", module="flash_attn", problem=ATTENTION, call=_flash, positional=_QKV,
           dtypes=HALF),
    *_FUSIONS,
    Kernel(name="fla.chunk_gated_delta_rule", module="fla.ops.gated_delta_rule", problem=RULE, call=_rule, positional=_QKV,
           devices=_CARDS),
    Kernel(name="fla.fused_recurrent_gated_delta_rule", module="fla.ops.gated_delta_rule", problem=RULE,
           call=partial(_rule, kernel="fla_cp"), positional=_QKV, devices=_CARDS, backward=()),
    Kernel(name="fla.chunk_kda", module="fla.ops.kda", problem=KDA, call=_rule, positional=_QKV, devices=_CARDS),
    Kernel(name="fla.causal_conv1d", module="fla.modules.convolution", problem=CONVOLUTION, call=_fla_convolution,
           positional=("x",), devices=_CARDS),
    Kernel(name="causal_conv1d.causal_conv1d_fn", module="causal_conv1d", problem=CONVOLUTION, call=_convolution,
           positional=("x",), forms=("seq_idx",)),
    Kernel(name="mamba_ssm.mamba_chunk_scan_combined", module="mamba_ssm.ops.triton.ssd_combined", problem=SCAN, call=_scan,
           positional=("x", "dt", "A", "B", "C", "chunk_size"), forms=("seq_idx",)),
    Kernel(name="transformers.torch_chunk_gated_delta_rule", module="transformers.models.qwen3_next.modeling_qwen3_next",
           problem=RULE, call=_plain_rule, positional=_LONG, forms=("2D mask",), devices=_ANY),
    Kernel(name="fla_npu.npu_causal_conv1d", module="fla_npu.ops.ascendc", problem=CONVOLUTION, call=_npu_convolution,
           positional=("x", "weight", "bias", "conv_states"), devices=_NPU, dtypes=HALF, backward=()),
    Kernel(name="torch_npu.npu_chunk_gated_delta_rule", module="torch_npu", problem=RULE, call=_npu_rule, positional=_LONG,
           forms=("lengths",), devices=_NPU, dtypes=HALF[:1], backward=()),
)  # fmt: skip
"""Every operator that has arguments of ours and can be called alone."""
