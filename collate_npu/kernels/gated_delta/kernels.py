"""Kernels of GPUs: fla, causal-conv1d, mamba; rows, and rules of theirs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call, Operator, words
from collate_npu.releases import CONV1D_STATES, FLA_STATES

MAMBA_TOKENS = 61_000
_OWN = "gated_delta_kwargs(segments, kernel='causal_conv1d')."


def _context(call: Call) -> Iterator[Breach]:
    """fla on several ranks."""
    if "cp_context" not in call.arguments:
        return
    for name in ("initial_state", "output_final_state"):
        if call.is_set(name):
            says = "Under cp_context states come from the rank before, and fla asserts that there are no others."
            yield call.breach("context", name, "given beside cp_context", says, f"Leave {name} out.")
    if not call.where and call.segments is not None:
        got, says = type(call.get("cp_context")).__name__, "A context holds local offsets alone, not those of the whole row."
        remedy = "Pass the global cu_seqlens beside it, or check kernel='fla_cp' with them."
        yield call.breach("context-unread", "cp_context", got, says, remedy, silent=True)


def _convolution(call: Call) -> Iterator[Breach]:
    backend = call.word("backend", "triton")
    if backend in ("cuda", "mix") and call.is_set("initial_state") and call.where:
        says, remedy = "The cuda backend takes no initial state with offsets.", "Use backend='triton'."
        yield call.breach("cuda-state", "initial_state", f"backend {backend!r}", says, remedy)
    shortest = min((n for n in call.lengths if n), default=call.T)
    states = call.training and call.is_set("output_final_state") and call.before(FLA_STATES)
    if states and shortest < call.taps - 1:
        says = f"The gradient of a final state is wrong for sequences shorter than {call.taps - 1} (fla #1140, #1141)."
        remedy = f"Drop the final state in training, or sequences as short, or take fla {FLA_STATES} or later."
        yield call.breach("short-state", "output_final_state", f"a sequence of {shortest}", says, remedy, silent=True)


def _conv1d(call: Call) -> Iterator[Breach]:
    """causal-conv1d, which takes `seq_idx` for boundaries."""
    if "seq_idx" not in call.arguments:
        return
    for name in ("initial_states", "return_final_states"):
        if call.is_set(name) and call.before(CONV1D_STATES):
            says = f"causal-conv1d {call.release('causal_conv1d')} takes no states with seq_idx."
            yield call.breach("numbers-states", name, "given beside seq_idx", says, f"Leave {name} out.")
    yield from returning(call, call.taps)


def returning(call: Call, reach: int) -> Iterator[Breach]:
    """Only equality within reach counts: a number that comes back joins two sequences across what stands between."""
    ids_BT = call.numbers_BT
    for back in range(2, min(reach, ids_BT.shape[1])):
        same_BT = ids_BT[:, back:] == ids_BT[:, :-back]
        between_BT = np.any([ids_BT[:, i : i - back] != ids_BT[:, back:] for i in range(1, back)], axis=0)
        if (same_BT & between_BT).any():
            b, t = (int(i) for i in np.argwhere(same_BT & between_BT)[0])
            says = f"Tokens of the same number are neighbours for {reach - 1} places, whatever stands between them."
            remedy = "Give each sequence of the flat row a number of its own: " + _OWN
            got = str(ids_BT[b, t : t + back + 1].tolist())
            yield call.breach("numbers-return", "seq_idx", got, says, remedy, silent=True)
            return


def _mamba(call: Call) -> Iterator[Breach]:
    """mamba_ssm's scan, which takes `seq_idx` for boundaries."""
    if "cu_seqlens" in call.arguments and "seq_idx" not in call.arguments:
        says = "cu_seqlens serves return_varlen_states alone: without seq_idx states run on from sequence to sequence."
        yield call.breach("offsets-alone", "cu_seqlens", "no seq_idx", says, "Pass seq_idx: " + _OWN, silent=True)
    if call.B * call.T > MAMBA_TOKENS:
        says, remedy = f"Its int32 pointers overflow at about {MAMBA_TOKENS} tokens (mamba #1015).", "Use shorter rows."
        yield call.breach("tokens", "T", str(call.B * call.T), says, remedy, silent=True)
    for row in call.numbers_BT:
        firsts = row[np.insert(row[1:] != row[:-1], 0, True)]
        if len(np.unique(firsts)) != len(firsts):
            got, says = str(firsts[:12].tolist()), "Tokens of the same number in a chunk are one sequence."
            yield call.breach("numbers-return", "seq_idx", got, says, "Number them anew: " + _OWN, silent=True)
            return


