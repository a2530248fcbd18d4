"""A plugin that each rank imports before it meets the others, and that breaks rank 1 or all as BROKEN_RANK says."""

from __future__ import annotations

import os
import time

if os.environ.get("BROKEN_RANK") == "hangs" and os.environ.get("RANK") == "1":
    time.sleep(1000)
if os.environ.get("BROKEN_RANK") == "pads left" and "RANK" in os.environ:  # a way of ours that is wrong
    from collate_npu.tools.audit import sharded

    sharded.OURS_SHARDED["broken"] = ("left", sharded._left)
