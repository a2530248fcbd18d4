"""What the operator takes without a word, and then computes something else: refused here, because nothing else will.

`torch_npu`'s Python, meta and host code check no mask, and CANN's host code checks shapes, never contents. Read only for
calls that break none of the rules in `refused`. Source tags are explained in `operator_call`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.fusion_attention import refused
from collate_npu.kernels.fusion_attention.blocked_scores import BLOCK_SCORES, dense_blocks, skipped_scores
from collate_npu.kernels.fusion_attention.geometry import TRIANGLE, band_leaves_rows_empty, prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.operator_call import Call

MAX_HEADS = 256
MAX_LENGTH = MAX_TOKENS = 2**20
MAX_ROWS = 2**21
MAX_SEQUENCES = 1024
MAX_PREFIX_ROWS = 32
SKIP_EMPTY_ROWS = 2
"""The `inner_precise` under which a row without keys gives 0, not a mean of V (K `flash_attention_score_s1s2_bn2gs1.h`)."""
REQUIRED_TOKENS = {4: ("pre_tockens", "next_tockens"), 8: ("next_tockens",)}
"""Modes whose band comes from the tokens alone. Mode 7 without `next_tockens` is refused by the host code itself."""


def breaches(call: Call) -> Iterator[Breach]:
    """Every rule whose breach the operator takes without an error, and computes something else."""
    yield from _limits(call)
    yield from _unused(call)
    if call.tnd:
        yield from _lists(call)
    if call.atten_mask is None:
        yield from _none(call)
        return
    misread = [*_tokens_left_out(call), *_form(call, call.atten_mask)]
    yield from misread
    if not misread:
        yield from _contents(call, call.atten_mask)


def _breach(rule: str, where: str, got: str, says: str, remedy: str, source: str) -> Breach:
    return Breach(rule=rule, where=where, got=got, says=says, remedy=remedy, source=source, silent=True)


def _limits(call: Call) -> Iterator[Breach]:
    sizes, count = call.sizes, len(call.lengths)
    limits = [
        ("N", sizes.N, MAX_HEADS, "PD:160-181"),
        ("Sq", call.longest[0], MAX_LENGTH, "PD:160-181"),
        ("Skv", call.longest[1], MAX_LENGTH, "PD:160-181"),
        ("tokens", max(sizes.Tq or 0, sizes.Tkv or 0), MAX_TOKENS, "PD:160-181"),
        ("B", count, MAX_SEQUENCES if call.tnd else MAX_ROWS, "PD:160-182; 20000 fixed slots, A:449"),
    ]
    if call.mode in (5, 6):
        limits.append(("rows or sequences with a prefix", count, MAX_PREFIX_ROWS, "PD:181"))
    for name, value, limit, source in limits:
        if value > limit:
            says, remedy = f"The documented limit is {limit}; the operator reads on past it.", "Split the batch."
            yield _breach("documented-limit", name, str(value), says, remedy, source)


def _unused(call: Call) -> Iterator[Breach]:
    for name in ("padding_mask", "pse", "sink", "dropout_mask"):
        if call.arguments[name] is not None:
            says = "padding_mask is not supported by the operator" if name == "padding_mask" else f"{name} is unchecked"
            remedy = "Express padding in atten_mask." if name == "padding_mask" else "Check such a call by hand."
            yield _breach(name.replace("_", "-"), name, "a tensor", f"{says}, and would pass unread.", remedy, "PD:34")
    if call.prefix is not None and call.mode not in (5, 6):
        says, remedy = "A prefix is read in modes 5 and 6 alone.", "Pass sparse_mode 5 or 6, or leave the prefix out."
        yield _breach("prefix-unread", "prefix", f"{call.prefix[:8]} in sparse_mode {call.mode}", says, remedy, "PD:181, D")
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


def _tokens_left_out(call: Call) -> Iterator[Breach]:
    if missing := [name for name in REQUIRED_TOKENS.get(call.mode, ()) if name not in call.given]:
        says = f"sparse_mode {call.mode} attends by the tokens alone; left out they are unlimited, the future included."
        remedy = "Pass both: next_tockens=0 is causal, pre_tockens=window-1 a window."
        yield _breach("tokens-left-out", ", ".join(missing), "nothing", says, remedy, "T:689, T:3978-3986, D")


# --- the lists of packed sequences


def _lists(call: Call) -> Iterator[Breach]:
    for name, ends, T in zip(("actual_seq_qlen", "actual_seq_kvlen"), call.ends, (call.sizes.Tq, call.sizes.Tkv)):
        assert ends is not None
        yield from _ends(call, name, ends, T)
    if rows := [pair for pair in call.lengths if pair[0] and not pair[1]]:
        says, remedy = "A sequence with queries has keys.", "Drop the sequence from both lists."
        yield _breach("no-keys", "actual_seq_kvlen", f"(Sq, Skv) {rows[:8]}", says, remedy, "MS:111")
    counted = {"B": len(call.lengths), "Sq": call.longest[0], "Skv": call.longest[1]}
    given = {name: getattr(call.sizes, name) for name in counted}
    if wrong := [f"{name} {given[name]} for {n}" for name, n in counted.items() if given[name] not in (None, n)]:
        says = "Under TND B counts the ends of a list, and Sq, Skv are the longest sequences."
        remedy = "Pass the lists of this very batch, or leave B, Sq and Skv out."
        yield _breach("lists-disagree", "actual_seq_qlen", ", ".join(wrong), says, remedy, "PD:35, T:1181")


def _ends(call: Call, name: str, ends: tuple[int, ...], T: int | None) -> Iterator[Breach]:
    if ends[0] == 0 and call.mode in (6, 8):
        counts = "the prefixes count it" if call.mode == 6 else "mode 8 cuts the first sequence"
        says = f"A leading 0 is one more, empty sequence, and {counts}."
        yield _breach("leading-zero", name, str(ends[:6]), says, "Pass cu_seqlens[1:].", "PD:47-53, T:1176")
    used = [n for i, n in enumerate(ends) if n or not i or any(ends[i:])]
    last = max(used, default=0)
    if any(later < earlier for earlier, later in pairwise(used)):
        says = "Ends never fall, but for trailing zeros; a falling one counts as length 0."
        remedy, source = "Pass cumulative ends, not lengths.", "T GetActualSeqLenData, PD:183"
        yield _breach("falling-ends", name, str(ends[:12]), says, remedy, source)
    elif T is None:
        says = "Tokens after the last end belong to no sequence, and only the packed tensor's size shows them."
        remedy = "Pass Tq=query.shape[0] and Tkv=key.shape[0], or segments."
        yield _breach("tokens-unknown", name, f"no size of the packed tensor, {last} tokens", says, remedy, "T:1181")
    elif last < T:
        says = "Tokens after the last end belong to no sequence; nothing is promised for them."
        remedy = "unpad() the tail, or count it as one more sequence (keep_tail=True)."
        yield _breach("unused-tail", name, f"{last} of {T} tokens", says, remedy, "T:1181")


# --- a shape that is taken, but for something else


def _form(call: Call, atten_mask: Tensor) -> Iterator[Breach]:
    got = shape_of(atten_mask)
    if atten_mask.is_meta:
        says, remedy = "A mask on device meta has no contents to check.", "Check the mask that the operator will get."
        yield _breach("no-contents", "atten_mask", got, says, remedy, "rule of this library")
    if not atten_mask.is_contiguous():
        says = "A strided or expanded view is copied at each call, or read by packed steps."
        got, source = f"{got}, strides {atten_mask.stride()}", "rule of this library; K flash_attention_var_len_score.h:354"
        yield _breach("not-contiguous", "atten_mask", got, says, "Call .contiguous() once.", source)
    if not refused.is_compressed(call.mode):
        yield from _packed_form(call, atten_mask, got) if call.tnd else _padded_form(call, atten_mask, got)
    elif atten_mask.ndim == 4:
        says = f"sparse_mode {call.mode} reads it as the compressed mask, by the luck of its size."
        remedy = "Pass the 2-D compressed mask, or sparse_mode 1 with a dense one."
        yield _breach("dense-as-compressed", "atten_mask", got, says, remedy, "T:1527-1568")


def _packed_form(call: Call, atten_mask: Tensor, got: str) -> Iterator[Breach]:
    remedy = "Pass one [maxSq, maxSkv] mask, or the compressed triangle."
    if atten_mask.ndim == 4:
        says = "The kernel steps through it by packed Sq * Skv, which is right for equal lengths only."
        yield _breach("tnd-4d", "atten_mask", got, says, remedy, "PD:35, K flash_attention_var_len_score.h:354,376")
    elif tuple(atten_mask.shape) != call.longest:
        says = "A mask of all tokens is undocumented, and the backward refuses it."
        yield _breach("tnd-packed-mask", "atten_mask", got, says, remedy, "PD:35, G:508-516")
    yield from _compressed_as_dense(call, atten_mask, got)


def _padded_form(call: Call, atten_mask: Tensor, got: str) -> Iterator[Breach]:
    shape, (Sq, Skv) = tuple(atten_mask.shape), call.longest
    if len(shape) == 2 and shape[0] == len(call.lengths) > 1:
        says = "With B = Sq a [B, S] padding mask reads as one [Sq, Skv] matrix for every row."
        remedy = "Write a shared mask as [1, 1, Sq, Skv], padding as [B, 1, Sq, Skv]."
        yield _breach("rows-or-queries", "atten_mask", got, says, remedy, "T:1551")
    if Sq == 1 < Skv:
        says = "With one query [B, 1, 1, S] masks that query alone, where padding may be meant; it is for training."
        remedy = "For decoding use torch_npu.npu_fused_infer_attention_score."
        yield _breach("one-query", "atten_mask", got, says, remedy, "T:1527, PD constraints")
    yield from _compressed_as_dense(call, atten_mask, got)


def _compressed_as_dense(call: Call, atten_mask: Tensor, got: str) -> Iterator[Breach]:
    if tuple(atten_mask.shape) == TRIANGLE and torch.equal(atten_mask.cpu().bool(), triangle()):
        says = f"The compressed triangle in mode {call.mode} passes at Sq = Skv = {TRIANGLE[0]} only, as a dense mask."
        remedy = "Pass sparse_mode 2 or 3 with it, or [1, 1, 2048, 2048] if dense is meant."
        yield _breach("compressed-as-dense", "atten_mask", got, says, remedy, "T:1545, T:1551")


# --- contents


def _contents(call: Call, atten_mask: Tensor) -> Iterator[Breach]:
    if atten_mask.dtype == torch.uint8:
        flat = atten_mask.flatten()
        top = max(int(flat[at : at + BLOCK_SCORES].cpu().max()) for at in range(0, len(flat), BLOCK_SCORES))
        if top > 1:
            says, remedy = "A uint8 mask holds 0 and 1.", "Pass bool."
            yield _breach("mask-values", "atten_mask", f"values up to {top}", says, remedy, "PD:35")
    if refused.is_compressed(call.mode):
        yield from _compressed_contents(call, atten_mask.cpu().bool())
    else:
        yield from _polarity(call)
        yield from _sparsity_agrees(call)
        yield from _empty_rows(call)
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


def _polarity(call: Call) -> Iterator[Breach]:
    """In self-attention a query that cannot see itself is padding, and then nobody sees it."""
    if (call.mode == 0 and min(call.tokens) < 0) or any(q != kv for q, kv in call.lengths):
        return
    attended: dict[int, Tensor] = {}
    to_itself: dict[int, list[Tensor]] = {}
    for n, queries, masked in dense_blocks(call):
        attended[n] = attended.get(n, False) | ~masked.all(-2)
        to_itself.setdefault(n, []).append(masked.diagonal(queries.start, -2, -1))
    odd = sum(int((torch.cat(to_itself[n], -1) & attended[n]).sum()) for n in attended)
    if odd:
        says = "True = blocked. Here tokens that others attend cannot attend themselves: the mask of a keep convention."
        remedy = "Invert it (~keep), or use dense(segments, polarity='masked')."
        yield _breach("polarity", "atten_mask", f"{odd} such tokens", says, remedy, "PD:35, D")


def _sparsity_agrees(call: Call) -> Iterator[Breach]:
    for n, queries, masked in dense_blocks(call):
        skipped = skipped_scores(call, n, queries)
        if skipped is not None and bool((~masked & skipped).any()):
            says = "Blocks outside the tokens or prefix are skipped, whatever the mask says."
            remedy = "Make the two agree; tokens from the top-left corner, or sparse_mode 1 to compute everything."
            outside = f"the diagonal and prefix {call.prefix}" if call.mode == 5 else "pre {}, next {}".format(*call.tokens)
            got = f"keys attended outside {outside}"
            yield _breach("sparsity-disagrees", "atten_mask", got, says, remedy, "PD:178, D, T:705-812")
            return


def _empty_rows(call: Call) -> Iterator[Breach]:
    if not call.tnd and (call.arguments["inner_precise"] == SKIP_EMPTY_ROWS or _noticed(call)):
        return
    empty = sum(int(masked.all(-1).sum()) for _, _, masked in dense_blocks(call))
    if not empty:
        return
    got = f"{empty} rows that are True throughout"
    if call.tnd:
        says, remedy = "Under TND no query may have every key blocked.", "Leave padding out of the packed tensor."
        yield _breach("empty-row", "atten_mask", got, says, remedy, "PD:168, D")
    else:
        says = "A row with every key blocked gives a mean of V, unless inner_precise=2 makes it 0."
        remedy = "Pass inner_precise=2, or pad on the right and block keys alone."
        yield _breach("empty-row", "atten_mask", got, says, remedy, "PD:43-44, K flash_attention_score_common.h:58")


def _noticed(call: Call) -> bool:
    """A band that leaves rows empty makes the host code switch empty-row handling on by itself (T:624-635)."""
    return call.mode == 0 and band_leaves_rows_empty(*call.longest, *call.tokens)
