"""Without ms-swift, mcore-bridge or megatron-core our imports work, and import nothing of theirs."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("swift", "mcore_bridge", "megatron", "transformer_engine", "trl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for name in ("swift", "megatron", "megatron.mcore_bridge", "verl", "twinkle", "trl"):
    __import__(f"collate_npu.integrations.{name}")
    assert "transformers" not in sys.modules, name
from collate_npu.integrations import swift
swift.uninstall()
swift.install()
"""


@pytest.mark.slow
def test_importing_an_integration_imports_no_trainer_and_installing_it_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'swift")
