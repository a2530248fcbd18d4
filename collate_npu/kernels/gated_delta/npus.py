"""Kernels of NPUs: the port of fla to Ascend, and torch_npu; rows, and rules of theirs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from collate_npu.arrays import host_array, whole_number
from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.boundaries import chunk_indices
from collate_npu.kernels.gated_delta.kernels import FLA
from collate_npu.kernels.gated_delta.operator_call import Call, Operator, words
from collate_npu.releases import FLA_NPU_A2


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


def _scale(call: Call) -> Iterator[Breach]:
    if call.segments is not None and "scale" not in call.arguments:
        says, remedy = "Left out it is 1.0, where fla's rule has K**-0.5.", "Pass scale=K**-0.5, or the model's own."
        yield call.breach("scale", "scale", "nothing", says, remedy, silent=True)


def _cumsum(call: Call) -> Iterator[Breach]:
    if call.arguments.get("head_first", True) is False:
        says, remedy = "It takes g as [B, H, T] alone.", "Leave head_first out, and transpose g (and make it contiguous)."
        yield call.breach("layout", "head_first", "False", says, remedy, silent=False)


def _flash(call: Call) -> Iterator[Breach]:
    """The vendor's whole rule; tables that it is given, by their block, it uses unread."""
    given = [shape_of(call.get(name)) for name in "qkv" if isinstance(call.get(name), Tensor)]
    if (dtypes := {each.split()[0] for each in given}) and dtypes not in ({"float16"}, {"bfloat16"}):
        says, remedy = "They are all bfloat16 or all float16.", "Pass q, k and v as bfloat16."
        yield call.breach("dtype", "q, k, v", ", ".join(given), says, remedy, silent=False)
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
    if isinstance(x, Tensor) and x.ndim == 2 and not call.where:
        says = "A flat x needs its boundaries."
        yield call.breach("missing", "query_start_loc", "nothing", says, "Pass query_start_loc.")
    rows = tuple(range(0, call.B * call.T + 1, call.T))
    if call.where and call.offsets != rows and (call.B > 1 or (isinstance(x, Tensor) and x.ndim == 3)):
        says = f"An x [B, T, D] has one sequence a row, {list(rows[:8])} here: others are refused by their count, or unread."
        remedy = "Pass x [T, D] with boundaries inside a row: x.reshape(-1, D)."
        got, alike = str(list(call.offsets[:8])), len(call.offsets) == len(rows)
        yield call.breach("rows", call.where, got, says, remedy, silent=alike)
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
    yield from _scale(call)
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

_NPU = "flash-linear-attention-npu 17e24fd "
_THD = {"q": "THK", "k": "THK", "v": "TNV", "g": "TN", "beta": "TN"}
_FLA_NPU = Operator(
    "fla_npu", _NPU + "recompute_w_u_fwd_tiling_processor.h:299-385, chunk_local_cumsum_tiling.cpp:259-288",
    kernel="fla_npu", offsets=("cu_seqlens",), tables={"chunk_indices": "rule"},
    needs=words("chunk_indices"), host=True, chunk_sizes=(64, 128), own=(_chain,),
    checks=words("container rows first falling empty table missing chunk-size states"),
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
        needs=words("chunk_indices_out"), chunk_sizes=tuple(1 << n for n in range(9)), own=(_chain, _cumsum),
        checks=words("container chunk-size states missing rows"), shapes={"g": "BNT"},
        source=_NPU + "chunk_local_cumsum_tiling.cpp:211, 231, 252-279",
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
        checks=words("container first falling last missing rows channels taps states"),
    ),
    Operator(
        "fla_npu.recurrent_gated_delta_rule", _NPU + "_aclnn_ctypes.py:654-830; #641",
        kernel="fla_npu_recurrent", offsets=("actual_seq_lengths",), form="prefix and lengths",
        needs=words("actual_seq_lengths"), checks=words("container count rows missing shape"), limits={"tokens": 8},
        backward=False, own=(_scale,), shapes=_THD | {"state": "SNVK"},
    ),
    Operator(
        "torch_npu.npu_chunk_gated_delta_rule", "op-plugin 517f2e7 documentation of npu_chunk_gated_delta_rule",
        kernel="torch_npu", offsets=("actual_seq_lengths",), form="lengths",
        needs=words("actual_seq_lengths"), checks=words("container missing"), own=(_torch_npu,),
        shapes=_THD | {"initial_state": "SNVK"},
        limits={"K": 128, "V": 128}, backward=False,
    ),
)  # fmt: skip
"""`fla_npu` is what a whole training chain takes, the intersection of its operators."""
