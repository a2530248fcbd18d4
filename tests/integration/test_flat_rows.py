"""A flat row on real models: each sequence keeps its own logits, or the row is refused, by us or by transformers itself."""

import copy
from contextlib import nullcontext
from functools import wraps
from itertools import pairwise

import pytest
import torch
from rotation import rotating
from strategies import laid_out

pytest.importorskip("transformers")
from flat_rows import BY_OFFSETS, EXACT, PAD, RIGHT, alone, built, errors, ours, places, samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DataCollatorWithFlattening

from collate_npu import BatchAdapter, PaddingCollator, adapt
from collate_npu.consumers.transformers import SPLITS_BY_POSITIONS
from collate_npu.errors import UnsupportedFormError
from collate_npu.releases import KERNELS_TOLD, POSITIONS_SPLIT
from collate_npu.testing import kernels, reference_kernels, tiny_config

C = 4
SAMPLES = samples((6, 1, 5, 8))
SHAPES = {
    "plain": {},
    "aligned": {"sequence_multiple": C},
    "aligned, a tail": {"sequence_multiple": C, "padding": (48,)},
    "one shape": {"sequence_multiple": C, "padding": (32, 48), "max_sequences": 6},
    "one shape, not aligned": {"padding": (32, 48), "max_sequences": 6},
    "one shape, none left": {"sequence_multiple": C, "padding": (32, 48), "max_sequences": 4},
}


def flash(model):
    """Its config, as that of a model whose attention reads offsets."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "flash_attention_2"
    return {"model": config, "consumer": "transformers"}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [*(("llama", shape) for shape in SHAPES), *((n, "plain") for n in ("qwen3", "mistral", "gemma3_text"))],
)
def test_models_of_attention_alone_get_a_dense_mask_beside_the_offsets(name, shape, attn):
    """They look at positions only where they make no cache, and some never: the mask does not depend on either."""
    model = built(name, attn)
    batch = ours(model, **laid_out(SHAPES[shape]))(SAMPLES)
    truth, at = alone(model, SAMPLES), places(batch, SAMPLES)
    assert batch["attention_mask"] is not None
    assert max(errors(model, batch, truth, at)) < RIGHT
    assert (
        errors(model, {**batch, "attention_mask": None, "use_cache": True}, truth, at)[0] > 0.1
    )  # the control: without it they run into each other


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_by_offsets_is_as_alone_in_every_shape(shape):
    model, settings = built("llama", BY_OFFSETS), {"pad_token_id": PAD, "padding_free": True, **laid_out(SHAPES[shape])}
    truth = alone(model, SAMPLES)
    batch = PaddingCollator(**flash(model), **settings)(SAMPLES)
    at = places(batch, SAMPLES)
    assert batch["attention_mask"] is None
    assert max(errors(model, batch, truth, at)) < RIGHT
    unparted = {**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"][[0, -1]]}
    assert errors(model, unparted, truth, at)[0] > 0.1  # the control
    adapted, known = BatchAdapter(**flash(model), padding_free=True).with_segments(PaddingCollator(**settings)(SAMPLES))
    assert max(errors(model, adapted, truth, known.indices)) < RIGHT


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


INDEXED = [name for name in ("glm_moe_dsa", "deepseek_v32", "axk2") if name in CONFIG_MAPPING]


@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_picks_among_the_keys_of_its_sequence(name):
    config = tiny_config(name, vocab_size=PAD + 1)
    config.index_topk, config.index_n_heads = 4, 8
    model = AutoModelForCausalLM.from_config(config).eval()
    assert max(errors(model, ours(model)(SAMPLES), alone(model, SAMPLES))) < RIGHT


NEWER = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="before 5.19 kernels are resolved in other ways")


@NEWER
def test_alignment_is_a_way_around_kernels_that_are_wrong_in_short_chunks(monkeypatch):
    """Wrong where a sequence ends in a short chunk, as some are (flash-linear-attention-npu issues 367, 544, 733)."""
    right = kernels.reference_gated_delta_rule

    @wraps(right)
    def faulty(*args, cu_seqlens=None, **settings):
        out, state = right(*args, cu_seqlens=cu_seqlens, **settings)
        short = torch.zeros(1, out.shape[1], 1, 1)
        for a, b in pairwise([0, out.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()):
            short[:, b - (b - a) % C : b] = 1
        return out * (1 + short), state

    model = built("qwen3_next")
    truth = alone(model, SAMPLES)
    monkeypatch.setattr(kernels, "reference_gated_delta_rule", faulty)
    with reference_kernels(model):
        for settings in SHAPES.values():
            batch = ours(model, **laid_out(settings))(SAMPLES)
            error = errors(model, batch, truth, places(batch, SAMPLES))[0]
            assert (error < RIGHT) if "sequence_multiple" in settings else (error > 1e-2), settings


def test_a_window_that_the_model_leaves_out_of_its_masks_is_left_out_of_ours():
    model, rows = built("moshi"), samples((17, 30, 9))
    assert model.config.sliding_window < 17
    assert max(errors(model, ours(model)(rows), alone(model, rows))) < RIGHT


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", rotating([*sorted(SPLITS_BY_POSITIONS), "granitemoehybrid"]))
def test_beside_a_routers_loss_positions_tell_the_sequences_or_the_row_is_refused(name, attn):
    """Of 127 tokens windows show; a cache that was asked for would turn the positions off."""
    if name not in CONFIG_MAPPING or (name in EXACT and not KERNELS_TOLD.holds()):
        pytest.skip("not in this release")
    try:
        model = copy.deepcopy(built(name, attn))
    except ValueError as error:
        pytest.skip(str(error))
    row = samples((127, 1, 1, 17))
    with reference_kernels(model) if name in EXACT else nullcontext():
        truth = alone(model, row)
        model.config.output_router_logits = True
        if name == "granitemoehybrid" or not POSITIONS_SPLIT.holds():
            with pytest.raises(UnsupportedFormError, match="Set output_router_logits=False"):
                ours(model)(row)
            return
        batch, flat = ours(model)(row), DataCollatorWithFlattening()(row)
        assert (batch["attention_mask"], batch["use_cache"]) == (None, False)
        assert max(errors(model, batch, truth)) < RIGHT
        assert errors(model, batch | {"use_cache": True}, truth)[0] > 0.1
        with adapt(model):
            assert max(errors(model, {**flat, "use_cache": True}, truth)) < RIGHT
            assert model(**flat).aux_loss > 0
        untold = {**flat, "cu_seq_lens_q": ends(row), "cu_seq_lens_k": ends(row)}
        adapter = BatchAdapter(model, padding_free=True)
        for step in (1, 2) if adapter.model.positions == "places" else ():  # they run on over a boundary, or jump inside
            untold["position_ids"] = (torch.arange(146) * step)[None] + 3
            with pytest.raises(UnsupportedFormError, match="router's aux loss"):
                adapter(untold)
        for more in ({"padding": (160,)}, {"sequence_multiple": 4}):
            with pytest.raises(UnsupportedFormError, match="router's aux loss"):
                ours(model, **laid_out(more))(row)


def ends(row):
    return torch.tensor([0, *(len(each["input_ids"]) for each in row)]).cumsum(0).int()
