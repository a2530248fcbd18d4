"""Rules of fla, causal-conv1d and mamba alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from collate_npu.host import Array
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call

MAX_TAPS = 4
"""The widest convolution of causal-conv1d (csrc/causal_conv1d.cpp:183)."""
MAMBA_TOKENS = 61_000
_OWN = "gated_delta_kwargs(segments, kernel='causal_conv1d')."


def fla(call: Call) -> Iterator[Breach]:
    """Rules of fla's gated delta rule on several ranks."""
    ranks = call.get("world_size")
    if isinstance(ranks, int) and ranks > 1 and call.T % ranks:
        says, remedy = f"The row is shared out over {ranks} ranks.", "Pad it, the tail a sequence of its own."
        yield call.breach("ranks-total", "world_size", f"{call.T} tokens", says, remedy)
    if "cp_context" not in call.arguments:
        return
    for name in ("initial_state", "output_final_state"):
        if call.is_set(name):
            says = "Under cp_context states come from the rank before, and fla asserts that there are no others."
            yield call.breach("context", name, "given beside cp_context", says, f"Leave {name} out.")
    if not call.where:
        says = "A context holds local offsets only, from which the whole row cannot be told."
        remedy = "Pass the global cu_seqlens beside it, or check kernel='fla_cp' with them."
        if call.trusted:
            yield call.breach(
                "context-unread", "cp_context", type(call.get("cp_context")).__name__, says, remedy, silent=True
            )


def fla_conv(call: Call) -> Iterator[Breach]:
    """Rules of fla's convolution."""
    backend = call.word("backend", "triton")
    if backend in ("cuda", "mix") and call.is_set("initial_state") and call.where:
        says, remedy = "The cuda backend takes no initial state with offsets.", "Use backend='triton'."
        yield call.breach("cuda-state", "initial_state", f"backend {backend!r}", says, remedy)
    dy = call.get("dy")
    if isinstance(dy, Tensor) and not dy.is_contiguous():
        says, remedy = "A gradient that is not contiguous was read wrong (fla #871, #1138).", "Pass dy.contiguous()."
        yield call.breach("strides", "dy", f"strides {dy.stride()}", says, remedy, silent=True)
    shortest = min((n for n in call.lengths if n), default=call.T)
    if (call.is_set("dht") or (call.training and call.is_set("output_final_state"))) and shortest < taps(call) - 1:
        says = f"The gradient of a final state is wrong for sequences shorter than {taps(call) - 1} (fla #1140, #1141)."
        remedy = "Drop the final state in training, or sequences as short."
        yield call.breach("short-state", "dht", f"a sequence of {shortest}", says, remedy, silent=True)


# --- sequence numbers


def conv1d(call: Call) -> Iterator[Breach]:
    """Rules of causal-conv1d, which takes `seq_idx` for boundaries."""
    if "seq_idx" not in call.arguments:
        return
    for name in ("initial_states", "return_final_states"):
        if call.is_set(name) and call.releases.before("causal_conv1d", "1.6.2"):
            says = f"causal-conv1d {call.releases.text('causal_conv1d')} takes no states with seq_idx."
            yield call.breach("numbers-states", name, "given beside seq_idx", says, f"Leave {name} out.")
    yield from returning(call, taps(call))


def returning(call: Call, reach: int) -> Iterator[Breach]:
    """Only equality within reach counts: a number that comes back joins two sequences across what stands between."""
    ids_BT = numbered(call)
    for back in range(2, min(reach, ids_BT.shape[1])):
        same_BT = ids_BT[:, back:] == ids_BT[:, :-back]
        between_BT = np.any([ids_BT[:, i : i - back] != ids_BT[:, back:] for i in range(1, back)], axis=0)
        if (same_BT & between_BT).any():
            b, t = (int(i) for i in np.argwhere(same_BT & between_BT)[0])
            says = f"Tokens of the same number are neighbours for {reach - 1} places, whatever stands between them."
            remedy = "Give each sequence of the flat row a number of its own: " + _OWN
            yield call.breach(
                "numbers-return", "seq_idx", f"{ids_BT[b, t : t + back + 1].tolist()}", says, remedy, silent=True
            )
            return


def mamba(call: Call) -> Iterator[Breach]:
    """Rules of mamba_ssm's scan, which takes `seq_idx` for boundaries."""
    if "cu_seqlens" in call.arguments and "seq_idx" not in call.arguments:
        says = "cu_seqlens serves return_varlen_states alone: without seq_idx states run on from sequence to sequence."
        yield call.breach("offsets-alone", "cu_seqlens", "no seq_idx", says, "Pass seq_idx: " + _OWN, silent=True)
    if call.B * call.T > MAMBA_TOKENS:
        says, remedy = f"Its int32 pointers overflow at about {MAMBA_TOKENS} tokens (mamba #1015).", "Use shorter rows."
        yield call.breach("tokens", "T", str(call.B * call.T), says, remedy, silent=True)
    for row in numbered(call):
        firsts = row[np.insert(row[1:] != row[:-1], 0, True)]
        if len(np.unique(firsts)) != len(firsts):
            says = "Tokens of the same number in a chunk are one sequence, wherever they stand."
            yield call.breach(
                "numbers-return", "seq_idx", str(firsts[:12].tolist()), says, "Number them anew: " + _OWN, silent=True
            )
            return


def numbered(call: Call) -> Array:
    """The sequence numbers `[B, T]`, empty where there are none of that rank."""
    given = call.numbers_BT
    return given if given.ndim == 2 and given.size else np.zeros((0, 0), np.int64)


def taps(call: Call) -> int:
    """W of the convolution, the widest there is where no weight tells it."""
    weight = call.get("weight")
    return int(weight.shape[-1]) if isinstance(weight, Tensor) and weight.ndim == 2 else MAX_TAPS
