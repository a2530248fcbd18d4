"""What a run that is no test found, as a line of JSON in the file that COLLATE_NPU_REPORT names."""

import json
import os
from typing import Any

REPORT = os.environ.get("COLLATE_NPU_REPORT", "")
"""conftest takes it out of the environment: not for xdist's workers, nor for a run in a test."""


def report(counts: dict[str, Any], failed: dict[str, str]) -> None:
    if REPORT:
        with open(REPORT, "a", encoding="utf-8") as out:
            out.write(json.dumps({**counts, "failed": failed}) + "\n")
