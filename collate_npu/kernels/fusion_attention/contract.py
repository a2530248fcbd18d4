"""Check a call of `npu_fusion_attention` against the operator's contract, before the card does or does not.

The only check there is: torch_npu's own Python, meta and host code take a mask of any shape, and the card's host code
never looks inside one. Costs one pass over a mask; a mask on a device is copied to the host, so check in the collator or
once per shape, not at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.fusion_attention import accepted_wrong, refused
from collate_npu.kernels.fusion_attention.operator_call import Breach, Call, Sizes


def contract_breaches(
    kwargs: Mapping[str, Any],
    *,
    B: int,
    N: int,
    Nkv: int,
    Sq: int,
    Skv: int,
    D: int,
    Tq: int | None = None,
    Tkv: int | None = None,
) -> tuple[Breach, ...]:
    """Every rule that the arguments break, card's refusals first; arguments and sizes as in `check_contract`."""
    call = Call.read(kwargs, Sizes(B=B, N=N, Nkv=Nkv, Sq=Sq, Skv=Skv, D=D, Tq=Tq, Tkv=Tkv))
    return tuple(refused.breaches(call)) or tuple(accepted_wrong.breaches(call))


def check_contract(
    kwargs: Mapping[str, Any],
    *,
    B: int,
    N: int,
    Nkv: int,
    Sq: int,
    Skv: int,
    D: int,
    Tq: int | None = None,
    Tkv: int | None = None,
) -> None:
    """Raise `UnsupportedFormError`, with rule, remedy and source, unless the card computes what the arguments say.

    `kwargs` are those of `npu_fusion_attention` or its `_v3`, `input_layout` among them. B rows, N query and Nkv key
    heads, Sq and Skv rows, head size D; under TND B counts sequences, Sq and Skv are the longest, and Tq, Tkv (tokens of
    the packed tensors) prove that no token is left over. Stricter than the card wherever the card is silent.

    A mask cannot show everything: `~keep` and `keep` of a bidirectional padding mask are both legal masks.
    """
    found = contract_breaches(kwargs, B=B, N=N, Nkv=Nkv, Sq=Sq, Skv=Skv, D=D, Tq=Tq, Tkv=Tkv)
    if found:
        raise UnsupportedFormError("npu_fusion_attention:\n" + "\n".join(map(str, found)))
