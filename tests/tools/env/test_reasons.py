"""Why something does not load."""

from __future__ import annotations

from collate_npu.tools.env.reasons import reason


def test_the_first_cause_is_told():
    error = RuntimeError("Failed to load the backend\nand more")
    error.__cause__ = ImportError("libhccl.so: gone")
    assert reason(error) == "RuntimeError: Failed to load the backend (ImportError: libhccl.so: gone)"
    assert reason(KeyError()) == "KeyError: "
