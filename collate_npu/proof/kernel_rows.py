"""Kernel rows: how each operator is called with this library's arguments, and where it runs.

A row's `call` takes inputs `[B, S, ...]`, puts them in the operator's layout, asks for the mask arguments or boundaries that
this library gives, and brings the output back to `[B, S, ...]`: gradients come back the same way. It calls the operator
through `ask`, by the names of its arguments, so that each call can be judged before it is made.
Legend: B rows, S width, T tokens, N query heads, H key heads, D head size or channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.masks.forms import block_mask, dense, varlen
from collate_npu.masks.patterns import Bidirectional, Sliding
from collate_npu.outputs import repad, unpad
from collate_npu.proof.kernel_truths import (
    ATTENTION,
    CONVOLUTION,
    HEADS,
    KDA,
    KEY_HEADS,
    RULE,
    SCAN,
    D,
    Inputs,
    Problem,
    Truth,
    W,
)
from collate_npu.releases import installed

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
