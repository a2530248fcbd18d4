"""What the operator's own host code refuses, as far as a call could not be read otherwise. Breaking one of these raises an
error, but only at run time on the card; bands that cross the scores, and settings of dropout, are left to the card.

Source tags are explained in `operator_call`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.fusion_attention.geometry import PREFIX_TRIANGLE, TRIANGLE
from collate_npu.kernels.fusion_attention.operator_call import DEFAULTS, LISTS, RANKS, TENSORS, AttentionCall

COMPRESSED = {2: TRIANGLE, 3: TRIANGLE, 4: TRIANGLE, 6: PREFIX_TRIANGLE, 7: TRIANGLE, 8: TRIANGLE}
"""The shape of the mask that each compressed sparse mode takes."""
MAX_HEAD_DIM = 768


def breaches(call: AttentionCall) -> Iterator[Breach]:
    """The rules this call breaks. Each group builds on the ones before it, so the first that is broken ends the reading."""
    for group in (_arguments, _sequences, _mask, _sparsity):
        found = list(group(call))
        yield from found
        if found or (group is _sequences and call.atten_mask is None):
            return  # without a mask every mode and token value is let through, and ignored (T:799, T:4121)


def _tensors(call: AttentionCall) -> Iterator[Breach]:
    given = {name: x for name in TENSORS if isinstance(x := call.kwargs.get(name), Tensor)}
    dtypes = {x.dtype for x in given.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16, torch.float32}:
        got, says = ", ".join(map(shape_of, given.values())), "They are all float16, all bfloat16 or all float32."
        yield Breach("tensor-dtype", ", ".join(given), got, says, "Cast them alike, to bfloat16 for one.", "A:397, PD:26-28")
    value = given.get("value")
    if value is not None and value.ndim and value.shape[-1] > call.D * (call.Nkv if "H" in str(call.layout) else 1):
        says, remedy = f"A value's head is at most that of query and key, {call.D}.", "Use another attention kernel."
        yield Breach("value-head", "value", shape_of(value), says, remedy, "A:209, A:214")


def _arguments(call: AttentionCall) -> Iterator[Breach]:
    yield from _tensors(call)
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
    if min(call.N, call.Nkv) < 1 or call.N % call.Nkv:
        says, remedy = "Query heads are a whole multiple of key heads.", "Pass head_num as the number of query heads."
        yield Breach("heads", "head_num", f"{call.N} query heads, {call.Nkv} key heads", says, remedy, "T:1099")
    if not 1 <= call.D <= MAX_HEAD_DIM:
        says, remedy = f"A head has 1 to {MAX_HEAD_DIM} elements.", "Use another attention kernel for this head size."
        yield Breach("head-size", "D", str(call.D), says, remedy, "A:442, T:1097")
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
    atten_mask, compressed = call.atten_mask, COMPRESSED.get(call.mode)
    assert atten_mask is not None
    got, shape = shape_of(atten_mask), tuple(atten_mask.shape)
    if atten_mask.dtype not in (torch.bool, torch.uint8):
        says, remedy = "A mask is bool or uint8, True = blocked.", "Use dense(segments, polarity='masked')."
        yield Breach("mask-dtype", "atten_mask", got, says, remedy, "T:1501, PD:35")
    if atten_mask.ndim not in (2, 4):
        says, remedy = "A mask has 2 or 4 dimensions.", "Insert the head dimension: [B, 1, Sq, Skv]."
        yield Breach("mask-rank", "atten_mask", got, says, remedy, "T:1559")
    elif (atten_mask.ndim == 4 or compressed is None) and shape not in (shapes := _dense_shapes(call)):
        listed = " or ".join(str(list(each)) for each in shapes)
        says = f"A mask of rank {len(shape)} is {listed}: there is no form for keys alone."
        remedy = "Expand padding to [B, 1, Sq, Skv] with dense(segments, polarity='masked'), or use TND."
        yield Breach("mask-shape", "atten_mask", got, says, remedy, "T:1511-1556" if len(shape) == 4 else "T:1545, T:1551")
    elif compressed is not None and shape[-2:] != compressed:
        says = f"sparse_mode {call.mode} takes the compressed mask {list(compressed)}."
        remedy = "Use fusion_attention_kwargs, or sparse_mode 0 or 1 with a dense mask."
        yield Breach("compressed-shape", "atten_mask", got, says, remedy, "T:1565, T:1571")
    elif call.mode == 5 and call.prefix_is_legal and len(call.lengths) > 1 and (len(shape) == 2 or shape[0] == 1):
        says, remedy = "A prefix mask has one matrix for each row.", "Expand it to [B, 1, Sq, Skv]."
        yield Breach("prefix-shape", "atten_mask", got, says, remedy, "T:785")


def _dense_shapes(call: AttentionCall) -> list[tuple[int, ...]]:
    """Shapes the host code takes for a dense mask, whatever the layout of q, k and v (T:1511-1556)."""
    Sq, Skv = call.longest
    shapes: list[tuple[int, ...]] = [(Sq, Skv), (1, 1, Sq, Skv)]
    shapes += [(len(call.lengths), heads, Sq, Skv) for heads in (1, call.N)]
    if call.tnd:
        shapes.append((sum(q for q, _ in call.lengths), sum(kv for _, kv in call.lengths)))
    return shapes


def _sparsity(call: AttentionCall) -> Iterator[Breach]:
    if call.mode == 6 and not call.prefix_is_legal:
        says, remedy = "Each sequence has a prefix N in [max(0, Skv - Sq), Skv].", "Pass one legal N for each of them."
        yield Breach("prefix", "prefix", str(call.prefix), says, remedy, "T:780, T:1325-1352, T:4045-4082")
