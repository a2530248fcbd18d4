"""Packed rows: recurrent functions that know no boundary, kept within each sequence of a row by arithmetic around them.

No kernel takes part: what a function is handed is changed, so that it gives each sequence what that gives alone, on any
device. `seq_idx` int `[B, S]` numbers what stands in a row, padding too; a sequence begins where it changes.

A convolution counts the taps of its own sequence. Sequences of 3 and 2 tokens, W = 4, `■` counted::

    1 1 1 2 2
    ■ ⬚ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚ ⬚
    ■ ■ ■ ⬚ ⬚
    ⬚ ⬚ ⬚ ■ ⬚
    ⬚ ⬚ ⬚ ■ ■

A state is emptied by the decay of a sequence's first token. Alone that decay acts on nothing, so that another one changes
neither the output nor a gradient. Gated delta rule (arXiv 2412.06464) and KDA (2510.26692)::

    S_t = exp(g_t) S_(t-1) (I - beta k k') + beta v k'        g_t = -RESET

Mamba's second scan (2405.21060) has one `dt` for the decay and for what is written, so that the written is divided::

    h_t = exp(dt A) h_(t-1) + dt B x        dt' = dt + RESET / |A|,  x' = x dt / dt'

Legend: B rows, S width, D channels, W taps, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad, softplus

RESET = 18.0
"""e^-18 is 1.5e-8 of a state, below the rounding of float32. More costs digits: chunks sum their decays in float32."""
_CHUNK = 32
"""Tokens of a chunk where a function lets them be chosen: half the resets of its own 64 in a sum, and half the error."""


def starts_of(seq_idx: Tensor) -> Tensor:
    """bool `[B, S]`: where a sequence begins behind another one. Nothing stands before a row's first token.

    >>> starts_of(torch.tensor([[0, 0, 1, 2, 2]])).tolist()
    [[False, False, True, True, False]]
    """
    return pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *, seq_idx: Tensor, **_: Any
) -> Tensor:
    """Depthwise and causal: x `[B, D, S]`, weight `[D, W]`, bias `[D]` or None."""
    W, S, weight = weight.shape[-1], x.shape[-1], weight.to(torch.promote_types(x.dtype, torch.float32))  # as torch adds up
    out = x * weight[:, W - 1, None]
    for k in range(1, min(W, S)):
        same_BS = pad(seq_idx[:, k:] == seq_idx[:, :-k], (k, 0))
        out = out + (pad(x[..., :-k], (k, 0)) * same_BS[:, None]) * weight[:, W - 1 - k, None]
    out = out if bias is None else out + bias[:, None]
    if activation is not None:
        out = getattr(functional, "silu" if activation == "swish" else activation)(out)
    return out.to(x.dtype)


def delta_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a gated delta rule or KDA `(q, k, v, g, beta)`, `g` `[B, S, H]` or `[B, S, H, D]`, the log of the decay."""
    chosen = {"chunk_size": _CHUNK} if "chunk_size" in inspect.signature(function).parameters else {}

    def run(*args: Any, g: Tensor, seq_idx: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        first = starts_of(seq_idx)
        g = g.masked_fill(first.view(*first.shape, *[1] * (g.ndim - 2)), -RESET)
        return function(*args, g=g, **{**chosen, **kwargs})

    return run


def scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Mamba's second scan `(x [B, S, H, D], dt [B, S, H], A [H], B, C)`: `dt` behind its bias and limits."""

    def run(
        x: Tensor, dt: Tensor, A: Tensor, *args: Any, D: Tensor | None = None, dt_bias: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), seq_idx: Tensor, **kwargs: Any,
    ) -> Any:  # fmt: skip
        acting = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        acting = (softplus(acting) if dt_softplus else acting).clamp(*dt_limit).float()
        longer = torch.where(starts_of(seq_idx)[..., None], acting + RESET / A.float().abs(), acting)
        written = x * (acting / longer)[..., None]
        out = function(written, longer, A, *args, D=None, dt_bias=None, dt_softplus=False, **kwargs)
        if D is None:
            return out
        skipped = (x * D[..., None]).to(x.dtype)
        return (out[0] + skipped, *out[1:]) if isinstance(out, tuple) else out + skipped

    return run
