"""Process groups: which ranks talk, checked before anybody waits for anybody.

Tensors travel through the group that is given (Gloo, NCCL, HCCL). Python objects travel through a Gloo group only:
on HCCL an object is pickled into device memory on the default group, which is slow and takes device memory in silence.
"""

from __future__ import annotations

from typing import Any

from collate_npu.errors import CollateError, explain


def check_group(group: Any, size: int | None = None, rank: int | None = None) -> None:
    """Raise `CollateError` where the group is missing, or is not the one that `size` and `rank` speak of."""
    import torch.distributed as dist

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
    if not hasattr(group, "mesh_dim_names"):
        return group
    if group.ndim == 1:
        return group.get_group()
    if group.ndim == 2:
        return group._flatten().get_group()
    rule = "A context-parallel mesh has one dimension, or two: (ring, ulysses)."
    raise CollateError(explain("DeviceMesh", f"{group.ndim} dimensions", rule, "Pass mesh['cp']."))


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


def gloo_group(group: Any) -> Any:
    """The same ranks on Gloo, for Python objects: the group itself where its CPU side is Gloo, else a new group.

    Every rank of the group must call it (it meets the others), once, at start-up; keep what it returns.
    """
    import torch.distributed as dist

    check_group(group)
    group = mesh_group(group)
    if is_gloo(group):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def is_gloo(group: Any) -> bool:
    """True where CPU objects of this group travel by Gloo (`gloo`, or `cpu:gloo,npu:hccl`)."""
    import torch.distributed as dist

    config = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return config.get("cpu") == "gloo"
