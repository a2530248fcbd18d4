"""What a call of a kernel can break, in the words of an error message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.segments import Segments


@dataclass(frozen=True, slots=True)
class Breach:
    """One rule that a call breaks. `silent`: the kernel takes the call and computes something else."""

    rule: str
    where: str
    got: str
    says: str
    remedy: str
    source: str
    silent: bool = False

    def __str__(self) -> str:
        return f"[{self.rule}] {explain(self.where, self.got, self.says, self.remedy)} ({self.source})"


def require(where: str, value: object, kind: Any, rule: str, remedy: str) -> None:
    """Raise `CollateError` unless an argument is of this type."""
    if not isinstance(value, kind):
        raise CollateError(explain(where, f"a {type(value).__name__}", rule, remedy))


def flag(where: str, value: object) -> bool:
    """True or False, and nothing that only counts as such."""
    require(where, value, bool, "It is True or False.", f"Pass {where}=True or False.")
    return value is True


def of_segments(value: Any) -> Segments:
    """The Segments that a function was given, and nothing else that looks like them."""
    require("segments", value, Segments, "It is Segments.", "Pass Segments, or masks.find.segments_from_batch(batch).")
    return value  # type: ignore[no-any-return]


def here(device: Any) -> Any:
    """A device that torch can make a tensor on. Raises `CollateError` for any other."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        rule = f"torch makes no tensor there: {str(error).splitlines()[0][:120]}."
        raise CollateError(explain("device", repr(device)[:60], rule, "Pass 'cpu', or a device of this machine.")) from None


def refuse(kernel: str, found: Iterable[Breach]) -> None:
    """Raise `UnsupportedFormError` with every breach, if there is one."""
    if listed := "\n".join(map(str, found)):
        raise UnsupportedFormError(f"{kernel}:\n{listed}")
