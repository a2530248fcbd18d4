"""What is true of one operator or stack alone: its releases, its partners, its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import FIELDS, Call, UnreadableError, numbers

LAST_RANK_BASED = "17e24fd"
MAX_TAPS = 4
"""The widest convolution of causal-conv1d (csrc/causal_conv1d.cpp:183)."""


def breaches(call: Call) -> Iterator[Breach]:
    if call.training and not call.operator.backward:
        says = "The operator has no backward: it is for decoding and inference."
        remedy = "Use the chunked rule for training, or check with training=False."
        yield call.breach("backward", "training", "True", says, remedy)
    for name in (call.operator.name, call.operator.name.split(".")[0]):
        if rule := _RULES.get(name):
            yield from rule(call)


# --- fla


def _fla(call: Call) -> Iterator[Breach]:
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


def _fla_conv(call: Call) -> Iterator[Breach]:
    backend = call.get("backend") or "triton"
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


def _conv1d(call: Call) -> Iterator[Breach]:
    if "seq_idx" not in call.arguments:
        return
    for name in ("initial_states", "return_final_states"):
        if call.is_set(name) and call.releases.before("causal_conv1d", "1.6.2"):
            says = f"causal-conv1d {call.releases.text('causal_conv1d')} takes no states with seq_idx."
            yield call.breach("numbers-states", name, "given beside seq_idx", says, f"Leave {name} out.")
    yield from _returning(call, taps(call))


def _returning(call: Call, reach: int) -> Iterator[Breach]:
    """Only equality within reach counts: a number that comes back joins two sequences across what stands between."""
    ids_BT = _numbers(call)
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


def _mamba(call: Call) -> Iterator[Breach]:
    if "cu_seqlens" in call.arguments and "seq_idx" not in call.arguments:
        says = "cu_seqlens serves return_varlen_states alone: without seq_idx states run on from sequence to sequence."
        yield call.breach("offsets-alone", "cu_seqlens", "no seq_idx", says, "Pass seq_idx: " + _OWN, silent=True)
    if call.B * call.T > _MAMBA_TOKENS:
        says, remedy = f"Its int32 pointers overflow at about {_MAMBA_TOKENS} tokens (mamba #1015).", "Use shorter rows."
        yield call.breach("tokens", "T", str(call.B * call.T), says, remedy, silent=True)
    for row in _numbers(call):
        firsts = row[np.insert(row[1:] != row[:-1], 0, True)]
        if len(np.unique(firsts)) != len(firsts):
            says = "Tokens of the same number in a chunk are one sequence, wherever they stand."
            yield call.breach(
                "numbers-return", "seq_idx", str(firsts[:12].tolist()), says, "Number them anew: " + _OWN, silent=True
            )
            return


_MAMBA_TOKENS = 61_000
_OWN = "gated_delta_kwargs(segments, kernel='causal_conv1d')."


def _numbers(call: Call) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    given = call.numbers_BT
    return given if given.ndim == 2 and given.size else np.zeros((0, 0), np.int64)


def taps(call: Call) -> int:
    weight = call.get("weight")
    return int(weight.shape[-1]) if isinstance(weight, Tensor) and weight.ndim == 2 else MAX_TAPS


# --- transformers


def _transformers(call: Call) -> Iterator[Breach]:
    releases, numbered, version = call.releases, "seq_idx" in call.arguments, call.releases.text("transformers")
    given = [name for name in (call.where, "seq_idx" * numbered) if name]
    if given and releases.before("transformers", "5.10"):
        says = f"transformers {version} reads no boundaries in its Gated DeltaNet layers; 5.10 is the first read that does."
        yield call.breach(
            "release", ", ".join(given), "given", says, "Upgrade, or pass padded rows with a 2D mask.", silent=True
        )
        return
    if call.packed and len(given) == 1:
        leaks = "convolution" if call.where else "rule"
        says = f"The rule reads cu_seq_lens_q and the convolution seq_idx: here the {leaks} runs from sequence to sequence."
        remedy = "Pass both: gated_delta_kwargs(segments, kernel='transformers')."
        yield call.breach("pair", given[0], "alone", says, remedy, silent=True)
    for package, name in (("fla", call.where), ("causal_conv1d", "seq_idx" * numbered)):
        if name and not releases.has(package):
            old = releases.before("transformers", "5.20")
            says = f"Without {package} a torch function stands in, which knows no boundaries" + (
                f"; transformers {version} drops them in silence." if old else " (transformers raises)."
            )
            remedy = f"Install {package} and name its release in versions, or pass padded rows with a 2D mask."
            yield call.breach("package", name, f"{package} is not there", says, remedy, silent=old)
    yield from _positions(call)
    if given and not list(_numbers_rules(call)):
        yield from _returning(call, MAX_TAPS)
        yield from _agree(call)


def _numbers_rules(call: Call) -> Iterator[bool]:
    given = call.get("seq_idx")
    if isinstance(given, Tensor) and tuple(given.shape) != (call.B, call.T):
        yield True


def _positions(call: Call) -> Iterator[Breach]:
    """Positions that begin again say that rows are packed, and no recurrent layer reads them."""
    positions = call.get("position_ids")
    if call.trusted or call.where or not isinstance(positions, Tensor) or positions.ndim != 2 or positions.is_meta:
        return
    mask = call.get("attention_mask")
    real = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == positions.shape else positions.cpu() > -1
    again = (positions.cpu()[:, 1:] == 0) & real[:, 1:] & real[:, :-1]
    if bool(again.any()):
        says = "They begin again inside a row: it is packed, and recurrent layers read no positions."
        yield call.breach("positions-alone", "position_ids", shape_of(positions), says, silent=True)


def _agree(call: Call) -> Iterator[Breach]:
    ids_BT = _numbers(call)
    if not call.where or not ids_BT.size or call.offsets[-1] != ids_BT.shape[1] or call.B != 1:
        return
    begins = np.flatnonzero(ids_BT[0, 1:] != ids_BT[0, :-1]) + 1
    inner = np.unique([n for n in call.offsets if 0 < n < call.T])
    if not np.array_equal(begins, inner):
        says = f"Its numbers change at {begins[:8].tolist()}, and {call.where} begins sequences at {inner[:8].tolist()}."
        yield call.breach("disagree", "seq_idx", f"{len(begins) + 1} runs", says, silent=True)


# --- Ascend


def _npu(call: Call) -> Iterator[Breach]:
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
    if name == "solve_tri" and call.where and str(call.get("layout") or "bsnd").lower() not in ("tnd", "ntd"):
        says = "Boundaries are read in layouts tnd and ntd alone; in others they are not used."
        got = f"layout {call.get('layout') or 'bsnd'!r}"
        yield call.breach("layout", "layout", got, says, "Pass layout='tnd' and [T, H, BT].", silent=True)


def _kda_layout(call: Call, name: str) -> Iterator[Breach]:
    taken = ("TND", "BSND") if name == "chunk_kda_bwd_intra" and call.where else ("BSND", "BNSD", "TND", "NTD")
    layout = call.get("layout") or "BSND"
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
        remedy = "Pad each sequence to a multiple of 64, gated_delta_kwargs(..., padding='behind')."
        silent = call.get("disable_recompute") is not False
        yield call.breach("tails", call.where, f"lengths {tails[:8]}", says, remedy, silent=silent)
    q = call.get("q")
    if (
        isinstance(q, Tensor)
        and q.ndim > 2
        and call.T * max(q.shape[-2], q.shape[-3] if q.ndim == 4 else 0) >= 2**21 > call.T
    ):
        heads = q.shape[-2] if q.shape[-3] == call.T else q.shape[-3]
        if call.T * heads >= 2**21:
            says, remedy = "T * H is below 2**21 (#699).", "Use shorter rows."
            yield call.breach("limit", "q", str(call.T * heads), says, remedy)


def _npu_conv(call: Call) -> Iterator[Breach]:
    x, backward = call.get("x"), call.operator.name.endswith("_bwd")
    layout = str(call.get("input_layout") or "")
    flat = layout in ("TND", "NTD") if layout or backward else isinstance(x, Tensor) and x.ndim == 2
    if flat and not call.where:
        says, remedy = "A flat x needs its boundaries.", "Pass query_start_loc."
        yield call.breach("missing", "query_start_loc", "nothing", says, remedy)
    if backward and call.where and layout and not flat:
        says, remedy = "Boundaries are for layouts TND and NTD.", "Pass input_layout='TND'."
        yield call.breach("layout", "input_layout", repr(layout), says, remedy)
    if backward and call.is_set("activation") and call.get("activation") != 0 and "y" not in call.arguments:
        says, remedy = "With an activation the backward needs y.", "Pass y, the output of the forward."
        yield call.breach("missing", "y", "nothing", says, remedy)
    modes = call.get("initial_state_mode")
    if isinstance(modes, (list, tuple)) and len(modes) != (len(call.lengths) or call.B):
        says, remedy = "There is one mode for each sequence.", "Pass one for each, or leave it out."
        yield call.breach("states", "initial_state_mode", f"{len(modes)} modes", says, remedy)
    if not backward:
        yield from _history(call)


def _history(call: Call) -> Iterator[Breach]:
    """Outside its binding the operator returns a tensor without history: what stands before it learns nothing."""
    active = call.get("activation_mode") not in (None, 0, False)
    outside = ("query_start_loc", "cache_indices", "initial_state_mode", "num_accepted_tokens")
    unbound = [*(name for name in outside if name in call.arguments), *["activation_mode"] * active]
    if call.training and unbound and (call.wants_gradients or active):
        says = "The backward is bound only without boundaries, states and activation: here the output has no history."
        remedy = "Wrap it with npu_causal_conv1d_bwd in an autograd.Function and check both, activation apart; in inference "
        yield call.breach("history", ", ".join(unbound), "training", says, remedy + "pass training=False.", silent=True)


# --- Megatron and its kin


def _megatron(call: Call) -> Iterator[Breach]:
    if call.where and call.releases.before("megatron", "0.18"):
        version = call.releases.text("megatron")
        says = f"megatron-core {version} has no packed Gated DeltaNet (NotImplementedError); 0.18 has."
        yield call.breach("release", call.where, "given", says, "Pass rows padded on the right, or upgrade.", silent=False)
    yield from _fields(call)


def _fields(call: Call) -> Iterator[Breach]:
    """`PackedSeqParams`: its format, its padded and actual offsets, its totals."""
    layout, total = call.get("qkv_format"), call.get("total_tokens")
    if call.where and layout not in (None, "thd"):
        says, remedy = "Boundaries are read of qkv_format 'thd' alone.", "Pass qkv_format='thd'."
        yield call.breach("format", "qkv_format", repr(layout), says, remedy)
    if layout == "thd" and not call.where:
        yield call.breach("missing", "cu_seqlens_q", "nothing", "qkv_format 'thd' needs boundaries.", silent=False)
    if call.where and total is not None and total != call.T:
        says = f"The row has {call.T} tokens; sequence numbers are cut off or added without a word."
        yield call.breach("total", "total_tokens", str(total), says, "Pass the width of the row.", silent=True)
    if (call.is_set("deterministic") or call.is_set("deterministic_mode")) and call.where:
        says, remedy = "In deterministic mode there is no packed rule.", "Leave it off, or pass rows padded on the right."
        yield call.breach("deterministic", "deterministic_mode", "True", says, remedy)
    yield from _actual_offsets(call)


def _actual_offsets(call: Call) -> Iterator[Breach]:
    for q, kv in (("cu_seqlens_q", "cu_seqlens_kv"), ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")):
        if q in call.arguments and kv in call.arguments and (got := _differ(call, q, kv)):
            yield call.breach("keys", kv, got, f"Recurrent layers have one row of offsets, {q}.", f"Pass {q} for both.")
    if call.where == "cu_seqlens_q_padded" and "cu_seqlens_q" in call.arguments:
        actual = numbers(call, "cu_seqlens_q", host=False)
        real = [end - start for start, end in pairwise(actual)]
        if len(real) != len(call.lengths) or any(r < 0 or r > n for r, n in zip(real, call.lengths)) or actual[:1] != (0,):
            says = f"Actual offsets fit into the padded ones, {list(call.given[:8])}, sequence by sequence."
            remedy = "Take both from pad_documents(batch, cp)."
            yield call.breach("padded-actual", "cu_seqlens_q", str(list(actual[:12])), says, remedy, silent=True)


def _differ(call: Call, q: str, kv: str) -> str:
    try:
        left, right = (numbers(call, name, host=False) for name in (q, kv))
    except UnreadableError as error:
        return str(error)
    return "" if left == right else str(list(right[:12]))


def _bridge_transformers(call: Call) -> Iterator[Breach]:
    if call.packed and not call.releases.before("transformers", "5.15"):
        version = call.releases.text("transformers")
        says = f"With transformers {version} the convolution gets no boundary (its patch is for releases before 5.15)."
        remedy = "Use USE_MCORE_GDN=1, or transformers before 5.15."
        yield call.breach("release", call.where, "several sequences", says, remedy, silent=True)
    if call.packed and not call.releases.has("fla"):
        yield call.breach("package", call.where, "fla is not there", "Boundaries need fla.", "Install it.", silent=False)


def _mindspeed(call: Call) -> Iterator[Breach]:
    releases, version = call.releases, call.releases.text("mindspeed")
    if releases.before("mindspeed", "0.16"):
        says, remedy = f"MindSpeed {version} has no Gated DeltaNet module.", "Use 0.16 or later."
        yield call.breach("release", "versions", f"mindspeed {version}", says, remedy, silent=False)
    newer = not releases.before("mindspeed", "0.17")
    if newer and call.where and call.is_set("initial_state"):
        says = "With an initial state the rule falls back to one in torch, which is given no boundaries."
        yield call.breach("state-fallback", "initial_state", f"mindspeed {version}", says, "Leave it out.", silent=True)
    megatron = "megatron" if "megatron" in releases.named else "mindspeed"
    if newer and call.where and releases.before(megatron, "0.18"):
        says = f"It is Megatron's own module, and of {megatron} {releases.text(megatron)} that has no packed rows."
        yield call.breach(
            "release", call.where, "given", says, "Pass rows padded on the right, or upgrade both.", silent=False
        )
    floats = [n for n in ("q", "k", "v") if isinstance(call.get(n), Tensor) and shape_of(call.get(n)).startswith("float32")]
    if newer and floats:
        says, remedy = "The rule takes 16-bit floats.", "Pass bfloat16."
        yield call.breach("float32", floats[0], "float32", says, remedy, silent=False)
    yield from _fields(call)


def _mindspeed_llm(call: Call) -> Iterator[Breach]:
    if call.where or any(name in call.arguments for name in FIELDS) or "packed_seq_params" in call.arguments:
        fsdp2 = call.operator.name.endswith("fsdp2")
        if fsdp2 and not call.packed and call.B == 1:
            return
        says = "The convolution is given no boundary." if fsdp2 else "packed_seq_params is taken and never used."
        remedy = "Pass rows padded on the right, one sequence a row."
        yield call.breach("boundaries-unused", call.where or "packed_seq_params", "given", says, remedy, silent=True)


def _bridge_next(call: Call) -> Iterator[Breach]:
    held = call.get("num_samples")
    if call.where and held is not None and held != len(call.lengths):
        says = f"The offsets hold {len(call.lengths)} sequences; others are computed as samples."
        yield call.breach("samples", "num_samples", str(held), says, "Pass their number.", silent=True)
    yield from _fields(call)


# --- others


def _torchtitan(call: Call) -> Iterator[Breach]:
    if call.B > 1 and not call.where:
        says = "Rows are laid one behind the other, [1, B * L], and without boundaries states run from row to row."
        remedy = "Pass VarlenMetadata with host offsets over the folded row, or one row."
        yield call.breach("fold", "attention_masks", f"None with {call.B} rows", says, remedy, silent=True)


def _te(call: Call) -> Iterator[Breach]:
    if not call.where:
        yield call.breach("missing", "cu_seqlens_q", "nothing", "It takes packed rows alone.", silent=False)


def _masked_conv(call: Call) -> Iterator[Breach]:
    taps = call.get("weight").shape[0] if isinstance(call.get("weight"), Tensor) else 3
    if taps != 3:
        yield call.breach("taps", "weight", f"{taps} taps", "It takes 3.", "Use another convolution.")
    value = call.get("mask")
    if isinstance(value, Tensor) and shape_of(value).split()[0] != "bool":
        yield call.breach(
            "mask-dtype", "mask", shape_of(value), "It is bool, True = real.", "Pass segments.keep.", silent=False
        )


_RULES: dict[str, Callable[[Call], Iterator[Breach]]] = {
    "fla": _fla,
    "fla.causal_conv1d": _fla_conv,
    "causal_conv1d": _conv1d,
    "mamba": _mamba,
    "transformers": _transformers,
    "fla_npu": _npu,
    "fla_npu.causal_conv1d": _npu_conv,
    "fla_npu.causal_conv1d_bwd": _npu_conv,
    "megatron_core": _megatron,
    "mcore_bridge.GatedDeltaNet": _fields,
    "mcore_bridge.Qwen3_5MoeGatedDeltaNet(USE_MCORE_GDN=0)": _bridge_transformers,
    "mcore_bridge.Qwen3NextGatedDeltaNet(USE_MCORE_GDN=0)": _bridge_next,
    "mindspeed": _mindspeed,
    "mindspeed_llm": _mindspeed_llm,
    "torchtitan": _torchtitan,
    "te": _te,
    "torch_npu.npu_masked_causal_conv1d": _masked_conv,
}
"""By operator or by package, the part before the dot."""
