"""Parity of the split and the gather with the trainers' own code, on their real packages.

What a rank takes the peers compute from Megatron's sizes alone, so any number of ranks is played in one process; what ranks
gather, two real processes do.
"""

import functools
import os
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import te_stub  # noqa: F401  (before megatron)
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from collate_npu import Segments, split_batch
from collate_npu.parallel import ContextParallel, gather_sequence, split_tensor
from collate_npu.testing import tiny_config

NEEDS = ("megatron", "mcore_bridge", "swift")


few = settings(max_examples=10, deadline=None)
sizes = st.sampled_from([2, 4])
IMPORTS = 120  # seconds: the first call imports the peers in each rank


def places(size, **settings):
    """Each place among so many ranks, while Megatron says that this is its own."""
    from megatron.core import parallel_state as mpu

    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mpu, "get_context_parallel_world_size", lambda: size)
            patch.setattr(mpu, "get_context_parallel_rank", lambda rank=rank: rank)
            yield ContextParallel(size, rank, **settings)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "document_zigzag"])
@given(size=sizes, lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3), dim=st.sampled_from([0, 1, 2, -1, -2]))
@few
def test_mcore_bridge_split(layout, size, lengths, dim):
    from mcore_bridge.utils.megatron_utils import split_cp_inputs

    mode = "contiguous" if layout == "contiguous" else "zigzag"
    for cp in places(size, layout=layout):
        offsets = torch.tensor([0, *lengths]).cumsum(0) * max(cp.document_multiple, cp.multiple)
        shape = [2, 3, 2]
        shape[dim] = int(offsets[-1])
        x = torch.arange(float(torch.Size(shape).numel())).view(shape)
        theirs = split_cp_inputs(x, offsets if cp.documents else None, dim, cp_partition_mode=mode)
        assert torch.equal(split_tensor(x, cp, dim=dim, cu_seqlens=offsets), theirs)


def test_our_multiple_is_a_multiple_of_ms_swifts():
    from swift.megatron.utils.utils import get_padding_to

    for tp, size in product((1, 2, 3), (2, 4)):
        args = SimpleNamespace(
            tensor_model_parallel_size=tp, sequence_parallel=True, context_parallel_size=size, attention_backend="flash",
            fp8_format=None, fp8_recipe=None,
        )  # fmt: skip
        # zigzag's factor, which it leaves out
        assert ContextParallel(size, 0, tensor_parallel=tp).multiple == 2 * get_padding_to(args)


@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3))
@few
def test_ms_swift_ring(lengths):
    """A ring of four over padded documents."""
    from swift.sequence_parallel.sequence_parallel import SequenceParallel

    widths = [n * 2 * 4 for n in lengths]
    offsets = torch.tensor([0, *widths]).cumsum(0).tolist()
    positions, x = torch.cat([torch.arange(n) for n in widths])[None], torch.arange(sum(widths))[None]
    for cp in places(4, layout="document_zigzag"):
        kind = type("Peer", (SequenceParallel,), {"sp_rank": 0, "rp_rank": cp.rank})
        peer = kind.__new__(kind)
        peer.world_size, peer.sp_world_size, peer.rp_world_size, peer.device_mesh = 4, 1, 4, None
        assert torch.equal(split_tensor(x, cp, cu_seqlens=offsets), peer.split(x, 1, positions))


@functools.cache
def start() -> None:
    """Megatron's groups: all ranks of the pool are one context-parallel group."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())


def here(**settings: Any) -> ContextParallel:
    start()
    cp = ContextParallel.from_megatron(**settings)
    assert (cp.size, cp.rank, cp.tensor_parallel) == (dist.get_world_size(), dist.get_rank(), 1)
    return cp


def check_same(ours: Any, theirs: Any, key: str) -> None:
    assert torch.equal(ours, theirs), (key, ours, theirs)


def mcore_bridge_gather(layout: str, lengths: list[int]) -> None:
    """Their `reconstruct_tensor_cp` keeps the gradient of the own shard alone: our `loss="same"`."""
    from mcore_bridge.utils.megatron_utils import reconstruct_tensor_cp

    cp = here(layout=layout)
    sizes = [n * max(cp.document_multiple, cp.multiple) for n in lengths]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.randn(1, sum(sizes), 2, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    packed = SimpleNamespace(cu_seqlens_q=offsets, cu_seqlens_q_padded=offsets, qkv_format="thd")
    grads = []
    for gather in (
        lambda shard: gather_sequence(shard, cp, cu_seqlens=offsets),
        lambda shard: reconstruct_tensor_cp(
            shard, packed if cp.documents else None, 1, "contiguous" if layout == "contiguous" else "zigzag"
        ),
    ):
        shard = split_tensor(x, cp, cu_seqlens=offsets).clone().requires_grad_()
        whole = gather(shard)
        check_same(whole, x, layout)
        (whole * weights).sum().backward()
        grads.append(shard.grad)
    check_same(*grads, layout)


def swift_gated_delta_net(key_value_heads: int, length: int) -> dict[str, Any]:
    """Qwen3.5's recurrent layer between all ranks as ms-swift runs it, on the mesh that it makes for so many heads."""
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


def swift_last_tokens(layout: str, backend: str, batches: list[tuple[int, ...]], order: list[int]) -> list[list[float]]:
    """ms-swift's own pooling of a row that ranks share: every batch is prepared, then they are pooled in `order`.

    Gives the place in which each row's last token stands.
    """
    import swift_world

    from collate_npu.integrations import swift

    cp = here(layout=layout)
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


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])  # by document it calls a kernel of Transformer Engine
def test_mcore_bridge_gather_and_its_gradient(ranks, layout):
    ranks(2)("test_parallel_peers.mcore_bridge_gather", layout, [1, 2], seconds=IMPORTS)


def test_ms_swifts_recurrent_layers_share_a_row_between_ulysses_ranks_and_refuse_rings(ranks):
    """As many Ulysses ranks as go into the key-value heads; what is left over are rings, which its layer refuses itself."""
    for found in ranks(2)("test_parallel_peers.swift_gated_delta_net", 2, 32, seconds=IMPORTS):
        assert found["rings"] == 1
        assert found["error"] < 1e-5 * found["size"]
    with pytest.raises(AssertionError, match="does not support derived ring attention"):
        ranks(2)("test_parallel_peers.swift_gated_delta_net", 1, 32, seconds=IMPORTS)
