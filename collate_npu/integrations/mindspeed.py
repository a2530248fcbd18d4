"""MindSpeed's start, for code of ours that imports Megatron first; `start_problem` says where that was too early."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

from collate_npu.consumers import mindspeed
from collate_npu.consumers.mindspeed import ADAPTOR, start_problem as start_problem


def start() -> None:
    """Let the adaptor patch now, where MindSpeed is installed and Megatron is not imported yet. Nothing where it does not
    load, as in a driver process without CANN: so does verl (0.9.1 workers/engine/__init__.py:54-60)."""
    if mindspeed.installed() and "megatron.core" not in sys.modules:
        with suppress(ImportError):
            import_module(ADAPTOR)
