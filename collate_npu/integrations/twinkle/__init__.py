"""twinkle-kit 0.5.1: InputProcessors whose stages keep padding and the 2D mask, and a safe gather of objects. A processor
that is set after `install` gets our stages when it meets its first batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from collate_npu.errors import CollateError, explain
from collate_npu.integrations import patching
from collate_npu.integrations.twinkle.stages import Stages, chunks_of
from collate_npu.parallel import data_group, gather_objects
from collate_npu.parallel.layout import is_gloo
from collate_npu.releases import say_outside

PACKAGE, TESTED = "twinkle-kit", "0.5.1"

_MODELS: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()
"""The models of this process whose processors get our stages, and what was said of their need of a 2D mask."""


def install(target: Any, model: Any = None, *, needs_mask_2d: bool | None = None) -> None:
    """Let the batches of `target`, a model of twinkle's, carry the masks its layers read. Does nothing the second time.

    It reaches every processor of every adapter; where the model lives on Ray, in each worker. On NPUs twinkle's gather of
    objects becomes `gather_object`. A batch is refused where the kernels of some pipeline chunk cannot read its padding, or
    a forward does not take its masks (`attention_mask_2d`, on MoE models `padding_mask`).

    `target` may also be one `InputProcessor` of your own. Then `model` tells who reads its batches: twinkle's model, a
    module, a list of pipeline chunks, or a config. Raises `CollateError` where nothing says whether layers read the 2D mask.

    >>> from collate_npu.integrations import twinkle  # doctest: +SKIP
    >>> twinkle.install(model)  # doctest: +SKIP
    """
    if hasattr(target, "process_pipeline"):
        _replace(target, model, needs_mask_2d)
    elif hasattr(target, "_actors"):
        _in_each_worker(target, install, needs_mask_2d=needs_mask_2d)
    elif hasattr(target, "optimizer_group"):
        _install_here(target, needs_mask_2d)
    else:
        rule = "A processor lives beside the model: twinkle's MegatronModel or TransformersModel holds it."
        remedy = "Pass that model, or one InputProcessor and the model that reads its batches: install(processor, model)."
        raise CollateError(explain("install", type(target).__name__, rule, remedy))


def uninstall(target: Any) -> None:
    """Put twinkle's own stages back in the places of ours; a stage that somebody else put in since stays."""
    if hasattr(target, "process_pipeline"):
        _give_back(target)
    elif hasattr(target, "_actors"):
        _in_each_worker(target, uninstall)
    elif hasattr(target, "optimizer_group"):
        _MODELS.pop(target, None)
        for processor in _processors(target):
            _give_back(processor)
        if not _MODELS:
            patching.release(PACKAGE)


def _install_here(model: Any, needs_mask_2d: bool | None) -> None:
    from twinkle.processor import InputProcessor
    from twinkle.utils.framework import Framework

    if any(type(chunk).__module__.startswith("mcore_bridge") for chunk in chunks_of(model)):
        from collate_npu.integrations.megatron import mcore_bridge

        mcore_bridge.install(holder=PACKAGE)
    for processor in _processors(model):
        _replace(processor, model, needs_mask_2d)
    _MODELS[model] = needs_mask_2d
    patching.patch(PACKAGE, InputProcessor, "__call__", _first_batch)
    patching.patch(PACKAGE, Framework, "gather_object", _gather)


def _first_batch(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    for model, needs_mask_2d in list(_MODELS.items()):
        if any(each is processor for each in _processors(model)):
            _replace(processor, model, needs_mask_2d)
    return original(processor, *args, **kwargs)


def _in_each_worker(handle: Any, function: Callable[..., Any], **settings: Any) -> None:
    import ray

    ray.get([actor.__ray_call__.remote(function, **settings) for actor in handle._actors])


def _processors(model: Any) -> list[Any]:
    """Of every adapter (model/optimizer_group.py:43)."""
    held = (getattr(group, "processor", None) for group in model.optimizer_group.values())
    return [processor for processor in held if hasattr(processor, "process_pipeline")]


def _replace(processor: Any, model: Any, needs_mask_2d: bool | None) -> None:
    if _installed(processor) is not None:
        return
    say_outside(PACKAGE, TESTED)
    ours = Stages(processor, tuple(processor.process_pipeline), model, needs_mask_2d).by_name()
    if missing := set(ours) - {stage.__name__ for stage in processor.process_pipeline}:
        rule = f"The stages of {PACKAGE} {TESTED} are replaced by name."
        raise CollateError(explain("process_pipeline", f"no {sorted(missing)}", rule, f"Install {PACKAGE}=={TESTED}."))
    processor.process_pipeline = [ours.get(stage.__name__, stage) for stage in processor.process_pipeline]


def _give_back(processor: Any) -> None:
    if (stages := _installed(processor)) is not None:
        before = {stage.__name__: stage for stage in stages.before}
        pipeline = processor.process_pipeline
        processor.process_pipeline = [before[s.__name__] if getattr(s, "__self__", None) is stages else s for s in pipeline]


def _gather(original: Callable[..., Any], object: Any, device_mesh: Any, process_group: Any = None) -> list[Any]:
    from twinkle import Platform

    gather = gather_object if Platform.device_prefix() == "npu" else original
    return list(gather(object, device_mesh, process_group))


def gather_object(value: Any, device_mesh: Any = None, process_group: Any = None) -> list[Any]:
    """twinkle's `torch_util.gather_object` (utils/framework.py:41-71), through Gloo alone: no object meets HCCL. Between the
    ranks of Megatron's data and context parallelism, as twinkle does on an NPU, else those of `process_group`."""
    import torch.distributed as dist

    values = [value]
    if dist.is_available() and dist.is_initialized():
        group, shared = process_group or dist.group.WORLD, data_group()
        values = gather_objects(value, group if is_gloo(group) or shared is dist.group.WORLD else shared)
    return [one for part in values if part is not None for one in (part if isinstance(part, (list, tuple)) else [part])]


def _installed(processor: Any) -> Stages | None:
    owners = (getattr(stage, "__self__", None) for stage in processor.process_pipeline)
    return next((owner for owner in owners if isinstance(owner, Stages)), None)
