"""What sizes in a config tell of leaks; the real models are in tests/integration/test_model_sweeps.py."""

from types import SimpleNamespace

import pytest

from collate_npu.consumers.model_traits import rope_limit, sparse_from, why_holes_cut, why_lengths_clash, width_dependence


def config(**fields):
    return SimpleNamespace(**({"model_type": "mine"} | fields))


WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 8}


def test_a_hole_cuts_a_window_short_where_a_row_is_longer():
    assert [why_holes_cut(config(**WINDOW), n)[:15] for n in (8, 9)] == ["", "its window of 8"]
    assert why_holes_cut(config(), 9) == ""


ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8}
LONG = {"rope_parameters": ROPE, "max_position_embeddings": 64}
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8}
BLOCKS = {"num_random_blocks": 3, "block_size": 4}
RATES = {"compress_rates": {"compressed_sparse_attention": 4}}
LIMITS = [
    # the budget of an indexer, in tokens
    (width_dependence, {}, None), *((width_dependence, {"index_topk": 2048, "index_n_heads": heads}, budget)
                                    for heads, budget in ((32, None), (8, None), (7, 2048))),
    (width_dependence, {"index_topk": 512, "index_n_heads": 4, **RATES}, 2048),
    (width_dependence, {"index_n_heads": 2, "index_topk_blocks": 16}, None),
    # rotary frequencies that follow the longest
    (rope_limit, {}, None), (rope_limit, LONG, 8), (rope_limit, DYNAMIC, 8),
    (rope_limit, {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, None),
    (rope_limit, {**LONG, "rope_parameters": {"full_attention": ROPE}}, 8),
    (rope_limit, {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 8,
                  "max_position_embeddings": 64}, 8),
    # the width up to which block-sparse attention is full
    (sparse_from, {"attention_type": "block_sparse", **BLOCKS}, 44), (sparse_from, {}, None),
    (sparse_from, {"attention_type": "original_full", **BLOCKS}, None),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "fields", "limit"), LIMITS)
def test_a_limit_is_that_of_the_config(asked, fields, limit):
    assert asked(config(**fields)) == limit


CLASHES = [
    ({}, [5, 99], False), (LONG, [5, 8], False), (LONG, [5, 9], True), (LONG, [8, 9], True), (LONG, [9, 20], False),
    (DYNAMIC, [9, 20], True), (DYNAMIC, [20, 20], False), (LONG, [], False),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "lengths", "clash"), CLASHES)
def test_lengths_clash_where_one_changes_the_frequencies_of_another(fields, lengths, clash):
    assert bool(why_lengths_clash(config(**fields), lengths)) == clash
