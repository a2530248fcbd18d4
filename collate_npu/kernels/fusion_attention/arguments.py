"""The arguments of Ascend's fused attention from `Segments`: the cheapest form that computes exactly what they say.

| form       | `atten_mask`           | sparse_mode | when                                                          |
|------------|------------------------|-------------|---------------------------------------------------------------|
| `full`     | None                   | 0           | bidirectional, nothing to block                               |
| `triangle` | the 2048 triangle      | 2 or 3      | causal, padding on the right alone or TND                     |
| `band`     | the 2048 triangle      | 4           | sliding window, likewise                                      |
| `prefix`   | the 3072 triangle      | 6           | prefix, likewise                                              |
| `shared`   | `[1, 1, S, S]`         | 0           | chunked, likewise (under TND chunks are sequences: triangle)  |
| `dense`    | `[B, 1, S, S]`         | 0, 1 or 5   | everything else outside TND                                   |

The first four cost at most 6 MiB whatever S is, and skip the blocks nobody attends. Dense masks block keys alone, so a
padded query sees the real keys before it; where one sees none, `inner_precise=2` makes its output 0.

Legend: B batch, S width, T tokens without padding, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.kernels.fusion_attention.accepted_wrong import MAX_PREFIX_ROWS, MAX_SEQUENCES, SKIP_EMPTY_ROWS
from collate_npu.kernels.fusion_attention.geometry import PREFIX_TRIANGLE, TRIANGLE, prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.pattern_terms import CompressedName, PatternTerms, pattern_terms
from collate_npu.kernels.fusion_attention.refused import LAYOUTS
from collate_npu.masks.forms import MAX_MASK_BYTES, dense, none_is_exact, varlen
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

InputLayout = Literal["BSH", "SBH", "BSND", "BNSD", "TND"]
Operator = Literal["npu_fusion_attention", "npu_fusion_attention_v3"]
NpuFormName = CompressedName | Literal["dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuForm:
    """The form chosen for a batch, its sparse mode, and why it is exact and nothing cheaper is."""

    name: NpuFormName
    sparse_mode: int
    why: str


def choose_form(
    segments: Segments,
    *,
    pattern: str | Pattern = "causal",
    layout: InputLayout = "BSND",
    causal_mode: Literal[2, 3] = 3,
) -> NpuForm:
    """Which form `fusion_attention_kwargs` takes, and why; nothing is built. Raises where the operator has none.

    >>> choose_form(Segments.from_lengths([3, 5])).name, choose_form(Segments.from_lengths([3, 5], side="left")).name
    ('triangle', 'dense')
    """
    return _choose(segments, _terms(segments, Pattern.of(pattern), layout, causal_mode), layout)


def _terms(segments: Segments, pattern: Pattern, layout: str, causal_mode: int) -> PatternTerms:
    _check(segments, layout, causal_mode)
    return pattern_terms(segments, pattern, tnd=layout == "TND", causal_mode=causal_mode)


def _choose(segments: Segments, terms: PatternTerms, layout: str) -> NpuForm:
    if terms.compressed is None and layout == "TND":
        rule = f"The operator has no compressed form of {terms.what}, and packed rows take no dense mask of each row."
        raise UnsupportedFormError(explain("layout TND", repr(segments), rule, "Use a padded layout such as BSND."))
    if terms.compressed is None:
        return NpuForm(name="dense", sparse_mode=1, why=terms.what)
    if layout == "TND":
        why = f"{terms.what}, packed sequences, each bounded by its length"
        return NpuForm(name=terms.compressed, sparse_mode=terms.compressed_mode, why=why)
    few = not terms.prefixes or segments.shape[0] <= MAX_PREFIX_ROWS
    exact = none_is_exact(segments)
    whole = segments.padding_side == "none" and not segments.packed
    if few and (whole if terms.compressed == "full" else exact):
        where = "nothing to block" if whole else exact.why.replace("causal attention, ", "")
        return NpuForm(name=terms.compressed, sparse_mode=terms.compressed_mode, why=f"{terms.what}, {where}")
    why = f"{terms.what} of more than {MAX_PREFIX_ROWS} rows" if exact and not few else f"{terms.what}; {exact.why}"
    return NpuForm(name="dense", sparse_mode=terms.dense_mode if few else 1, why=why)


def fusion_attention_kwargs(
    segments: Segments,
    *,
    pattern: str | Pattern = "causal",
    layout: InputLayout = "BSND",
    operator: Operator = "npu_fusion_attention",
    causal_mode: Literal[2, 3] = 3,
    keep_tail: bool = False,
    device: torch.device | str = "cpu",
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> dict[str, Any]:
    """The mask arguments of `torch_npu.npu_fusion_attention` for self-attention over this batch, as a plain dict.

    Call `npu_fusion_attention(q, k, v, head_num, scale=D**-0.5, **kwargs)`: the operator's own default scale is 1.0. Only
    arguments that differ from its defaults are in the dict, `input_layout` always; `choose_form` says why this form.

    `layout="TND"` is for packed tensors `[T, heads, D]`, as `unpad` lays them out; `keep_tail` keeps the padding at the
    end of one flat row as one more sequence. `causal_mode` 2 or 3 is transformers' `NPU_FA2_SPARSE_MODE`; here Sq = Skv
    and both are the same attention. `_v3` takes its length lists as CPU tensors. Masks are built on `device`.

    Raises `UnsupportedFormError` where no form is exact: no tokens, under TND more sequences than the operator
    documents or a sliding window over a sequence with holes; and where the mask, compressed ones included, would take
    more than `max_mask_bytes`.
    Sources: op-plugin torch_npu-npu_fusion_attention.md and torch_npu-npu_fusion_attention_v3.md; forms in
    ops-transformer flash_attention_score_tiling_general.cpp:639-812.

    >>> kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 5], side="left"))
    >>> kwargs["input_layout"], kwargs["atten_mask"].dtype, list(kwargs["atten_mask"].shape)
    ('BSND', torch.bool, [2, 1, 5, 5])
    >>> fusion_attention_kwargs(Segments.from_lengths([3, 5]), layout="TND")["actual_seq_qlen"]
    [3, 8]
    """
    if operator not in get_args(Operator):
        rule, remedy = f"The operators are {' and '.join(get_args(Operator))}.", "Name the one you call."
        raise CollateError(explain("operator", repr(operator), rule, remedy))
    pattern = Pattern.of(pattern)
    terms = _terms(segments, pattern, layout, causal_mode)
    form = _choose(segments, terms, layout)
    kwargs: dict[str, Any] = {"input_layout": layout}
    if form.name in ("triangle", "band", "prefix"):
        kwargs |= {"atten_mask": _compressed_mask(form, device, max_mask_bytes), "sparse_mode": form.sparse_mode}
    if form.name == "band":
        kwargs |= {"pre_tockens": terms.before, "next_tockens": 0}
    if form.name in ("shared", "dense"):
        kwargs |= _dense_arguments(segments, pattern, terms, form, device, max_mask_bytes)
    if layout == "TND":
        kwargs |= _packed_arguments(segments, terms, operator, keep_tail)
    elif form.sparse_mode in (5, 6):
        kwargs["prefix"] = _row_prefixes(segments, terms.prefixes)
    return kwargs


def _check(segments: Segments, layout: str, causal_mode: int) -> None:
    if layout not in LAYOUTS:
        rule, remedy = f"The operator's layouts are {', '.join(LAYOUTS)}.", "Name the layout of q, k and v."
        raise CollateError(explain("layout", repr(layout), rule, remedy))
    if causal_mode not in (2, 3):
        rule, remedy = "Causal is mode 2 (top-left) or 3 (bottom-right).", "Leave it at 3."
        raise CollateError(explain("causal_mode", repr(causal_mode), rule, remedy))
    if not segments.num_tokens:
        rule, remedy = "The operator takes at least one token.", "Drop batches without tokens."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, remedy))


# --- masks


def _compressed_mask(form: NpuForm, device: torch.device | str, max_mask_bytes: int) -> Tensor:
    Q, K = PREFIX_TRIANGLE if form.name == "prefix" else TRIANGLE
    if max_mask_bytes < Q * K:
        rule = f"The compressed mask [{Q}, {K}] takes {Q * K} bytes, the limit max_mask_bytes is {max_mask_bytes}."
        raise UnsupportedFormError(explain("max_mask_bytes", str(max_mask_bytes), rule, "Raise it."))
    return prefix_triangle(device) if form.name == "prefix" else triangle(device)


def _dense_arguments(
    segments: Segments,
    pattern: Pattern,
    terms: PatternTerms,
    form: NpuForm,
    device: torch.device | str,
    max_mask_bytes: int,
) -> dict[str, Any]:
    if form.name == "shared":
        segments = Segments.from_lengths([segments.shape[1]])
    masked_B1SS = dense(segments, polarity="masked", pattern=pattern, max_mask_bytes=max_mask_bytes)
    arguments: dict[str, Any] = {"atten_mask": masked_B1SS.to(device)}
    if form.sparse_mode:
        arguments["sparse_mode"] = form.sparse_mode
    else:
        arguments |= {"pre_tockens": terms.before, "next_tockens": 0}
    if bool(masked_B1SS.all(-1).any()):
        arguments["inner_precise"] = SKIP_EMPTY_ROWS
    return arguments


def _row_prefixes(segments: Segments, prefixes: Sequence[int]) -> list[int]:
    """For each row, how many keys from its left edge some query sees beyond the diagonal, and no padding after them."""
    ends = [0] * segments.shape[0]
    for (b, start, end), prefix in zip(segments.spans, prefixes):
        if prefix:
            ends[b] = max(ends[b], min(start + prefix, end))
    return ends


# --- TND


def _packed_arguments(segments: Segments, terms: PatternTerms, operator: Operator, keep_tail: bool) -> dict[str, Any]:
    if terms.counts_places:
        _check_holes(segments)
    tail = varlen(segments, keep_tail=keep_tail).cu_seqlens_host[segments.num_sequences + 1 :]
    lengths = [n for chunks in _chunk_lengths(segments, terms.chunk) for n in chunks]
    ends = [*np.cumsum(lengths).tolist(), *tail]
    _check_count("sequences", len(ends), MAX_SEQUENCES)
    lists = torch.tensor(ends) if operator == "npu_fusion_attention_v3" else ends
    arguments: dict[str, Any] = {"actual_seq_qlen": lists, "actual_seq_kvlen": lists}
    if terms.prefixes:
        _check_count("sequences with a prefix", len(ends), MAX_PREFIX_ROWS)
        wanted = zip(_offsets(segments), terms.prefixes)
        arguments["prefix"] = [int((offsets < prefix).sum()) for offsets, prefix in wanted] + [0] * len(tail)
    return arguments


def _offsets(segments: Segments) -> list[np.ndarray[Any, Any]]:
    """For each sequence, how far in the row each of its tokens stands from its first one; holes leave gaps."""
    columns = segments.indices.numpy() % segments.shape[1]
    return [tokens - tokens[0] for tokens in np.split(columns, segments.cu_seqlens_host[1:-1])]


def _chunk_lengths(segments: Segments, chunk: int) -> list[list[int]]:
    if not chunk:
        return [[n] for row in segments.lengths for n in row]
    counted = (np.bincount(offsets // chunk) for offsets in _offsets(segments))
    return [[int(n) for n in counts if n] for counts in counted]


def _check_holes(segments: Segments) -> None:
    if any(offsets[-1] >= len(offsets) for offsets in _offsets(segments)):
        rule = "A window counts places in the row; packing the tokens closes the holes and moves keys into it."
        raise UnsupportedFormError(explain("layout TND", repr(segments), rule, "Use a padded layout such as BSND."))


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        rule = f"The operator documents at most {limit} {what} under TND (op-plugin docs, npu_fusion_attention:181-182)."
        raise UnsupportedFormError(explain("layout TND", f"{count} {what}", rule, "Split the batch, or use BSND."))
