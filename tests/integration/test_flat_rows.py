"""A flat row on real models of attention alone, by the dense mask of our collator, without `adapt`: each sequence gives the
logits and gradients it gives alone, or the row is refused.
"""

import copy
from itertools import product

import pytest
import torch

pytest.importorskip("transformers")
from flat_rows import PAD, RIGHT, ROWS, alone, built, errors, ours, places, samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DataCollatorWithFlattening

from collate_npu import BatchAdapter, adapt
from collate_npu.errors import UnsupportedFormError
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import tiny_config

pytestmark = pytest.mark.models

C = 4
SAMPLES = samples((6, 1, 5, 8))
ATTENTION, IMPLEMENTED = ["llama", "qwen3", "mistral", "gemma3_text"], ["sdpa", "eager"]
SHAPES = {
    "a multiple": {"pad_to_multiple_of": 16},
    "a tail": {"padding": (256,)},
    "aligned": {"multiple": C},
    "one shape": {"multiple": C, "padding": (256,), "max_sequences": 8},
    "one shape, not aligned": {"padding": (256,), "max_sequences": 8},
}


def theirs(model):
    """transformers' own collator tells positions, unless asked for more."""
    adapter, flatten = BatchAdapter(model, padding_free=True), DataCollatorWithFlattening()
    return lambda features: adapter(flatten(features))


@pytest.mark.parametrize(("name", "attn"), [*product(ATTENTION, IMPLEMENTED)])
def test_every_sequence_of_a_flat_row_is_as_alone(name, attn):
    """Attention alone gets a dense mask beside the offsets: it looks at positions only where no cache is made, if ever."""
    model = built(name, attn)
    others = [theirs(model), *(ours(model, **settings) for settings in SHAPES.values())]
    for (row, lengths), other in zip(ROWS.items(), others, strict=True):
        features = samples(lengths)
        truth = alone(model, features)
        for batch in (ours(model)(features), other(features)):
            at = places(batch, features) if "cu_seq_lens_q" in batch else torch.arange(sum(lengths))
            assert max(errors(model, batch, truth, at)) < RIGHT, row
            unmasked = {**batch, "attention_mask": None, "use_cache": True}  # the control: they run into each other
            assert errors(model, unmasked, truth, at)[0] > 0.1


COUNTING = {
    "deepseek_v4": {},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    | {"index_topk_blocks": 2, "index_block_size": 4, "index_local_blocks": 1},
}
"""Attention that picks or compresses keys by their places in the row."""


@pytest.mark.parametrize("name", sorted(COUNTING.keys() & CONFIG_MAPPING.keys()))
def test_attention_that_counts_places_takes_no_flat_row(name):
    config = tiny_config(name, vocab_size=PAD + 1)
    for key, value in COUNTING[name].items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(UnsupportedFormError, match="begins: padding moves a sequence"):
        ours(model)(SAMPLES)
    flat = ours(built("llama", "eager"))(SAMPLES)
    assert errors(model, flat, alone(model, SAMPLES))[0] > 1e-3  # what would come of it


INDEXED = [name for name in ("glm_moe_dsa", "deepseek_v32", "axk2") if name in CONFIG_MAPPING and KERNELS_TOLD.holds()]


@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_picks_among_the_keys_of_its_sequence(name):
    config = tiny_config(name, vocab_size=PAD + 1)
    config.index_topk, config.index_n_heads = 4, 8
    model = AutoModelForCausalLM.from_config(config).eval()
    assert max(errors(model, ours(model)(SAMPLES), alone(model, SAMPLES))) < RIGHT


def test_a_window_that_the_model_leaves_out_of_its_masks_is_left_out_of_ours():
    model, rows = built("moshi"), samples((17, 30, 9))
    assert model.config.sliding_window < 17
    assert max(errors(model, ours(model)(rows), alone(model, rows))) < RIGHT


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoehybrid", "qwen3_next"])
def test_beside_a_routers_loss_a_flat_row_is_refused_and_adapt_runs_it(name):
    """Of 127 tokens windows show."""
    model, row = copy.deepcopy(built(name, "eager")), samples((127, 1, 1, 17))
    truth, collate = alone(model, row), ours(model)
    model.config.output_router_logits = True  # set later, it is seen
    with pytest.raises(UnsupportedFormError, match=r"Set output_router_logits=False|call adapt\(model\)"):
        collate(row)
    with adapt(model):
        flat = DataCollatorWithFlattening()(row)
        assert max(errors(model, flat, truth)) < RIGHT
        assert model(**flat, use_cache=False).aux_loss > 0
