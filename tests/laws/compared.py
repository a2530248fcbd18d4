"""What targets ask of a result: the numbers in it, whose memory it is, and whether it should have been refused."""

from functools import cache

import numpy as np
import oracle
import torch

from collate_npu import BatchAdapter, CollateError, ContextParallel

adapter_of, rank_of, others = cache(BatchAdapter), cache(ContextParallel), cache(ContextParallel.with_rank)


def refused(call, must: bool, why: str, given=None):
    """What came out, None for a refusal. `must`: it has to be refused. What was `given` is as it was."""
    before = bits(given)
    try:
        out = call()
    except CollateError:
        out = None
    assert bits(given) == before
    assert out is None or not must, f"taken, although {why}: {out}"
    return out


def taken(call, bad: bool, why: str, given=None):
    """What came out, None for what is bad. That is refused, and nothing else is."""
    out = refused(call, bad, why, given)
    assert out is not None or bad, "refused"
    return out


def lists(value):
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def is_mask(masked, rows, must_be_dense=False) -> None:
    """None exactly where that is exact, else True = blocked, of plain causal attention."""
    if oracle.none_is_exact(rows) and not must_be_dense:
        assert masked is None
    else:
        assert masked.dtype == torch.bool
        assert lists(~masked) == oracle.dense(rows)


def leaves(value):
    """Its arrays, as numpy sees their memory."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in leaves(part)]
    if isinstance(value, torch.Tensor):
        bits = value.detach()
        plain = bits.dtype in READ and bits.layout is torch.strided and not (bits.is_nested or bits.is_meta)
        return [(bits.view(torch.int16) if bits.dtype == torch.bfloat16 else bits).numpy()] if plain else []
    return [value] if isinstance(value, np.ndarray) else []


def bits(value):
    """What it is, to the bit, with its types: of equal values one text, and a copy of what may be written to."""
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), tuple(value.shape), leaves(value)[0].tobytes()
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (dict, list, tuple, torch.Tensor, np.ndarray)):
        return type(value), [bits(each) for each in value]
    return repr(value)


def apart(given, made) -> bool:
    """Does nothing made share memory with what was given, or with anything else made? What is handed on is no matter."""
    old, new = leaves(given), leaves(made)
    pairs = [(x, y) for x in new for y in old] + [(x, y) for n, x in enumerate(new) for y in new[:n]]
    return not any(np.may_share_memory(x, y) for x, y in pairs)


NUMBERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
READ = {getattr(torch, name) for name in NUMBERS}
