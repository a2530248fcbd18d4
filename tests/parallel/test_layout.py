"""Layouts: the ranks' rows are those of the definition; a group that is wrong is refused at once; a row is shared out for
recurrent layers exactly where their scheme puts its tokens in order."""

import sys
import types
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, strategies as st
from torch.distributed.device_mesh import init_device_mesh

from collate_npu import CollateError, Segments, parallel
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.parallel import ContextParallel, check_recurrent_split, gloo_group, split_batch, split_tensor, token_runs
from collate_npu.parallel.layout import Layout, is_gloo

LAYOUTS = get_args(Layout)


@st.composite
def places(draw, layouts=LAYOUTS):
    """A place in a group, a width it can share out, and the offsets of documents that it can share out, too."""
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    layout = draw(st.sampled_from(layouts))
    cp = ContextParallel(size, draw(st.integers(0, size - 1)), layout=layout, tensor_parallel=draw(st.integers(1, 3)))
    lengths = [cp.document_multiple * n for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
    lengths[-1] += -sum(lengths) % cp.multiple
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return cp, offsets[-1], offsets


def by_hand(cp: ContextParallel, S: int, offsets: list[int]) -> list[int]:
    """The same rows by definition."""
    bounds = offsets if cp.documents else [0, S]
    return oracle.share_of_documents(bounds, cp.size, cp.rank, cp.layout.removeprefix("document_"))


@given(places())
def test_rows_are_those_of_the_definition_in_few_runs(case):
    cp, S, offsets = case
    runs = token_runs(S, cp, offsets)
    assert [n for start, stop in runs for n in range(start, stop)] == by_hand(cp, S, offsets)
    assert all(a[1] != b[0] for a, b in pairwise(runs))
    assert all(start < stop for start, stop in runs)
    assert cp.documents or len(runs) <= 2


# --- multiples ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "row", "document"), [("document_zigzag", 24, 8), ("contiguous", 12, 4)])
def test_the_multiples_of_four_ranks_that_three_split_again(layout, row, document):
    cp = ContextParallel(4, 0, layout=layout, tensor_parallel=3)
    assert (cp.multiple, cp.document_multiple) == (row, document)


@given(places(), st.integers(1, 300))
def test_widths_that_do_not_divide_are_refused_with_the_width_to_pad_to(case, extra):
    cp, S, _ = case
    assert cp.multiple % cp.min_multiple == 0
    if (S + extra) % cp.min_multiple:
        with pytest.raises(CollateError, match=f"multiple of {cp.min_multiple} ") as error:
            token_runs(S + extra, cp, [0, S + extra])
        to = int(str(error.value).split("Pad to ")[1].split(":")[0])
        assert to % cp.multiple == 0
        assert S + extra < to < S + extra + cp.multiple


def test_documents_that_do_not_divide_are_all_named():
    cp = ContextParallel(2, 0, layout="document_zigzag")
    with pytest.raises(CollateError, match="2 bad rows") as error:
        token_runs(16, cp, [0, 3, 7, 16])
    assert "row 0: got 3 tokens" in str(error.value)
    assert "row 2: got 9 tokens" in str(error.value)
    assert "multiple of 4" in str(error.value)


# --- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 2, "rank": 2}, "count from 0 to 1"),
        ({"size": 2, "rank": -1}, "count from 0 to 1"),
        ({"size": 0, "rank": 0}, "a whole number, at least 1"),
        ({"size": 2, "rank": 0, "tensor_parallel": 0}, "a whole number, at least 1"),
        ({"size": 2, "rank": 0, "layout": "ring"}, "It is one of zigzag"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(CollateError, match=words):
        ContextParallel(**settings)


# --- process groups


@pytest.fixture
def fake_world():
    """A world of 4 of which this process is rank 1; its backend computes nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_size_and_rank_are_checked_against_the_group(fake_world):
    assert ContextParallel.from_group(fake_world) == ContextParallel(4, 1)
    assert ContextParallel(4, 1, group=fake_world).group is fake_world
    with pytest.raises(CollateError, match="The group has 4 ranks and this process is its rank 1"):
        ContextParallel(2, 1, group=fake_world)
    with pytest.raises(CollateError, match="rank 1"):
        ContextParallel(4, 2, group=fake_world)
    with pytest.raises(CollateError, match="a group without this rank"):
        ContextParallel.from_group(dist.new_group([2, 3]))


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
        KEPT.append(gloo_group())
        dist.all_gather_object(values := [None], "a", group=KEPT[-1])
        assert values == ["a"]
        assert is_gloo(KEPT[-1])
        assert dist.group.WORLD.bound_device_id == torch.device(device)
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_one_dimension_and_none_of_two(fake_world):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp"))
    assert ContextParallel.from_mesh(mesh["cp"], layout="contiguous") == ContextParallel(4, 1, layout="contiguous")
    with pytest.raises(CollateError, match=r"mesh\['cp'\]"):
        ContextParallel.from_mesh(mesh)


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


# --- recurrent layers


def gathered(cp, offsets):
    """The tokens of all ranks, one rank behind the other: what an exchange of heads puts together."""
    places = torch.arange(offsets[-1])
    return torch.cat([split_tensor(places, cp.with_rank(rank), dim=0, cu_seqlens=offsets) for rank in range(cp.size)])


def undone(tokens, offsets, size):
    """As Megatron undoes zigzag in each sequence, from the definition: a rank holds its chunks r and 2 * size - 1 - r."""
    share, places = offsets[-1] // size, []
    for start, stop in pairwise(offsets):
        half = (stop - start) // (2 * size)
        for chunk in range(2 * size):
            rank, second = min(chunk, 2 * size - 1 - chunk), chunk >= size
            first = rank * share + start // size + second * half
            places += range(first, first + half)
    return tokens[places]


def in_order(cp, offsets):
    return torch.equal(undone(gathered(cp, offsets), offsets, cp.size), torch.arange(offsets[-1]))


@st.composite
def shared_rows(draw):
    size = draw(st.sampled_from([2, 3, 4]))
    layout = draw(st.sampled_from(LAYOUTS))
    lengths = [n * 2 * size for n in draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))]
    return ContextParallel(size, 0, layout=layout), lengths


@given(shared_rows(), st.booleans())
@example((ContextParallel(2, 0, layout="zigzag"), [8, 8]), True)
def test_rows_pass_exactly_where_the_layers_put_their_tokens_in_order(row, flat):
    cp, lengths = row
    segments = Segments.from_lengths([lengths] if flat else lengths)
    offsets = [0, *np.cumsum(lengths).tolist()] if flat else [0, segments.shape[1]]
    if in_order(cp, offsets):
        check_recurrent_split(cp, segments, padding_free=flat)
        return
    words = "put tokens in order only from the layout '"
    with pytest.raises(UnsupportedFormError, match=f"layout: got '{cp.layout}'.* {words}") as refused:
        check_recurrent_split(cp, segments, padding_free=flat)
    right = replace(cp, layout=str(refused.value).split(words)[1].split("'")[0])
    assert in_order(right, offsets)
    check_recurrent_split(right, segments, padding_free=flat)  # the remedy
    split_batch({"input_ids": torch.zeros(segments.shape)}, right, segments=segments)


def test_a_flat_row_is_one_row():
    with pytest.raises(CollateError, match=r"A flat row is \[1, S\]"):
        check_recurrent_split(ContextParallel(2, 0), Segments.from_lengths([4, 4]), padding_free=True)
    check_recurrent_split(ContextParallel(1, 0, layout="contiguous"), Segments.from_lengths([4]))  # nothing is shared


@pytest.mark.parametrize("lengths", [[6, 6], [10, 2], [2, 4]])
def test_a_sequence_that_divides_by_the_ranks_but_not_by_twice_them_is_refused(lengths):
    """megatron-core 0.19.2 lets 6 + 6 pass on two ranks, and makes an index with -5 ... -11 of it (common.py:466, 565)."""
    cp, segments = ContextParallel(2, 0, layout="document_zigzag"), Segments.from_lengths([lengths])
    with pytest.raises(CollateError, match="multiple of 4"):
        check_recurrent_split(cp, segments, padding_free=True)
    held = {"input_ids": torch.ones(segments.shape), "cu_seqlens": segments.cu_seqlens}
    batch, padded = parallel.pad_documents(held, cp)  # the remedy
    offsets = gated_delta_kwargs(padded, kernel="megatron")["cu_seqlens_q_padded"]
    check_recurrent_split(cp, padded, padding_free=True, offsets=offsets)
    assert torch.equal(offsets, batch["cu_seqlens_padded"])  # it is split by what the kernel is given
    own = gated_delta_kwargs(padded, kernel="fla_cp")["cu_seqlens"]
    if len(own) > len(offsets):  # the padding as sequences of its own, which zigzag cannot share out
        with pytest.raises(CollateError, match="pad_documents"):
            check_recurrent_split(cp, padded, padding_free=True, offsets=own)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_share_out_both_kinds_of_heads(tp):
    cp, segments = ContextParallel(2, 0, tensor_parallel=tp), Segments.from_lengths([8, 8])
    check_recurrent_split(cp, segments, heads=(2 * tp, 4 * tp))
    for heads in ((2 * tp, 2 * tp + 1), (tp, 4 * tp)):
        with pytest.raises(CollateError, match=f"heads: got .* shared out over {2 * tp} .*divides both numbers"):
            check_recurrent_split(cp, segments, heads=heads)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 20, 32], ""),
        ([0, 20, 20, 28, 32], ""),  # an empty sequence, the tail one of its own
        ([0, 32], "row 1: got tokens 20 to 27"),
        ([0, 12, 20, 32], "row 0: got tokens 0 to 19"),
        ([0, 16], "and the last offset is its end"),  # a rank's own
        ([0, 8, 16], "and the last offset is its end"),
        ([20, 32], "0 first"),  # ends
        ([20, 8], "0 first"),  # lengths
        ([0, 20, 28], "the tail counted"),
        ([0, 20, 12, 32], "never falling"),
    ],
)
def test_offsets_are_those_of_the_whole_row(offsets, said):
    cp, segments = ContextParallel(2, 0).for_documents(), Segments.from_lengths([[20, 8]], width=32)
    if not said:
        check_recurrent_split(cp, segments, padding_free=True, offsets=offsets)
        return
    with pytest.raises(CollateError, match=said):
        check_recurrent_split(cp, segments, padding_free=True, offsets=offsets)
    check_recurrent_split(cp, segments, padding_free=True)  # the remedy: leave them out
