"""MindSpeed and Ascend's other adaptors, started before code of ours imports Megatron; `start_problem` says where that was
too late."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

from collate_npu.consumers.mindspeed import adaptors, start_problem as start_problem


def start() -> None:
    """Let the adaptor patch now, where MindSpeed, or else MegatronAdaptor, is installed and Megatron is not imported yet.
    Nothing where it does not load, as in a driver process without CANN: so does verl (0.9.1 workers/engine/__init__.py:
    54-60)."""
    found = adaptors()
    if found and "megatron.core" not in sys.modules:
        with suppress(ImportError):
            import_module(found[0])
