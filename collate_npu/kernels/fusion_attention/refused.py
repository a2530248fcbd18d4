"""What the operator's own host code refuses. Breaking one of these raises an error, but only at run time on the card.

Source tags are explained in `operator_call`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.fusion_attention.geometry import PREFIX_TRIANGLE, TRIANGLE
from collate_npu.kernels.fusion_attention.operator_call import Call

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
TRIANGLE_MODES = (2, 3, 4, 7, 8)
MAX_HEAD_DIM = 768
PADDED_MODES = (0, 1, 2, 3, 4, 5, 6)
PACKED_MODES = (0, 1, 2, 3, 4, 6, 7, 8)


def breaches(call: Call) -> Iterator[Breach]:
    """The rules this call breaks. Each group builds on the ones before it, so the first that is broken ends the reading."""
    for group in (_arguments, _sequences, _mask, _sparsity):
        found = list(group(call))
        yield from found
        if found or (group is _sequences and call.atten_mask is None):
            return  # without a mask every mode and token value is let through, and ignored (T:799, T:4121)


def _arguments(call: Call) -> Iterator[Breach]:
    sizes = call.sizes
    for name in call.unknown:
        says, remedy = "npu_fusion_attention has no such argument.", "Its spelling is pre_tockens, next_tockens."
        yield Breach(rule="argument", where=name, got="an argument", says=says, remedy=remedy, source="PD")
    if call.layout not in LAYOUTS:
        says, remedy = f"The layouts are {', '.join(LAYOUTS)}.", "Name the one q, k and v are in."
        yield Breach(rule="layout", where="input_layout", got=repr(call.layout), says=says, remedy=remedy, source="P:743")
    modes = PACKED_MODES if call.tnd else PADDED_MODES
    if call.mode not in modes:
        says = f"Layout {call.layout} takes sparse_mode {', '.join(map(str, modes))}."
        remedy = "Use mode 6 for a prefix under TND; 7 and 8 are for TND alone."
        got, source = str(call.mode), "P:772-786, T:768, T:4098"
        yield Breach(rule="sparse-mode", where="sparse_mode", got=got, says=says, remedy=remedy, source=source)
    if min(sizes.N, sizes.Nkv) < 1 or sizes.N % sizes.Nkv:
        says, remedy = "Query heads are a whole multiple of key heads.", "Pass head_num as the number of query heads."
        got = f"{sizes.N} query heads, {sizes.Nkv} key heads"
        yield Breach(rule="heads", where="head_num", got=got, says=says, remedy=remedy, source="T:1099")
    if not 1 <= sizes.D <= MAX_HEAD_DIM:
        says, remedy = f"A head has 1 to {MAX_HEAD_DIM} elements.", "Use another attention kernel for this head size."
        yield Breach(rule="head-size", where="D", got=str(sizes.D), says=says, remedy=remedy, source="A:442, T:1097")
    if not 0 < (keep := float(call.arguments["keep_prob"])) <= 1:
        says, remedy = "keep_prob is in (0, 1].", "Pass 1 - dropout, and 1.0 for none."
        yield Breach(rule="keep-prob", where="keep_prob", got=str(keep), says=says, remedy=remedy, source="P:743-795")


def _sequences(call: Call) -> Iterator[Breach]:
    if not call.tnd:
        return
    q_ends, kv_ends = call.ends
    if not q_ends or not kv_ends or len(q_ends) != len(kv_ends):
        says = "TND needs both lists, not empty and equally long."
        remedy = "Pass the cumulative ends of the same sequences for query and key, on the host."
        got, where = f"{len(q_ends or ())} and {len(kv_ends or ())} ends", "actual_seq_qlen, actual_seq_kvlen"
        yield Breach(rule="tnd-lists", where=where, got=got, says=says, remedy=remedy, source="P:779, T:1176")
        return
    for name, total, T in (
        ("q", sum(q for q, _ in call.lengths), call.sizes.Tq),
        ("kv", sum(kv for _, kv in call.lengths), call.sizes.Tkv),
    ):
        if T is not None and total > T:
            says, remedy = "Sequences lie inside the packed tensor.", "Build the list from the tensor that is passed."
            got = f"lengths that add up to {total}, of {T} tokens"
            yield Breach(rule="tnd-total", where=f"actual_seq_{name}len", got=got, says=says, remedy=remedy, source="T:1181")


def _mask(call: Call) -> Iterator[Breach]:
    atten_mask = call.atten_mask
    assert atten_mask is not None
    got = shape_of(atten_mask)
    if atten_mask.dtype not in (torch.bool, torch.uint8):
        says, remedy = "A mask is bool or uint8, True = blocked.", "Use dense(segments, polarity='masked')."
        yield Breach(rule="mask-dtype", where="atten_mask", got=got, says=says, remedy=remedy, source="T:1501, PD:35")
    if atten_mask.ndim not in (2, 4):
        says, remedy = "A mask has 2 or 4 dimensions.", "Insert the head dimension: [B, 1, Sq, Skv]."
        yield Breach(rule="mask-rank", where="atten_mask", got=got, says=says, remedy=remedy, source="T:1559")
        return
    shape = tuple(atten_mask.shape)
    if (atten_mask.ndim == 4 or not is_compressed(call.mode)) and shape not in dense_shapes(call):
        listed = " or ".join(map(str, map(list, dense_shapes(call))))
        says = f"A mask of rank {atten_mask.ndim} is {listed}: there is no form for keys alone."
        remedy = "Expand padding to [B, 1, Sq, Skv] with dense(segments, polarity='masked'), or use TND."
        source = "T:1511-1556" if atten_mask.ndim == 4 else "T:1545, T:1551"
        yield Breach(rule="mask-shape", where="atten_mask", got=got, says=says, remedy=remedy, source=source)
    elif is_compressed(call.mode) and shape[-2:] != compressed_shape(call.mode):
        says = f"sparse_mode {call.mode} takes the compressed mask {list(compressed_shape(call.mode))}."
        remedy = "Use fusion_attention_kwargs, or sparse_mode 0 or 1 with a dense mask."
        yield Breach(rule="compressed-shape", where="atten_mask", got=got, says=says, remedy=remedy, source="T:1565, T:1571")
    elif call.mode == 5 and call.prefix_is_legal and len(call.lengths) > 1 and (atten_mask.ndim == 2 or shape[0] == 1):
        says, remedy = "A prefix mask has one matrix for each row.", "Expand it to [B, 1, Sq, Skv]."
        yield Breach(rule="prefix-shape", where="atten_mask", got=got, says=says, remedy=remedy, source="T:785")


def is_compressed(mode: int) -> bool:
    return mode == 6 or mode in TRIANGLE_MODES


def compressed_shape(mode: int) -> tuple[int, int]:
    return PREFIX_TRIANGLE if mode == 6 else TRIANGLE


def dense_shapes(call: Call) -> list[tuple[int, ...]]:
    """Shapes the host code takes for a dense mask, whatever the layout of q, k and v (T:1511-1556)."""
    Sq, Skv = call.longest
    shapes: list[tuple[int, ...]] = [(Sq, Skv), (1, 1, Sq, Skv)]
    shapes += [(len(call.lengths), heads, Sq, Skv) for heads in (1, call.sizes.N)]
    if call.tnd:
        shapes.append((sum(q for q, _ in call.lengths), sum(kv for _, kv in call.lengths)))
    return shapes


def _sparsity(call: Call) -> Iterator[Breach]:
    if call.mode in (0, 4):
        yield from _packed_tokens(call) if call.tnd else _tokens(call)
    if call.mode == 6 and not call.prefix_is_legal:
        says, remedy = "Each sequence has a prefix N in [max(0, Skv - Sq), Skv].", "Pass one legal N for each of them."
        source = "T:780, T:1325-1352, T:4045-4082"
        yield Breach(rule="prefix", where="prefix", got=str(call.prefix), says=says, remedy=remedy, source=source)
    if call.tnd and call.mode in (3, 7) and (rows := [(q, kv) for q, kv in call.lengths if q > kv]):
        says, remedy = "In packed sequences mode 3 needs Sq <= Skv.", "Pass the keys of the whole sequence."
        yield Breach(
            rule="tnd-longer-query",
            where="actual_seq_qlen",
            got=f"(Sq, Skv) {rows[:8]}",
            says=says,
            remedy=remedy,
            source="T:3917, T:3953-3973",
        )
    if call.mode in (7, 8):
        yield from _outer_cut(call)


def _tokens(call: Call) -> Iterator[Breach]:
    pre, after = call.tokens
    Sq, Skv = call.longest
    if call.mode == 4:
        pre, after = pre + Sq - Skv, after + Skv - Sq
    if (pre < 0 and (after < -pre or -pre >= Skv)) or (after < 0 and (-after > pre or -after >= Sq)):
        says = "The band between pre_tockens and next_tockens crosses the scores."
        remedy = "A negative end needs the other to reach at least as far, and to stay inside Sq and Skv."
        got, source = f"{pre} before, {after} after (from the top-left)", "T:705-757"
        yield Breach(rule="tokens", where="pre_tockens, next_tockens", got=got, says=says, remedy=remedy, source=source)


def _packed_tokens(call: Call) -> Iterator[Breach]:
    pre, after = call.tokens
    rows = [(q, kv) for q, kv in call.lengths if q]
    if call.mode == 0:
        bad = after < 0 or (pre < 0 and after < -pre) or any(kv + pre < q for q, kv in rows)
        says = "In packed sequences mode 0 needs next >= 0, next >= -pre and Skv + pre >= Sq."
    else:
        bad = pre < 0 or pre + after < 0 or any(q - after > kv for q, kv in rows)
        says = "In packed sequences mode 4 needs pre >= 0, pre + next >= 0 and Sq - next <= Skv."
    if bad:
        got, source = f"{pre} before, {after} after", "T:3928-3940, T:3999-4025"
        yield Breach(
            rule="tokens",
            where="pre_tockens, next_tockens",
            got=got,
            says=says,
            remedy="Widen the band until every query has a key.",
            source=source,
        )


def _outer_cut(call: Call) -> Iterator[Breach]:
    pre, after = call.tokens
    rows = [(q, kv) for q, kv in call.lengths if q]
    if not rows:
        return
    q, kv = rows[-1] if call.mode == 7 else rows[0]
    which = "last" if call.mode == 7 else "first"
    if pre < kv or (call.mode == 7 and after > 0) or q - after > kv:
        says = f"Mode {call.mode} needs pre >= Skv and Sq - next <= Skv of the {which} sequence, in mode 7 next <= 0."
        remedy = f"Set the tokens to the band of the {which} sequence, counted from the bottom-right."
        got = f"{pre} before, {after} after, for ({q}, {kv})"
        yield Breach(
            rule="outer-cut", where="pre_tockens, next_tockens", got=got, says=says, remedy=remedy, source="T:3953-3986"
        )
