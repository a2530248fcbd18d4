"""Operators: those that are installed, called with this library's arguments on a device, against each sequence alone.

    python -m benchmarks.operators [--device npu] [--json]

Every token of a batch has inputs, padding too, so that what leaks from there shows. Each sequence is taken out of its row
and run by an oracle of the tests, in float64: no boundary, no padding, no mask of the batch takes part. A row's `call`
takes inputs `[B, S, ...]`, puts them in the operator's layout, asks for the mask arguments or boundaries that this library
gives, and brings the output back to `[B, S, ...]`: gradients come back the same way.

Outputs and gradients of real tokens are compared, gradients at padding must be finite. What passes is measured
(`measure.noise_limit`): the noise is what rounding the inputs to the dtype moves. A kernel's matrix units may round float32
to ten bits (TF32, HF32), whatever torch is set to: on a card that is its noise. Exit code 1: an operator is wrong.
Legend: B rows, S width, T tokens, N query heads, H key heads, D head size.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.kernels import fusion_attention_kwargs, gated_delta_kwargs
from collate_npu.masks.forms import block_mask, dense, varlen
from collate_npu.masks.patterns import CAUSAL, Bidirectional, Pattern, Sliding
from collate_npu.outputs import repad, unpad
from collate_npu.proof.measure import MARGIN, noise_limit
from collate_npu.releases import installed
from collate_npu.segments import Segments

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from attention_oracle import reference_fusion_attention
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule

HEADS, KEY_HEADS, D, W, CHUNK = 4, 2, 32, 4, 64
SHARED = frozenset({"weight", "bias"})
"""Inputs that all tokens have in common; the others are `[B, S, ...]`."""
Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """A batch. Tokens of an empty row are padding."""

    name: str
    segments: Segments
    pattern: Pattern = CAUSAL


_of = Segments.from_lengths
TRUTHS = (
    Truth("padded right", _of([5, 70, 33])),
    Truth("padded left", _of([5, 70, 33], side="left")),
    Truth("padded on both sides", Segments.from_ids([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])),
    Truth("no padding", _of([40, 40])),
    Truth("a hole", Segments.from_ids([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]])),
    Truth("packed rows", _of([[3, 70, 1], [64, 10]], width=80)),
    Truth("one flat row and its tail", _of([[64, 1, 65, 2]], width=140)),
    Truth("an empty row", _of([5, 0, 9])),
    Truth("an empty row, padded left", _of([5, 0, 9], side="left")),
    Truth("one token", _of([[1]])),
    Truth("chunk edges", _of([63, 64, 65])),
    Truth("chunk edges, packed", _of([[127, 128, 129]])),
    Truth("window", _of([40, 70]), Pattern.sliding(7)),
    Truth("window, packed", _of([[40, 70, 3]]), Pattern.sliding(7)),
    Truth("window, padded left", _of([40, 70], side="left"), Pattern.sliding(7)),
    Truth("prefix", _of([30, 50]), Pattern.prefix([3, 20])),
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
        if "beta" in found:
            rule = {"g": -found["g"].sigmoid(), "beta": found["beta"].sigmoid(), "k": normalize(found["k"], dim=-1)}
            return found | rule
        return found


@lru_cache(maxsize=64)
def expected(problem: Problem, truth: Truth, dtype: torch.dtype) -> tuple[Inputs, dict[str, float]]:
    """What each sequence gives alone in this dtype: `out` `[B, S, ...]`, zero at padding, and the gradient of each input by
    its name; and the noise of each, how far rounding the inputs moves it."""
    drawn = problem.draw(truth.segments)
    rounded = {name: x.double() for name, x in in_dtype(drawn, dtype).items()}
    with torch.enable_grad():  # whoever asks
        right, exact = (_each_alone(problem, truth, inputs) for inputs in (rounded, _summed(drawn)))
    return right, token_errors(truth.segments, right, exact)


def in_dtype(drawn: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs as the kernel gets them: decays in float32, whatever the dtype of the rest."""
    return {name: x.to(torch.float32 if name == "g" else dtype) for name, x in drawn.items()}


