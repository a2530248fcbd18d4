"""Symptoms: what the pattern of a batch's errors says of their cause, where nothing but numbers is known.

Which samples are wrong, and from which of their tokens on, tells lost boundaries from padding that is read, and both from
answers that are another sample's, moved, or cut in chunks. How fast an error fades tells attention, which forgets nothing,
from a recurrent state and from a convolution; this takes sequences of 40 tokens and more, and a state of shorter memory.
Legend: N samples of L tokens; the log-probability at t, of L - 1, is that of token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NAN = "not a number"
ORDER = "answers are another sample's: the order of the samples is lost"
MOVED = "moved by one token: each answer stands at its neighbour's place"
BOUNDARIES = "begins at the second sequence: boundaries are lost"
PADDING = "wrong with padding, right in the longest: padding is read"
PAD_ID = "only where a token is the pad id: real tokens are masked"
EVERYWHERE = "every sample, from its first token on: all are padded, or positions are wrong"
TAIL = "only the last {} of each sample: a chunk's tail"
CHUNK = "begins at multiples of {}: a chunk's tail, or a window"
ENDS, FADES, STAYS = "; only first tokens: a convolution runs on", "; fades: a state or convolution", "; stays: attention"
_TAPS, _LATER, _FADED, _PAST, _FEW = 16, slice(32, 48), 2.2, 48, 3
"""First tokens that stacked convolutions reach; tokens further on, and how many times smaller a fading error is there; how
much must be read before them, for what attention reads of it not to fade beside their own; and in how many sequences.

On tiny models an error that entered by attention is 1.1 to 1.7 times smaller there, by a state or convolution 2.9 to 13.
"""


def meaning(found: Sequence[Tensor], known: Sequence[Tensor], bound: float, holding: Sequence[bool] = ()) -> str:
    """What it means that `found` differs from `known`, N float tensors `[L - 1]` each, by more than `bound` at a token.

    `holding` says which samples hold the pad id as text. "" for a pattern that is not known.

    >>> known = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0]), torch.tensor([-5.0, -6.0])]
    >>> meaning(known[::-1], known, 1e-3)
    "answers are another sample's: the order of the samples is lost"
    """
    if not all(bool(x.isfinite().all()) for x in found):
        return NAN
    if [len(x) for x in found] != [len(y) for y in known]:  # as many of each length, or they were refused
        return ORDER
    far = [(x - y).abs() for x, y in zip(found, known)]
    begins = {n: int((x > bound).nonzero()[0]) for n, x in enumerate(far) if bool((x > bound).any())}
    told = [n for n in begins if len(known[n]) > 1]  # one number alone may be near by chance
    if told and all(any(m != n and _near(found[n], known[m], bound) for m in range(len(known))) for n in told):
        return ORDER
    if told and all(_moved(found[n], known[n], bound) for n in told):
        return MOVED
    return _placed(begins, far, [len(y) for y in known], holding)


def _near(x: Tensor, y: Tensor, bound: float) -> bool:
    return x.shape == y.shape and bool(((x - y).abs() <= bound).all())


def _moved(x: Tensor, y: Tensor, bound: float) -> bool:
    return _near(x[1:], y[:-1], bound) or _near(x[:-1], y[1:], bound)


def _placed(begins: dict[int, int], far: Sequence[Tensor], lengths: Sequence[int], holding: Sequence[bool]) -> str:
    """By which samples are wrong, and from which token on."""
    if not begins:
        return ""
    step = next((c for c in (64, 32, 16, 8) if all(t and t % c == 0 for t in begins.values())), 0)
    if step:
        return CHUNK.format(step)
    tail = max(lengths[n] - t for n, t in begins.items())
    if any(begins.values()) and all(t == max(0, lengths[n] - tail) and not 0 < t < tail for n, t in begins.items()):
        return TAIL.format(tail)
    if any(holding) and all(holding[n] for n in begins):
        return PAD_ID
    right, longest = {*range(len(lengths))} - {*begins}, {n for n, length in enumerate(lengths) if length == max(lengths)}
    if longest <= right:
        return PADDING + _reach([far[n] for n in begins if max(lengths) - lengths[n] >= _PAST])
    if 0 in right:
        return BOUNDARIES + _reach([far[n] for n in begins if sum(lengths[:n]) >= _PAST])
    return EVERYWHERE if not any(lengths[n] for n in right) and not any(begins.values()) else ""


def _reach(far: Sequence[Tensor]) -> str:
    """How far into a sequence the error reaches; "" where too few are long enough to tell."""
    long = [x for x in far if len(x) > _LATER.start + 8]
    if len(long) < _FEW:
        return ""
    first, later = (float(torch.cat(part).square().mean().sqrt()) for part in zip(*((x[:4], x[_LATER]) for x in long)))
    if max(float(x[_TAPS:].max()) for x in long) <= first / 1000:
        return ENDS
    return FADES if first > _FADED * later else STAYS
