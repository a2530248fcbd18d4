"""What ranks do in the parity tests: the same input to a peer's own function and to ours. Runs in processes of a Pool."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import te_stub  # noqa: F401  (before megatron)
import torch
import torch.distributed as dist
from torch import Tensor

from collate_npu import Segments, dense, to_nested
from collate_npu.parallel import (
    ContextParallel,
    cu_seqlens_of,
    gather_sequence,
    pad_documents,
    split_batch,
    split_tensor,
)
from collate_npu.testing import tiny_config

warnings.filterwarnings("ignore")


@functools.cache
def start() -> None:
    """Megatron's groups: all ranks of the pool are one context-parallel group."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())


def place(**settings: Any) -> ContextParallel:
    start()
    cp = ContextParallel.from_megatron(**settings)
    assert (cp.size, cp.rank, cp.tensor_parallel) == (dist.get_world_size(), dist.get_rank(), 1)
    return cp


def same(ours: Any, theirs: Any, key: str) -> None:
    assert torch.equal(ours, theirs), (key, ours, theirs)


def megatron_batch(segments: Segments) -> dict[str, Any]:
    ids = torch.arange(segments.ids.numel()).view(segments.shape)
    return {
        "tokens": ids,
        "labels": ids + 1000,
        "loss_mask": segments.keep.float(),
        "position_ids": segments.position_ids.contiguous(),
        "attention_mask": dense(segments, polarity="masked"),
        "attention_mask_2d": segments.keep,
    }


