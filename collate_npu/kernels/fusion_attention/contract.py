"""Check a call of `npu_fusion_attention` against the operator's contract, before the operator does or does not.

The only check there is: torch_npu's own Python, meta and host code take a mask of any shape, and CANN's host code never
looks inside one. Costs a few passes over a mask, block by block, and with `segments` a look at every score; check in the
collator or once per shape, not at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.fusion_attention import accepted_wrong, against_segments, refused
from collate_npu.kernels.fusion_attention.operator_call import Call, Sizes
from collate_npu.masks.forms import varlen
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments


def contract_breaches(
    kwargs: Mapping[str, Any],
    *,
    N: int,
    Nkv: int,
    D: int,
    B: int | None = None,
    Sq: int | None = None,
    Skv: int | None = None,
    Tq: int | None = None,
    Tkv: int | None = None,
    segments: Segments | None = None,
    pattern: str | Pattern = "causal",
    keep_tail: bool = False,
) -> tuple[Breach, ...]:
    """Every rule that the arguments break, the operator's own refusals first; arguments as in `check_contract`.

    >>> left = Segments.from_lengths([3, 5], side="left")
    >>> [breach.rule for breach in contract_breaches({"input_layout": "BSND"}, N=4, Nkv=2, D=64, segments=left)]
    ['differs-from-segments']
    """
    wrong_sizes: tuple[Breach, ...] = ()
    sizes = Sizes(N=N, Nkv=Nkv, D=D, B=B, Sq=Sq, Skv=Skv, Tq=Tq, Tkv=Tkv)
    if segments is not None:
        sizes, wrong_sizes = _sizes_of(segments, sizes, kwargs.get("input_layout") == "TND", keep_tail)
    call = Call.read(kwargs, sizes)
    found = wrong_sizes or tuple(refused.breaches(call)) or tuple(accepted_wrong.breaches(call))
    if found or segments is None:
        return found
    return tuple(against_segments.breaches(call, segments, Pattern.of(pattern), keep_tail))


def check_contract(
    kwargs: Mapping[str, Any],
    *,
    N: int,
    Nkv: int,
    D: int,
    B: int | None = None,
    Sq: int | None = None,
    Skv: int | None = None,
    Tq: int | None = None,
    Tkv: int | None = None,
    segments: Segments | None = None,
    pattern: str | Pattern = "causal",
    keep_tail: bool = False,
) -> None:
    """Raise `UnsupportedFormError`, with rule, remedy and source, unless the operator computes what the arguments say.

    `kwargs` are those of `npu_fusion_attention` or its `_v3`, `input_layout` among them. N query and Nkv key heads of
    size D. With `segments`, what the call computes is compared with what they and `pattern` say at every real query: no
    wrong call passes. Under TND the packed tensors are then those of `unpad`, or with `keep_tail` the whole flat row.

    Without `segments` the sizes must be given: B rows, Sq and Skv of the padded layouts; Tq and Tkv, the tokens of the
    packed tensors, under TND. The check is stricter than the operator where that says nothing, but it believes a legal
    mask: `~keep` and `keep` of a bidirectional padding mask both pass. Raises `CollateError` where a size is missing.

    >>> left = Segments.from_lengths([3, 5], side="left")
    >>> check_contract({"input_layout": "BSND", "sparse_mode": 3}, N=4, Nkv=2, D=64, segments=left)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: npu_fusion_attention:
    [none-is-full] atten_mask: got None with sparse_mode 3, pre 2147483647, next 2147483647. Without a mask every mode
        and token is ignored: full attention, the future included. Pass the compressed mask geometry.triangle(), or
        sparse_mode 0 if full attention is meant. (T:799, T:4121, PD:176, MS:102)
    """
    found = contract_breaches(
        kwargs,
        N=N,
        Nkv=Nkv,
        D=D,
        B=B,
        Sq=Sq,
        Skv=Skv,
        Tq=Tq,
        Tkv=Tkv,
        segments=segments,
        pattern=pattern,
        keep_tail=keep_tail,
    )
    if found:
        raise UnsupportedFormError("npu_fusion_attention:\n" + "\n".join(map(str, found)))


def _sizes_of(segments: Segments, given: Sizes, tnd: bool, keep_tail: bool) -> tuple[Sizes, tuple[Breach, ...]]:
    """The sizes that follow from the batch filled in, and those given that are others."""
    B, S = segments.shape
    T = varlen(segments, keep_tail=keep_tail).cu_seqlens_host[-1] if tnd else 0
    follow = {"Tq": T, "Tkv": T} if tnd else {"B": B, "Sq": S, "Skv": S}
    wrong = [name for name, size in follow.items() if getattr(given, name) not in (None, size)]
    breaches = tuple(
        Breach(
            rule="sizes-differ",
            where=name,
            got=str(getattr(given, name)),
            says=f"By the segments it is {follow[name]}.",
            remedy="Leave it out, or pass the segments of this batch (keep_tail=True if the tail is in the tensor).",
            source="Segments",
            silent=True,
        )
        for name in wrong
    )
    return replace(given, **follow), breaches
