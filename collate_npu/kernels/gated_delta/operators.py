"""Operators: the one table of recurrent kernels and layers that the contract knows, by package, and the rules of one alone.

Behind them stand the names that `gated_delta_kwargs` and consumers have for some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise

import numpy as np
from torch import Tensor

from collate_npu import releases
from collate_npu.arrays import host_array, whole_number
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.kernels import Breach
from collate_npu.kernels.gated_delta.boundaries import chunk_indices
from collate_npu.kernels.gated_delta.operator_call import Call, Operator, words

MAMBA_TOKENS = 61_000
_OWN = "gated_delta_kwargs(segments, kernel='causal_conv1d')."


def _context(call: Call) -> Iterator[Breach]:
    """fla on several ranks."""
    if "cp_context" in call.arguments and not call.where and call.segments is not None:
        got, says = type(call.get("cp_context")).__name__, "A context holds local offsets alone, not those of the whole row."
        remedy = "Pass the global cu_seqlens beside it, or check kernel='fla_cp' with them."
        yield call.breach("context-unread", "cp_context", got, says, remedy, silent=True)


def _convolution(call: Call) -> Iterator[Breach]:
    shortest = min((n for n in call.lengths if n), default=call.T)
    states = call.training and call.is_set("output_final_state") and call.before(releases.FLA_STATES)
    if states and shortest < call.taps - 1:
        says = f"The gradient of a final state is wrong for sequences shorter than {call.taps - 1} (fla #1140, #1141)."
        remedy = f"Drop the final state in training, or sequences as short, or take fla {releases.FLA_STATES} or later."
        yield call.breach("short-state", "output_final_state", f"a sequence of {shortest}", says, remedy, silent=True)


def returning(call: Call) -> Iterator[Breach]:
    """Only equality within reach counts: a number that comes back joins two sequences across what stands between."""
    ids_BT, reach = call.numbers_BT, call.taps
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
    checks=words("container rows chunk-size states backward"), own=(_context,),
    empties="fla", shapes=_RULE,
)  # fmt: skip
_CONV = replace(
    FLA, name="fla.causal_conv1d",
    source="fla 0.5.2 modules/conv/triton/ops.py:64, 191, 383-386, cuda/ops.py:202; fla #955",
    kernel="fla_conv", tables={"chunk_indices": "conv"}, chunk_sizes=(), checks=words("container"),
    own=(_context, _convolution), shapes=_X | {"weight": "DW", "bias": "D"},
)  # fmt: skip
_MAMBA = Operator(
    "mamba.mamba_chunk_scan_combined", "mamba e9594ce ops/triton/ssd_combined.py:274, 599-604, 642; mamba #1015",
    kernel="causal_conv1d", numbers="seq_idx", reads=words("cu_seqlens"), checks=words("container"),
    own=(_mamba,), shapes={"x": "BTHV", "dt": "BTH"},
)  # fmt: skip
KERNEL_ROWS: tuple[Operator, ...] = (
    FLA,
    replace(
        FLA, name="fla.chunk_kda", source="fla 0.5.2 ops/kda/chunk.py:365-420", chunk_sizes=(32, 64),
        checks=FLA.checks | words("shape"), shapes=_RULE | {"g": "BTNK"},
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
        chunk_sizes=(), checks=words("container"), own=(), empties="legal", shapes={},
        ranks="state_passing",
    ),
    Operator(
        "causal_conv1d.causal_conv1d_fn",
        "causal-conv1d 1.6.1 csrc/causal_conv1d.cpp:175-198, causal_conv1d_interface.py:28-34",
        kernel="causal_conv1d", numbers="seq_idx", own=(returning,), shapes={"x": "BDT", "weight": "DW", "bias": "D"},
        checks=words("container shape"),
    ),
    _MAMBA,
    replace(_MAMBA, name="mamba.mamba_split_conv1d_scan_combined", shapes={"zxbcdt": "BTD"}),
)  # fmt: skip


# --- Ascend's


def _chain(call: Call) -> Iterator[Breach]:
    """The operators of the Gated DeltaNet chain, by release."""
    old = call.before(releases.FLA_NPU_A2)
    tails = [n for n in call.lengths if n % call.chunk_size]
    if call.training and old and call.T >= 32768:
        says = "In release 26.6.0 gradients of rows this long are NaN on A2 (#232)."
        yield call.breach("release", "T", str(call.T), says, "Use a later release, or shorter rows.", silent=True)
    if old and tails:
        says = "In release 26.6.0 v_new is off by up to 0.7 in short last chunks on A2 (#367, fixed in #368)."
        yield call.breach("release", call.where, f"lengths {tails[:8]}", says, "Use a later release.", silent=True)


def _scale(call: Call) -> Iterator[Breach]:
    if call.segments is not None and "scale" not in call.arguments:
        says, remedy = "Left out it is 1.0, where fla's rule has K**-0.5.", "Pass scale=K**-0.5, or the model's own."
        yield call.breach("scale", "scale", "nothing", says, remedy, silent=True)


def _flash(call: Call) -> Iterator[Breach]:
    """The vendor's whole rule; tables that it is given, by their block, it uses unread."""
    for name in ("chunk_indices", "chunk_indices_list"):
        if call.offsets[:1] != (0,):
            return
        given = call.get(name)
        by_block = given if isinstance(given, Mapping) or given is None else {call.chunk_size: given}
        for block, table in (by_block or {}).items():
            right = chunk_indices(call.offsets, whole_number(name, int(block), least=1)) if str(block).isdecimal() else None
            if right is None or host_array(name, table).reshape(-1).tolist() != right.reshape(-1).tolist():
                says = "It holds (sequence, chunk) for each piece of so many tokens, by their number as text."
                remedy = f"Leave {name} out: the function builds its own."
                yield call.breach("table", f"{name}[{block!r}]", "another table", says, remedy, silent=True)