def megatron(lengths: list[int], side: str, with_mask: bool) -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    cp = place()
    width = -(-max(lengths) // cp.multiple) * cp.multiple
    batch = megatron_batch(Segments.from_lengths(lengths, width=width, side=side))
    if not with_mask:
        batch["attention_mask"] = None
    theirs = get_batch_on_this_cp_rank(dict(batch))
    ours = split_batch(batch, cp)
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert (value is None and ours[key] is None) or torch.equal(ours[key], value), key


# --- mcore-bridge and ms-swift ------------------------------------------------------------------------------------------


def mcore_bridge(layout: str, lengths: list[int], dim: int) -> None:
    from mcore_bridge.utils.megatron_utils import split_cp_inputs

    cp = place(layout=layout)
    sizes = [n * max(cp.document_multiple, cp.multiple) for n in lengths]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    mode = "contiguous" if layout == "contiguous" else "zigzag"
    theirs = split_cp_inputs(x, offsets if cp.documents else None, dim, cp_partition_mode=mode)
    same(split_tensor(x, cp, dim=dim, cu_seqlens=offsets), theirs, layout)


def mcore_bridge_gather(layout: str, lengths: list[int]) -> None:
    """Their `reconstruct_tensor_cp` keeps the gradient of the own shard alone: our `loss="same"`."""
    from mcore_bridge.utils.megatron_utils import reconstruct_tensor_cp

    cp = place(layout=layout)
    sizes = [n * max(cp.document_multiple, cp.multiple) for n in lengths]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.randn(1, sum(sizes), 2, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    packed = types.SimpleNamespace(cu_seqlens_q=offsets, cu_seqlens_q_padded=offsets, qkv_format="thd")
    grads = []
    for gather in (
        lambda shard: gather_sequence(shard, cp, cu_seqlens=offsets),
        lambda shard: reconstruct_tensor_cp(
            shard, packed if cp.documents else None, 1, "contiguous" if layout == "contiguous" else "zigzag"
        ),
    ):
        shard = split_tensor(x, cp, cu_seqlens=offsets).clone().requires_grad_()
        whole = gather(shard)
        same(whole, x, layout)
        (whole * weights).sum().backward()
        grads.append(shard.grad)
    same(*grads, layout)


def swift_batch(lengths: list[int], mode: str) -> dict[str, Any]:
    """`get_batch_on_this_cp_rank` of ms-swift as it runs on an NPU, where it cuts the dense mask too."""
    from swift.megatron.utils import megatron_lm_utils

    cp = place(layout=mode)
    multiple = 2 * cp.size
    segments = Segments.from_lengths(lengths, width=-(-max(lengths) // multiple) * multiple)
    batch = megatron_batch(segments)
    batch = {"input_ids": batch.pop("tokens"), "loss_scale": batch.pop("loss_mask"), **batch}
    args = types.SimpleNamespace(is_multimodal=False, task_type="causal_lm", cp_partition_mode=mode)
    before, megatron_lm_utils.is_torch_npu_available = megatron_lm_utils.is_torch_npu_available, lambda: True
    try:
        theirs = megatron_lm_utils.get_batch_on_this_cp_rank(args, dict(batch))
    finally:
        megatron_lm_utils.is_torch_npu_available = before
    ours = split_batch(batch, cp)
    for key in ("input_ids", "labels", "loss_scale", "position_ids", "attention_mask"):
        same(ours[key], theirs[key], key)
    return {
        "theirs": theirs["attention_mask_2d"].shape[1],
        "ours": ours["attention_mask_2d"].shape[1],
        "whole": segments.shape[1],
    }


def swift_padding(tp: int, recipe: str | None, backend: str) -> tuple[int, int]:
    from swift.megatron.utils.utils import get_padding_to

    from collate_npu.parallel import BLOCKS

    size = dist.get_world_size()
    args = types.SimpleNamespace(
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        context_parallel_size=size,
        fp8_format=recipe and "e4m3",
        fp8_recipe={"fp8": "delayed"}.get(recipe, recipe),
        attention_backend=backend,
    )
    block = max(BLOCKS[recipe] if recipe else 1, 64 if backend == "fused" else 1)
    return get_padding_to(args), ContextParallel(size, 0, tensor_parallel=tp, block=block).multiple


def swift_sequence_parallel(ulysses: int, lengths: list[int]) -> None:
    """ms-swift's Ulysses, and its Ulysses x ring over padded documents."""
    from swift.sequence_parallel.sequence_parallel import SequenceParallel

    size = dist.get_world_size()
    layout = "ulysses" if ulysses == size else "document_ulysses_ring"
    cp = place(layout=layout, ulysses=1 if layout == "ulysses" else ulysses)
    peer = SequenceParallel.__new__(SequenceParallel)
    peer.world_size, peer.sp_world_size, peer.rp_world_size = size, ulysses, size // ulysses
    peer.device_mesh = None
    rank = types.SimpleNamespace(sp_rank=cp.rank % ulysses, rp_rank=cp.rank // ulysses)
    kind = type("Peer", (SequenceParallel,), {"sp_rank": rank.sp_rank, "rp_rank": rank.rp_rank})
    peer.__class__ = kind
    sizes = [n * 2 * size for n in lengths]
    offsets = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(n) for n in sizes])[None]
    x = torch.arange(sum(sizes))[None]
    same(split_tensor(x, cp, cu_seqlens=offsets), peer.split(x, 1, positions), layout)


def swift_gated_delta_net(key_value_heads: int, length: int) -> dict[str, Any]:
    """ms-swift's own forward of a Qwen3.5 layer between all ranks, on the mesh that it makes for so many heads."""
    import os

    from swift.model.models.qwen import _patch_qwen3_5_linear_attention_sequence_parallel
    from swift.sequence_parallel import sequence_parallel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    size, rank = dist.get_world_size(), dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    config = tiny_config("qwen3_5_text", vocab_size=40)
    config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
    torch.manual_seed(0)
    layer, positions = Qwen3_5GatedDeltaNet(config, layer_idx=0), torch.arange(length)[None]
    x = torch.randn(1, length, config.hidden_size)
    with torch.no_grad():
        alone = layer(x)
        _patch_qwen3_5_linear_attention_sequence_parallel()
        sequence_parallel.num_heads, sequence_parallel.world_size = key_value_heads, size
        sequence_parallel._init_device_mesh()
        sequence_parallel.extra_kwargs["text_position_ids"] = positions
        try:
            local = layer(sequence_parallel.split(x, dim=1, position_ids=positions))
            whole = sequence_parallel.gather(local, dim=1, position_ids=positions)
        finally:
            sequence_parallel.world_size = None
    rings = sequence_parallel.rp_world_size
    return {"rings": rings, "error": float((whole - alone).abs().max()), "size": float(alone.abs().max())}


# --- verl ---------------------------------------------------------------------------------------------------------------


def jagged_of(lengths: list[int]) -> Tensor:
    rows = [torch.arange(1, n + 1) + 100 * i for i, n in enumerate(lengths)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def verl_padded(lengths: list[int]) -> None:
    from verl.models.mcore.util import postprocess_bshd_engine, preprocess_bshd_engine

    cp = place()
    ids = jagged_of(lengths)
    theirs, keep, positions = preprocess_bshd_engine(ids)
    segments = Segments.from_lengths(lengths, width=-(-max(lengths) // cp.multiple) * cp.multiple)
    whole = torch.zeros(segments.shape, dtype=torch.int64).masked_scatter(segments.keep, ids.values())
    batch = {"input_ids": whole, "attention_mask": segments.keep, "position_ids": segments.position_ids}
    ours = split_batch(batch, cp)
    same(ours["input_ids"], theirs, "input_ids")
    same(ours["attention_mask"], keep, "attention_mask")
    same(ours["position_ids"], positions, "position_ids")
    output = ours["input_ids"].float()[..., None]
    back = postprocess_bshd_engine(output, keep)
    same(to_nested(gather_sequence(output, cp, segments), segments).values(), back.values(), "output")


def verl_flat(lengths: list[int]) -> None:
    from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

    cp = place(layout="document_zigzag")
    ids = jagged_of(lengths)
    theirs, params, _ = preprocess_thd_engine(ids)
    batch, segments = pad_documents({"input_ids": ids.values()[None]}, cp, segments=Segments.from_lengths([lengths]))
    same(batch["cu_seqlens_padded"], params.cu_seqlens_q_padded, "offsets")
    ours = split_batch(batch, cp)["input_ids"]
    same(ours, theirs, "input_ids")
    output = ours.float()[..., None]
    back = postprocess_thd_engine(output, params, ids, len(lengths))
    whole = gather_sequence(output, cp, segments, cu_seqlens=cu_seqlens_of(batch))
    same(to_nested(whole, segments).values(), back.values(), "output")
