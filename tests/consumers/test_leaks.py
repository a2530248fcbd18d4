"""What configs alone tell of leaks; the real models are in tests/integration/test_leak_sweep.py."""

from types import SimpleNamespace

import pytest

from collate_npu import releases
from collate_npu.consumers.leaks import rope_limit, sparse_from, why_lengths_clash, why_padding_leaks, width_dependence


def config(**fields):
    return SimpleNamespace(**({"model_type": "mine"} | fields))


GDN = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("fields", "right", "left", "holes"),
    [
        ({}, "", "", ""),
        (GDN, "", "", "decays"),
        (GDN | {"use_bias": True}, "", "use_bias", "use_bias"),
        (GDN | {"use_bias": True, "layer_types": ["full_attention"]}, "", "", ""),
        (GDN | {"mamba_proj_bias": True, "model_type": "nemotron_h"}, "", "", "decays"),
        ({"layer_types": ["minimax_m3_sparse", "full_attention"]}, "", "indexer", "indexer"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "", "", "window of 8"),
        ({"model_type": "fnet"}, "Fourier", "Fourier", "Fourier"),
        ({"model_type": "nllb-moe"}, "", "capacity", "capacity"),
        ({"model_type": "rwkv"}, "", "unused", "unused"),
        ({"model_type": "mpt"}, "", "", "distance"),
        ({"text_config": config(**GDN, conv_bias=True)}, "", "conv_bias", "conv_bias"),
    ],
)
def test_each_reason_belongs_to_its_places(fields, right, left, holes):
    for where, expected in {"right": right, "left": left, "holes": holes}.items():
        why = why_padding_leaks(config(**fields), where)
        assert (expected in why) if expected else why == ""


@pytest.mark.parametrize(("longest", "cut"), [(8, False), (9, True)])
def test_a_hole_cuts_a_window_short_where_a_row_is_longer(longest, cut):
    fields = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    assert bool(why_padding_leaks(config(**fields), "holes", longest=longest)) == cut


@pytest.mark.parametrize(("release", "leaks_there"), [("4.57.1", True), ("5.0.0", False), ("5.23.0", False)])
def test_a_fault_that_a_release_mended_is_looked_up_by_release(release, leaks_there, monkeypatch):
    monkeypatch.setitem(releases._FOUND, "transformers", release)
    assert bool(why_padding_leaks(config(model_type="lfm2"), "left")) == leaks_there


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"index_topk": 2048, "index_n_heads": 32}, None),
        ({"index_topk": 2048, "index_n_heads": 8}, None),
        ({"index_topk": 2048, "index_n_heads": 7}, 2048),
        ({"index_topk": 512, "index_n_heads": 4, "compress_rates": {"compressed_sparse_attention": 4}}, 2048),
        ({"index_n_heads": 2, "index_topk_blocks": 16}, None),
    ],
)
def test_the_budget_of_an_indexer_counts_in_tokens(fields, budget):
    assert width_dependence(config(**fields)) == budget


LONG = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8}, "max_position_embeddings": 64}
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8}}, None),
        (LONG, 8),
        (DYNAMIC, 8),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 8, "max_position_embeddings": 64}, 8),
        ({"rope_parameters": {"full_attention": LONG["rope_parameters"]}, "max_position_embeddings": 64}, 8),
    ],
)
def test_rotary_frequencies_that_follow_the_longest_have_a_limit(fields, limit):
    assert rope_limit(config(**fields)) == limit


@pytest.mark.parametrize(
    ("fields", "lengths", "clash"),
    [
        ({}, [5, 99], False),
        (LONG, [5, 8], False),
        (LONG, [5, 9], True),
        (LONG, [8, 9], True),
        (LONG, [9, 20], False),
        (DYNAMIC, [9, 20], True),
        (DYNAMIC, [20, 20], False),
        (LONG, [], False),
    ],
)
def test_lengths_clash_where_one_changes_the_frequencies_of_another(fields, lengths, clash):
    assert bool(why_lengths_clash(config(**fields), lengths)) == clash


def test_block_sparse_attention_is_full_up_to_a_width():
    sizes = {"num_random_blocks": 3, "block_size": 4}
    assert sparse_from(config(attention_type="block_sparse", **sizes)) == 44
    assert sparse_from(config(attention_type="original_full", **sizes)) is sparse_from(config()) is None
