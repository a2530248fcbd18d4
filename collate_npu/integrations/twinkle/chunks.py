"""The modules behind what a user of twinkle holds: its model, a list of pipeline chunks, one module; and what each reads.

Under virtual pipeline parallelism a rank has several chunks, and one batch goes through each of them (megatron.py:159 of
twinkle-kit 0.5.1, `self.model: List[nn.Module]`). What one of them cannot read the batch must not carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collate_npu.consumers.megatron import kernel_of, refuse_unread_padding
from collate_npu.consumers.models import config_of, unwrap
from collate_npu.errors import CollateError, explain
from collate_npu.integrations.megatron.mcore_bridge import pass_through_forward
from collate_npu.segments import Segments


def is_twinkle_model(model: Any) -> bool:
    """A MegatronModel or TransformersModel, with or without adapters: it holds a processor for each of them."""
    return hasattr(model, "optimizer_group")


def chunks_of(model: Any) -> list[Any]:
    """Every module a batch goes through, without DDP, Float16Module and PEFT around it; or a config, alone; or nothing."""
    if hasattr(model, "_actors"):
        rule = "The modules of a model on Ray live in its workers, and its processors too."
        raise CollateError(explain("model", f"the handle of a {type(model).__name__}", rule, "Call install(model)."))
    holder = is_twinkle_model(model) or (hasattr(model, "model") and not hasattr(model, "forward"))
    held = model.model if holder else model
    held = list(held) if isinstance(held, (list, tuple)) or type(held).__name__ == "ModuleList" else [held]
    return [unwrap(chunk) for chunk in held if chunk is not None]


def pass_through(chunks: list[Any], batch: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with `extras` where the forward of every kind of chunk takes them; raises where one does not."""
    out = dict(batch)
    for kind in {type(chunk): None for chunk in chunks if hasattr(chunk, "forward")}:
        out |= pass_through_forward(kind, batch, extras)
    return out


def refuse_unread(chunks: list[Any], segments: Segments, *, attention: bool = True) -> None:
    """Raise where padding reaches a layer that cannot see it, in whichever chunk. A config tells of its softmax alone.

    Without `attention` of recurrent layers alone: what MindSpeed's attention reads is its consumer's to say.
    """
    modules = [chunk for chunk in chunks if hasattr(chunk, "modules")]
    kinds = [{type(module).__name__ for module in chunk.modules()} for chunk in modules]
    recurrent = any("GatedDeltaNet" in found for found in kinds)
    attending = [chunk for chunk, found in zip(modules, kinds) if any("DotProductAttention" in kind for kind in found)]
    kernels = [kernel_of(chunk) for chunk in attending or modules]
    if not modules and any(getattr(config_of(chunk), "masked_softmax_fusion", False) for chunk in chunks):
        kernels = ["transformer_engine"]
    for kernel in dict.fromkeys(kernels if attention else ["megatron"]):
        refuse_unread_padding(segments, kernel, recurrent=recurrent)
