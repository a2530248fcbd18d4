"""torch's ring attention on CPU tensors: the one kernel that torch 2.13 does not register for context parallelism.

On the CPU `scaled_dot_product_attention` picks `_scaled_dot_product_flash_attention_for_cpu`, which has no rule in
torch/distributed/tensor/experimental/_context_parallel (NotImplementedError: no sharding strategy). The ring itself
takes any kernel, so this hands it that one. A stand-in for a card: the sharding, the hooks and the ring are torch's own.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def install() -> None:
    """Let torch's context parallelism run on this process's CPU."""
    handlers: dict[Any, Any] = ring.custom_ops
    handlers |= {FORWARD: _forward, BACKWARD: _backward}


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _wrapped(locals_: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in locals_)


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    mesh = args[0].device_mesh
    query, key, value = map(_local, args[:3])
    is_causal = args[4] if len(args) > 4 else False
    out, lse, *_ = ring._templated_ring_attention(
        mesh.get_group(), 2, op, query=query, key=key, value=value, is_causal=is_causal, scale=kwargs.get("scale")
    )
    return _wrapped((out, lse), mesh)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    mesh = args[0].device_mesh
    grad_out, query, key, value, out, lse = map(_local, args[:6])
    told = {"grad_out": grad_out, "grad_out_name": "grad_out", "query": query, "key": key, "value": value, "out": out}
    told |= {"logsumexp": lse, "is_causal": args[7], "dropout_p": args[6], "scale": kwargs.get("scale")}
    grads = ring._templated_ring_attention_backward(mesh.get_group(), 2, op, **told)
    return _wrapped(grads[:3], mesh)