# --- rows

_RULE = {"q": "BTHK", "k": "BTHK", "v": "BTNV", "g": "BTN", "beta": "BTN", "initial_state": "SNKV"}
_X = {"x": "BTD", "residual": "BTD"}
FLA = Operator(
    "fla.chunk_gated_delta_rule", "fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560, ops/utils/index.py:156",
    offsets=("cu_seqlens",), copies=("cu_seqlens_cpu",), tables={"chunk_indices": "rule"}, chunk_sizes=(16, 32, 64),
    checks=words("container rows chunk-size heads states context removed backward"), own=(_context,),
    empties="fla", shapes=_RULE,
)  # fmt: skip
_CONV = replace(
    FLA, name="fla.causal_conv1d",
    source="fla 0.5.2 modules/conv/triton/ops.py:64, 191, 383-386, cuda/ops.py:202; fla #955",
    kernel="fla_conv", tables={"chunk_indices": "conv"}, chunk_sizes=(), checks=words("container cuda-state context"),
    own=(_context, _convolution), shapes=_X | {"weight": "DW", "bias": "D"},
)  # fmt: skip
_MAMBA = Operator(
    "mamba.mamba_chunk_scan_combined", "mamba e9594ce ops/triton/ssd_combined.py:274, 599-604, 642; mamba #1015",
    kernel="causal_conv1d", numbers="seq_idx", reads=words("cu_seqlens"), checks=words("container numbers-shape"),
    own=(_mamba,), shapes={"x": "BTHV", "dt": "BTH"},
)  # fmt: skip
KERNEL_ROWS: tuple[Operator, ...] = (
    FLA,
    replace(
        FLA, name="fla.chunk_kda", source="fla 0.5.2 ops/kda/chunk.py:365-420", chunk_sizes=(32, 64),
        checks=FLA.checks | words("shape head-size state-dtype"), shapes=_RULE | {"g": "BTNK"}, limits={"K": 256},
    ),
    replace(
        FLA, name="fla.fused_recurrent_gated_delta_rule",
        source="fla 0.5.2 ops/gated_delta_rule/fused_recurrent.py:301, 432", kernel="fla_cp",
        copies=(), tables={}, chunk_sizes=(), backward=False,
    ),
    _CONV,
    replace(
        FLA, name="fla.build_cp_context", kernel="fla_cp",
        source="fla 0.6.0 ops/cp/context.py:177-316; 0.5.2 drops what ranks cannot share", tables={},
        needs=words("cu_seqlens"), chunk_sizes=(), checks=words("container missing"), own=(), empties="legal", shapes={},
        ranks="state_passing",
    ),
    replace(
        FLA, name="fla.GatedDeltaNet",
        source="fla 0.5.2 layers/gated_deltanet.py:229, layers/utils.py:98-141; fla #838",
        reads=words("attention_mask"), chunk_sizes=(), checks=words("container rows mask-rank"), masks="unpadded",
        shapes={"hidden_states": "BTD"},
    ),
    replace(
        _CONV, name="fla.ShortConvolution", source="fla 0.5.2 modules/convolution/short_conv.py:133, 159; fla #955",
        reads=words("mask"), checks=words("container mask-and-offsets"), own=(_context,), masks="multiplied", shapes=_X,
    ),
    Operator(
        "causal_conv1d.causal_conv1d_fn",
        "causal-conv1d 1.6.1 csrc/causal_conv1d.cpp:175-198, causal_conv1d_interface.py:28-34",
        kernel="causal_conv1d", numbers="seq_idx", own=(_conv1d,), shapes={"x": "BDT", "weight": "DW", "bias": "D"},
        checks=words("container numbers-dtype numbers-shape numbers-states channels taps strides shape"),
    ),
    _MAMBA,
    replace(_MAMBA, name="mamba.mamba_split_conv1d_scan_combined", shapes={"zxbcdt": "BTD"}),
)  # fmt: skip