def _npu_convolution(call: Call) -> Iterator[Breach]:
    x, mode = call.get("x"), call.arguments.get("activation_mode", 0)
    active = not isinstance(mode, int) or mode != 0
    rows = tuple(range(0, call.B * call.T + 1, call.T))
    if call.where and call.offsets != rows and (call.B > 1 or (isinstance(x, Tensor) and x.ndim == 3)):
        says = f"An x [B, T, D] has one sequence a row, {list(rows[:8])} here: others are refused by their count, or unread."
        remedy = "Pass x [T, D] with boundaries inside a row: x.reshape(-1, D)."
        got, alike = str(list(call.offsets[:8])), len(call.offsets) == len(rows)
        yield call.breach("rows", call.where, got, says, remedy, silent=alike)
    outside = ("query_start_loc", "cache_indices", "initial_state_mode", "num_accepted_tokens")
    unbound = [*(name for name in outside if name in call.arguments), *["activation_mode"] * active]
    if call.training and unbound and (call.wants_gradients or active):
        says = "The backward is bound only without boundaries, states and activation: here the output has no history."
        remedy = "Wrap it with npu_causal_conv1d_bwd in an autograd.Function and check both, activation apart; in inference "
        yield call.breach("history", ", ".join(unbound), "training", says, remedy + "pass training=False.", silent=True)


# --- rows

_NPU = "flash-linear-attention-npu 17e24fd "
_THD = {"q": "THK", "k": "THK", "v": "TNV", "g": "TN", "beta": "TN"}
_FLA_NPU = Operator(
    "fla_npu", _NPU + "recompute_w_u_fwd_tiling_processor.h:299-385, chunk_local_cumsum_tiling.cpp:259-288",
    kernel="fla_npu", offsets=("cu_seqlens",), tables={"chunk_indices": "rule"},
    host=True, chunk_sizes=(64, 128), own=(_chain,),
    checks=words("container rows first falling empty table alone chunk-size states"),
    shapes={
        **dict.fromkeys(("q", "k"), "BHTK"), **dict.fromkeys(("v", "u", "dv", "du", "d_o", "dox"), "BNTV"),
        **dict.fromkeys(("w", "dw", "gk", "gK"), "BNTK"), **dict.fromkeys(("A", "dA"), "BNTC"),
        **dict.fromkeys(("g", "beta"), "BNT"), "initial_state": "SNKV",
    },
)  # fmt: skip
NPU_ROWS: tuple[Operator, ...] = (
    _FLA_NPU,
    replace(
        _FLA_NPU, name="fla_npu.chunk_local_cumsum", kernel="fla_npu_cumsum", tables={"chunk_indices_out": "cumsum"},
        chunk_sizes=tuple(1 << n for n in range(9)), checks=words("container chunk-size states alone rows"),
        shapes={"g": "BNT"}, source=_NPU + "chunk_local_cumsum_tiling.cpp:211, 231, 252-279",
    ),
    replace(
        FLA, name="fla_npu.flash_gated_delta_rule", source=_NPU + "examples/flash_gated_delta_rule.py:481-516, 1126-1225",
        kernel="fla_npu_flash", copies=("cu_seqlens_list",), tables={}, reads=words("chunk_indices chunk_indices_list"),
        chunk_sizes=(64, 128), checks=words("container rows states shape"), own=(_chain, _flash), empties="never",
        shapes={**_FLA_NPU.shapes, "v": "BHTV", "g": "BTH", "beta": "BTH", "initial_state": "SHKV"},
    ),
    Operator(
        "fla_npu.causal_conv1d", _NPU + "causal_conv1d_tiling_validation.h:190-265, op_kernel/causal_conv1d.h:50-60, "
        "ops/ascendc/__init__.py:321-329",
        kernel="fla_npu_conv", offsets=("query_start_loc",), host=True, own=(_npu_convolution,), empties="legal",
        checks=words("container first falling last rows"),
    ),
    Operator(
        "fla_npu.recurrent_gated_delta_rule", _NPU + "_aclnn_ctypes.py:654-830; #641",
        kernel="fla_npu_recurrent", offsets=("actual_seq_lengths",), form="prefix and lengths",
        checks=words("container count rows shape"), most_tokens=8,
        backward=False, own=(_scale,), shapes=_THD | {"state": "SNVK"},
    ),
    Operator(
        "torch_npu.npu_chunk_gated_delta_rule", "op-plugin 517f2e7 documentation of npu_chunk_gated_delta_rule",
        kernel="torch_npu", offsets=("actual_seq_lengths",), form="lengths",
        checks=words("container"), own=(_scale,), shapes=_THD | {"initial_state": "SNVK"},
        backward=False,
    ),
)  # fmt: skip
"""`fla_npu` is what a whole training chain takes, the intersection of its operators."""


