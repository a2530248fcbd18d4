"""A row of `nox -s elsewhere` runs this in its environment: what is installed there, for its line in elsewhere.json."""

import json
import os
import platform
from importlib.metadata import distributions

NAMES = ("torch", "transformers", "numpy")
there = {one.metadata["Name"]: one.version for one in distributions()}
found = {"python": platform.python_version(), **{name: there[name] for name in NAMES if name in there}}
found["platform"] = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
with open(os.environ["COLLATE_NPU_REPORT"], "a", encoding="utf-8") as out:
    out.write(json.dumps({"found": found}) + "\n")
print(found)
