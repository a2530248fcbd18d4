"""What a kernel computes from the arguments of a call, read as that kernel reads them.

Written from the kernels' sources. One scalar channel: a convolution of W taps, then a decaying
sum, in float64. `RefusedError` where the kernel raises; NaN where nothing is written.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu import Segments

Kwargs = dict[str, Any]
Offsets = list[int]
Row = np.ndarray[Any, Any]
TAPS = np.array([0.9, -1.3, 0.7, 2.1])
RANKS = 2


class RefusedError(Exception):
    """The kernel, or Python, raises."""


class WildError(Exception):
    """Memory of others is read or written: wrong, whatever comes out."""


def values(tokens: int) -> tuple[Row, Row]:
    """An input and a decay for each place of the batch."""
    random = np.random.default_rng(7)
    return random.normal(size=tokens) + 3, random.uniform(0.3, 0.9, tokens)


def decayed(x: Row, decay: Row, offsets: Sequence[int]) -> Row:
    """The rule's stand-in over the sequences of one flat row; what none covers is NaN."""
    out = np.full(len(x), np.nan)
    for start, end in pairwise(offsets):
        wild_unless(start >= 0 and end <= len(x))
        state = 0.0
        for t in range(start, end):
            state = decay[t] * state + x[t]
            out[t] = state
    return out


def convolved(x: Row, ids: Row) -> Row:
    """Each token from those of its own number up to W - 1 places before it; one row."""
    out = TAPS[-1] * x
    for back in range(1, len(TAPS)):
        same = ids[back:] == ids[:-back]
        out[back:] = out[back:] + np.where(same, TAPS[-1 - back] * x[:-back], 0)
    return out


def sequences_alone(batch: Segments, places: Row, rule: bool, conv: bool) -> Row:
    """`[tokens]`: the right output at the places of the call's tensor, NaN at padding."""
    x, decay = values(batch.array.size)
    out = np.full(batch.array.size, np.nan)
    B, S = batch.shape
    for b in range(B):
        for n in range(1, batch.array[b].max(initial=0) + 1):
            at = b * S + np.flatnonzero(batch.array[b] == n)
            y = convolved(x[at], np.zeros(len(at))) if conv else x[at]
            out[at] = decayed(y, decay[at], (0, len(at))) if rule else y
    return out[places]


# --- readings of one call


def refuse_unless(right: bool) -> None:
    if not right:
        raise RefusedError


def wild_unless(right: bool) -> None:
    if not right:
        raise WildError


def ints(value: Any, *dtypes: torch.dtype) -> list[int]:
    refuse_unless(isinstance(value, Tensor) and value.ndim == 1 and not value.is_meta)
    refuse_unless(value.dtype in (dtypes or (torch.int32, torch.int64)))
    return [int(n) for n in value]


def host(value: Any) -> list[int]:
    refuse_unless(isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value))
    return list(value)


