"""Rules of Megatron, its kin, and other stacks with a module of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.host import whole_number
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import FIELDS, Call, UnreadableError, numbers


def megatron(call: Call) -> Iterator[Breach]:
    if call.where and call.releases.before("megatron", "0.18"):
        version = call.releases.text("megatron")
        says = f"megatron-core {version} has no packed Gated DeltaNet (NotImplementedError); 0.18 has."
        yield call.breach("release", call.where, "given", says, "Pass rows padded on the right, or upgrade.", silent=False)
    yield from fields(call)


def fields(call: Call) -> Iterator[Breach]:
    """`PackedSeqParams`: its format, its padded and actual offsets, its totals."""
    layout = call.word("qkv_format")
    total = whole_number("total_tokens", call.get("total_tokens")) if "total_tokens" in call.arguments else call.T
    if call.where and layout not in ("", "thd"):
        says, remedy = "Boundaries are read of qkv_format 'thd' alone.", "Pass qkv_format='thd'."
        yield call.breach("format", "qkv_format", repr(layout), says, remedy)
    if layout == "thd" and not call.where:
        yield call.breach("missing", "cu_seqlens_q", "nothing", "qkv_format 'thd' needs boundaries.", silent=False)
    if call.where and total != call.T:
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
        if actual == call.given:
            return
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


def mindspeed(call: Call) -> Iterator[Breach]:
    """Rules of MindSpeed's Gated DeltaNet module, by release."""
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
    yield from fields(call)


def mindspeed_llm(call: Call) -> Iterator[Breach]:
    """Rules of MindSpeed-LLM's layers: what says where a sequence begins is not used there."""
    if call.where or any(name in call.arguments for name in FIELDS) or "packed_seq_params" in call.arguments:
        fsdp2 = call.operator.name.endswith("fsdp2")
        if fsdp2 and not call.packed and call.B == 1:
            return
        says = "The convolution is given no boundary." if fsdp2 else "packed_seq_params is taken and never used."
        remedy = "Pass rows padded on the right, one sequence a row."
        yield call.breach("boundaries-unused", call.where or "packed_seq_params", "given", says, remedy, silent=True)


def bridge_next(call: Call) -> Iterator[Breach]:
    held = whole_number("num_samples", call.get("num_samples")) if "num_samples" in call.arguments else len(call.lengths)
    if call.where and held != len(call.lengths):
        says = f"The offsets hold {len(call.lengths)} sequences; others are computed as samples."
        yield call.breach("samples", "num_samples", str(held), says, "Pass their number.", silent=True)
    yield from fields(call)


def torchtitan(call: Call) -> Iterator[Breach]:
    if call.B > 1 and not call.where:
        says = "Rows are laid one behind the other, [1, B * L], and without boundaries states run from row to row."
        remedy = "Pass VarlenMetadata with host offsets over the folded row, or one row."
        yield call.breach("fold", "attention_masks", f"None with {call.B} rows", says, remedy, silent=True)


def te(call: Call) -> Iterator[Breach]:
    if not call.where:
        yield call.breach("missing", "cu_seqlens_q", "nothing", "It takes packed rows alone.", silent=False)
