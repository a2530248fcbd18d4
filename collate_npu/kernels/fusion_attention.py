"""Fusion attention: the arguments of Ascend's `npu_fusion_attention` from `Segments`, in the cheapest form that is exact.

| form       | `atten_mask`           | sparse_mode | when                                                          |
|------------|------------------------|-------------|---------------------------------------------------------------|
| `full`     | None                   | 0           | bidirectional, nothing to block                               |
| `triangle` | the 2048 triangle      | 3           | causal, padding on the right alone or TND                     |
| `band`     | the 2048 triangle      | 4           | sliding window, likewise                                      |
| `prefix`   | the 3072 triangle      | 6           | prefix, likewise                                              |
| `shared`   | `[1, 1, S, S]`         | 0           | chunked, likewise (under TND chunks are sequences: triangle)  |
| `dense`    | `[B, 1, S, S]`         | 0, 1 or 5   | everything else outside TND                                   |

The first four cost at most 6 MiB whatever S is, and skip the blocks nobody attends. Dense masks block keys alone, so a
padded query sees the real keys before it; where one sees none, `inner_precise=2` makes its output 0.
No device is touched: the operator itself is never called from here.

Legend: B batch, S width, T tokens without padding, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.masks.forms import dense, none_is_exact
from collate_npu.masks.patterns import Bidirectional, Chunked, Pattern, Prefix, Sliding
from collate_npu.segments import Segments
from collate_npu.validation import checked

UNLIMITED = 2**31 - 1
"""The operator's default of `pre_tockens` and `next_tockens`."""
SKIP_EMPTY_ROWS = 2
"""The `inner_precise` under which a query without keys gives 0; else it gives a mean of V."""
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
MAX_SEQUENCES, MAX_PREFIX_ROWS = 1024, 32
"""What the documents allow under TND, and of rows with a prefix (op-plugin docs, npu_fusion_attention:181-182)."""
InputLayout = Literal["BSH", "SBH", "BSND", "BNSD", "TND"]
CompressedName = Literal["full", "triangle", "band", "prefix", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuForm:
    """The form chosen for a batch, its sparse mode, and why it is exact and nothing cheaper is."""

    name: CompressedName | Literal["dense"]
    sparse_mode: int
    why: str


@checked
def choose_form(segments: Segments, *, pattern: str | Pattern = "causal", layout: InputLayout = "BSND") -> NpuForm:
    """Return the form that `fusion_attention_kwargs` takes, and why; nothing is built. Raises where the operator has none.

    >>> choose_form(Segments.from_lengths([3, 5])).name, choose_form(Segments.from_lengths([3, 5], side="left")).name
    ('triangle', 'dense')
    """
    return _choose(segments, _terms(segments, Pattern.of(pattern), layout), layout)


def _choose(segments: Segments, terms: _Terms, layout: str) -> NpuForm:
    what, name, tnd, exact = terms.what, terms.compressed, layout == "TND", none_is_exact(segments)
    if name is None and tnd:
        rule = f"The operator has no compressed form of {what}, and packed rows take no dense mask of each row."
        raise UnsupportedFormError(explain("layout TND", repr(segments), rule, "Use a padded layout such as BSND."))
    if name is None:
        return NpuForm(name="dense", sparse_mode=1, why=what)
    few = tnd or not terms.prefixes or segments.shape[0] <= MAX_PREFIX_ROWS
    whole = segments.padding_side == "none" and not segments.packed
    if few and (tnd or (whole if name == "full" else exact)):
        where = "nothing to block" if whole else exact.why.replace("causal attention, ", "")
        where = "packed sequences, each bounded by its length" if tnd else where
        return NpuForm(name=name, sparse_mode=terms.compressed_mode, why=f"{what}, {where}")
    why = f"{what} of more than {MAX_PREFIX_ROWS} rows" if exact and not few else f"{what}; {exact.why}"
    return NpuForm(name="dense", sparse_mode=terms.dense_mode if few else 1, why=why)


@checked
def fusion_attention_kwargs(
    segments: Segments,
    *,
    pattern: str | Pattern = "causal",
    layout: InputLayout = "BSND",
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Return the mask arguments of `torch_npu.npu_fusion_attention` for self-attention over this batch.

    Call `npu_fusion_attention(q, k, v, head_num, scale=D**-0.5, **kwargs)`: the operator's own default scale is 1.0. Only
    arguments that differ from its defaults are in the dict, `input_layout` always; `choose_form` says why this form.
    `layout="TND"` is for packed tensors `[T, heads, D]`, as `unpad` returns them; `npu_fusion_attention_v3` takes its two
    lists as int64 tensors on the host. Masks are built on `device`.

    Raises `UnsupportedFormError` where no form is exact: no tokens, under TND more sequences than the operator documents
    or a sliding window over a sequence with holes; and where a dense mask is too large.
    Sources: op-plugin torch_npu-npu_fusion_attention.md; forms in ops-transformer
    flash_attention_score_tiling_general.cpp:639-812.

    >>> kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 5], side="left"))
    >>> kwargs["input_layout"], kwargs["atten_mask"].dtype, list(kwargs["atten_mask"].shape)
    ('BSND', torch.bool, [2, 1, 5, 5])
    >>> fusion_attention_kwargs(Segments.from_lengths([3, 5]), layout="TND")["actual_seq_qlen"]
    [3, 8]
    """
    pattern, device = Pattern.of(pattern), torch.device(device)
    terms = _terms(segments, pattern, layout)
    form = _choose(segments, terms, layout)
    kwargs: dict[str, Any] = {"input_layout": layout}
    if form.name in ("shared", "dense"):
        rows = Segments.from_lengths([segments.shape[1]]) if form.name == "shared" else segments
        masked_B1SS = dense(rows, polarity="masked", pattern=pattern)
        kwargs["atten_mask"] = masked_B1SS.to(device)
        if bool(masked_B1SS.all(-1).any()):
            kwargs["inner_precise"] = SKIP_EMPTY_ROWS
    elif form.name != "full":
        kwargs["atten_mask"] = prefix_triangle(device) if form.name == "prefix" else triangle(device)
    if form.sparse_mode:
        kwargs["sparse_mode"] = form.sparse_mode
    if form.sparse_mode in (0, 4) and "atten_mask" in kwargs:
        kwargs |= {"pre_tockens": terms.before, "next_tockens": 0}
    if layout == "TND":
        kwargs |= _packed_arguments(segments, terms)
    elif form.sparse_mode in (5, 6):
        kwargs["prefix"] = _row_prefixes(segments, terms.prefixes)
    return kwargs


def _row_prefixes(segments: Segments, prefixes: Sequence[int]) -> list[int]:
    """Return for each row how many keys from its left edge some query sees beyond the diagonal, padding left out."""
    ends = [0] * segments.shape[0]
    for (b, start, end), prefix in zip(segments.spans, prefixes):
        if prefix:
            ends[b] = max(ends[b], min(start + prefix, end))
    return ends


# --- the compressed masks: the 2048 triangle, and its form with a prefix block, in small::
#
#     ⬚ ■ ■ ■      ⬚ ■ ■ ■      the first 2048 rows are the triangle again
#     ⬚ ⬚ ■ ■      ⬚ ⬚ ■ ■
#     ⬚ ⬚ ⬚ ■      ⬚ ⬚ ⬚ ■
#     ⬚ ⬚ ⬚ ⬚      ⬚ ⬚ ⬚ ⬚
#                  ⬚ ⬚ ■ ■      1024 more: the left half open, the right half closed
#                  ⬚ ⬚ ■ ■


def triangle(device: torch.device | str = "cpu") -> Tensor:
    """Return bool `[2048, 2048]`, True above the diagonal: the compressed mask of sparse modes 2, 3, 4, 7 and 8.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 2 (compressed lower triangle, True = blocked).

    >>> triangle().shape, triangle()[:3, :3].int().tolist()
    (torch.Size([2048, 2048]), [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    """
    at_S = torch.arange(2048, device=torch.device(device))
    return at_S > at_S[:, None]


def prefix_triangle(device: torch.device | str = "cpu") -> Tensor:
    """Return bool `[3072, 2048]`: the triangle over 1024 rows whose right half is True, for sparse mode 6.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 6.
    """
    right_half = (torch.arange(2048, device=torch.device(device)) >= 1024).expand(1024, 2048)
    return torch.cat([triangle(device), right_half])


# --- a pattern in the operator's terms: the one place of this room that asks what kind of pattern it is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """How the operator can compute one pattern over one batch."""

    what: str  # the pattern in words
    compressed: CompressedName | None  # the form that is exact where nothing else blocks; None: only a mask says it
    compressed_mode: int = 0
    dense_mode: int = 1  # of the dense mask for everything else
    before: int = UNLIMITED  # tokens before a query that it attends at most: `pre_tockens` of the modes that read it
    prefixes: tuple[int, ...] = ()  # of each of the N sequences
    chunk: int = 0  # under TND every `chunk` places of a sequence are a sequence of their own


def _terms(segments: Segments, pattern: Pattern, layout: str) -> _Terms:
    """The terms of the simplest pattern that is the same attention over this batch; a dense mask for one unknown here."""
    _check(segments, layout)
    if not pattern.reaches(segments.longest_span):
        return _Terms(what="causal", compressed="triangle", compressed_mode=3, dense_mode=0)
    if isinstance(pattern, Bidirectional):
        return _Terms(what="full attention", compressed="full")
    if isinstance(pattern, Prefix):
        prefixes = pattern.of_each(segments.num_sequences)
        return _Terms(what="prefix", compressed="prefix", compressed_mode=6, dense_mode=5, prefixes=prefixes)
    if isinstance(pattern, Sliding):
        what, before = f"sliding window of {pattern.size}", pattern.size - 1
        return _Terms(what=what, compressed="band", compressed_mode=4, dense_mode=0, before=before)
    if isinstance(pattern, Chunked) and layout == "TND":
        what = f"chunks of {pattern.size} are sequences of their own"
        return _Terms(what=what, compressed="triangle", compressed_mode=3, chunk=pattern.size)
    if isinstance(pattern, Chunked):
        what, before = f"chunks of {pattern.size} in one matrix for all rows", pattern.size - 1
        return _Terms(what=what, compressed="shared", dense_mode=0, before=before)
    return _Terms(what=str(pattern), compressed=None)


def _check(segments: Segments, layout: str) -> None:
    if layout not in LAYOUTS:
        rule, remedy = f"The operator's layouts are {', '.join(LAYOUTS)}.", "Pass the layout of q, k and v."
        raise CollateError(explain("layout", repr(layout), rule, remedy))
    if not segments.num_tokens:
        rule, remedy = "The operator takes at least one token.", "Drop batches without tokens."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, remedy))


def _packed_arguments(segments: Segments, terms: _Terms) -> dict[str, Any]:
    columns = segments.indices.numpy() % segments.shape[1]
    # For each sequence, how far in the row each of its tokens stands from its first one; holes leave gaps.
    offsets = [tokens - tokens[0] for tokens in np.split(columns, segments.cu_seqlens_host[1:-1])]
    if terms.compressed == "band" and any(places[-1] >= len(places) for places in offsets):
        rule = "A window counts places in the row; packing the tokens closes the holes and moves keys into it."
        raise UnsupportedFormError(explain("layout TND", repr(segments), rule, "Use a padded layout such as BSND."))
    lengths = list(segments.sequence_lengths)
    if terms.chunk:
        lengths = [int(n) for places in offsets for n in np.bincount(places // terms.chunk) if n]
    limits = {"sequences": MAX_SEQUENCES} | ({"sequences with a prefix": MAX_PREFIX_ROWS} if terms.prefixes else {})
    for what, limit in limits.items():
        if len(lengths) > limit:
            rule = f"The operator documents at most {limit} {what} under TND (op-plugin docs, npu_fusion_attention:181-182)."
            raise UnsupportedFormError(
                explain("layout TND", f"{len(lengths)} {what}", rule, "Split the batch, or use BSND.")
            )
    ends = np.cumsum(lengths).tolist()
    arguments: dict[str, Any] = {"actual_seq_qlen": ends, "actual_seq_kvlen": [*ends]}
    if terms.prefixes:
        arguments["prefix"] = [int((places < prefix).sum()) for places, prefix in zip(offsets, terms.prefixes)]
    return arguments
