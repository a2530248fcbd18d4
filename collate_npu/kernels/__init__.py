"""Kernels: arguments from `Segments`, checked before a card sees them, and a CPU reference of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from collate_npu.errors import UnsupportedFormError, explain


@dataclass(frozen=True, slots=True)
class Breach:
    """One rule that a call breaks: the kernel would compute something else, or nothing can be read of the call."""

    rule: str
    where: str
    got: str
    says: str
    remedy: str
    source: str

    def __str__(self) -> str:
        return f"[{self.rule}] {explain(self.where, self.got, self.says, self.remedy)} ({self.source})"


def refuse(kernel: str, found: Iterable[Breach]) -> None:
    """Raise `UnsupportedFormError` with every breach, if there is one."""
    if listed := "\n".join(map(str, found)):
        raise UnsupportedFormError(f"{kernel}:\n{listed}")