def pairs(offsets: Sequence[int], block: int) -> list[tuple[int, int]]:
    return [(n, c) for n, (a, b) in enumerate(pairwise(offsets)) for c in range(-(-(b - a) // block) if b > a else 0)]


def rising(offsets: Sequence[int]) -> bool:
    return len(offsets) >= 2 and all(a <= b for a, b in pairwise(offsets))


def only(kwargs: Kwargs, *names: str) -> None:
    """Another argument of the kind is a TypeError, or vanishes and is a mistake either way."""
    refuse_unless(not set(kwargs) - set(names))


def _fla(kwargs: Kwargs, B: int, T: int, block: int) -> Offsets | None:
    only(kwargs, "cu_seqlens", "cu_seqlens_cpu", "chunk_indices")
    if "cu_seqlens" not in kwargs:
        refuse_unless(not kwargs)  # a table or a copy without what it belongs to
        return None
    offsets = ints(kwargs["cu_seqlens"])
    refuse_unless(B == 1)
    found: Any = pairs(ints(kwargs["cu_seqlens_cpu"]) if "cu_seqlens_cpu" in kwargs else offsets, block)
    if "chunk_indices" in kwargs:
        table = kwargs["chunk_indices"]
        refuse_unless(isinstance(table, Tensor) and table.ndim == 2 and not table.is_floating_point())
        found = [tuple(pair) for pair in table.tolist()]
    wild_unless(found == pairs(offsets, block) and rising(offsets))
    return offsets


def _npu(kwargs: Kwargs, B: int, T: int, name: str, block: int) -> Offsets | None:
    only(kwargs, "cu_seqlens", name)
    if "cu_seqlens" not in kwargs:
        refuse_unless(not kwargs)
        return None
    offsets, table = host(kwargs["cu_seqlens"]), host(kwargs.get(name))
    refuse_unless(B == 1 and offsets[:1] == [0] and rising(offsets) and len({*offsets}) == len(offsets))
    refuse_unless(table == [n for pair in pairs(offsets, block) for n in pair])
    return offsets


def _flash(kwargs: Kwargs, B: int, T: int) -> Offsets | None:
    """The vendor's rule, which builds its tables from both."""
    only(kwargs, "cu_seqlens", "cu_seqlens_list")
    if "cu_seqlens" not in kwargs:
        wild_unless(not kwargs)  # a list alone is dropped
        return None
    offsets = ints(kwargs["cu_seqlens"])
    refuse_unless(B == 1)
    wild_unless(host(kwargs.get("cu_seqlens_list", offsets)) == offsets)
    wild_unless(offsets[:1] == [0] and rising(offsets) and len({*offsets}) == len(offsets))
    return offsets


def _npu_conv(kwargs: Kwargs, B: int, T: int) -> Offsets | None:
    only(kwargs, "query_start_loc")
    if not kwargs:
        return None
    offsets = host(kwargs["query_start_loc"])
    refuse_unless(B == 1 and rising(offsets) and offsets[0] == 0 and offsets[-1] == T)
    return offsets


def _lengths(kwargs: Kwargs, B: int, *, prefix: bool, longest: int) -> Offsets:
    only(kwargs, "actual_seq_lengths", "scale")
    wild_unless("scale" in kwargs)
    given = ints(kwargs.get("actual_seq_lengths"), torch.int32)
    refuse_unless(B == 1 and len(given) > prefix)
    wild_unless(all(1 <= n <= longest for n in given[prefix:]))
    return np.cumsum(given if prefix else [0, *given]).tolist()


def _megatron(kwargs: Kwargs, B: int, T: int) -> Offsets | None:
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    only(kwargs, *names, "qkv_format", "total_tokens", "max_seqlen_q", "max_seqlen_kv", "attention_mask")
    held = {name: ints(kwargs[name]) for name in names if name in kwargs}
    offsets = held.get("cu_seqlens_q_padded", held.get("cu_seqlens_q"))
    if offsets is None:
        refuse_unless(kwargs.get("qkv_format") != "thd" and not held)
        return None
    keys = held.get("cu_seqlens_kv_padded", held.get("cu_seqlens_kv", offsets))
    refuse_unless(B == 1 and keys == offsets and kwargs.get("qkv_format") in (None, "thd"))
    refuse_unless(len(offsets) > 1 and offsets[-1] == T)
    wild_unless(rising(offsets) and kwargs.get("total_tokens", T) == T)
    return offsets


def _cp(kwargs: Kwargs, B: int, T: int) -> Offsets:
    """fla's context on each of two ranks: their local spans, and who hands a state on."""
    only(kwargs, "cu_seqlens", "cu_seqlens_cpu")
    offsets = ints(kwargs.get("cu_seqlens"))
    copy = ints(kwargs["cu_seqlens_cpu"]) if "cu_seqlens_cpu" in kwargs else offsets
    total = copy[-1] if copy else 0
    refuse_unless(total >= RANKS and total % RANKS == 0)
    wild_unless(total == T and B == 1 and copy == offsets and rising(offsets))
    return offsets


def _numbers(kwargs: Kwargs, B: int, T: int, *dtypes: torch.dtype) -> np.ndarray[Any, Any]:
    given = kwargs.get("seq_idx", torch.zeros(B, T, dtype=torch.int32))
    refuse_unless(isinstance(given, Tensor) and given.dtype in dtypes)
    refuse_unless(tuple(given.shape) == (B, T))
    return given.numpy()


def _layer(kwargs: Kwargs, x: Row, decay: Row, B: int, T: int) -> Row:
    """transformers 5.23 with fla and causal-conv1d: mask, convolution, rule."""
    lengths = ("max_length_q", "max_length_k", "cu_seq_lens_k")
    only(kwargs, "cu_seq_lens_q", "seq_idx", "attention_mask", "position_ids", *lengths)
    keep = kwargs.get("attention_mask", torch.ones(1))
    refuse_unless(isinstance(keep, Tensor))
    if keep.ndim == 2 and T > 1 and not bool((keep == 1).all()):
        refuse_unless(tuple(keep.shape) == (B, T))
        x = x * keep.reshape(-1).double().numpy()
    offsets: Sequence[int] = range(0, B * T + 1, T)
    if "cu_seq_lens_q" in kwargs:
        offsets = ints(kwargs["cu_seq_lens_q"])
        refuse_unless(B == 1)
        wild_unless(rising(offsets))
    ids = _numbers(kwargs, B, T, torch.int32)
    return decayed(np.concatenate([convolved(x[b * T : (b + 1) * T], ids[b]) for b in range(B)]), decay, offsets)


def computed(kernel: str, kwargs: Kwargs, x: Row, decay: Row, *, B: int, T: int) -> Row:
    """`[tokens]`: what the kernel gives for the input of these tokens. Raises `RefusedError`, or `WildError`."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if kernel == "causal_conv1d":
        only(kwargs, "seq_idx")
        ids = _numbers(kwargs, B, T, torch.int32)
        return np.concatenate([convolved(x[b * T : (b + 1) * T], ids[b]) for b in range(B)])
    if kernel == "transformers":
        return _layer(kwargs, x, decay, B, T)
    given = {
        "fla": lambda: _fla(kwargs, B, T, 64),
        "fla_conv": lambda: _fla(kwargs, B, T, 64),
        "fla_cp": lambda: _cp(kwargs, B, T),
        "fla_npu": lambda: _npu(kwargs, B, T, "chunk_indices", 64),
        "fla_npu_cumsum": lambda: _npu(kwargs, B, T, "chunk_indices_out", 2048),
        "fla_npu_flash": lambda: _flash(kwargs, B, T),
        "fla_npu_conv": lambda: _npu_conv(kwargs, B, T),
        "fla_npu_recurrent": lambda: _lengths(kwargs, B, prefix=True, longest=8),
        "torch_npu": lambda: _lengths(kwargs, B, prefix=False, longest=10**9),
        "megatron": lambda: _megatron(kwargs, B, T),
    }[kernel]()
    offsets = range(0, B * T + 1, T) if given is None else given
    if not kernel.endswith("conv"):
        return decayed(x, decay, offsets)
    ids = np.full(len(x), -1)
    for n, (start, end) in enumerate(pairwise(offsets)):
        wild_unless(start >= 0 and end <= len(x))
        ids[start:end] = n
    return np.where(ids >= 0, convolved(x, ids), np.nan)
