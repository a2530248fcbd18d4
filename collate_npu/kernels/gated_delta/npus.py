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
from collate_npu.kernels.gated_delta.operator_call import KDA_LAYOUTS, SOLVE_LAYOUTS, Call, Operator, words
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
    if "chunk_bwd_dqkwg" in call.operator.name:
        yield from _scale(call)
    if "dht" in call.arguments:
        says = "dht was not used at all (#312), and which release mends it is not established."
        yield call.breach("dht", "dht", "a tensor", says, "Leave dht out: train without final states.", silent=True)


def _scale(call: Call) -> Iterator[Breach]:
    if call.segments is not None and "scale" not in call.arguments:
        says, remedy = "Left out it is 1.0, where fla's rule has K**-0.5.", "Pass scale=K**-0.5, or the model's own."
        yield call.breach("scale", "scale", "nothing", says, remedy, silent=True)


def _head_sizes(call: Call) -> Iterator[Breach]:
    v = call.get("v")
    if isinstance(v, Tensor) and v.ndim == 4 and v.shape[3] not in (128, 256):
        yield call.breach("head-size", "v", shape_of(v), "V is 128 or 256.", "Use another rule for this size.", silent=False)


def _solve(call: Call) -> Iterator[Breach]:
    """Any other text is bsnd to the host, capitals among them (solve_tri_tiling.cpp:43-50)."""
    layout = call.word("layout", "bsnd")
    if layout not in (taken := ("tnd", "ntd") if call.where else SOLVE_LAYOUTS):
        says = f"It takes {', '.join(taken)}{' with boundaries' * bool(call.where)}, and reads any other as bsnd."
        remedy = "Pass layout='tnd' and a tensor [T, H, C]." if call.where else "Pass it in small letters."
        yield call.breach("layout", "layout", repr(layout), says, remedy, silent=True)


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
_LINK = replace(_FLA_NPU, checks=words("container chunk-size states missing"))
CHAIN = (
    replace(_LINK, name="fla_npu.chunk_fwd_o"),
    *(replace(_LINK, name=f"fla_npu.{name}", checks=_LINK.checks | {"rows"}) for name in (
        "prepare_wy_repr_bwd_full", "prepare_wy_repr_bwd_da", "chunk_bwd_dv_local", "chunk_bwd_dqkwg",
        "chunk_gated_delta_rule_bwd_dhu",
    )),
    replace(_LINK, name="fla_npu.recompute_w_u_fwd", own=(_chain, _head_sizes),
            source=_NPU + "recompute_w_u_fwd_tiling_processor.h:293-385"),
    replace(_LINK, name="fla_npu.chunk_gated_delta_rule_fwd_h", needs=words(""), source=_NPU + "_aclnn_ctypes.py:575-588",
            checks=_LINK.checks | {"shape"}),
    replace(_LINK, name="fla_npu.chunk_scaled_dot_kkt", chunk_sizes=(16, 32, 64, 128),
            source=_NPU + "chunk_scaled_dot_kkt_tiling.cpp:36, 249-262"),
    replace(_LINK, name="fla_npu.chunk_local_cumsum", kernel="fla_npu_cumsum", tables={"chunk_indices_out": "cumsum"},
            needs=words("chunk_indices_out"), chunk_sizes=tuple(1 << n for n in range(9)), own=(_chain, _cumsum),
            checks=_LINK.checks | {"rows"}, shapes={"g": "BNT"},
            source=_NPU + "chunk_local_cumsum_tiling.cpp:211, 231, 252-279"),
    replace(_LINK, name="fla_npu.solve_tri", own=(_chain, _solve), chunk_sizes=(16, 32, 64, 128),
            checks=_LINK.checks - {"chunk-size"}, source=_NPU + "solve_tri_tiling.cpp:43-105, op_kernel/solve_tri.cpp:48"),
)  # fmt: skip
"""The operators of a training chain, each with what its own host code takes."""
NPU_ROWS: tuple[Operator, ...] = (
    _FLA_NPU,
    *CHAIN,
    replace(
        FLA, name="fla_npu.flash_gated_delta_rule", source=_NPU + "examples/flash_gated_delta_rule.py:481-516, 1126-1225",
        kernel="fla_npu_flash", copies=("cu_seqlens_list",), tables={}, reads=words("chunk_indices chunk_indices_list"),
        chunk_sizes=(64, 128), checks=words("container rows states shape"), own=(_chain, _flash), empties="never",
        shapes={**_FLA_NPU.shapes, "v": "BHTV", "g": "BTH", "beta": "BTH", "initial_state": "SHKV"},
    ),
    replace(
        _FLA_NPU, name="fla_npu.chunk_kda_fwd",
        source=_NPU + "_aclnn_ctypes.py:1066-1182; aclnn_chunk_kda_fwd.cpp:201-255",
        needs=words(""), own=(_kda,), empties="legal", shapes={}, limits={"sequences": 1024},
        checks=words("container rows first falling last table chunk-size states limit layout shape state-dtype"),
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
