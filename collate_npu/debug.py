"""Debug: with COLLATE_NPU_DEBUG=1, what was decided about each kind of batch and why, on stderr, once a process.

Goes to the logger `collate_npu`; without a handler of your own it gets one for stderr. The variable is read when this is
imported. Unset, a batch pays for looking at one name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable

from collate_npu.errors import printable


def asked(name: str) -> bool:
    """Is this switch of the environment on?"""
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")


ON = asked("COLLATE_NPU_DEBUG")

_LOGGER = logging.getLogger("collate_npu")
_said: set[tuple[int, Hashable]] = set()
"""By process: a worker that was forked says again what it does itself."""


def say(what: Hashable, text: str, *, level: int = logging.DEBUG) -> None:
    """Log `text`, unless this process has said `what` before. A warning is said whatever the variable is."""
    if (os.getpid(), what) in _said:
        return
    _said.add((os.getpid(), what))
    if not _LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s [%(processName)s %(process)d] %(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.propagate = False  # else an application's own handlers say it a second time
    _LOGGER.setLevel(logging.DEBUG)
    _LOGGER.log(level, printable(text))
