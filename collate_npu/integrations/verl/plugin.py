"""For verl's workers: `VERL_USE_EXTERNAL_MODULES=collate_npu.integrations.verl.plugin`, and each process patches
the Megatron engine.

Ray hands the variable to no worker of a cluster that stands already (0.9.1 trainer/constants_ppo.py): give it in
`runtime_env`, or name this module as a model's `external_lib`.

Importing this patches nothing yet. MindSpeed "must be imported before Megatron" (workers/engine/__init__.py): `verl.install`
runs when verl itself imports `verl.models.mcore`.
"""

from __future__ import annotations

from collate_npu.integrations import verl
from collate_npu.integrations.patching import once_imported

# any module of `verl.models.mcore` runs its `__init__` first, which imports the forwards, the registry, `util` and Megatron
once_imported(verl.PACKAGE, "verl.models.mcore", verl.install, before=verl.start_adaptor)
