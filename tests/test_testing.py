"""The room that builds tiny models: it finds every hybrid family, its models are sound, and on them a fault shows."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

transformers = pytest.importorskip("transformers")

from collate_npu import testing  # noqa: E402
from collate_npu.consumers.model_traits import family_needs_mask_2d, needs_mask_2d  # noqa: E402
from collate_npu.consumers.tiny_models import quiet  # noqa: E402

pytestmark = pytest.mark.models

VOCAB = 257
HYBRID = testing.hybrid_model_types()


def text(config):
    return config.get_text_config(decoder=True)


def default_text(model_type):
    with quiet():
        return text(transformers.CONFIG_MAPPING[model_type]())


@pytest.mark.slow
def test_every_model_whose_source_masks_padding_states_is_found():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    uses = re.compile("create_recurrent_attention_mask|apply_mask_to_padding_states")
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    folders = {source.parent.name for source in sources if uses.search(source.read_text(encoding="utf-8"))}
    assert "qwen3_next" in folders  # the pattern still means something
    found = set(HYBRID) | {default_text(name).model_type for name in HYBRID}
    missed = set(folders)
    for name in CONFIG_MAPPING_NAMES:
        folder = CONFIG_MAPPING[name].__module__.split(".")[-2]
        if folder in missed and default_text(name).model_type in found:
            missed.discard(folder)
    assert not missed


def test_a_family_counts_once_and_attention_alone_does_not_count():
    assert sorted(set(HYBRID)) == HYBRID
    assert {"qwen3_next", "mamba2", "bamba", "rwkv", "lfm2"} <= set(HYBRID)
    assert not {"qwen3", "llama", "mixtral", "gpt2", "gemma2", "qwen3_5"} & set(HYBRID)
    dense = transformers.GraniteMoeHybridConfig(layer_types=["attention"] * 2, num_hidden_layers=2)
    assert (needs_mask_2d(dense), family_needs_mask_2d(dense)) == (False, True)  # the layers of this config decide
    assert not needs_mask_2d(transformers.Gemma2Config())  # sliding and full attention


@pytest.mark.parametrize("model_type", HYBRID)
def test_a_tiny_config_is_tiny_and_mixes_what_the_family_mixes(model_type):
    whole = testing.tiny_config(model_type, vocab_size=VOCAB)
    assert needs_mask_2d(whole)
    config = text(whole)
    assert 2 <= config.num_hidden_layers <= 4
    assert config.hidden_size <= 64
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (VOCAB, VOCAB - 1, VOCAB - 1)
    kinds, mixed = (
        set(getattr(each, "layers_block_type", None) or getattr(each, "layer_types", None) or ())
        for each in (config, default_text(model_type))
    )
    assert kinds >= mixed or len(kinds) == 3
    if model_type in ("bamba", "granitemoehybrid", "lfm2", "lfm2_moe"):  # families whose default lists one kind only
        assert len(kinds) == 2


def test_the_model_is_as_asked_for_and_the_random_state_and_the_notices_as_they_were():
    from transformers.utils import logging

    build = partial(testing.tiny_model, "qwen3_next", vocab_size=VOCAB)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        with quiet():
            assert logging.get_verbosity() == logging.ERROR
        state = torch.get_rng_state()
        one, same, other, plain = build(seed=1), build(seed=1), build(seed=2), build(seed=1, scale=1.0)
        assert torch.equal(torch.get_rng_state(), state)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.allclose(one.lm_head.weight, 5 * plain.lm_head.weight)
    assert torch.equal(one.model.norm.weight, plain.model.norm.weight)
    assert float(one.model.layers[0].linear_attn.conv1d.weight.std()) > 0.3
    model = build(attn_implementation="eager", dtype=torch.bfloat16)
    assert (model.training, model.dtype, model.config._attn_implementation) == (False, torch.bfloat16, "eager")


@pytest.mark.slow
def test_left_out_is_measured_and_says_why():
    assert "padding moves" in testing.left_out()["rwkv"]
    assert not {"qwen3_next", "qwen2_vl", "qwen2_5_vl", "glm4v"} & {*testing.left_out()}  # three split frequencies by axis
    assert set(testing.left_out()) <= set(HYBRID)


TOKENIZER = testing.byte_tokenizer()


@given(st.text())
def test_each_token_is_a_byte(words):
    ids = TOKENIZER(words, add_special_tokens=False).input_ids
    assert ids == list(words.encode())
    assert TOKENIZER.decode(ids) == words


@pytest.mark.parametrize(("side", "kept"), [("left", [0, 1]), ("right", [1, 0])])
def test_special_tokens_follow_the_bytes_and_it_pads_on_the_side_asked_for(side, kept):
    for pad_is_eos, size in ((True, 257), (False, 258)):
        tokenizer = testing.byte_tokenizer(pad_is_eos=pad_is_eos, padding_side=side)
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (size, 256, size - 1)
        batch = tokenizer(["ab", "c"], padding=True)
        assert set(batch) == {"input_ids", "attention_mask"}
        assert batch["attention_mask"][1] == kept
        limit = text(testing.tiny_config("qwen3_next", vocab_size=VOCAB)).max_position_embeddings
        assert tokenizer.model_max_length == limit
