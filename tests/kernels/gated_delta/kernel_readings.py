"""What a kernel computes from the arguments of a call, read as that kernel reads them: the judge of the contract's check.

Written from the kernels' sources, without a line of the check. One scalar channel: a convolution of W taps, then a decaying
sum, in float64. `RefusedError` where the kernel raises; NaN where nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu import Segments

TAPS = np.array([0.9, -1.3, 0.7, 2.1])
RANKS = 2


class RefusedError(Exception):
    """The kernel, or Python, raises."""


def values(tokens: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """An input and a decay for each place of the batch."""
    random = np.random.default_rng(7)
    return random.normal(size=tokens) + 3, random.uniform(0.3, 0.9, tokens)


def decayed(x: np.ndarray[Any, Any], decay: np.ndarray[Any, Any], spans: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """The rule's stand-in over spans of one flat row; what no span covers is NaN."""
    out = np.full(len(x), np.nan)
    for start, end in spans:
        if start < 0 or end > len(x):
            raise WildError
        state = 0.0
        for t in range(start, end):
            state = decay[t] * state + x[t]
            out[t] = state
    return out


class WildError(Exception):
    """Memory of others is read or written: wrong, whatever comes out."""


def convolved(x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each token from those of its own number up to W - 1 places before it; one row."""
    out = TAPS[-1] * x
    for back in range(1, len(TAPS)):
        same = ids[back:] == ids[:-back]
        out[back:] = out[back:] + np.where(same, TAPS[-1 - back] * x[:-back], 0)
    return out


def alone(batch: Segments, places: np.ndarray[Any, Any], rule: bool, conv: bool) -> np.ndarray[Any, Any]:
    """`[tokens]`: the right output at the places of the call's tensor, NaN at padding."""
    x, decay = values(batch.array.size)
    out = np.full(batch.array.size, np.nan)
    B, S = batch.shape
    for b in range(B):
        for n in range(1, batch.array[b].max(initial=0) + 1):
            at = b * S + np.flatnonzero(batch.array[b] == n)
            y = convolved(x[at], np.zeros(len(at))) if conv else x[at]
            out[at] = decayed(y, decay[at], [(0, len(at))]) if rule else y
    return out[places]


# --- readings of one call


def ints(value: Any, *dtypes: torch.dtype) -> list[int]:
    if (
        not isinstance(value, Tensor)
        or value.ndim != 1
        or value.is_meta
        or value.dtype not in (dtypes or (torch.int32, torch.int64))
    ):
        raise RefusedError
    return [int(n) for n in value]


def host(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(n, int) for n in value):
        raise RefusedError
    return list(value)


def pairs(offsets: Sequence[int], block: int) -> list[tuple[int, int]]:
    return [(n, c) for n, (a, b) in enumerate(pairwise(offsets)) for c in range(-(-(b - a) // block) if b > a else 0)]


def spans_of(offsets: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(offsets))


def only(kwargs: dict[str, Any], *names: str) -> None:
    """Another argument of the kind is a TypeError, or vanishes and is a mistake either way."""
    if set(kwargs) - set(names):
        raise RefusedError


def _fla(kwargs: dict[str, Any], B: int, T: int, chunk: int, block: int) -> list[tuple[int, int]] | None:
    only(kwargs, "cu_seqlens", "cu_seqlens_cpu", "chunk_indices")
    cu = kwargs.get("cu_seqlens")
    if cu is None:
        if kwargs:
            raise RefusedError  # a table or a copy without what it belongs to
        return None
    offsets = ints(cu)
    if B != 1:
        raise RefusedError
    sized_by = ints(kwargs["cu_seqlens_cpu"]) if kwargs.get("cu_seqlens_cpu") is not None else offsets
    table = kwargs.get("chunk_indices")
    if table is not None:
        if not isinstance(table, Tensor) or table.ndim != 2 or table.is_floating_point():
            raise RefusedError
        table = [tuple(pair) for pair in table.tolist()]
    else:
        table = pairs(sized_by, block)
    if len(offsets) < 2 or table != pairs(offsets, block) or any(a > b for a, b in spans_of(offsets)):
        raise WildError
    return spans_of(offsets)


def _npu(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    only(kwargs, "cu_seqlens", "chunk_indices", "chunk_indices_out")
    if kwargs.get("cu_seqlens") is None:
        if kwargs:
            raise RefusedError
        return None
    offsets, table, sums = (host(kwargs.get(name)) for name in ("cu_seqlens", "chunk_indices", "chunk_indices_out"))
    if B != 1 or len(offsets) < 2 or offsets[0] != 0 or any(a >= b for a, b in spans_of(offsets)):
        raise RefusedError
    if table != [n for pair in pairs(offsets, chunk) for n in pair]:
        raise RefusedError
    if sums != [n for pair in pairs(offsets, {64: 2048, 128: 1024}[chunk]) for n in pair]:
        raise WildError
    return spans_of(offsets)


def _npu_conv(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    only(kwargs, "query_start_loc")
    if kwargs.get("query_start_loc") is None:
        return None
    offsets = host(kwargs["query_start_loc"])
    if B != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != T or any(a > b for a, b in spans_of(offsets)):
        raise RefusedError
    return spans_of(offsets)


def _lengths(
    kwargs: dict[str, Any], B: int, T: int, chunk: int, *, prefix: bool, longest: int
) -> list[tuple[int, int]] | None:
    only(kwargs, "actual_seq_lengths")
    given = ints(kwargs.get("actual_seq_lengths"), torch.int32)
    if B != 1 or len(given) < (2 if prefix else 1):
        raise RefusedError
    ends = np.cumsum(given).tolist() if prefix else [0, *np.cumsum(given).tolist()]
    lengths = given[1:] if prefix else given
    if any(n < 1 or n > longest for n in lengths):
        raise WildError
    return spans_of(ends)


def _megatron(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    only(kwargs, *names, "qkv_format", "total_tokens", "max_seqlen_q", "max_seqlen_kv", "attention_mask")
    held = {name: ints(kwargs[name]) for name in names if kwargs.get(name) is not None}
    offsets = held.get("cu_seqlens_q_padded", held.get("cu_seqlens_q"))
    if offsets is None:
        if kwargs.get("qkv_format") == "thd" or held:
            raise RefusedError
        return None
    keys = held.get("cu_seqlens_kv_padded", held.get("cu_seqlens_kv", offsets))
    if B != 1 or keys != offsets or kwargs.get("qkv_format") not in (None, "thd") or len(offsets) < 2 or offsets[-1] != T:
        raise RefusedError
    if any(a > b for a, b in spans_of(offsets)) or kwargs.get("total_tokens", T) != T:
        raise WildError
    return spans_of(offsets)


def _cp(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    """fla's context on each of two ranks: their local spans, and who hands a state on."""
    only(kwargs, "cu_seqlens", "cu_seqlens_cpu")
    offsets = ints(kwargs.get("cu_seqlens"))
    copy = ints(kwargs["cu_seqlens_cpu"]) if kwargs.get("cu_seqlens_cpu") is not None else offsets
    total = copy[-1] if copy else 0
    if total < RANKS or total % RANKS:
        raise RefusedError
    if total != T or B != 1 or copy != offsets or any(a > b for a, b in spans_of(offsets)):
        raise WildError
    return spans_of(offsets)


def _bridge(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    """mcore-bridge: ends get their 0, and what it cannot use is replaced by the actual offsets, as they are."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    only(kwargs, *names, "qkv_format", "total_tokens", "max_seqlen_q", "max_seqlen_kv", "attention_mask")
    held = {name: ints(kwargs[name]) for name in names if kwargs.get(name) is not None}
    offsets = held.get("cu_seqlens_q_padded", held.get("cu_seqlens_q"))
    if not offsets:
        if held or kwargs.get("qkv_format") == "thd":
            raise RefusedError
        return None
    if offsets[0] != 0 and offsets[-1] == T:
        offsets = [0, *offsets]
    elif offsets[0] != 0 and offsets[-1] - offsets[0] == T:
        raise WildError  # moved to 0: right by luck alone
    offsets = offsets if offsets[-1] == T else held.get("cu_seqlens_q", [])
    keys = [held.get("cu_seqlens_kv"), held.get("cu_seqlens_kv_padded")]
    same = [held.get("cu_seqlens_q"), held.get("cu_seqlens_q_padded")]
    mixed = any(k is not None and q is not None and k != q for k, q in zip(keys, same))
    if mixed or kwargs.get("qkv_format", "thd") != "thd" or kwargs.get("total_tokens", T) != T:
        raise WildError  # the attention beside it reads other ones
    if B != 1 or len(offsets) < 2 or offsets[0] != 0 or any(a > b for a, b in spans_of(offsets)):
        raise WildError
    return spans_of(offsets)


def _verl(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    only(kwargs, "cu_seqlens", "cu_seqlens_cpu", "attention_mask")
    spans = _fla({name: value for name, value in kwargs.items() if name != "attention_mask"}, B, T, 64, 64)
    if spans is not None and spans[-1][1] != T:
        raise RefusedError
    return spans


def _titan(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    """Rows laid one behind the other."""
    only(kwargs, "cu_seqlens", "cu_seqlens_cpu")
    if kwargs.get("cu_seqlens") is None:
        if kwargs:
            raise RefusedError
        return [(0, B * T)]
    offsets, copy = ints(kwargs["cu_seqlens"]), ints(kwargs.get("cu_seqlens_cpu"))
    if copy != offsets or len(offsets) < 2 or any(a > b for a, b in spans_of(offsets)):
        raise WildError
    return spans_of(offsets)


def _mamba(kwargs: dict[str, Any], B: int, T: int, chunk: int) -> list[tuple[int, int]] | None:
    """Runs of one number; a number that comes back is the same sequence again."""
    only(kwargs, "seq_idx", "cu_seqlens")
    given = kwargs.get("seq_idx")
    if given is None:
        if kwargs:
            raise WildError
        return None
    if (
        not isinstance(given, Tensor)
        or given.is_floating_point()
        or tuple(given.shape) != (B, T)
        or not given.is_contiguous()
    ):
        raise RefusedError
    spans = []
    for b, row in enumerate(given.tolist()):
        begins = [t for t in range(T) if t == 0 or row[t] != row[t - 1]]
        if len({row[t] for t in begins}) != len(begins):
            raise WildError
        spans += [(b * T + start, b * T + end) for start, end in pairwise([*begins, T])]
    return spans


def _unpadded(kwargs: dict[str, Any], x: Any, decay: Any, B: int, T: int) -> Any:
    """fla's layer: padding by a mask of two dimensions is taken out, and put back as zeros."""
    keep = kwargs.get("attention_mask")
    if "cu_seqlens" in kwargs and keep is not None:
        raise WildError
    if keep is None and kwargs:
        return decayed(x, decay, _fla(kwargs, B, T, 64, 64) or [])
    only(kwargs, "attention_mask")
    if keep is None:
        return decayed(x, decay, [(b * T, (b + 1) * T) for b in range(B)])
    if not isinstance(keep, Tensor) or tuple(keep.shape) != (B, T) or not bool(((keep == 0) | (keep == 1)).all()):
        raise RefusedError
    out = np.zeros(B * T)
    for b in range(B):
        at = b * T + np.flatnonzero(keep[b].numpy())
        out[at] = decayed(x[at], decay[at], [(0, len(at))])
    return out


def _numbers(kwargs: dict[str, Any], B: int, T: int) -> np.ndarray[Any, Any]:
    given = kwargs.get("seq_idx")
    if given is None:
        return np.zeros((B, T), np.int64)
    if (
        not isinstance(given, Tensor)
        or given.dtype != torch.int32
        or tuple(given.shape) != (B, T)
        or not given.is_contiguous()
    ):
        raise RefusedError
    return given.numpy()


def computed(kernel: str, kwargs: dict[str, Any], x: np.ndarray[Any, Any], decay: np.ndarray[Any, Any], **sizes: int) -> Any:
    """`[tokens]`: what the kernel gives for the input of these tokens. Raises `RefusedError`, or `WildError`."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    B, T, chunk = sizes["B"], sizes["T"], sizes["chunk"]
    rows = [(b * T, (b + 1) * T) for b in range(B)]
    if kernel == "causal_conv1d":
        only(kwargs, "seq_idx")
        ids = _numbers(kwargs, B, T)
        return np.concatenate([convolved(x[a:b], ids[i]) for i, (a, b) in enumerate(rows)])
    if kernel == "fla.GatedDeltaNet":
        return _unpadded(kwargs, x, decay, B, T)
    if kernel == "transformers":
        return _layer(kwargs, x, decay, B, T, rows)
    spans = {
        "fla": lambda: _fla(kwargs, B, T, chunk, chunk),
        "fla_conv": lambda: _fla(kwargs, B, T, chunk, 64),
        "fla_cp": lambda: _cp(kwargs, B, T, chunk),
        "fla_npu": lambda: _npu(kwargs, B, T, chunk),
        "fla_npu_conv": lambda: _npu_conv(kwargs, B, T, chunk),
        "fla_npu_recurrent": lambda: _lengths(kwargs, B, T, chunk, prefix=True, longest=8),
        "torch_npu": lambda: _lengths(kwargs, B, T, chunk, prefix=False, longest=10**9),
        "megatron": lambda: _megatron(kwargs, B, T, chunk),
        "mcore_bridge.GatedDeltaNet": lambda: _bridge(kwargs, B, T, chunk),
        "verl.qwen3_5_gdn": lambda: _verl(kwargs, B, T, chunk),
        "torchtitan.qwen3_5_gdn": lambda: _titan(kwargs, B, T, chunk),
        "mamba.mamba_chunk_scan_combined": lambda: _mamba(kwargs, B, T, chunk),
    }[kernel]()
    if kernel == "verl.qwen3_5_gdn" and "attention_mask" in kwargs:
        if tuple(kwargs["attention_mask"].shape) != (B, T):
            raise RefusedError
        x = x * kwargs["attention_mask"].reshape(-1).double().numpy()
    if not kernel.endswith("conv"):
        return decayed(x, decay, rows if spans is None else spans)
    spans = rows if spans is None else spans
    ids = np.full(len(x), -1)
    for n, (start, end) in enumerate(spans):
        if start < 0 or end > len(x):
            raise WildError
        ids[start:end] = n
    return np.where(ids >= 0, convolved(x, ids), np.nan)


def _layer(kwargs: dict[str, Any], x: Any, decay: Any, B: int, T: int, rows: list[tuple[int, int]]) -> Any:
    """transformers 5.23 with fla and causal-conv1d: mask, convolution, rule."""
    only(
        kwargs, "cu_seq_lens_q", "seq_idx", "attention_mask", "position_ids", "max_length_q", "cu_seq_lens_k", "max_length_k"
    )
    keep = kwargs.get("attention_mask")
    if keep is not None:
        if not isinstance(keep, Tensor):
            raise RefusedError
        if keep.ndim == 2 and T > 1 and not bool((keep == 1).all()):
            if tuple(keep.shape) != (B, T):
                raise RefusedError
            x = x * keep.reshape(-1).double().numpy()
    spans = rows
    if kwargs.get("cu_seq_lens_q") is not None:
        offsets = ints(kwargs["cu_seq_lens_q"])
        if B != 1:
            raise RefusedError
        if len(offsets) < 2 or any(a > b for a, b in spans_of(offsets)):
            raise WildError
        spans = spans_of(offsets)
    ids = _numbers(kwargs, B, T)
    y = np.concatenate([convolved(x[a:b], ids[i]) for i, (a, b) in enumerate(rows)])
    return decayed(y, decay, spans)
