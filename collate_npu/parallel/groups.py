"""Process groups: which ranks talk, checked before anybody waits for anybody.

Tensors travel through the group that is given (Gloo, NCCL, HCCL). Python objects travel through a Gloo group only:
on HCCL an object is pickled into device memory, which takes memory in silence and was seen to hang with 8 cards (twinkle
utils/framework.py:48-56). `gloo_group` gives the right one.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from collate_npu.errors import CollateError, explain

_GLOO: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""The groups made here, by the world they are of and their ranks."""


def check_group(group: Any, size: int | None = None, rank: int | None = None) -> None:
    """Raise `CollateError` where the group is missing, or is not the one that `size` and `rank` speak of."""
    remedy = "Pass group=torch.distributed.group.WORLD, a group of new_group(), or use ContextParallel.from_mesh(mesh)."
    if group is None:
        raise CollateError(explain("group", "None", "Gathering needs the process group of these ranks.", remedy))
    if not dist.is_available() or not dist.is_initialized():
        rule = "torch.distributed is not initialised in this process."
        raise CollateError(explain("group", type(group).__name__, rule, "Call init_process_group() (torchrun) first."))
    group = mesh_group(group)
    held, here = dist.get_world_size(group), dist.get_rank(group)
    if here < 0:
        raise CollateError(explain("group", "a group without this rank", "A rank gathers with its own group.", remedy))
    if size is not None and (held, here) != (size, rank):
        got, rule = f"size {size}, rank {rank}", f"The group has {held} ranks and this process is its rank {here}."
        raise CollateError(explain("ContextParallel", got, rule, "Use ContextParallel.from_group."))


def mesh_group(group: Any) -> Any:
    """The process group of a DeviceMesh of one or two dimensions (row major), or the group itself."""
    if isinstance(group, dist.ProcessGroup) or not hasattr(group, "mesh_dim_names"):
        return group
    if group.ndim == 1:
        return group.get_group()
    if group.ndim == 2:
        return group._flatten().get_group()
    rule = "A context-parallel mesh has one dimension, or two: (ring, ulysses)."
    raise CollateError(explain("DeviceMesh", f"{group.ndim} dimensions", rule, "Pass mesh['cp']."))


def timeout_of(group: Any) -> timedelta:
    """How long ranks of this group wait for each other: what `init_process_group` or `new_group` was told."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(told := getattr(options, "_timeout", None), timedelta):
            return told
    return timedelta(minutes=10)  # as long as the collectives of NCCL wait by default


def megatron_group() -> tuple[Any, int]:
    """Megatron's context-parallel group and tensor-parallel size (megatron/core/parallel_state.py)."""
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        rule = "megatron-core is not installed here."
        raise CollateError(explain("from_megatron", repr(error), rule, "Use from_group or from_mesh.")) from error
    if not parallel_state.model_parallel_is_initialized():
        rule = "Megatron's parallel groups do not exist yet."
        remedy = "Call parallel_state.initialize_model_parallel(context_parallel_size=...) first."
        raise CollateError(explain("from_megatron", "an uninitialised parallel_state", rule, remedy))
    return parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_world_size()


def gloo_group(group: Any = None) -> Any:
    """The Gloo group that carries Python objects between the ranks of `group`: made at its first use, and kept.

    Without `group`, between the ranks of `data_group`. A group whose CPU side is Gloo is returned as it is. Every rank of
    the group must come here the first time (it meets the others). Raises `CollateError` where there is no group, or no
    Gloo: objects never go to HCCL or NCCL instead.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = data_group()
    check_group(group)
    group = mesh_group(group)
    if is_gloo(group):
        return group
    if not dist.is_gloo_available():
        rule = "Python objects travel by Gloo, never by HCCL or NCCL, and this torch is built without it."
        raise CollateError(explain("group", dist.get_backend(group), rule, "Install a torch that has Gloo."))
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _GLOO.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        # torch hands the device of init_process_group(device_id=) on to each new group, and Gloo has no backend for it
        # ("No backend type associated with device type npu")
        world: Any = dist.group.WORLD
        device, world.bound_device_id = getattr(world, "bound_device_id", None), None
        try:
            made[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    return made[ranks]


def data_group() -> Any:
    """The ranks that share out the data of a step: under Megatron those of its data and context parallelism, else all.

    A context-parallel rank holds a part of each row, so what counts tokens or losses needs both. Megatron's own Gloo group
    where it made one (`get_data_parallel_group_gloo`, parallel_state.py:1442-1458 of megatron-core 0.16.1).
    """
    state = sys.modules.get("megatron.core.parallel_state")  # an import here could come before MindSpeed's patches
    if state is None or not state.model_parallel_is_initialized():
        return dist.group.WORLD
    with suppress(AssertionError):  # create_gloo_process_groups=False
        if own := state.get_data_parallel_group_gloo(with_context_parallel=True):
            return own
    return state.get_data_parallel_group(with_context_parallel=True)


def is_gloo(group: Any) -> bool:
    """True where CPU objects of this group travel by Gloo (`gloo`, or `cpu:gloo,npu:hccl`)."""
    config = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return config.get("cpu") == "gloo"
