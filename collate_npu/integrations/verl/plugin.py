"""With `VERL_USE_EXTERNAL_MODULES=collate_npu.integrations.verl.plugin` each worker of verl patches its Megatron engine.

Ray hands the variable to no worker of a cluster that stands already (0.9.1 trainer/constants_ppo.py): give it in
`runtime_env`, or name this module as a model's `external_lib`.

Importing this patches nothing yet: `verl.install` runs when verl itself imports `verl.models.mcore`, after MindSpeed, which
"must be imported before Megatron" (workers/engine/__init__.py).
"""

from __future__ import annotations

import wrapt

from collate_npu.integrations import verl

# any module of `verl.models.mcore` runs its `__init__` first, which imports the forwards, the registry, `util` and Megatron
wrapt.register_post_import_hook(lambda _: verl.install(), "verl.models.mcore")
