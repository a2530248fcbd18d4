"""Kernels of GPUs and NPUs: fla and its port to Ascend, causal-conv1d, mamba, torch_npu; rows, and rules of theirs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call, Operator, words
from collate_npu.releases import CONV1D_STATES, FLA_NPU_A2

MAMBA_TOKENS = 61_000
KDA_LAYOUTS = {"BSND": "BTHK", "BNSD": "BHTK", "TND": "THK", "NTD": "HTK"}
_OWN = "gated_delta_kwargs(segments, kernel='causal_conv1d')."

# --- GPUs


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
    if call.training and call.is_set("output_final_state") and shortest < call.taps - 1:
        says = f"The gradient of a final state is wrong for sequences shorter than {call.taps - 1} (fla #1140, #1141)."
        remedy = "Drop the final state in training, or sequences as short."
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


# --- NPUs


def _chain(call: Call) -> Iterator[Breach]:
    """The operators of the Gated DeltaNet chain, by release."""
    old = call.before(FLA_NPU_A2)
    tails = [n for n in call.lengths if n % call.chunk_size]
    if call.training and old and call.T >= 32768:
        says = "In release 26.6.0 gradients of rows this long are NaN on A2 (#232)."
        yield call.breach("release", "T", str(call.T), says, "Use a later release, or shorter rows.", silent=True)
    if old and tails:
        says = "In release 26.6.0 v_new is off by up to 0.7 in short last chunks on A2 (#367, fixed in #368)."
        yield call.breach("release", call.where, f"lengths {tails[:8]}", says, "Use a later release.", silent=True)
    if "dht" in call.arguments:
        says = "dht was not used at all (#312), and which release mends it is not established."
        yield call.breach("dht", "dht", "a tensor", says, "Leave dht out: train without final states.", silent=True)


def _kda(call: Call) -> Iterator[Breach]:
    """The forward of KDA, which takes more than its backward does."""
    layout = call.word("layout", "BSND")
    if layout not in KDA_LAYOUTS:
        says, remedy = f"It takes {', '.join(KDA_LAYOUTS)}.", "Pass layout='TND' and tensors [T, H, D]."
        yield call.breach("layout", "layout", repr(layout), says, remedy)
    if not call.wants_gradients:
        return
    chunks = sum(-(-n // call.chunk_size) for n in call.lengths) or -(-call.T // call.chunk_size) * call.B
    if len(call.lengths) > 64 or chunks > 1024:
        says = "The backward takes 64 sequences and 1024 chunks, the forward more: this call fails in its backward (#508)."
        got = f"{len(call.lengths)} sequences, {chunks} chunks"
        yield call.breach("limit", call.where or "T", got, says, "Pack fewer sequences, shorter rows.", silent=False)
    if tails := [n for n in call.lengths if n % 64]:
        says = "dk and dg are wrong, or the call is refused, where a length is no multiple of 64 (#544, #733)."
        remedy = "Pad each sequence: sequence_multiple=64 of the collator, and padding=batch['cu_seqlens_padded'] here."
        yield call.breach("tails", call.where, f"lengths {tails[:8]}", says, remedy, silent=True)
    q, order = call.get("q"), KDA_LAYOUTS.get(layout, "")
    if isinstance(q, Tensor) and q.ndim == len(order) and call.T * (heads := q.shape[order.index("H")]) >= 2**21:
        got, says = str(call.T * heads), "In the backward T * H is below 2**21 (#699)."
        yield call.breach("limit", "q", got, says, "Use shorter rows.", silent=False)


def _npu_convolution(call: Call) -> Iterator[Breach]:
    x, mode = call.get("x"), call.arguments.get("activation_mode", 0)
    active = not isinstance(mode, int) or mode != 0
    if isinstance(x, Tensor) and x.ndim == 2 and not call.where:
        says, remedy = "A flat x needs its boundaries.", "Pass query_start_loc."
        yield call.breach("missing", "query_start_loc", "nothing", says, remedy)
    modes = call.get("initial_state_mode")
    if isinstance(modes, (list, tuple)) and len(modes) != (len(call.lengths) or call.B):
        says, remedy = "There is one mode for each sequence.", "Pass one for each, or leave it out."
        yield call.breach("states", "initial_state_mode", f"{len(modes)} modes", says, remedy)
    outside = ("query_start_loc", "cache_indices", "initial_state_mode", "num_accepted_tokens")
    unbound = [*(name for name in outside if name in call.arguments), *["activation_mode"] * active]
    if call.training and unbound and (call.wants_gradients or active):
        says = "The backward is bound only without boundaries, states and activation: here the output has no history."
        remedy = "Wrap it with npu_causal_conv1d_bwd in an autograd.Function and check both, activation apart; in inference "
        yield call.breach("history", ", ".join(unbound), "training", says, remedy + "pass training=False.", silent=True)


def _torch_npu(call: Call) -> Iterator[Breach]:
    q = call.get("q")
    if not isinstance(q, Tensor):
        return
    for name in ("beta", "initial_state"):
        if name not in call.arguments:
            yield call.breach("missing", name, "nothing", "The operator takes no call without it.", f"Pass {name}.")
    if shape_of(q).split()[0] != "bfloat16":
        yield call.breach("dtype", "q", shape_of(q), "It takes bfloat16.", "Pass q.bfloat16().", silent=False)
    for name in ("q", "v"):
        x = call.get(name)
        if isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] > 64:
            yield call.breach("heads", name, f"{x.shape[1]} heads", "It takes 64 at most.", "Split the heads.", silent=True)


# --- rows

_RULE = {"q": "BTHK", "k": "BTHK", "v": "BTNV", "g": "BTN", "beta": "BTN"}
_X = {"x": "BTD", "residual": "BTD"}
_FLA = Operator(
    "fla.chunk_gated_delta_rule", "fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560, ops/utils/index.py:156",
    offsets=("cu_seqlens",), copies=("cu_seqlens_cpu",), tables={"chunk_indices": "rule"}, chunk_sizes=(16, 32, 64),
    checks=words("container rows chunk-size heads states context removed backward"), own=(_context,),
    empties="fla", shapes=_RULE,
)  # fmt: skip
_CONV = replace(
    _FLA, name="fla.causal_conv1d",
    source="fla 0.5.2 modules/conv/triton/ops.py:64, 191, 383-386, cuda/ops.py:202; fla #955",
    kernel="fla_conv", tables={"chunk_indices": "conv"}, chunk_sizes=(), checks=words("container cuda-state context"),
    own=(_context, _convolution), shapes=_X | {"weight": "DW", "bias": "D"},
)  # fmt: skip
_MAMBA = Operator(
    "mamba.mamba_chunk_scan_combined", "mamba e9594ce ops/triton/ssd_combined.py:274, 599-604, 642; mamba #1015",
    kernel="causal_conv1d", numbers="seq_idx", reads=words("cu_seqlens"), checks=words("container numbers-shape"),
    own=(_mamba,), shapes={"x": "BTHV", "dt": "BTH"},
)  # fmt: skip
_NPU = "flash-linear-attention-npu 17e24fd "
_FLA_NPU = Operator(
    "fla_npu", _NPU + "recompute_w_u_fwd_tiling_processor.h:299-385, chunk_local_cumsum_tiling.cpp:259-288",
    kernel="fla_npu", offsets=("cu_seqlens",), tables={"chunk_indices": "rule", "chunk_indices_out": "cumsum"},
    needs=words("chunk_indices chunk_indices_out"), host=True, chunk_sizes=(64, 128), own=(_chain,),
    checks=words("container rows first falling empty table missing chunk-size states"),
    shapes=dict.fromkeys(("q", "k"), "BHTK") | dict.fromkeys(("v", "u"), "BNTV") | {"w": "BNTK", "g": "BNT", "beta": "BNT"},
)  # fmt: skip
CHAIN = (
    *("recompute_w_u_fwd", "prepare_wy_repr_bwd_full", "prepare_wy_repr_bwd_da", "chunk_gated_delta_rule_fwd_h"),
    *("chunk_fwd_o", "chunk_bwd_dv_local", "chunk_bwd_dqkwg", "chunk_gated_delta_rule_bwd_dhu"),
    *("chunk_local_cumsum", "chunk_scaled_dot_kkt", "solve_tri"),
)
"""The operators of a training chain. Some check less than others; a chain takes what all of them take."""
KERNEL_ROWS: tuple[Operator, ...] = (
    _FLA,
    replace(
        _FLA, name="fla.chunk_kda", source="fla 0.5.2 ops/kda/chunk.py:365-420", chunk_sizes=(32, 64),
        checks=_FLA.checks | words("shape head-size state-dtype"), shapes=_RULE | {"g": "BTNK"}, limits={"K": 256},
    ),
    replace(
        _FLA, name="fla.fused_recurrent_gated_delta_rule",
        source="fla 0.5.2 ops/gated_delta_rule/fused_recurrent.py:301, 432",
        copies=(), tables={}, chunk_sizes=(), backward=False,
    ),
    _CONV,
    replace(
        _FLA, name="fla.build_cp_context", source="fla 0.5.2 ops/cp/context.py:60-140", kernel="fla_cp", tables={},
        needs=words("cu_seqlens"), chunk_sizes=(), checks=words("container missing"), own=(), empties="legal", shapes={},
        ranks="state_passing",
    ),
    replace(
        _FLA, name="fla.GatedDeltaNet",
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
    _FLA_NPU,
    replace(_FLA_NPU, name="fla_npu.link", needs=words(""), checks=words("container chunk-size states"), shapes={}),
    replace(
        _FLA_NPU, name="fla_npu.chunk_kda_fwd",
        source=_NPU + "_aclnn_ctypes.py:1066-1182; aclnn_chunk_kda_fwd.cpp:201-255",
        tables={"chunk_indices": "rule"}, needs=words(""), own=(_kda,), empties="legal", shapes={},
        limits={"sequences": 1024},
        checks=words("container rows first falling last table chunk-size states limit layout state-dtype"),
    ),
    Operator(
        "fla_npu.causal_conv1d", _NPU + "causal_conv1d_tiling_validation.h:190-245, ops/ascendc/__init__.py:321-329",
        kernel="fla_npu_conv", offsets=("query_start_loc",), host=True, own=(_npu_convolution,), empties="legal",
        checks=words("container first falling last missing rows channels taps states"),
    ),
    Operator(
        "fla_npu.recurrent_gated_delta_rule", _NPU + "_aclnn_ctypes.py:654-830; #641",
        kernel="fla_npu_recurrent", offsets=("actual_seq_lengths",), form="prefix and lengths",
        needs=words("actual_seq_lengths"), checks=words("container count rows missing"), limits={"tokens": 8},
        backward=False,
    ),
    Operator(
        "torch_npu.npu_chunk_gated_delta_rule", "op-plugin 517f2e7 documentation of npu_chunk_gated_delta_rule",
        kernel="torch_npu", offsets=("actual_seq_lengths",), form="lengths",
        needs=words("actual_seq_lengths"), checks=words("container missing"), own=(_torch_npu,),
        shapes={"q": "THK", "k": "THK", "v": "TNV", "g": "TN", "beta": "TN"},
        limits={"K": 128, "V": 128}, backward=False,
    ),
)  # fmt: skip
"""`fla_npu` is what a whole training chain takes, the intersection of its operators."""
