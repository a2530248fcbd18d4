"""The room that builds tiny models: it finds every hybrid family, its models are sound, and on them a fault shows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

transformers = pytest.importorskip("transformers")

from collate_npu import testing  # noqa: E402
from collate_npu.consumers.models import family_needs_mask_2d, needs_mask_2d  # noqa: E402

pytestmark = pytest.mark.models

VOCAB = 257
HYBRID = testing.hybrid_model_types()
LENGTHS, WIDTH = (5, 9, 17), 17


def text(config):
    return config.get_text_config(decoder=True)


# --- which families


def test_every_model_whose_source_masks_padding_states_is_found():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    uses = re.compile("create_recurrent_attention_mask|apply_mask_to_padding_states")
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    folders = {source.parent.name for source in sources if uses.search(source.read_text(encoding="utf-8"))}
    assert "qwen3_next" in folders  # the pattern still means something
    found = set(HYBRID) | {text(testing._default_config(name)).model_type for name in HYBRID}
    missed = set(folders)
    for name in CONFIG_MAPPING_NAMES:
        folder = CONFIG_MAPPING[name].__module__.split(".")[-2]
        if folder in missed and text(testing._default_config(name)).model_type in found:
            missed.discard(folder)
    assert not missed


def test_a_family_counts_once_and_attention_alone_does_not_count():
    assert sorted(set(HYBRID)) == HYBRID
    assert {"qwen3_next", "mamba2", "bamba", "rwkv", "lfm2"} <= set(HYBRID)
    assert not {"qwen3", "llama", "mixtral", "gpt2", "gemma2", "qwen3_5"} & set(HYBRID)


@pytest.mark.parametrize("model_type", HYBRID)
def test_detection_agrees_with_the_tiny_config(model_type):
    assert needs_mask_2d(testing.tiny_config(model_type, vocab_size=VOCAB))


def test_the_layers_of_this_config_decide_over_those_of_its_family():
    dense = transformers.GraniteMoeHybridConfig(layer_types=["attention"] * 2, num_hidden_layers=2)
    assert not needs_mask_2d(dense)
    assert family_needs_mask_2d(dense)
    assert not needs_mask_2d(transformers.LlamaConfig())
    assert not needs_mask_2d(transformers.Gemma2Config())  # sliding and full attention


@pytest.mark.parametrize(
    ("switches", "needed"),
    [
        ({"linear_attention_freq": None}, False),
        ({"linear_attention_freq": 0}, False),
        ({"linear_attention_freq": [0, 0]}, False),
        ({"linear_attention_freq": 4}, True),
        ({"linear_attention_freq": [1, 0]}, True),
        ({"linear_attention_freq": None, "experimental_attention_variant": "gated_delta_net"}, True),
        ({"linear_attention_freq": None, "experimental_attention_variant": "dsa"}, False),
        ({"linear_attention_freq": None, "is_hybrid_model": True}, True),
        ({"linear_attention_freq": None, "layer_types": ["full_attention", "linear_attention"]}, True),
    ],
)
def test_a_megatron_config_is_judged_by_its_switches_not_by_sizes_it_always_carries(switches, needed):
    config = SimpleNamespace(linear_conv_kernel_dim=4, linear_num_key_heads=16, mamba_state_dim=128, **switches)
    assert needs_mask_2d(config) is needed


def test_a_composite_without_a_method_is_judged_by_its_text():
    inner = SimpleNamespace(layer_types=["linear_attention"])
    assert needs_mask_2d(SimpleNamespace(text_config=inner, layer_types=["full_attention"]))
    assert not needs_mask_2d(SimpleNamespace(hidden_size=8))


# --- the models


@pytest.mark.parametrize("model_type", HYBRID)
def test_a_tiny_config_is_tiny_and_mixes_what_the_family_mixes(model_type):
    config = text(testing.tiny_config(model_type, vocab_size=VOCAB))
    assert 2 <= config.num_hidden_layers <= 4
    assert config.hidden_size <= 64
    assert config.vocab_size == VOCAB
    assert config.pad_token_id == config.eos_token_id == VOCAB - 1
    kinds = set(getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ())
    listed = text(testing._default_config(model_type))
    mixed = set(getattr(listed, "layers_block_type", None) or getattr(listed, "layer_types", None) or ())
    assert kinds >= mixed or len(kinds) == 3
    if model_type in ("bamba", "granitemoehybrid", "lfm2", "lfm2_moe"):  # families whose default lists one kind only
        assert len(kinds) == 2


@pytest.fixture(params=[(name, impl) for name in HYBRID for impl in ("sdpa", "eager")], ids="-".join)
def model(request):
    model_type, impl = request.param
    if model_type in testing.left_out(impl):
        pytest.skip(testing.left_out(impl)[model_type])
    return testing.tiny_model(model_type, vocab_size=VOCAB, attn_implementation=impl)


def padded(side: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(0, 256, (length,), generator=generator) for length in LENGTHS]
    ids, keep = torch.full((len(samples), WIDTH), VOCAB - 1), torch.zeros(len(samples), WIDTH, dtype=torch.bool)
    for row, sample in enumerate(samples):
        where = slice(WIDTH - len(sample), None) if side == "left" else slice(0, len(sample))
        ids[row, where], keep[row, where] = sample, True
    return ids, keep, samples


def gradient(model, losses) -> Tensor:
    model.zero_grad()
    sum(losses).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logit_and_no_gradient(model, side):
    ids, keep, samples = padded(side)
    alone = [testing._logits(model, s[None], torch.ones(1, len(s), dtype=torch.bool))[0] for s in samples]
    wanted = gradient(model, [next_token_loss(logits, s) for logits, s in zip(alone, samples)])
    together = testing._logits(model, ids, keep)
    rows = [row[real] for row, real in zip(together, keep)]
    got = gradient(model, [next_token_loss(logits, s) for logits, s in zip(rows, samples)])
    assert max(float((a - b).detach().abs().max()) for a, b in zip(rows, alone)) <= 1e-4
    assert float((got - wanted).norm() / wanted.norm()) <= 1e-4
    assert 1 < max(float(logits.detach().abs().max()) for logits in alone) < 10


@torch.no_grad()
def test_a_lost_2d_mask_shows(model):
    """A 4D mask keeps padding from attention and says nothing to the recurrent layers; some families refuse it."""
    ids, keep, samples = padded("left")
    positions = {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)}
    positions = positions if "position_ids" in inspect.signature(model.forward).parameters else {}
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril() & keep[:, None, None]
    bias = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    given = causal if model.config._attn_implementation == "sdpa" else bias
    try:
        lost = model(ids, attention_mask=given, **positions).logits
    except RuntimeError:
        lost = model(ids, attention_mask=None, **positions).logits
    alone = testing._logits(model, samples[0][None], torch.ones(1, LENGTHS[0], dtype=torch.bool))[0]
    assert float((lost[0][keep[0]] - alone).abs().max()) > 0.5


@torch.no_grad()
def test_one_padding_token_in_the_recurrent_state_is_seen_twelve_tokens_later():
    if not hasattr(transformers.masking_utils, "create_recurrent_attention_mask"):
        pytest.skip("before 5.13 qwen3_next takes no mapping of masks")
    model = testing.tiny_model("qwen3_next", vocab_size=VOCAB)
    ids, width = torch.arange(40)[None], 40
    keep = torch.arange(width)[None] >= 20
    causal = torch.ones(width, width, dtype=torch.bool).tril()[None, None] & keep[:, None, None]
    leaky = keep | (torch.arange(width) == 8)

    def run(linear: Tensor) -> Tensor:
        return model(ids, attention_mask={"full_attention": causal, "linear_attention": linear}).logits[:, 20:]

    assert float((run(leaky) - run(keep)).abs().max()) > 0.5


def test_the_pad_row_is_alive():
    model = testing.tiny_model("qwen3_next", vocab_size=VOCAB)
    table = model.get_input_embeddings()
    assert table.padding_idx is None
    weight = table.weight.detach()
    assert float(weight[VOCAB - 1].std()) > 0.5 * float(weight.std())
    model(torch.tensor([[VOCAB - 1, 1]])).logits.sum().backward()
    assert float(table.weight.grad[VOCAB - 1].abs().max()) > 0


def test_a_seed_gives_one_model_and_leaves_the_random_state_alone():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    one, same, other = (testing.tiny_model("qwen3_next", vocab_size=VOCAB, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), wanted)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_the_model_is_as_asked_for():
    model = testing.tiny_model("qwen3_next", vocab_size=VOCAB, attn_implementation="eager", dtype=torch.bfloat16)
    assert not model.training
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    plain = testing.tiny_model("qwen3_next", vocab_size=VOCAB, scale=1.0)
    scaled = testing.tiny_model("qwen3_next", vocab_size=VOCAB, scale=3.0)
    assert torch.allclose(scaled.lm_head.weight, 3 * plain.lm_head.weight)
    assert torch.equal(scaled.model.norm.weight, plain.model.norm.weight)


def test_notices_come_back_after_building():
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        with testing._quiet():
            assert logging.get_verbosity() == logging.ERROR
        testing.tiny_model("qwen3_next", vocab_size=VOCAB)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


# --- what cannot be tested


def test_left_out_is_measured_and_says_why(monkeypatch):
    assert "unused" in testing.left_out()["rwkv"]
    assert "qwen3_next" not in testing.left_out()
    assert set(testing.left_out()) <= set(HYBRID)
    monkeypatch.setattr(testing, "_left_padding_error", lambda model: 0.25)
    assert testing._why_not("qwen3_next", "sdpa") == "left padding with a 2D attention_mask moves logits by 0.25"
    assert testing._why_not("no_such_model", "sdpa").startswith("KeyError")


def test_the_measurement_sees_a_model_that_ignores_its_mask():
    model = testing.tiny_model("qwen3_next", vocab_size=VOCAB)
    assert testing._left_padding_error(model) < 1e-4
    forward = model.forward

    def deaf(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor):
        return forward(input_ids=input_ids, position_ids=position_ids)

    model.forward = deaf
    assert testing._left_padding_error(model) > 0.5


# --- the tokenizer


@given(st.text())
def test_each_token_is_a_byte(words):
    tokenizer = testing.byte_tokenizer()
    ids = tokenizer(words, add_special_tokens=False).input_ids
    assert ids == list(words.encode())
    assert tokenizer.decode(ids) == words


@pytest.mark.parametrize(("pad_is_eos", "size"), [(True, 257), (False, 258)])
def test_special_tokens_follow_the_bytes(pad_is_eos, size):
    tokenizer = testing.byte_tokenizer(pad_is_eos=pad_is_eos)
    assert len(tokenizer) == size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, size - 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizer_pads_on_the_side_asked_for(side):
    batch = testing.byte_tokenizer(padding_side=side)(["ab", "c"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][1] == ([0, 1] if side == "left" else [1, 0])