def _summed(drawn: Inputs) -> Inputs:
    """With decays as differences of their sums over a chunk of the row, in float32: what is small beside a sum is lost."""
    if "g" not in drawn:
        return drawn
    sums = [chunk.cumsum(1).float().double() for chunk in torch.split(drawn["g"], CHUNK, 1)]
    return drawn | {"g": torch.cat([each.diff(dim=1, prepend=torch.zeros_like(each[:, :1])) for each in sums], 1)}


def _loss(out: Tensor, segments: Segments) -> Tensor:
    """The product of the output with drawn weights, at real tokens: what stands at padding takes no part."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))[segments.keep]
    return (unpad(out, segments).float() * weights.to(out.device)).sum()


def _each_alone(problem: Problem, truth: Truth, inputs: Inputs) -> Inputs:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    segments, parts = truth.segments, []
    for n, indices in enumerate(torch.split(segments.indices, list(segments.sequence_lengths))):
        taken = {name: x if name in SHARED else x.flatten(0, 1)[indices][None] for name, x in leaves.items()}
        parts.append(problem.alone(taken, indices - indices[0], n, truth.pattern)[0])
    out = repad(torch.cat(parts), segments)
    torch.autograd.backward(_loss(out, segments))
    return {"out": out.detach()} | {name: x.grad for name, x in leaves.items() if x.grad is not None}


def token_errors(segments: Segments, mine: Inputs, right: Inputs) -> dict[str, float]:
    """The error of each: of the worst real token over the size of an average one, of shared inputs as a whole.

    One wrong token counts whole, however many are right. Where the right one is zero throughout, the size is that of the
    largest of the others. NaN stays NaN.
    """

    def rows(x: Tensor, name: str) -> Tensor:
        x = x.detach().cpu().double()
        return x.reshape(1, -1) if name in SHARED else x[segments.keep].flatten(1)

    sizes = {name: float(rows(x, name).square().sum(-1).mean().sqrt()) for name, x in right.items()}
    away = {name: float((rows(mine[name], name) - rows(x, name)).norm(dim=-1).amax()) for name, x in right.items()}
    return {name: away[name] / (size or max(sizes.values()) or 1.0) for name, size in sizes.items()}


# --- each kind of kernel


def _attend(x: Inputs, places: Tensor, n: int, pattern: Pattern) -> Tensor:
    at = places.numpy()
    blocked = torch.from_numpy(~np.asarray(pattern.attends(at[:, None], at[None], np.array(n))))
    blocked = blocked.expand(len(at), len(at)).contiguous()
    q, k, v = x["q"], x["k"], x["v"]
    return reference_fusion_attention(q, k, v, q.shape[2], "BSND", atten_mask=blocked, scale=D**-0.5)[0]


_HEAD, _VALUE = (KEY_HEADS, D), (HEADS, D)
ATTENTION = Problem("attention", {"q": _VALUE, "k": _HEAD, "v": _HEAD}, _attend, recurrent=False)
RULE = Problem(
    "rule",
    {"q": _HEAD, "k": _HEAD, "v": _VALUE, "g": (HEADS,), "beta": (HEADS,)},
    lambda x, *_: reference_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0],
)
KDA = replace(RULE, name="kda", shapes={"q": _HEAD, "k": _HEAD, "v": _HEAD, "g": _HEAD, "beta": (KEY_HEADS,)})
CONVOLUTION = Problem(
    "convolution",
    {"x": (D,), "weight": (D, W), "bias": (D,)},
    lambda x, *_: reference_causal_conv1d(x["x"], x["weight"], x["bias"], "silu"),
)


Ask = Callable[..., Any]
"""`ask(form, **arguments)` makes the call, and returns what the operator gives."""
HALF = (torch.bfloat16, torch.float16)
_ANY, _CARDS, _NPU = ("cpu", "cuda", "npu"), ("cuda", "npu"), ("npu",)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """An operator. `positional`: its arguments that are passed without names."""

    name: str
    """Its package and name."""
    module: str
    problem: Problem
    call: Callable[[Ask, Truth, Inputs, str], Tensor]
    positional: tuple[str, ...]
    forms: tuple[str, ...] = ("offsets",)
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    backward: tuple[str, ...] = _ANY
    """Devices on which it has one."""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def version(self) -> str:
        """The version of its package, "" where that is not installed."""
        return installed(self.package)

    def function(self, kind: str) -> Callable[..., Any]:
        """The operator itself, for a kind of device. Raises what its package raises."""
        found: Callable[..., Any] = getattr(import_module(self.module), self.name.rpartition(".")[2])
        if self.name == "torch.flex_attention" and kind != "cpu":  # it is meant to be compiled
            return torch.compile(found, dynamic=False)
        return inspect.unwrap(found) if self.package == "transformers" else found  # else it gives way to fla's


# --- attention


def _fusion(ask: Ask, truth: Truth, x: Inputs, layout: str) -> Tensor:
    segments = truth.segments
    kwargs = fusion_attention_kwargs(segments, pattern=truth.pattern, layout=cast(Any, layout), device=x["q"].device)
    laid = {name: _laid(x[short], truth, layout) for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}
    shown = f"{layout}, mode {kwargs.get('sparse_mode', 0)}" + ", empty rows" * ("inner_precise" in kwargs)
    out = ask(shown, **laid, head_num=HEADS, scale=D**-0.5, **kwargs)[0]
    if layout == "TND":
        return repad(out, segments)
    out = out.transpose(0, 1) if layout == "SBH" else out
    out = out.transpose(1, 2) if layout == "BNSD" else out
    return cast(Tensor, out.unflatten(2, (HEADS, D)) if out.ndim == 3 else out)


def _laid(x: Tensor, truth: Truth, layout: str) -> Tensor:
    if layout == "TND":
        return unpad(x, truth.segments)
    if layout == "BNSD":
        return x.transpose(1, 2).contiguous()
    x = x if layout == "BSND" else x.flatten(2)
    return x.transpose(0, 1).contiguous() if layout == "SBH" else x


def _of_torch(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """torch's `scaled_dot_product_attention` and `flex_attention`."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    held: dict[str, Any] = {"pattern": truth.pattern, "device": q.device}
    if form == "BlockMask":
        mask: dict[str, Any] = {"block_mask": block_mask(truth.segments, **held)}
        if q.is_cuda:  # for 65 to 127 queries its kernel of decoding has no size (2.11)
            mask["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    else:
        held["dtype"] = q.dtype if form == "dense, bias" else None
        mask = {"attn_mask": dense(truth.segments, polarity=cast(Any, form.removeprefix("dense, ")), **held)}
    return cast(Tensor, ask(form, query=q, key=k, value=v, enable_gqa=True, **mask)).transpose(1, 2)


def _window(truth: Truth) -> tuple[int, int]:
    """Return the window of kernels that take offsets: tokens before and after, -1 for all. Raises for other patterns."""
    pattern = truth.pattern
    if not pattern.reaches(truth.segments.longest_span):
        return -1, 0
    if isinstance(pattern, Bidirectional):
        return -1, -1
    if isinstance(pattern, Sliding) and not truth.segments.hole_rows:
        return pattern.size - 1, 0
    rule, remedy = "A kernel of offsets attends causally, in a window, or fully.", "Use a dense mask, or a BlockMask."
    raise UnsupportedFormError(explain("pattern", f"{pattern} over {truth.segments!r}", rule, remedy))


def _by_offsets(ask: Ask, truth: Truth, x: Inputs, form: str, *, of_torch: bool) -> Tensor:
    """torch's `varlen_attn`, or flash-attn's function."""
    window, flat = _window(truth), varlen(truth.segments)
    q, k, v = (unpad(x[name], truth.segments) for name in "qkv")
    ends, longest = flat.cu_seqlens.to(q.device), flat.max_length
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": window[1] == 0}
    given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    if of_torch:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))  # 2.11 has no enable_gqa
        given = {"query": q, "key": k, "value": v, "cu_seq_q": ends, "cu_seq_k": ends, "max_q": longest, "max_k": longest}
    return repad(ask(form, **given, window_size=window), truth.segments)


