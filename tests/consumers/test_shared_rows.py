"""What ranks send each other for the mixers of shared rows, all ranks in this process."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from strategies import whole_rows

from collate_npu.consumers import mixers, shared_rows
from collate_npu.consumers.shared_rows import SharedPlan
from collate_npu.parallel import ContextParallel, split_tensor

HEADS, REACH = 4, 3


def exchanged(routes, xs):
    """What each rank gets where all send by these routes."""
    sent = [x.index_select(0, route.send).split(route.to) for route, x in zip(routes, xs)]
    for rank, route in enumerate(routes):
        assert [len(parts[rank]) for parts in sent] == route.come
    return [torch.cat([parts[rank] for parts in sent])[route.order] for rank, route in enumerate(routes)]


@st.composite
def shared(draw):
    """Whole rows, and the place and the plan of each rank."""
    segments, size = draw(whole_rows()), draw(st.sampled_from([1, 2, 4]))
    layout, most = draw(st.sampled_from(["contiguous", "zigzag"])), draw(st.sampled_from([0, 1, 5]))
    cps = [ContextParallel(size, rank, layout=layout) for rank in range(size)]
    return segments, cps, [SharedPlan.of(segments, cp, torch.device("cpu"), most=most) for cp in cps]


def rows_of(segments, cps):
    """Each rank's part of a value that is the number of the token among the real ones, and -1 at padding."""
    numbers = np.full(segments.shape, -1)
    numbers[segments.array > 0] = np.arange(segments.num_tokens)
    return [split_tensor(torch.from_numpy(numbers), cp).flatten() for cp in cps]


@given(shared())
def test_each_sequence_is_whole_on_one_rank_and_comes_home(drawn):
    segments, cps, plans = drawn
    works = [plan._work(-1) for plan in plans]
    got = exchanged([work.route for work in works], rows := rows_of(segments, cps))
    whole, ends = [], np.cumsum(segments.sequence_lengths).tolist()
    for work, tokens in zip(works, got):
        lengths = work.plan.lengths if len(tokens) else ()
        whole += [part.tolist() for part in tokens.split(lengths)] if lengths else []
    assert sorted(whole) == [list(range(end - n, end)) for n, end in zip(segments.sequence_lengths, ends)]
    loads = [len(tokens) for tokens in got]
    assert max(loads) - min(loads) <= max(segments.sequence_lengths)
    for home, row in zip(exchanged([work.home for work in works], got), rows):
        assert home.tolist() == sorted(row[row >= 0].tolist())


@given(shared())
def test_pieces_hold_own_tokens_once_behind_those_that_a_convolution_reads(drawn):
    segments, cps, plans = drawn
    works = [plan._work(REACH) for plan in plans]
    begins = np.repeat(np.cumsum(segments.sequence_lengths) - segments.sequence_lengths, segments.sequence_lengths)
    for work, tokens, row in zip(works, exchanged([work.route for work in works], rows := rows_of(segments, cps)), rows):
        assert tokens[work.home].tolist() == sorted(row[row >= 0].tolist())
        own, at = set(work.home.tolist()), 0
        for n in work.plan.lengths if len(tokens) else ():
            piece, before = tokens[at : at + n].tolist(), [place for place in range(at, at + n) if place not in own]
            first = piece[len(before)]
            assert before == list(range(at, at + len(before)))
            assert piece == list(range(first - min(REACH, first - begins[first]), piece[-1] + 1))
            assert begins[piece[-1]] == begins[first]
            at += n


@given(shared())
def test_heads_are_traded_for_tokens_and_back(drawn):
    segments, cps, plans = drawn
    works, T, P = [plan._work(REACH) for plan in plans], segments.num_tokens, len(plans)
    rows = [row[row >= 0].sort().values for row in rows_of(segments, cps)]
    numbered = torch.arange(T)[:, None] * HEADS + torch.arange(HEADS)
    xs = [numbered[row].view(len(row), P, HEADS // P).movedim(1, 0).flatten(0, 1) for row in rows]
    got = exchanged([work.heads[0] for work in works], xs)
    for rank, heads in enumerate(got):
        assert torch.equal(heads, numbered.view(T, P, -1)[:, rank])
    assert all(map(torch.equal, exchanged([work.heads[1] for work in works], got), xs))


@pytest.mark.models
def test_the_mixers_of_hybrids_that_a_rule_may_run_by_heads_are_asked_on_one_rank(monkeypatch):
    """A copy whose convolution reads further than its pieces hold, or whose heads come back turned, is dealt out."""
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    model = tiny_model("qwen3_next", vocab_size=61)
    assert [kind.__name__ for kind in mixers._asked(model).ruled] == ["Qwen3NextGatedDeltaNet"]
    with monkeypatch.context() as patch:
        patch.setattr(shared_rows, "reach_of", lambda mixer: 2)
        assert not mixers._asked(model).ruled
    turned = SharedPlan._by_token
    monkeypatch.setattr(SharedPlan, "_by_token", lambda *args: [x.flip(1) for x in turned(*args)])
    assert not mixers._asked(model).ruled
    assert not mixers._asked(model).why_padded
