"""What configs alone tell of leaks; the real models are in tests/integration/test_leak_sweep.py."""

from types import SimpleNamespace

import pytest

from collate_npu import releases
from collate_npu.consumers.leaks import rope_limit, sparse_from, why_lengths_clash, why_padding_leaks, width_dependence


def config(**fields):
    return SimpleNamespace(**({"model_type": "mine"} | fields))


GDN = {"layer_types": ["linear_attention", "full_attention"]}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 8}
PLACES = {
    "no reason": ({}, "", "", ""), "recurrent": (GDN, "", "", "decays"),
    "a bias": (GDN | {"use_bias": True}, "", "use_bias", "use_bias"),
    "a bias of attention": ({"use_bias": True, "layer_types": ["full_attention"]}, "", "", ""),
    "a bias behind": (GDN | {"mamba_proj_bias": True, "model_type": "nemotron_h"}, "", "", "decays"),
    "an indexer": ({"layer_types": ["minimax_m3_sparse", "full_attention"]}, "", "indexer", "indexer"),
    "a window": (WINDOW, "", "", "window of 8"), "fnet": ({"model_type": "fnet"}, "Fourier", "Fourier", "Fourier"),
    "experts": ({"model_type": "nllb-moe"}, "", "capacity", "capacity"),
    "rwkv": ({"model_type": "rwkv"}, "", "unused", "unused"), "mpt": ({"model_type": "mpt"}, "", "", "distance"),
    "a text part": ({"text_config": config(**GDN, conv_bias=True)}, "", "conv_bias", "conv_bias"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "right", "left", "holes"), PLACES.values(), ids=PLACES)
def test_each_reason_belongs_to_its_places(fields, right, left, holes):
    for where, expected in {"right": right, "left": left, "holes": holes}.items():
        why = why_padding_leaks(config(**fields), where)
        assert (expected in why) if expected else why == ""


def test_a_hole_cuts_a_window_short_where_a_row_is_longer():
    assert [bool(why_padding_leaks(config(**WINDOW), "holes", longest=n)) for n in (8, 9)] == [False, True]


def test_a_fault_that_a_release_mended_is_looked_up_by_release(monkeypatch):
    for release, leaks_there in (("4.57.1", True), ("5.0.0", False), ("5.23.0", False)):
        monkeypatch.setitem(releases._FOUND, "transformers", release)
        assert bool(why_padding_leaks(config(model_type="lfm2"), "left")) == leaks_there


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
