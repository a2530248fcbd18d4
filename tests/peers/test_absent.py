"""Without ms-swift, mcore-bridge or megatron-core our imports work, and import nothing of theirs."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("swift", "mcore_bridge", "megatron", "transformer_engine", "trl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize(
    "module", ["swift", "swift.masks", "megatron", "megatron.mcore_bridge", "verl.engine", "twinkle", "trl"]
)
def test_importing_an_integration_imports_no_trainer(module):
    code = f"{BLOCKED}\nimport collate_npu.integrations.{module}\nassert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_installing_without_the_trainer_says_what_is_missing():
    code = f"{BLOCKED}\nfrom collate_npu.integrations import swift\nswift.uninstall()\nswift.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'swift" in done.stderr
