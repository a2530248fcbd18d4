"""A flat row on real models: each sequence gives the logits and gradients it gives alone, or the row is refused.

Recurrent layers call reference kernels, where an installed package would stand; attention reads a dense mask.
"""

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from rotation import rotating

pytest.importorskip("transformers")
from flat_rows import (
    EXACT,
    FORGOTTEN,
    GATED_DELTA,
    KDA,
    PAD,
    RIGHT,
    ROWS,
    WRONG,
    alone,
    built,
    errors,
    ours,
    places,
    samples,
    without,
)
from recurrent_oracle import reference_kernels
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DataCollatorWithFlattening

from collate_npu import BatchAdapter, CollateError, Segments, adapt, check_delivery
from collate_npu.consumers.recurrent import as_it_is
from collate_npu.consumers.transformers import SPLITS_BY_POSITIONS
from collate_npu.errors import UnsupportedFormError
from collate_npu.releases import KERNELS_TOLD, MISSING_KERNEL_RAISES, POSITIONS_SPLIT
from collate_npu.testing import tiny_config

pytestmark = pytest.mark.long

NEWER = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="before 5.19 kernels are resolved in other ways")
LOUD = MISSING_KERNEL_RAISES.holds()
"""Does transformers itself raise where a kernel that is told is missing?"""
C = 4
SAMPLES = samples((6, 1, 5, 8))
ATTENTION, IMPLEMENTED = ["llama", "qwen3", "mistral", "gemma3_text"], ["sdpa", "eager"]
TWO_KEYS = [name for name in EXACT if name in GATED_DELTA + KDA]
"""Gated DeltaNet and KDA: the convolution reads `seq_idx`, the rule offsets."""
ONE_KEY = [name for name in EXACT if name not in TWO_KEYS]
"""Mamba-2 and convolutions alone: both read `seq_idx`, and the dense mask keeps attention apart."""
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


@pytest.mark.parametrize(
    ("name", "attn"),
    [*rotating(product(ATTENTION, IMPLEMENTED), 2), *rotating(product(TWO_KEYS + ONE_KEY, IMPLEMENTED), slow=8)],
)
def test_every_sequence_of_a_flat_row_is_as_alone(name, attn):
    """Attention alone gets a dense mask beside the offsets: it looks at positions only where no cache is made, if ever."""
    if name not in ATTENTION and not KERNELS_TOLD.holds():
        pytest.skip("before 5.19 kernels are resolved in other ways")
    model = built(name, attn)
    with nullcontext() if name in ATTENTION else reference_kernels(model):
        others = [theirs(model), *(ours(model, **settings) for settings in SHAPES.values())]
        for (row, lengths), other in zip(ROWS.items(), others, strict=True):
            features = samples(lengths)
            truth = alone(model, features)
            for batch in (ours(model)(features), other(features)):
                at = places(batch, features) if "cu_seq_lens_q" in batch else torch.arange(sum(lengths))
                assert max(errors(model, batch, truth, at)) < RIGHT, row
                if name in ATTENTION:  # the control: without it they run into each other
                    unmasked = {**batch, "attention_mask": None, "use_cache": True}
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


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", rotating([*sorted(SPLITS_BY_POSITIONS), "granitemoehybrid"]))
def test_beside_a_routers_loss_positions_tell_the_sequences_or_the_row_is_refused(name, attn):
    """Of 127 tokens windows show; a cache that was asked for would turn the positions off."""
    if name not in CONFIG_MAPPING or ((name in EXACT or "granite" in name) and not KERNELS_TOLD.holds()):
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
            with pytest.raises(UnsupportedFormError, match=r"Set output_router_logits=False|no tiny copy of it runs"):
                ours(model)(row)
            return
        batch, flat = ours(model)(row), DataCollatorWithFlattening()(row)
        assert (batch["attention_mask"], batch["use_cache"]) == (None, False)
        assert max(errors(model, batch, truth)) < RIGHT
        assert errors(model, batch | {"use_cache": True}, truth)[0] > 0.1
        with adapt(model):
            assert max(errors(model, {**flat, "use_cache": True}, truth)) < RIGHT
            assert model(**flat).aux_loss > 0
        ends = torch.tensor([0, 127, 128, 129, 146]).int()
        untold = {**flat, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone()}
        adapter = BatchAdapter(model, padding_free=True)
        for step in (1, 2) if adapter.model.positions == "places" else ():  # they run on over a boundary, or jump inside
            untold["position_ids"] = (torch.arange(146) * step)[None] + 3
            with pytest.raises(UnsupportedFormError, match="router's aux loss"):
                adapter(untold)
        for more in ({"padding": (160,)}, {"multiple": 4}):
            with pytest.raises(UnsupportedFormError, match="router's aux loss"):
                ours(model, **more)(row)


# --- recurrent layers


@NEWER
@pytest.mark.parametrize("name", [*rotating(TWO_KEYS, slow=2), *rotating(ONE_KEY, slow=2)])
def test_each_forgotten_boundary_is_seen(name):
    """Recurrent layers of one key read `seq_idx` alone: there `cu_seq_lens_q` is for flash attention."""
    model, features = built(name), samples(ROWS["short"])
    with reference_kernels(model):
        truth, batch = alone(model, features), ours(model)(features)
        for what, keys in FORGOTTEN.items():
            found = errors(model, without(batch, *keys), truth)
            needed = name in TWO_KEYS or "seq_idx" in keys
            assert min(found) > WRONG / 2 if needed else max(found) < RIGHT, what
        assert min(errors(model, batch | {"attention_mask": None, "use_cache": True}, truth)) > WRONG  # attention runs on


@NEWER
def test_delivery_tells_that_a_kernel_is_missing_or_told_of_other_sequences():
    """transformers before 5.20 runs on without a kernel; later ones raise while the check runs the model."""
    model, features = built("qwen3_5_text"), samples(ROWS["short"])
    with reference_kernels(model):
        batch = without(ours(model)(features), "labels")
        assert len(check_delivery(model, batch).layers) == 3
        truth, other = Segments.from_lengths([list(ROWS["short"])]), ours(model)(samples(ROWS["turned"]))
        with pytest.raises(CollateError, match=r"linear_attn: .*got \[0, 5, 13, 19\]"):
            check_delivery(model, batch | {"cu_seq_lens_q": other["cu_seq_lens_q"]}, segments=truth)
    said = pytest.raises(ValueError, match="without" if LOUD else "conv1d_fn got nothing: .* another sequence")
    with reference_kernels(model, without=("causal_conv1d",)), as_it_is(), said:
        check_delivery(model, batch)


@NEWER
@pytest.mark.skipif("qwen4_exp_text" not in EXACT, reason="not in this release")
def test_embeddings_of_n_grams_read_no_boundary():
    """They run over the row in qwen4_exp's PLE layers: refused where the config has any, and measured without us."""
    config = tiny_config("qwen4_exp_text", vocab_size=PAD + 1)
    config.ple_layer_ids, config.number_of_conv_states, config.ngram_vocab_size_base = [1], 3, 64
    model, features = type(built("qwen4_exp_text"))(config).eval(), samples(ROWS["short"])
    with reference_kernels(model):
        with pytest.raises(UnsupportedFormError, match="another sequence of its row moves a sequence"):
            ours(model)(features)
        batch = ours(built("qwen4_exp_text"))(features)
        assert min(errors(model, batch, alone(model, features))) > 1e-3