# --- layers of training stacks: transformers


def _layer(call: Call) -> Iterator[Breach]:
    """By release and installed kernels."""
    numbered, version = "seq_idx" in call.arguments, call.release("transformers")
    given = [name for name in (call.where, "seq_idx" * numbered) if name]
    if given and call.before(releases.BOUNDARIES_READ):
        says = f"transformers {version} reads no boundaries in its Gated DeltaNet layers; {releases.BOUNDARIES_READ} does."
        remedy = "Upgrade, or pass padded rows with a 2D mask."
        yield call.breach("release", ", ".join(given), "given", says, remedy, silent=True)
        return
    if call.packed and len(given) == 1:
        leaks = "convolution" if call.where else "rule"
        says = f"The rule reads cu_seq_lens_q and the convolution seq_idx: here the {leaks} runs from sequence to sequence."
        remedy = "Pass both: gated_delta_kwargs(segments, kernel='transformers')."
        yield call.breach("pair", given[0], "alone", says, remedy, silent=True)
    for package, name in (("fla", call.where), ("causal_conv1d", "seq_idx" * numbered)):
        if name and call.release(package) is None and call.before(releases.MISSING_KERNEL_RAISES):
            says = f"Without {package} a torch function stands in; transformers {version} drops boundaries in silence."
            remedy = f"Install {package} and name its release in versions, or pass padded rows with a 2D mask."
            yield call.breach("package", name, f"{package} is not there", says, remedy, silent=True)
    yield from _positions(call)
    yield from returning(call)
    yield from _agree(call)


def _positions(call: Call) -> Iterator[Breach]:
    """Positions that begin again say that rows are packed, and no recurrent layer reads them."""
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    if call.segments is not None or call.where or not isinstance(positions, Tensor):
        return
    if positions.ndim == 2 and not positions.is_meta:
        real = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == positions.shape else positions.cpu() > -1
        if bool(((positions.cpu()[:, 1:] == 0) & real[:, 1:] & real[:, :-1]).any()):
            says = "They begin again inside a row: it is packed, and recurrent layers read no positions."
            yield call.breach("positions-alone", "position_ids", shape_of(positions), says, silent=True)


def _agree(call: Call) -> Iterator[Breach]:
    """Numbers and offsets of one row; with the Segments at hand each is compared with them."""
    ids_BT = call.numbers_BT
    if call.segments is not None or not call.where or ids_BT.shape[0] != 1 or call.offsets[-1] != call.T:
        return
    begins = np.flatnonzero(ids_BT[0, 1:] != ids_BT[0, :-1]) + 1
    inner = np.unique([n for n in call.offsets if 0 < n < call.T])
    if not np.array_equal(begins, inner):
        says = f"Its numbers change at {begins[:8].tolist()}, and {call.where} begins sequences at {inner[:8].tolist()}."
        yield call.breach("disagree", "seq_idx", f"{len(begins) + 1} runs", says, silent=True)


# --- Megatron and its kin


def _fields(call: Call) -> Iterator[Breach]:
    """`PackedSeqParams`: its padded and actual offsets, its totals."""
    total = whole_number("total_tokens", call.arguments.get("total_tokens", call.T))
    if call.where and total != call.T:
        says = f"The row has {call.T} tokens; sequence numbers are cut off or added without a word."
        yield call.breach("total", "total_tokens", str(total), says, "Pass the width of the row.", silent=True)
    yield from _actual_offsets(call)


