"""For verl's workers: `VERL_USE_EXTERNAL_MODULES=collate_npu.integrations.verl.plugin`, and each process installs `engine`.

verl imports what that variable names in every process that imports verl, Ray's workers included (verl 0.9.1
verl/__init__.py:49-52). Where there is no megatron-core no Megatron engine can run, and there is nothing to install.
"""

from __future__ import annotations

from importlib.util import find_spec

from collate_npu.integrations.verl import engine

if find_spec("megatron") is not None:
    engine.install()
