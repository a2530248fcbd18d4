"""Groups: what is wrong with one is said at once, and Python objects never travel by HCCL or NCCL."""

import sys
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from collate_npu import CollateError
from collate_npu.parallel import ContextParallel, gather_objects, gloo_group
from collate_npu.parallel.layout import data_group, is_gloo, mesh_group, timeout_of


@pytest.fixture
def fake_world():
    """A world of 4 of which this process is rank 1; its backend computes nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_torch_distributed():
    with pytest.raises(CollateError, match="not initialised"):
        ContextParallel(2, 0, group=object())
    with pytest.raises(CollateError, match="Gathering needs the process group"):
        ContextParallel.from_group(None)
    with pytest.raises(CollateError, match="Gathering needs the process group"):
        gloo_group(None)


def test_size_and_rank_are_checked_against_the_group(fake_world):
    assert ContextParallel.from_group(fake_world) == ContextParallel(4, 1)
    assert ContextParallel(4, 1, group=fake_world).group is fake_world
    with pytest.raises(CollateError, match="The group has 4 ranks and this process is its rank 1"):
        ContextParallel(2, 1, group=fake_world)
    with pytest.raises(CollateError, match="rank 1"):
        ContextParallel(4, 2, group=fake_world)
    with pytest.raises(CollateError, match="a group without this rank"):
        ContextParallel.from_group(dist.new_group([2, 3]))


def test_objects_do_not_travel_by_the_device_backend(monkeypatch, fake_world):
    """The world here is no Gloo group, as HCCL's is none."""
    assert not is_gloo(fake_world)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    for group in (None, fake_world):
        with pytest.raises(CollateError, match="never by HCCL or NCCL"):
            gather_objects([1, 2], group)


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:gloo", "cpu:gloo,npu:hccl", "npu:hccl", "cuda:nccl", "cpu:hccl"])
def test_only_a_cpu_side_on_gloo_counts(monkeypatch, config):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert is_gloo(object()) is config.startswith("cpu:gloo")


def test_a_gloo_group_is_made_once_for_the_same_ranks(monkeypatch, fake_world):
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **settings: made.append((ranks, settings)) or object())
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "npu:hccl")
    assert gloo_group(fake_world) is gloo_group(fake_world) is gloo_group()
    assert made == [([0, 1, 2, 3], {"backend": "gloo", "use_local_synchronization": True})]
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,npu:hccl")
    assert gloo_group(fake_world) is fake_world
    assert len(made) == 1


KEPT: list = []
"""Gloo groups that carried objects: torch joins their threads with the GIL held, and one that just lets go of the last
tensor waits for it (seen with 2.6, for ever)."""


@pytest.mark.parametrize("device", ["xpu:0", "privateuseone:0"])
def test_a_gloo_group_is_made_where_the_world_is_bound_to_a_device_that_gloo_does_not_know(device):
    """As init_process_group(device_id=) binds it on such hardware; the world is bound again after."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert fake_pg
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = torch.device(device)
        assert gather_objects("a") == ["a"]
        KEPT.append(gloo_group())
        assert is_gloo(KEPT[-1])
        assert dist.group.WORLD.bound_device_id == torch.device(device)
    finally:
        dist.destroy_process_group()


def test_a_group_waits_as_long_as_it_was_told(fake_world):
    assert timeout_of(fake_world) == timedelta(minutes=10)  # this backend says nothing
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    assert timeout_of(dist.group.WORLD) == timedelta(seconds=7)
    assert timeout_of(dist.new_group([0], timeout=timedelta(seconds=3))) == timedelta(seconds=3)


def test_groups_end_with_their_world(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    groups = []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
        groups.append(gloo_group())
        dist.destroy_process_group()
    assert groups[0] is not groups[1]


@pytest.mark.parametrize("with_gloo", [True, False])
def test_data_is_shared_out_over_data_and_context_parallelism(monkeypatch, fake_world, with_gloo):
    """Four ranks, tensor parallel in pairs 0 1 and 2 3: rank 1 shares the data out with rank 3."""
    shared = dist.new_group([1, 3])
    asked = []

    def gloo(**told):
        asked.append(told)
        assert with_gloo, "data parallel group-gloo with context parallel combined is not initialized"
        return "Megatron's own"

    state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda with_context_parallel: shared if with_context_parallel else None,
        get_data_parallel_group_gloo=gloo,
    )
    assert data_group() is dist.group.WORLD
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert data_group() == ("Megatron's own" if with_gloo else shared)
    assert asked == [{"with_context_parallel": True}]
    state.model_parallel_is_initialized = lambda: False
    assert data_group() is dist.group.WORLD


def test_a_mesh_of_one_dimension_and_of_two(fake_world):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("ring", "cp"))
    assert ContextParallel.from_mesh(mesh["cp"], layout="contiguous") == ContextParallel(4, 1, layout="contiguous")
    assert ContextParallel.from_mesh(mesh) == ContextParallel(4, 1, layout="ulysses_ring", ulysses=4)
    assert ContextParallel.from_mesh(mesh, layout="zigzag", ulysses=1) == ContextParallel(4, 1)


def test_a_mesh_of_three_dimensions_is_refused():
    with pytest.raises(CollateError, match="mesh\\['cp'\\]"):
        mesh_group(types.SimpleNamespace(mesh_dim_names=("dp", "ring", "ulysses"), ndim=3))


def test_megatron(monkeypatch, fake_world):
    state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_context_parallel_group=lambda: fake_world,
        get_tensor_model_parallel_world_size=lambda: 2,
    )
    core = types.SimpleNamespace(parallel_state=state)
    monkeypatch.setitem(sys.modules, "megatron", types.SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    cp = ContextParallel.from_megatron()
    assert cp == ContextParallel(4, 1, tensor_parallel=2)
    assert cp.multiple == 16
    assert ContextParallel.from_megatron(tensor_parallel=1, layout="contiguous").multiple == 4
    state.model_parallel_is_initialized = lambda: False
    with pytest.raises(CollateError, match="initialize_model_parallel"):
        ContextParallel.from_megatron()
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(CollateError, match="megatron-core is not installed"):
        ContextParallel.from_megatron()
