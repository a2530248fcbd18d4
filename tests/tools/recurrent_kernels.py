"""Stand-ins for the kernels of a card: a model's own torch functions, run sequence by sequence where they are told."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from itertools import pairwise

import torch

TOLD = {
    "causal_conv1d_fn": ("seq_idx", 2),
    "mamba2_chunk_scan": ("seq_idx", 1),
    "torch_chunk_gated_delta_rule": ("cu_seqlens", 1),
}
"""Functions that give way to a kernel: what it reads, and the axis of its tokens."""


@contextmanager
def kernels(model, *, deaf=()):
    """While this is entered; `deaf` names functions that drop what they are told, in silence."""
    module = sys.modules[type(model).__module__]
    kept = {name: getattr(module, name) for name in TOLD if hasattr(module, name)}
    for name, function in kept.items():
        setattr(module, name, _kernel(inspect.unwrap(function), *TOLD[name], deaf=name in deaf))
    try:
        yield model
    finally:
        for name, function in kept.items():
            setattr(module, name, function)


def _kernel(plain, key, axis, *, deaf):
    def run(*args, **kwargs):
        told = kwargs.pop(key, None)
        if told is None or deaf:
            return plain(*args, **kwargs)
        length = args[0].shape[axis]
        cuts = told.tolist() if key == "cu_seqlens" else [0, *(1 + told[0].diff().nonzero().flatten()).tolist(), length]
        assert cuts[0] == 0
        assert cuts[-1] == length

        def cut(x, a, b):
            tokens = isinstance(x, torch.Tensor) and x.ndim > 2 and x.shape[axis] == length
            return x.narrow(axis, a, b - a) if tokens else x

        parts = [
            plain(*(cut(x, a, b) for x in args), **{name: cut(x, a, b) for name, x in kwargs.items()})
            for a, b in pairwise(cuts)
        ]
        outs = [part[0] if isinstance(part, tuple) else part for part in parts]
        return (torch.cat(outs, axis), parts[-1][1]) if isinstance(parts[0], tuple) else torch.cat(outs, axis)

    return run
