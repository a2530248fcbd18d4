"""What is `collate_npu.proof.delivery` now."""

from __future__ import annotations

from typing import Any

from collate_npu.errors import moved


def __getattr__(name: str) -> Any:
    return moved(__name__, name)
