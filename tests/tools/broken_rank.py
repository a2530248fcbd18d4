"""A plugin that breaks rank 1, or every rank, as BROKEN_RANK says; imported by each rank before it meets the others."""

from __future__ import annotations

import os
import time

if os.environ.get("BROKEN_RANK") == "hangs" and os.environ.get("RANK") == "1":
    time.sleep(1000)
if os.environ.get("BROKEN_RANK") == "pads left":  # what ours must never hand over
    from collate_npu.tools import sharded

    sharded.OURS_SHARDED["accelerate"] = ("left", sharded._left)
