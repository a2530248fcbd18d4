"""What two ranks do in the parity tests: the same input to a peer's own gather and to ours. Runs in processes of a Pool."""

import functools
import types
import warnings
from typing import Any

import te_stub  # noqa: F401  (before megatron)
import torch
import torch.distributed as dist
from torch import Tensor

from collate_npu import Segments
from collate_npu.outputs import to_nested
from collate_npu.parallel import ContextParallel, cu_seqlens_of, gather_sequence, pad_documents, split_batch, split_tensor
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


def swift_gated_delta_net(family: str, key_value_heads: int, length: int) -> dict[str, Any]:
    """A recurrent layer between all ranks as ms-swift runs it, on the mesh that it makes for so many heads."""
    import os

    from swift.model.models.qwen import _patch_qwen3_5_linear_attention_sequence_parallel
    from swift.sequence_parallel import sequence_parallel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    size, rank = dist.get_world_size(), dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    config, kind = tiny_config(family, vocab_size=40), Qwen3_5GatedDeltaNet if "3_5" in family else Qwen3NextGatedDeltaNet
    config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
    torch.manual_seed(0)
    layer, positions = kind(config, layer_idx=0), torch.arange(length)[None]
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


def swift_last_tokens(layout: str, backend: str, batches: list[tuple[int, ...]], order: list[int]) -> list[list[float]]:
    """ms-swift's own pooling of a row that ranks share: every batch is prepared, then they are pooled in `order`.

    Gives the place in which each row's last token stands.
    """
    import pytest
    import swift_world

    from collate_npu.integrations import swift

    cp = place(layout=layout)
    args = swift_world.arguments("qwen3", cp=2, cp_partition_mode=layout, task_type="seq_cls", attention_backend=backend)
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        swift_world.World(patch).npu()
        swift.install()
        try:
            trainer = swift_world.pooling_trainer(args)
            for lengths in batches:
                data = swift_world.collate(args, *lengths)
                truth = Segments.from_lengths(lengths, data["input_ids"].shape[1])
                data["labels"] = torch.zeros(len(lengths), dtype=torch.long)
                places = split_batch({"x": truth.position_ids.unsqueeze(-1).float(), "input_ids": truth.ids}, cp)["x"]
                steps.append((places, trainer.forward_step(iter([data]), swift_world.Recorder())[1]))
            return [loss(places).flatten().tolist() for places, loss in (steps[i] for i in order)]
        finally:
            swift.uninstall()


def jagged_of(lengths: list[int]) -> Tensor:
    rows = [torch.arange(1, n + 1) + 100 * i for i, n in enumerate(lengths)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


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