def _actual_offsets(call: Call) -> Iterator[Breach]:
    if call.where != "cu_seqlens_q_padded" or "cu_seqlens_q" not in call.arguments:
        return
    actual, _ = call.row("cu_seqlens_q")
    real = [end - start for start, end in pairwise(actual)]
    fits = len(real) == len(call.lengths) and all(0 <= r <= n for r, n in zip(real, call.lengths)) and actual[:1] == (0,)
    if actual != call.given and not fits:
        says = f"Actual offsets fit into the padded ones, {list(call.given[:8])}, sequence by sequence."
        remedy = "Take both from pad_documents(batch, cp)."
        yield call.breach("padded-actual", "cu_seqlens_q", str(list(actual[:12])), says, remedy, silent=True)


def _mindspeed(call: Call) -> Iterator[Breach]:
    """MindSpeed's own rule."""
    if call.where and call.is_set("initial_state") and not call.before(releases.MINDSPEED_TRITON_RULE):
        got = f"mindspeed {call.release('mindspeed')}"
        says = "With an initial state the rule falls back to one in torch, which is given no boundaries."
        yield call.breach("state-fallback", "initial_state", got, says, "Leave it out.", silent=True)
    yield from _fields(call)


_GDN = Operator(
    "transformers.gdn_layer", "transformers 5.23 integrations/hub_kernels.py:1033-1050, masking_utils.py:1521-1529",
    kernel="transformers", offsets=("cu_seq_lens_q",), numbers="seq_idx",
    reads=words("cu_seq_lens_k attention_mask position_ids seq_lens"),
    checks=words("container rows unread"), own=(_layer,),
    empties="fla", masks="multiplied", shapes={"hidden_states": "BTD"},
)  # fmt: skip
_MEGATRON = Operator(
    "megatron_core.GatedDeltaNet",
    "Megatron-LM d98e8a6 ssm/gated_delta_net/common.py:469-618; 0.16.1 ssm/gated_delta_net.py:297",
    kernel="megatron", offsets=("cu_seqlens_q_padded", "cu_seqlens_q"),
    reads=words("cu_seqlens_kv cu_seqlens_kv_padded attention_mask qkv_format total_tokens"),
    checks=words("container rows last"), own=(_fields,),
    empties="fla", masks="ignored", ranks="head_exchange_zigzag",
)  # fmt: skip
STACKS: tuple[Operator, ...] = (
    _GDN,
    _MEGATRON,
    replace(
        _MEGATRON, name="mindspeed.GatedDeltaNet", form="offsets or ends", own=(_mindspeed,), empties="never",
        source="MindSpeed core_r0.16.0 ssm/gated_delta_net.py:592-665, ops/triton/utils.py:73-78; "
        "core_r0.17.0 ssm/npu_chunk_gated_delta_rule.py:300-355",
    ),
)  # fmt: skip
"""Layers whose forward a user calls."""

# --- names

OPERATORS: dict[str, Operator] = {row.name: row for row in (*KERNEL_ROWS, *NPU_ROWS, *STACKS)}
KERNELS: dict[str, str] = {
    "transformers": "transformers.gdn_layer", "causal_conv1d": "causal_conv1d.causal_conv1d_fn",
    "fla": "fla.chunk_gated_delta_rule", "fla_conv": "fla.causal_conv1d", "fla_cp": "fla.build_cp_context",
    "fla_npu_cumsum": "fla_npu.chunk_local_cumsum", "fla_npu_flash": "fla_npu.flash_gated_delta_rule",
    "fla_npu_conv": "fla_npu.causal_conv1d", "fla_npu_recurrent": "fla_npu.recurrent_gated_delta_rule",
    "torch_npu": "torch_npu.npu_chunk_gated_delta_rule", "megatron": "megatron_core.GatedDeltaNet",
    "mindspeed": "mindspeed.GatedDeltaNet",
}  # fmt: skip


def find_operator(name: str) -> Operator | None:
    """The row of this kernel, if there is one. Modules between package and name do not count, nor does `npu_` of fla_npu."""
    package, _, path = name.partition(".")
    package, last = "mamba" if package == "mamba_ssm" else package, path.rpartition(".")[2]
    tried = (name, f"{package}.{last.removeprefix('npu_' if package == 'fla_npu' else '')}", f"{package}.npu_{path}")
    found = (OPERATORS.get(KERNELS.get(each, each)) for each in tried)
    return next((row for row in found if row is not None), None)


def operator_named(kernel: str) -> Operator:
    """Raises `CollateError` with close matches for names that are not known."""
    if (row := find_operator(str(kernel))) is None:
        near = get_close_matches(str(kernel), [*KERNELS, *OPERATORS], 3, 0.5) or list(KERNELS)
        rule = "Kernels are those of gated_delta_kwargs, and the operators that kernels/gated_delta knows."
        raise CollateError(explain("kernel", repr(kernel), rule, f"Close to it: {', '.join(near)}."))
    return row
