"""What the operator's own host code refuses, as far as a call could not be read otherwise.

The host code refuses more, with an error at run time on the card: dtypes, head sizes, bands that cross the scores, a prefix
mask for all rows, settings of dropout. That is left to it. Source tags are explained in `operator_call`.
"""

from __future__ import annotations

from collections.abc import Iterator

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.fusion_attention.geometry import PREFIX_TRIANGLE, TRIANGLE
from collate_npu.kernels.fusion_attention.operator_call import DEFAULTS, LISTS, RANKS, AttentionCall

COMPRESSED = {2: TRIANGLE, 3: TRIANGLE, 4: TRIANGLE, 6: PREFIX_TRIANGLE, 7: TRIANGLE, 8: TRIANGLE}
"""The shape of the mask that each compressed sparse mode takes."""


def breaches(call: AttentionCall) -> Iterator[Breach]:
    """The rules this call breaks. Each group builds on the ones before it, so the first that is broken ends the reading."""
    for group in (_arguments, _sequences, _mask, _sparsity):
        found = list(group(call))
        yield from found
        if found or (group is _sequences and call.atten_mask is None):
            return  # without a mask every mode and token value is let through, and ignored (T:799, T:4121)


def _arguments(call: AttentionCall) -> Iterator[Breach]:
    for name in sorted(call.given - DEFAULTS.keys()):
        says, remedy = "npu_fusion_attention has no such argument.", "Its spelling is pre_tockens, next_tockens."
        yield Breach("argument", name, "an argument", says, remedy, "PD")
    if call.layout not in tuple(RANKS):
        says, remedy = f"The layouts are {', '.join(RANKS)}.", "Name the one q, k and v are in."
        yield Breach("layout", "input_layout", repr(call.layout), says, remedy, "P:743")
    modes = (0, 1, 2, 3, 4, 6, 7, 8) if call.tnd else (0, 1, 2, 3, 4, 5, 6)
    if call.mode not in modes:
        says = f"Layout {call.layout} takes sparse_mode {', '.join(map(str, modes))}."
        remedy = "Use mode 6 for a prefix under TND; 7 and 8 are for TND alone."
        yield Breach("sparse-mode", "sparse_mode", str(call.mode), says, remedy, "P:772-786, T:768, T:4098")
    if min(call.N, call.Nkv, call.D) < 1 or call.N % call.Nkv:
        says = "Query heads are a whole multiple of key heads, and no head is empty."
        remedy = "Pass head_num as the number of query heads."
        got = f"{call.N} query heads, {call.Nkv} key heads, of {call.D} elements"
        yield Breach("heads", "head_num", got, says, remedy, "T:1099")
    if not call.tnd and any(ends is not None for ends in call.ends):
        says, remedy = "Length lists are read under layout TND alone.", "Pass input_layout='TND' and packed tensors."
        source = "P:901-918, A:875; Ascend 950 takes them"
        yield Breach("lists-outside-tnd", "actual_seq_qlen", f"layout {call.layout}", says, remedy, source)


def _sequences(call: AttentionCall) -> Iterator[Breach]:
    if not call.tnd:
        return
    q_ends, kv_ends = call.ends
    if not q_ends or not kv_ends or len(q_ends) != len(kv_ends):
        says = "TND needs both lists, not empty and equally long."
        remedy = "Pass the cumulative ends of the same sequences for query and key, on the host."
        got = f"{len(q_ends or ())} and {len(kv_ends or ())} ends"
        yield Breach("tnd-lists", ", ".join(LISTS), got, says, remedy, "P:779, T:1176")
        return
    for i, (name, T) in enumerate(zip(LISTS, (call.Tq, call.Tkv))):
        total = sum(pair[i] for pair in call.lengths)
        if T is not None and total > T:
            says, remedy = "Sequences lie inside the packed tensor.", "Build the list from the tensor that is passed."
            yield Breach("tnd-total", name, f"lengths that add up to {total}, of {T} tokens", says, remedy, "T:1181")


def _mask(call: AttentionCall) -> Iterator[Breach]:
    assert call.atten_mask is not None
    if tuple(call.atten_mask.shape) not in (shapes := _shapes(call)):
        says = f"sparse_mode {call.mode} takes {' or '.join(str(list(each)) for each in shapes)}: no form for keys alone."
        remedy = "Use fusion_attention_kwargs, or sparse_mode 0 or 1 with dense(segments, polarity='masked')."
        yield Breach("mask-shape", "atten_mask", shape_of(call.atten_mask), says, remedy, "T:1511-1571")


def _shapes(call: AttentionCall) -> list[tuple[int, ...]]:
    """Shapes the host code takes for a mask, whatever the layout of q, k and v (T:1511-1571)."""
    Sq, Skv = call.longest
    shapes: list[tuple[int, ...]] = [(Sq, Skv), (1, 1, Sq, Skv)]
    shapes += [(len(call.lengths), heads, Sq, Skv) for heads in (1, call.N)]
    if call.tnd:
        shapes.append((sum(q for q, _ in call.lengths), sum(kv for _, kv in call.lengths)))
    if call.mode not in COMPRESSED:
        return shapes
    right = COMPRESSED[call.mode]  # a dense mask of this very size passes, too
    return [right, *(each for each in shapes if len(each) == 4 and each[2:] == right)]


def _sparsity(call: AttentionCall) -> Iterator[Breach]:
    if call.mode == 6 and not call.prefix_is_legal:
        says, remedy = "Each sequence has a prefix N in [max(0, Skv - Sq), Skv].", "Pass one legal N for each of them."
        yield Breach("prefix", "prefix", str(call.prefix), says, remedy, "T:780, T:1325-1352, T:4045-4082")
