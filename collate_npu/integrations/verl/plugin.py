"""For verl's workers: `VERL_USE_EXTERNAL_MODULES=collate_npu.integrations.verl.plugin`, and each process patches
the engine, Megatron or FSDP, that its strategy runs.

Ray hands the variable to no worker of a cluster that stands already (0.9.1 trainer/constants_ppo.py): give it in
`runtime_env`, or name this module as a model's `external_lib`.

Importing this installs nothing yet. MindSpeed "must be imported before Megatron" (workers/engine/__init__.py), so
`verl.install` runs when verl itself imports `verl.models.mcore`, before any module can take a function from it, and
`verl.install_fsdp` when verl has imported its FSDP engine. Nor does it do that much where verl does not import it
(utils/import_utils.py `import_external_libs`) and the variable does not name it: it says so, and `arm` can be called.
"""

from __future__ import annotations

import os
import sys
import warnings

from collate_npu.integrations import mindspeed, verl
from collate_npu.integrations.patching import once_imported


def arm() -> None:
    """Patch verl's engines: now where one is imported, else as soon as it is."""
    # any module of it runs its `__init__` first, which imports the forwards, the registry and `util`, and Megatron
    once_imported("verl.models.mcore", verl.install, before=mindspeed.start)
    once_imported("verl.workers.engine.fsdp.transformer_impl", verl.install_fsdp)


def _named_by_user() -> bool:
    """True if the variable names this module, or verl is importing it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "verl":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None or __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").replace(" ", "").split(",")


if _named_by_user():
    arm()
else:
    warnings.warn(f"collate_npu: {__name__} was not imported by verl, and changes nothing; call its arm().", stacklevel=2)
