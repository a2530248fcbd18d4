"""Rules of the operators of flash-linear-attention-npu and torch_npu alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call
from collate_npu.kernels.gated_delta.tensor_rules import KDA_LAYOUTS


def npu(call: Call) -> Iterator[Breach]:
    """Rules of the kernels of flash-linear-attention-npu, by name and release."""
    name = call.operator.name.split(".")[-1]
    old = call.releases.before("fla_npu", "26.6.1")
    tails = [n for n in call.lengths if n % call.chunk_size]
    if "layout" in call.operator.checks and name.startswith("chunk_kda"):
        yield from _kda_layout(call, name)
    if name == "fla_npu" and call.training and old and call.T >= 32768:
        says = "In release 26.6.0 gradients of rows this long are NaN on A2 (#232)."
        yield call.breach("release", "T", str(call.T), says, "Use a later release, or shorter rows.", silent=True)
    if name == "chunk_gated_delta_rule_fwd_h" and old and tails:
        says = "In release 26.6.0 v_new is off by up to 0.7 in short last chunks on A2 (#367, fixed in #368)."
        yield call.breach("release", call.where, f"lengths {tails[:8]}", says, "Use a later release.", silent=True)
    if name == "chunk_gated_delta_rule_bwd_dhu" and "dht" in call.arguments:
        says = "dht was not used at all (#312), and which release mends it is not established."
        yield call.breach("dht", "dht", "a tensor", says, "Leave dht out: train without final states.", silent=True)
    if name == "chunk_kda_bwd":
        yield from _kda_backward(call)
    if name == "chunk_kda_fwd" and call.wants_gradients and len(call.lengths) > 64:
        says = "chunk_kda_bwd_intra takes 64 sequences, the forward 1024: this call fails in its backward."
        yield call.breach("limit", call.where, f"{len(call.lengths)} sequences", says, "Pack fewer sequences.", silent=False)
    if name == "solve_tri" and call.where and call.word("layout", "bsnd").lower() not in ("tnd", "ntd"):
        says = "Boundaries are read in layouts tnd and ntd alone; in others they are not used."
        got = f"layout {call.word('layout', 'bsnd')!r}"
        yield call.breach("layout", "layout", got, says, "Pass layout='tnd' and [T, H, BT].", silent=True)


def _kda_layout(call: Call, name: str) -> Iterator[Breach]:
    taken = ("TND", "BSND") if name == "chunk_kda_bwd_intra" and call.where else ("BSND", "BNSD", "TND", "NTD")
    layout = call.word("layout", "BSND")
    if layout not in taken:
        says, remedy = f"With boundaries it takes {', '.join(taken)}.", "Pass layout='TND' and tensors [T, H, D]."
        yield call.breach("layout", "layout", repr(layout), says, remedy)
    if name == "chunk_kda_bwd_intra":
        if "safe_gate" in call.arguments and not call.get("safe_gate"):
            says, remedy = "It has the safe gate alone.", "Pass safe_gate=True."
            yield call.breach("layout", "safe_gate", "False", says, remedy)
        for key, x in call.arguments.items():
            if isinstance(x, Tensor) and not x.is_contiguous():
                says, remedy = "Every input is contiguous.", f"Pass {key}.contiguous()."
                yield call.breach("strides", key, f"strides {x.stride()}", says, remedy)


def _kda_backward(call: Call) -> Iterator[Breach]:
    chunks = sum(-(-n // call.chunk_size) for n in call.lengths) or -(-call.T // call.chunk_size) * call.B
    tails = [n for n in call.lengths if n % 64]
    if chunks > 1024:
        says, remedy = "It takes at most 1024 chunks (#508).", "Use shorter rows, or chunk_size=128."
        yield call.breach("limit", "chunks", str(chunks), says, remedy)
    if tails:
        says = "dk and dg are wrong, or the call is refused, where a length is no multiple of 64 (#544, #733)."
        remedy = "Pad each sequence: sequence_multiple=64 of the collator, and padding=batch['cu_seqlens_padded'] here."
        silent = call.get("disable_recompute") is not False
        yield call.breach("tails", call.where, f"lengths {tails[:8]}", says, remedy, silent=silent)
    q, order = call.get("q"), KDA_LAYOUTS.get(call.word("layout", "BSND"), "")
    if isinstance(q, Tensor) and q.ndim == len(order) and call.T * (heads := q.shape[order.index("H")]) >= 2**21:
        says, remedy = "T * H is below 2**21 (#699).", "Use shorter rows."
        yield call.breach("limit", "q", str(call.T * heads), says, remedy)


def npu_conv(call: Call) -> Iterator[Breach]:
    """Rules of the convolution of flash-linear-attention-npu."""
    x, backward = call.get("x"), call.operator.name.endswith("_bwd")
    layout = call.word("input_layout")
    flat = layout in ("TND", "NTD") if layout or backward else isinstance(x, Tensor) and x.ndim == 2
    if flat and not call.where:
        says, remedy = "A flat x needs its boundaries.", "Pass query_start_loc."
        yield call.breach("missing", "query_start_loc", "nothing", says, remedy)
    if backward and call.where and layout and not flat:
        says, remedy = "Boundaries are for layouts TND and NTD.", "Pass input_layout='TND'."
        yield call.breach("layout", "input_layout", repr(layout), says, remedy)
    if backward and _is_on(call, "activation") and "y" not in call.arguments:
        says, remedy = "With an activation the backward needs y.", "Pass y, the output of the forward."
        yield call.breach("missing", "y", "nothing", says, remedy)
    modes = call.get("initial_state_mode")
    if isinstance(modes, (list, tuple)) and len(modes) != (len(call.lengths) or call.B):
        says, remedy = "There is one mode for each sequence.", "Pass one for each, or leave it out."
        yield call.breach("states", "initial_state_mode", f"{len(modes)} modes", says, remedy)
    if not backward:
        yield from _history(call)


def _is_on(call: Call, name: str) -> bool:
    value = call.get(name)
    return value is not None and not (isinstance(value, int) and value == 0)


def _history(call: Call) -> Iterator[Breach]:
    """Outside its binding the operator returns a tensor without history: what stands before it learns nothing."""
    active = _is_on(call, "activation_mode")
    outside = ("query_start_loc", "cache_indices", "initial_state_mode", "num_accepted_tokens")
    unbound = [*(name for name in outside if name in call.arguments), *["activation_mode"] * active]
    if call.training and unbound and (call.wants_gradients or active):
        says = "The backward is bound only without boundaries, states and activation: here the output has no history."
        remedy = "Wrap it with npu_causal_conv1d_bwd in an autograd.Function and check both, activation apart; in inference "
        yield call.breach("history", ", ".join(unbound), "training", says, remedy + "pass training=False.", silent=True)


def recurrent(call: Call) -> Iterator[Breach]:
    """`ssm_state_indices` says where the state of each token lies, and nobody looks whether there is such a place (#641)."""
    places, state = call.get("ssm_state_indices"), call.get("state")
    if not isinstance(places, Tensor):
        return
    if tuple(places.shape) != (call.T,):
        says, remedy = "It names a state for each token.", "Pass int32 [T]."
        yield call.breach("states", "ssm_state_indices", shape_of(places), says, remedy, silent=False)
    elif isinstance(state, Tensor) and not places.is_meta and call.T:
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= state.shape[0]:
            says, remedy = f"There are {state.shape[0]} states.", "Number them from 0."
            yield call.breach("states", "ssm_state_indices", f"{low} to {high}", says, remedy, silent=True)


def torch_npu_chunk(call: Call) -> Iterator[Breach]:
    """Rules of `torch_npu.npu_chunk_gated_delta_rule`."""
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


def masked_conv(call: Call) -> Iterator[Breach]:
    """Rules of the convolution that takes a mask in place of boundaries."""
    weight = call.get("weight")
    taps = weight.shape[0] if isinstance(weight, Tensor) and weight.ndim else 3
    if taps != 3:
        yield call.breach("taps", "weight", f"{taps} taps", "It takes 3.", "Use another convolution.")
    value = call.get("mask")
    if isinstance(value, Tensor) and shape_of(value).split()[0] != "bool":
        yield call.breach(
            "mask-dtype", "mask", shape_of(value), "It is bool, True = real.", "Pass segments.keep.", silent=False
        )
