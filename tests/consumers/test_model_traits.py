"""What a forward, a config or a wrapper says of a model, on stand-ins; the real families are in tests/integration."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import BatchAdapter
from collate_npu.consumers import model_traits
from collate_npu.consumers.model_traits import config_of, consumer_of, is_encoder, unwrap, windows
from collate_npu.errors import UnsupportedFormError


def class_of(package, name, *bases):
    return type(name, (*bases, nn.Module), {"__module__": f"{package}.some.file"})


HF = class_of("transformers", "PreTrainedModel")
STACKS = {"transformers": HF}
STACKS |= {name: class_of(name, base) for name, base in (("megatron", "MegatronModule"), ("torchtitan", "Decoder"))}


class Holder(nn.Module):
    """The model is its `module` as in DDP, or its `pretrained_model` as in TRL's value head before 1.0."""

    def __init__(self, model, name):
        super().__init__()
        setattr(self, name, model)


class Peft(Holder):
    def get_base_model(self):
        return self.base_model


Wrapper, ValueHead = partial(Holder, name="module"), partial(Holder, name="pretrained_model")
peft = partial(Peft, name="base_model")


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_is_told_by_the_classes_a_module_derives_from(stack):
    model = class_of("users", "Mine", STACKS[stack])()
    for wrapped in (model, Wrapper(model), Wrapper(Wrapper(model)), torch.compile(model), Wrapper(torch.compile(model))):
        assert consumer_of(wrapped) == stack
        assert unwrap(wrapped) is model
    assert consumer_of(peft(Wrapper(model))) == stack
    assert consumer_of(torch.compile(Wrapper(peft(model)))) == stack
    assert consumer_of(Wrapper(ValueHead(peft(model)))) == stack


@pytest.mark.parametrize(
    "other",
    [
        *(nn.Linear(2, 2), Wrapper(nn.Linear(2, 2)), SimpleNamespace(model_type="llama"), "llama", None, [HF()]),
        *(class_of("transformers", "PushToHubMixin")(), class_of("users", "PreTrainedModel")()),
    ],
)
def test_what_no_stack_runs_names_no_consumer(other):
    assert consumer_of(other) is None


def test_a_wrapper_of_megatron_is_megatrons_and_hides_nothing():
    Module = STACKS["megatron"]
    model = class_of("users", "GPTModel", Module)()
    model.config = SimpleNamespace(hidden_size=8)
    wrapped = class_of("megatron", "Float16Module", Module)()
    wrapped.module = model
    assert consumer_of(wrapped) == "megatron"
    assert config_of(wrapped) is model.config


def config(**fields):
    return SimpleNamespace(**fields)


SLIDING = ["full_attention", "sliding_attention"]
FLASH = (({}, None), ({"_attn_implementation": "sdpa"}, None), ({"_attn_implementation": "flash_attention_2"}, 8))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(), {"": None}),
        (config(sliding_window=8), {"": 8}),  # mistral
        (config(sliding_window=8, use_sliding_window=False), {"": None}),  # qwen3_moe
        *((config(sliding_window=none), {"": None}) for none in (None, 0, -1)),
        (config(sliding_window=1), {"": 1}),
        (config(layer_types=["full_attention"], sliding_window=8), {"full_attention": None}),  # dots1
        (config(layer_types=SLIDING, sliding_window=8), {"full_attention": None, "sliding_attention": 8}),
        (config(layer_types=["chunked_attention"], attention_chunk_size=16), {"chunked_attention": 16}),
        (config(layer_types=["sliding_attention"], local_attention=128), {"sliding_attention": 64}),  # modernbert
        (config(layer_types=["linear_attention", "sliding_attention"], attention_window_size=9), {"sliding_attention": 9}),
        (config(text_config=config(sliding_window=8)), {"": 8}),
        *((config(model_type="moshi", sliding_window=8, **on), {"": size}) for on, size in FLASH),
    ],
)
def test_windows_are_those_of_the_layers_that_use_them(given, expected):
    assert model_traits.attention_windows(given) == expected
    assert windows(given) == tuple(size for size in expected.values() if size)


def test_layers_of_one_kind_with_two_windows_have_no_mapping():
    class PerLayer(SimpleNamespace):
        """transformers 5.23 refuses to read a field that layers differ in from the whole config."""

        @property
        def sliding_window(self):
            raise RuntimeError("'sliding_window' is a per-layer attribute")

    layers = [config(sliding_window=size) for size in (8, None, 4)]
    given = PerLayer(layer_types=SLIDING, per_layer_config=layers)
    assert windows(given) == (4, 8)
    with pytest.raises(UnsupportedFormError, match="sliding_attention with windows"):
        model_traits.attention_windows(given)


def test_an_encoder_is_a_masked_language_model_that_is_not_told_to_decode(monkeypatch):
    pytest.importorskip("transformers")
    told = [config(model_type="bert", **{name: True}) for name in ("is_decoder", "is_encoder_decoder", "causal")]
    assert not any(map(is_encoder, (config(), config(model_type="llama"), *told)))
    assert is_encoder(config(model_type="bert"))
    monkeypatch.delattr("transformers.models.auto.modeling_auto", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    assert not is_encoder(config(model_type="bert"))


@pytest.mark.models
def test_positions_are_kept_from_a_forward_that_takes_none():
    """Its own part would take them."""
    transformers = pytest.importorskip("transformers")

    class Scorer(transformers.LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None):
            return self.model(input_ids=input_ids, attention_mask=attention_mask)

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}
    batch = {"input_ids": torch.tensor([[0, 3, 4], [5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    handed = {cls: BatchAdapter(cls(transformers.LlamaConfig(**sizes)))(batch) for cls in (Scorer, transformers.LlamaModel)}
    assert "position_ids" not in handed[Scorer]
    assert "position_ids" in handed[transformers.LlamaModel]
