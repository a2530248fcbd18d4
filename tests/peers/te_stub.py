"""Stand-ins for Transformer Engine and triton: import this before megatron, mcore_bridge, swift.megatron or verl."""

import importlib
import importlib.metadata

from stand_ins import stand_in, triton

VERSION = "2.9.0"
_real_version = importlib.metadata.version


def _version(name: str) -> str:
    return VERSION if name.replace("_", "-").lower() == "transformer-engine" else _real_version(name)


importlib.metadata.version = _version
stand_in(transformer_engine=VERSION, transformer_engine_torch=VERSION)
if int(_real_version("megatron-core").split(".")[1]) >= 18:
    triton()
for _name in ("megatron.core", "megatron.core.transformer", "megatron.core.ssm.gated_delta_net"):
    importlib.import_module(_name)
stand_in(triton="3.6.0")