# --- recurrent layers: one flat row


def _flat(x: Tensor, truth: Truth) -> Tensor:
    return x if truth.segments.shape[0] == 1 else unpad(x, truth.segments)[None]


def _back(out: Tensor, truth: Truth) -> Tensor:
    return out if truth.segments.shape[0] == 1 else repad(out[0], truth.segments)


def _boundaries(truth: Truth, kernel: str, x: Inputs) -> dict[str, Any]:
    return gated_delta_kwargs(truth.segments, kernel=cast(Any, kernel), device=next(iter(x.values())).device)


def _flat_call(ask: Ask, truth: Truth, x: Inputs, form: str, *, kernel: str, **more: Any) -> Tensor:
    """Return the output of an operator that takes a flat row as it is."""
    flat = {name: each if name in SHARED else _flat(each, truth) for name, each in x.items()}
    out = ask(form, **flat, **more, **_boundaries(truth, kernel, x))
    return _back(out[0] if isinstance(out, tuple) else out, truth)


def _plain_rule(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """Padded rows, written zero at padding, as transformers' layers do it by the 2D mask."""
    keep = _boundaries(truth, "transformers", x).get("attention_mask")
    if truth.segments.packed:
        rule, remedy = "The plain torch rule reads no boundaries.", "Give each sequence its own row, or install fla."
        raise UnsupportedFormError(explain("segments", repr(truth.segments), rule, remedy))
    if keep is not None:
        x = x | {name: x[name] * keep[..., None, None].to(x[name].dtype) for name in ("k", "v")}
    q, k = (x[name].repeat_interleave(HEADS // KEY_HEADS, 2) for name in "qk")
    return cast(Tensor, ask(form, query=q, key=k, value=x["v"], g=x["g"], beta=x["beta"])[0])


def _npu_rule(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """It takes tokens first, and states of every sequence."""
    given = _boundaries(truth, "torch_npu", x)
    names = {"q": "query", "k": "key", "v": "value"}
    flat = {names.get(name, name): _flat(each, truth)[0] for name, each in x.items()}
    states = x["v"].new_zeros(len(given["actual_seq_lengths"]), HEADS, D, D)
    return _back(ask(form, **flat, initial_state=states, scale=D**-0.5, **given)[0][None], truth)


def _convolution(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    """Channels last: the channels of one token lie together."""
    flat = _flat(x["x"], truth).contiguous().transpose(1, 2)
    out = ask(form, **x | {"x": flat}, activation="silu", **_boundaries(truth, "causal_conv1d", x))
    return _back(out.transpose(1, 2), truth)


def _npu_convolution(ask: Ask, truth: Truth, x: Inputs, form: str) -> Tensor:
    given, flat = _boundaries(truth, "fla_npu_conv", x), _flat(x["x"], truth)[0].contiguous()
    states = flat.new_zeros(len(given["query_start_loc"]) - 1, W - 1, D)
    weights = {"weight": x["weight"].T.contiguous(), "bias": x["bias"]}
    out = ask(form, x=flat, **weights, conv_states=states, **given, activation_mode=0)
    return _back(silu(out)[None], truth)


# --- rows

_LAYOUTS = ("BSND", "BNSD", "BSH", "SBH", "TND")
_QKV, _LONG = ("q", "k", "v"), ("query", "key", "value")
_TORCH_VARLEN, _FLASH = (partial(_by_offsets, of_torch=each) for each in (True, False))
_FLA, _FLA_CONV = partial(_flat_call, kernel="fla"), partial(_flat_call, kernel="fla_conv", activation="silu")
KERNELS = (
    Kernel("torch.scaled_dot_product_attention", "torch.nn.functional", ATTENTION, _of_torch, _LONG,
           ("dense, keep", "dense, bias"), _ANY),
    Kernel("torch.flex_attention", "torch.nn.attention.flex_attention", ATTENTION, _of_torch, _LONG, ("BlockMask",),
           ("cpu", "cuda"), backward=("cuda",)),
    Kernel("torch.varlen_attn", "torch.nn.attention.varlen", ATTENTION, _TORCH_VARLEN, _LONG, dtypes=HALF),
    Kernel("flash_attn.flash_attn_varlen_func", "flash_attn", ATTENTION, _FLASH, _QKV, dtypes=HALF),
    Kernel("torch_npu.npu_fusion_attention", "torch_npu", ATTENTION, _fusion, (*_LONG, "head_num"), _LAYOUTS, _NPU),
    Kernel("fla.chunk_gated_delta_rule", "fla.ops.gated_delta_rule", RULE, _FLA, _QKV, devices=_CARDS),
    Kernel("fla.chunk_kda", "fla.ops.kda", KDA, _FLA, _QKV, devices=_CARDS),
    Kernel("fla.causal_conv1d", "fla.modules.convolution", CONVOLUTION, _FLA_CONV, ("x",), devices=_CARDS),
    Kernel("causal_conv1d.causal_conv1d_fn", "causal_conv1d", CONVOLUTION, _convolution, ("x",), ("seq_idx",)),
    Kernel("transformers.torch_chunk_gated_delta_rule", "transformers.models.qwen3_next.modeling_qwen3_next", RULE,
           _plain_rule, _LONG, ("2D mask",), _ANY),
    Kernel("fla_npu.npu_causal_conv1d", "fla_npu.ops.ascendc", CONVOLUTION, _npu_convolution,
           ("x", "weight", "bias", "conv_states"), devices=_NPU, dtypes=HALF, backward=()),
    Kernel("torch_npu.npu_chunk_gated_delta_rule", "torch_npu", RULE, _npu_rule, _LONG, ("lengths",), _NPU, HALF[:1], ()),
)  # fmt: skip
"""Every operator that has arguments of ours and can be called alone."""


# --- runs

State = Literal["right", "wrong", "refused", "raised", "cannot tell", "not installed", "not here"]
"""`refused` by this library, which has no form for it; `raised` by the operator; `not here`: not on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of an operator, or why there is none. Errors as in `token_errors`; None where not measured."""

    operator: str
    state: State
    version: str = ""
    truth: str = ""
    form: str = ""
    forward: float | None = None
    backward: float | None = None
    """The largest of any input."""
    passes: float | None = None
    """The largest error of the output that passes."""
    note: str = ""


@dataclass(slots=True)
class _Asked:
    """What a row calls in the place of its operator."""

    kernel: Kernel
    truth: Truth
    function: Callable[..., Any]
    form: str
    called: bool = False

    def __call__(self, form: str, **arguments: Any) -> Any:
        self.form, self.called = form, True
        first = [arguments.pop(name) for name in self.kernel.positional]
        return self.function(*first, **arguments)


def runs(kernels: Sequence[Kernel], *, device: str, dtype: torch.dtype) -> Iterator[Run]:
    """Every operator on every truth that it is for, in each of its forms."""
    kind = device.partition(":")[0]
    for kernel in kernels:
        if why := _absence_reason(kernel, kind, dtype):
            yield Run(operator=kernel.name, state="not installed" if why.endswith("not installed") else "not here", note=why)
            continue
        try:
            function = kernel.function(kind)
        except Exception as error:  # a package that is half there
            yield Run(operator=kernel.name, state="not here", note=f"it does not load: {_first_line(error)}")
            continue
        yield from of_kernel(kernel, function, device=device, dtype=dtype)


def _absence_reason(kernel: Kernel, kind: str, dtype: torch.dtype) -> str:
    if kind not in kernel.devices:
        return f"it runs on {' and '.join(kernel.devices)}"
    if not kernel.version:
        return f"{kernel.package} is not installed"
    names = (str(each).removeprefix("torch.") for each in kernel.dtypes)
    return "" if dtype in kernel.dtypes else f"it takes {', '.join(names)}"


def of_kernel(
    kernel: Kernel, function: Callable[..., Any], *, device: str, dtype: torch.dtype, truths: Sequence[Truth] = TRUTHS
) -> Iterator[Run]:
    """One operator, or a function in its place, on these truths."""
    for truth in truths:
        if truth.pattern.name == "causal" or not kernel.problem.recurrent:
            for form in kernel.forms:
                yield _run(_Asked(kernel, truth, function, form), device, dtype)


def _run(asked: _Asked, device: str, dtype: torch.dtype) -> Run:
    run = Run(
        operator=asked.kernel.name, version=asked.kernel.version, truth=asked.truth.name, form=asked.form, state="right"
    )
    try:
        found = _measured(asked, device, dtype)
        run = _judged(run, asked.truth, *found)
    except CollateError as error:
        run = replace(run, state="raised" if asked.called else "refused", note=str(error))  # an output of another shape
    except Exception as error:  # operators raise what they like
        run = replace(run, state="raised", note=_first_line(error))
    return replace(run, form=asked.form)


def _measured(asked: _Asked, device: str, dtype: torch.dtype) -> tuple[Inputs, Inputs, dict[str, float]]:
    """Return what the operator gives, what is right, and the largest error of each that passes."""
    problem, truth = asked.kernel.problem, asked.truth
    backward = device.partition(":")[0] in asked.kernel.backward
    drawn = in_dtype(problem.draw(truth.segments), dtype)
    inputs = {name: x.to(device).requires_grad_(backward) for name, x in drawn.items()}
    with torch.set_grad_enabled(backward), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = asked.kernel.call(asked, truth, inputs, asked.form)
        right, _ = expected(problem, truth, dtype)
        if out.shape != right["out"].shape:
            rule, remedy = f"It is {shape_of(right['out'])}.", "Look at the release of the operator."
            raise CollateError(explain("output", shape_of(out), rule, remedy))
        if backward:
            torch.autograd.backward(_loss(out, truth.segments))
    found = {"out": out}
    if backward:
        found |= {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}
    coarse = _rounded_to(dtype, device)
    (_, noise), like = expected(problem, truth, coarse), torch.zeros(1, dtype=coarse, device=device)
    return found, right, {name: noise_limit(noise[name], like) for name in found}


def _rounded_to(dtype: torch.dtype, device: str) -> torch.dtype:
    """What a kernel's products round their inputs to: float16 has the ten bits of TF32 and HF32."""
    return torch.float16 if dtype == torch.float32 and not device.startswith("cpu") else dtype


def _judged(run: Run, truth: Truth, found: Inputs, right: Inputs, passes: Mapping[str, float]) -> Run:
    errors = token_errors(truth.segments, found, {name: right[name] for name in found})
    astray = [name for name in found if not errors[name] <= passes[name]]
    spoilt = [name for name in sorted({*found} - SHARED - {"out"}) if not bool(torch.isfinite(found[name]).all())]
    wrong = [f"{', '.join(astray)} of real tokens"] * bool(astray)
    wrong += [f"not finite at padding: gradients of {', '.join(spoilt)}"] * bool(spoilt)
    blind = MARGIN * max(passes.values()) >= 1  # zeros would pass
    others = torch.tensor([errors[name] for name in found if name != "out"], dtype=torch.float64)
    return replace(
        run,
        state="wrong" if wrong else "cannot tell" if blind else "right",
        forward=errors["out"],
        backward=float(others.amax()) if len(others) else None,  # NaN if one is
        passes=passes["out"],
        note="; ".join(wrong) or "the noise here is as large as what is wrong" * blind,
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def main() -> None:
    parser = argparse.ArgumentParser("operators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, npu, or one of several: npu:1")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.device.startswith("npu"):
        import torch_npu  # noqa: F401
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    found = list(runs(KERNELS, device=given.device, dtype=dtype))
    if given.json:
        print(json.dumps({"runs": [asdict(run) for run in found]}, indent=1))
    else:
        print(
            *(f"{run.state:12} {run.operator}, {run.truth} ({run.form}) {' '.join(run.note.split())}" for run in found),
            sep="\n",
        )
    states = {run.state for run in found}
    sys.exit(1 if "wrong" in states else 0 if "right" in states else 2)


if __name__ == "__main__":
    main()
