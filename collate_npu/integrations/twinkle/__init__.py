"""twinkle-kit 0.5.1: an InputProcessor whose stages keep padding and the 2D mask, and a safe gather of objects.

`install(processor)` swaps five stages of its `process_pipeline` for those of `stages.py`; `uninstall` puts them back.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from collate_npu.errors import CollateError, explain
from collate_npu.integrations.twinkle.stages import Stages
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import data_group, gather_objects
from collate_npu.parallel.groups import is_gloo

PACKAGE, TESTED = "twinkle-kit", "0.5.1"


def install(
    processor: Any, model: Any = None, *, needs_mask_2d: bool | None = None, pattern: str | Pattern = "causal"
) -> None:
    """Replace the stages of one `InputProcessor`. `model` tells whether its layers read the 2D mask: twinkle's own model,
    Megatron's, or its config.

    With the model itself, `attention_mask_2d`, and on MoE models `padding_mask`, go where its forward passes them on
    (`pass_through_forward`; `mcore_bridge.install()` lets its layers take them), and a batch whose padding its
    kernels cannot read is refused. With a config or `needs_mask_2d` alone the 2D mask is a keyword, and of the kernels
    only a config's `masked_softmax_fusion` is known. Raises `CollateError` where none of them is given, or a stage is
    missing. Does nothing the second time.
    """
    if _installed(processor) is not None:
        return
    stages = Stages(processor, tuple(processor.process_pipeline), _module(model), needs_mask_2d, pattern)
    ours = stages.by_name()
    missing = set(ours) - {stage.__name__ for stage in processor.process_pipeline}
    if missing:
        rule = "The stages of twinkle-kit 0.5.1 are replaced by name."
        raise CollateError(explain("process_pipeline", f"no {sorted(missing)}", rule, "Install twinkle-kit==0.5.1."))
    processor.process_pipeline = [ours.get(stage.__name__, stage) for stage in processor.process_pipeline]


def uninstall(processor: Any) -> None:
    """Put twinkle's own stages back in the places of ours; a stage that somebody else put in since stays."""
    if (stages := _installed(processor)) is not None:
        before = {stage.__name__: stage for stage in stages.before}
        pipeline = processor.process_pipeline
        processor.process_pipeline = [before[s.__name__] if getattr(s, "__self__", None) is stages else s for s in pipeline]


def gather_object(value: Any, device_mesh: Any = None, process_group: Any = None) -> list[Any]:
    """twinkle's `torch_util.gather_object`, through Gloo alone: no object meets HCCL (twinkle utils/framework.py:41-71).

    Where Megatron shares out the data, between all ranks of its data and context parallelism, as twinkle does on an NPU;
    else between those of `process_group`. Lists of ranks are joined and None left out, as twinkle's callers expect.
    """
    import torch.distributed as dist

    values = [value]
    if dist.is_available() and dist.is_initialized():
        group, shared = process_group or dist.group.WORLD, data_group()
        values = gather_objects(value, group if is_gloo(group) or shared is dist.group.WORLD else shared)
    return [one for part in values if part is not None for one in (part if isinstance(part, (list, tuple)) else [part])]


def _module(model: Any) -> Any:
    """The first pipeline chunk of twinkle's MegatronModel, or of its list (model/megatron/megatron.py:159); else `model`."""
    if not isinstance(model, nn.Module) and hasattr(model, "model"):
        model = model.model
    return model[0] if isinstance(model, (list, tuple, nn.ModuleList)) else model


def _installed(processor: Any) -> Stages | None:
    owners = (getattr(stage, "__self__", None) for stage in processor.process_pipeline)
    return next((owner for owner in owners if isinstance(owner, Stages)), None)
