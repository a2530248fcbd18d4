"""What the card takes without a word, and then computes something else: refused here, because nothing else will.

`torch_npu`'s Python, meta and host code check no mask, and CANN's host code checks shapes, never contents. Read only for
calls that break none of the rules in `card`. Source tags are explained in `call`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.fusion_attention import refused
from collate_npu.kernels.fusion_attention.geometry import TRIANGLE, outside_band, outside_prefix, prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.operator_call import Breach, Call

MAX_HEADS = 256
MAX_LENGTH = MAX_TOKENS = 2**20
MAX_ROWS = 2**21
MAX_SEQUENCES = 1024
MAX_PREFIX_ROWS = 32
SKIP_EMPTY_ROWS = 2
"""The `inner_precise` under which a row without keys gives 0, not a mean of V (K `flash_attention_score_s1s2_bn2gs1.h`)."""


def breaches(call: Call) -> Iterator[Breach]:
    yield from _limits(call)
    yield from _unused(call)
    if call.tnd:
        yield from _lists(call)
    if call.atten_mask is None:
        yield from _none(call)
        return
    misread = [*_form(call, call.atten_mask)]
    yield from misread
    if not misread:
        yield from _contents(call, call.atten_mask)


def _breach(rule: str, where: str, got: str, says: str, remedy: str, source: str) -> Breach:
    return Breach(rule=rule, where=where, got=got, says=says, remedy=remedy, source=source, silent=True)


def _limits(call: Call) -> Iterator[Breach]:
    sizes, count = call.sizes, len(call.lengths)
    limits = [
        ("N", sizes.N, MAX_HEADS, "PD:160-181"),
        ("Sq", max(call.longest[0], sizes.Sq), MAX_LENGTH, "PD:160-181"),
        ("Skv", max(call.longest[1], sizes.Skv), MAX_LENGTH, "PD:160-181"),
        ("tokens", max(sizes.Tq or 0, sizes.Tkv or 0), MAX_TOKENS, "PD:160-181"),
        ("B", count, MAX_SEQUENCES if call.tnd else MAX_ROWS, "PD:160-182; 20000 fixed slots, A:449"),
    ]
    if call.mode in (5, 6):
        limits.append(("rows with a prefix", count, MAX_PREFIX_ROWS, "PD:181"))
    for name, value, limit, source in limits:
        if value > limit:
            says, remedy = f"The documented limit is {limit}; the card reads on past it.", "Split the batch."
            yield _breach("documented-limit", name, str(value), says, remedy, source)


def _unused(call: Call) -> Iterator[Breach]:
    for name in ("padding_mask", "pse", "sink", "dropout_mask"):
        if call.arguments[name] is not None:
            says = "padding_mask is not supported by the operator" if name == "padding_mask" else f"{name} is unchecked"
            remedy = "Express padding in atten_mask." if name == "padding_mask" else "Check such a call by hand."
            yield _breach(name.replace("_", "-"), name, "a tensor", f"{says}, and would pass unread.", remedy, "PD:34")
    if not call.tnd and any(ends is not None for ends in call.ends):
        says, remedy = "Length lists are read under layout TND alone.", "Pass input_layout='TND' and packed tensors."
        yield _breach("lists-outside-tnd", "actual_seq_qlen", f"layout {call.layout}", says, remedy, "PD:47-53")


def _none(call: Call) -> Iterator[Breach]:
    Sq, Skv = call.longest
    restricts = call.tokens[0] < Sq - 1 or call.tokens[1] < Skv - 1
    if call.mode != 0 or restricts:
        got = f"None with sparse_mode {call.mode}, pre {call.tokens[0]}, next {call.tokens[1]}"
        says = "Without a mask every mode and token is ignored: full attention, the future included."
        remedy = "Pass the compressed mask geometry.triangle(), or sparse_mode 0 if full attention is meant."
        yield _breach("none-is-full", "atten_mask", got, says, remedy, "T:799, T:4121, PD:176, MS:102")


def _lists(call: Call) -> Iterator[Breach]:
    for name, ends, T in zip(("actual_seq_qlen", "actual_seq_kvlen"), call.ends, (call.sizes.Tq, call.sizes.Tkv)):
        assert ends is not None
        if ends[0] == 0:
            says = "The list holds ends, no starts: a leading 0 is one more, empty sequence, which shifts prefixes."
            yield _breach("leading-zero", name, str(ends[:6]), says, "Pass cu_seqlens[1:].", "PD:47-53, T:1176")
        used = [n for i, n in enumerate(ends) if n or not i or any(ends[i:])]
        if any(later < earlier for earlier, later in pairwise(used)):
            says = "Ends never fall, but for trailing zeros; a falling one counts as length 0."
            yield _breach(
                "falling-ends",
                name,
                str(ends[:12]),
                says,
                "Pass cumulative ends, not lengths.",
                "T GetActualSeqLenData, PD:183",
            )
        elif T is not None and max(used, default=0) < T:
            says = "Tokens after the last end belong to no sequence; nothing is promised for them."
            remedy = "unpad() the tail, or count it as one more sequence (keep_tail=True)."
            yield _breach("unused-tail", name, f"{max(used)} of {T} tokens", says, remedy, "T:1181")
    if rows := [pair for pair in call.lengths if pair[0] and not pair[1]]:
        says, remedy = "A sequence with queries has keys.", "Drop the sequence from both lists."
        yield _breach("no-keys", "actual_seq_kvlen", f"(Sq, Skv) {rows[:8]}", says, remedy, "MS:111")
    if len(call.lengths) != call.sizes.B or call.longest != (call.sizes.Sq, call.sizes.Skv):
        got = (
            f"{len(call.lengths)} sequences, longest {call.longest}; B, Sq, Skv say {call.sizes.B}, "
            f"{(call.sizes.Sq, call.sizes.Skv)}"
        )
        says, remedy = "Under TND B counts sequences and Sq, Skv are the longest.", "Pass the lists of this very batch."
        yield _breach("lists-disagree", "actual_seq_qlen", got, says, remedy, "PD:35, T:1181")


def _form(call: Call, atten_mask: Tensor) -> Iterator[Breach]:
    """A shape that is taken, but for something else."""
    shape, got, (Sq, Skv) = tuple(atten_mask.shape), shape_of(atten_mask), call.longest
    if not atten_mask.is_contiguous():
        says = "A strided or expanded view is copied at each call, or read by packed steps."
        yield _breach(
            "not-contiguous",
            "atten_mask",
            f"{got}, strides {atten_mask.stride()}",
            says,
            "Call .contiguous() once.",
            "rule of this library; K flash_attention_var_len_score.h:354",
        )
    if refused.is_compressed(call.mode):
        if len(shape) == 4:
            says = f"sparse_mode {call.mode} reads it as the compressed mask, by the luck of its size."
            remedy = "Pass the 2-D compressed mask, or sparse_mode 1 with a dense one."
            yield _breach("dense-as-compressed", "atten_mask", got, says, remedy, "T:1527-1568")
        return
    if call.tnd and len(shape) == 4:
        says = "The kernel steps through it by packed Sq * Skv, which is right for equal lengths only."
        remedy = "Pass one [maxSq, maxSkv] mask, or the compressed triangle."
        yield _breach("tnd-4d", "atten_mask", got, says, remedy, "PD:35, K flash_attention_var_len_score.h:354,376")
    elif call.tnd and shape != (Sq, Skv):
        says = "A mask of all tokens is undocumented, and the backward refuses it."
        remedy = "Pass one [maxSq, maxSkv] mask, or the compressed triangle."
        yield _breach("tnd-packed-mask", "atten_mask", got, says, remedy, "PD:35, G:508-516")
    if not call.tnd and len(shape) == 2 and shape[0] == call.sizes.B > 1:
        says = "With B = Sq a [B, S] padding mask reads as one [Sq, Skv] matrix for every row."
        remedy = "Write a shared mask as [1, 1, Sq, Skv], padding as [B, 1, Sq, Skv]."
        yield _breach("rows-or-queries", "atten_mask", got, says, remedy, "T:1551")
    if Sq == 1 < Skv:
        says = "With one query [B, 1, 1, S] masks that query alone, where padding may be meant; it is for training."
        remedy = "For decoding use torch_npu.npu_fused_infer_attention_score."
        yield _breach("one-query", "atten_mask", got, says, remedy, "T:1527, PD constraints")
    if shape == TRIANGLE and torch.equal(atten_mask.cpu().bool(), triangle()):
        says = f"The compressed triangle in mode {call.mode} passes at Sq = Skv = {TRIANGLE[0]} only, as a dense mask."
        remedy = "Pass sparse_mode 2 or 3 with it, or [1, 1, 2048, 2048] if dense is meant."
        yield _breach("compressed-as-dense", "atten_mask", got, says, remedy, "T:1545, T:1551")


def _contents(call: Call, atten_mask: Tensor) -> Iterator[Breach]:
    if atten_mask.dtype == torch.uint8 and int(atten_mask.max()) > 1:
        says, remedy = "A uint8 mask holds 0 and 1.", "Pass bool."
        yield _breach("mask-values", "atten_mask", f"values up to {int(atten_mask.max())}", says, remedy, "PD:35")
    blocked = atten_mask.cpu().bool()
    if refused.is_compressed(call.mode):
        yield from _compressed_contents(call, blocked)
    else:
        yield from _polarity(call, blocked)
        yield from _sparsity_agrees(call, blocked)
        yield from _empty_rows(call, blocked)
    if call.mode == 5 and not call.prefix_is_legal:
        says = "Each row has a prefix N in [max(0, Skv - Sq), Skv]; a wrong one only switches sparsity off."
        yield _breach("prefix-ignored", "prefix", str(call.prefix), says, "Pass legal ones, or sparse_mode 1.", "T:777")


def _compressed_contents(call: Call, blocked: Tensor) -> Iterator[Breach]:
    right = prefix_triangle() if call.mode == 6 else triangle()
    if torch.equal(blocked, right):
        return
    forms = [("inverted: True = keep", ~right), ("all False", right & False), ("all True", right | True)]
    if call.mode != 6:
        forms.append(("transposed: True below the diagonal", right.T))
    wrong = f"{int((blocked != right).sum())} wrong cells"
    got = next((name for name, form in forms if torch.equal(blocked, form)), wrong)
    says = f"sparse_mode {call.mode} reads its mask as one that is True above the diagonal; contents are never checked."
    remedy = f"Use geometry.{'prefix_triangle' if call.mode == 6 else 'triangle'}()."
    yield _breach("compressed-contents", "atten_mask", got, says, remedy, "PD:554-606, D")


def _polarity(call: Call, blocked: Tensor) -> Iterator[Breach]:
    """In self-attention a query that cannot see itself is padding, and then nobody sees it."""
    beside_itself = call.mode == 0 and min(call.tokens) < 0
    if beside_itself or any(q != kv for q, kv in call.lengths):
        return
    itself = blocked.diagonal(dim1=-2, dim2=-1)
    odd = itself & ~blocked.all(-2)
    if bool(odd.any()):
        says = "True = blocked. Here tokens that others attend cannot attend themselves: the mask of a keep convention."
        remedy = "Invert it (~keep), or use dense(segments, polarity='masked')."
        yield _breach("polarity", "atten_mask", f"{int(odd.sum())} such tokens", says, remedy, "PD:35, D")


def _sparsity_agrees(call: Call, blocked: Tensor) -> Iterator[Breach]:
    for skipped, at in _skipped(call):
        part = blocked if at is None or blocked.ndim == 2 or blocked.shape[0] == 1 else blocked[at]
        if bool((~part & skipped).any()):
            says = "Blocks outside the tokens or prefix are skipped, whatever the mask says."
            remedy = "Make the two agree; tokens from the top-left corner, or sparse_mode 1 to compute everything."
            got = f"keys attended outside pre {call.tokens[0]}, next {call.tokens[1]}"
            got = f"keys attended beyond the diagonal and prefix {call.prefix}" if call.mode == 5 else got
            yield _breach("sparsity-disagrees", "atten_mask", got, says, remedy, "PD:178, D, T:705-812")
            return


def _skipped(call: Call) -> Iterator[tuple[Tensor, int | None]]:
    Sq, Skv = call.longest
    if call.mode == 0 and (call.tokens[0] < Sq - 1 or call.tokens[1] < Skv - 1):
        yield outside_band(Sq, Skv, *call.tokens), None
    elif call.mode == 5 and call.prefix is not None and call.prefix_is_legal:
        yield from ((outside_prefix(Sq, Skv, n), b) for b, n in enumerate(call.prefix))


def _empty_rows(call: Call, blocked: Tensor) -> Iterator[Breach]:
    if call.tnd:
        empty = any(bool(blocked[:q, :kv].all(-1).any()) for q, kv in call.lengths if q)
        if empty:
            says, remedy = "Under TND no query may have every key blocked.", "Leave padding out of the packed tensor."
            yield _breach("empty-row", "atten_mask", "a row that is True throughout", says, remedy, "PD:168, D")
    elif int(call.arguments["inner_precise"]) != SKIP_EMPTY_ROWS and bool(blocked.all(-1).any()) and not _noticed(call):
        says = "A row with every key blocked gives a mean of V, unless inner_precise=2 makes it 0."
        remedy = "Pass inner_precise=2, or pad on the right and block keys alone."
        got = f"{int(blocked.all(-1).sum())} rows that are True throughout"
        yield _breach("empty-row", "atten_mask", got, says, remedy, "PD:43-44, K flash_attention_score_common.h:58")


def _noticed(call: Call) -> bool:
    """A band that leaves rows empty makes the host code switch empty-row handling on by itself (T:624-635)."""
    return call.mode == 0 and bool(outside_band(*call.longest, *call.tokens).all(-1).any())
