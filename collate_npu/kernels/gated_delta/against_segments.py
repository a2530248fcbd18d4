"""What a call computes against what `Segments` say, at every real token.

A causal layer is a chain: each token goes on from the state that another one left, and that one must be the token before
it in its own sequence, or none where it is the first. A kernel's offsets, numbers or mask give one chain, the Segments
the other; what padding goes on from does not matter. The convolution reads W - 1 tokens back, and each must be the right
one. Cost: some passes over one number a token, on the host.

Which tensors the call speaks of follows from its sizes: rows `[B, S]`, the same one behind the other `[1, B * S]`, or
those of `unpad`, `[1, T]`. A place is row * S + column of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collate_npu.host import Array
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.fla_rules import taps
from collate_npu.kernels.gated_delta.operator_call import Call
from collate_npu.kernels.gated_delta.padding_rules import kept
from collate_npu.segments import Segments

LISTED = 8
"""Sequences that a message names."""
NONE = -1


def breaches(call: Call, segments: Segments) -> Iterator[Breach]:
    """One breach that names the first wrong token of each sequence; read where no other rule is broken."""
    places_T = _places(call, segments)
    if places_T is None:
        B, S = segments.shape
        yield call.breach(
            "sizes-differ",
            "B, T",
            f"[{call.B}, {call.T}]",
            f"By the segments it is [{B}, {S}], [1, {B * S}], or [1, {segments.num_tokens}] without padding.",
            "Pass the B and T of the tensors, and the segments of this batch.",
            source="Segments",
            silent=True,
        )
        return
    truth_T = _labels(segments)[places_T]
    found = [(t, text) for read in _readings(call) for t, text in _differences(read, truth_T, places_T, segments.shape[1])]
    if found:
        texts = [text for _, text in sorted(set(found))]
        yield call.breach(
            "differs-from-segments",
            ", ".join(filter(None, (call.where, call.operator.numbers))) or "boundaries",
            "; ".join([*texts[:LISTED], *["..."] * (len(texts) > LISTED)]),
            "The segments say otherwise.",
            f"Use gated_delta_kwargs(segments, kernel={call.operator.kernel!r}), or unpad() the batch and its tensors; "
            "or pass the segments that this call is for.",
            source="Segments",
            silent=True,
        )


def _places(call: Call, segments: Segments) -> Array | None:
    """int64 `[B * T]`, the place of each token of the call in the batch; None where its sizes are none of the three."""
    B, S = segments.shape
    if (call.B, call.T) in ((B, S), (1, B * S)):
        return np.arange(B * S)
    return np.flatnonzero(segments.array) if (1, segments.num_tokens) == (call.B, call.T) else None


def _labels(segments: Segments) -> Array:
    """int64 `[B * S]`: a number for each sequence of the whole batch, -1 for padding."""
    ids_BS = segments.array.astype(np.int64)
    before_B = np.cumsum(ids_BS.max(axis=1, initial=0)) - ids_BS.max(axis=1, initial=0)
    labels: Array = np.where(ids_BS > 0, ids_BS + before_B[:, None], NONE).reshape(-1)
    return labels


Reading = list[Array]
"""For each step back, 1, 2, ..., the token that a token reads there, -1 for none; NaN of the first is `NOWHERE`."""
NOWHERE = -2
"""What no sequence covers."""


def _readings(call: Call) -> Iterator[Reading]:
    """The rule's chain, the convolution's, or both, as far as the operator has them."""
    keep_BT = kept(call)
    numbered = bool(call.operator.numbers)
    if call.operator.offsets or not numbered or call.operator.package == "mamba":
        yield [_rule(call, keep_BT)]
    if numbered and call.operator.package != "mamba":
        yield _convolution(call, keep_BT)


def _rule(call: Call, keep_BT: Array | None) -> Array:
    tokens = call.B * call.T
    sequence_T = np.arange(tokens) // (tokens if call.operator.folds else call.T)
    if call.where:
        sequence_T = np.searchsorted(np.array(call.offsets[1:]), np.arange(tokens), side="right")
        sequence_T = np.where(np.arange(tokens) < call.offsets[-1], sequence_T, NOWHERE)
    elif call.operator.package == "mamba" and call.numbers_BT.size:
        ids_T = call.numbers_BT.reshape(-1)
        sequence_T = np.cumsum(np.insert((ids_T[1:] != ids_T[:-1]) | (np.diff(sequence_T) > 0), 0, False))
    if keep_BT is not None:
        sequence_T = np.where(keep_BT.reshape(-1), sequence_T, NOWHERE)
    return np.where(sequence_T == NOWHERE, NOWHERE, _previous(sequence_T))


def _previous(sequence_T: Array) -> Array:
    """The token before each in its own sequence, -1 for the first."""
    order = np.argsort(sequence_T, kind="stable")
    previous_T = np.full(len(sequence_T), NONE)
    follows = sequence_T[order][1:] == sequence_T[order][:-1]
    previous_T[order[1:][follows]] = order[:-1][follows]
    return previous_T


def _convolution(call: Call, keep_BT: Array | None) -> Reading:
    shape = (call.B, call.T)
    ids_BT = call.numbers_BT if call.numbers_BT.size else np.zeros(shape, np.int64)
    real_BT = np.ones(shape, bool) if keep_BT is None else keep_BT
    at_BT = np.arange(call.B * call.T).reshape(shape)
    read = []
    for back in range(1, taps(call)):
        earlier_BT = np.full(shape, NONE)
        same = (ids_BT[:, back:] == ids_BT[:, :-back]) & real_BT[:, :-back]
        earlier_BT[:, back:] = np.where(same, at_BT[:, :-back], NONE)
        read.append(np.where(real_BT, earlier_BT, NOWHERE).reshape(-1))
    return read


def _differences(read: Reading, truth_T: Array, places_T: Array, S: int) -> Iterator[tuple[int, str]]:
    """The first real token of each sequence that goes on from a wrong one, and a sentence on it."""
    real_T = truth_T != NONE
    before_T = np.where(real_T, _previous(truth_T), NONE)
    right_T = np.where(real_T, np.arange(len(truth_T)), NONE)
    seen: set[int] = set()
    for step_T in read:
        right_T = np.where(right_T == NONE, NONE, before_T[right_T])
        for t in np.flatnonzero(real_T & (step_T != right_T)):
            if (sequence := int(truth_T[t])) not in seen:
                seen.add(sequence)
                yield int(t), _sentence(int(step_T[t]), int(right_T[t]), int(t), places_T, S)


def _sentence(reads: int, right: int, token: int, places_T: Array, S: int) -> str:
    def place(t: int) -> str:
        return f"({int(places_T[t]) // S}, {int(places_T[t]) % S})"

    at = f"the token at (row, column) {place(token)}"
    if reads == NOWHERE:
        return f"{at} belongs to no sequence"
    if reads == NONE:
        return f"{at} does not read {place(right)}"
    return f"{at} reads {place(reads)}" + (
        f", not {place(right)}" if right != NONE else ", and is the first of its sequence"
    )
