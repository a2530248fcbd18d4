"""What a forward, a config or a wrapper says of a model, on stand-ins; the real families are in tests/integration."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu.consumers import model_traits
from collate_npu.consumers.mask_routing import Model
from collate_npu.consumers.model_traits import (
    attention_windows,
    config_of,
    consumer_of,
    first_position,
    has_two_sides,
    holes_cut_reason,
    is_compiled,
    is_encoder,
    label_rule,
    lengths_clash_reason,
    looks_ahead,
    needs_mask_2d,
    pattern_of,
    pooling,
    position_rule,
    rope_limit,
    sparse_from,
    unwrap,
    width_dependence,
    windows,
)  # fmt: skip
from collate_npu.errors import CollateError, UnsupportedFormError

Base = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils", "main_input_name": "input_ids"})


class Reads(Base):
    def forward(self, input_ids=None, position_ids=None): ...


class PassesOn(Base):
    def forward(self, input_ids=None, **kwargs): ...


class Sees(Base):
    def forward(self, pixel_values=None, position_ids=None): ...


class Ignores(Base):
    def forward(self, input_ids=None): ...


def model(outer, inner=None, **config):
    made = outer()
    if inner is not None:
        made.model = inner()
    made.config = SimpleNamespace(**{"model_type": "mine", "pad_token_id": 7} | config)
    return made


@pytest.fixture
def source(monkeypatch):
    pytest.importorskip("transformers")

    def write(text):
        monkeypatch.setattr(model_traits, "_source", lambda module: text)

    return write


PADDING_IDX, AXES = "def create_position_ids_from_input_ids(", "if position_ids.ndim == 3 and position_ids.shape[0] == 4:"


@pytest.mark.parametrize(("outer", "inner", "text", "rule", "first"), [
    (Reads, None, "", "places", 0), (PassesOn, Reads, "", "places", 0), (PassesOn, None, "", "none", 0),
    (PassesOn, Sees, "", "none", 0), (Ignores, Reads, "", "none", 0),
    (Reads, None, PADDING_IDX, "padding_idx", 8), (Reads, None, AXES, "axes", 0)])  # fmt: skip
def test_positions_are_read_where_a_forward_names_them_and_counted_as_its_file_tells(
    outer, inner, text, rule, first, source
):
    source(text)
    assert position_rule(model(outer, inner)) == rule
    assert first_position(model(outer, inner)) == first
    assert first_position(model(Reads, model_type="mpnet")) == 2


def test_a_config_that_no_class_of_transformers_reads_asks_for_the_model():
    pytest.importorskip("transformers")
    with pytest.raises(CollateError, match="Pass the model itself"):
        position_rule(SimpleNamespace(model_type="mine"))


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("", ()),
        *((told, ("images",)) for told in ("or_mask_function", "token_type_ids_mask_function", "block_sequence_ids")),
        ("torch.where(token_type_ids ==", ("types",)),
        ("token_type_ids[:, None, None, :]", ("images", "types")),
    ],
)
def test_masks_that_look_ahead_are_told_by_images_or_types(text, by, source):
    source(text)
    assert tuple(each for each in ("images", "types") if looks_ahead(model(Reads), each)) == by
    assert Model.of(model(Reads), needs_2d=False).looks_ahead == by


def test_a_module_of_transformers_is_asked_all_of_it_and_a_stranger_nothing(source):
    source("masking_utils position_ids.shape[0] == 4")
    made = model(Reads)
    made.is_causal = True
    read = Model.of(made, needs_2d=True)
    assert (read.positions, read.pattern) == ("axes", "causal")
    assert read.boundaries_unread is None  # the adapter asks
    stranger = nn.Linear(1, 1)
    assert "not transformers'" in Model.of(stranger, needs_2d=True).boundaries_unread
    assert Model.of(stranger, needs_2d=False) == Model(config=stranger, needs_mask_2d=False, dtype=stranger.weight.dtype)


class Pools(Base):
    def forward(self, input_ids=None):
        self.pooled = input_ids[:, 0]


class PoolsImages(Base):
    def forward(self, pixel_values=None):
        self.pooled = pixel_values[:, 0]


class PoolsElsewhere(nn.Module):
    forward = Pools.forward


def test_only_parts_of_transformers_that_read_ids_pool_tokens():
    pytest.importorskip("transformers")
    found = {inner: pooling(model(PassesOn, inner)) for inner in (Pools, PoolsImages, PoolsElsewhere, Reads)}
    assert found == {Pools: "pooled", PoolsImages: "", PoolsElsewhere: "", Reads: ""}
    assert label_rule(model(Reads)) is None, "a config that says nothing of two sides is no decoder's"
    assert label_rule(model(Reads, is_encoder_decoder=True)) == "decoder"


# --- a config or a module: its consumer, what a wrapper holds, its windows


def class_of(package, name, *bases):
    return type(name, (*bases, nn.Module), {"__module__": f"{package}.some.file"})


HF = class_of("transformers", "PreTrainedModel")
STACKS = {
    "transformers": HF,
    "megatron": class_of("megatron", "MegatronModule"),
    "torchtitan": class_of("torchtitan", "Decoder"),
}


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
    assert attention_windows(given) == expected
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
        attention_windows(given)


@pytest.mark.parametrize(
    ("flags", "said"),
    [([True, True], "causal"), ([False], "bidirectional"), ([True, False], None), ([], None), ([None, True], "causal")],
)
def test_a_pattern_is_told_only_where_every_layer_says_the_same(flags, said):
    model = HF()
    for number, flag in enumerate(flags):
        layer = nn.Module()
        layer.is_causal = flag
        model.add_module(f"layer{number}", layer)
    assert pattern_of(model) == said
    assert pattern_of(Wrapper(model)) == said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(model_type="bert"), True),
        (config(model_type="llama"), False),
        (config(), False),
        *((config(model_type="bert", **{name: True}), False) for name in ("is_decoder", "is_encoder_decoder", "causal")),
    ],
)
def test_an_encoder_is_a_masked_language_model_that_is_not_told_to_decode(monkeypatch, given, expected):
    pytest.importorskip("transformers")
    assert is_encoder(given) == expected
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    assert not is_encoder(given)


@pytest.mark.parametrize(
    ("wrong", "said"), [*((wrong, "model: got") for wrong in (5, None, ["layer"])), ("qwen3_nex", "'qwen3_nex'.*qwen3_next")]
)
def test_what_is_no_model_and_a_name_that_no_registry_has_are_refused(wrong, said):
    pytest.importorskip("transformers")
    with pytest.raises(CollateError, match=said):
        needs_mask_2d(wrong)


@pytest.mark.parametrize(
    ("inner", "said", "expected"), [("encoder", True, True), ("encoder", False, False), ("layers", True, False)]
)
def test_two_sides_are_an_encoder_and_a_config_that_says_so(inner, said, expected):
    model = nn.Module()
    model.config, model.model = config(is_encoder_decoder=said), nn.ModuleDict({inner: nn.Module()})
    assert has_two_sides(model) == expected
    del model.config.is_encoder_decoder
    assert not has_two_sides(model)


def test_a_module_of_which_a_part_is_compiled():
    plain, inside, in_place = nn.Linear(1, 1), nn.Sequential(torch.compile(nn.Linear(1, 1))), nn.Linear(1, 1)
    in_place.compile()
    assert [is_compiled(model) for model in (plain, inside, nn.Sequential(in_place))] == [False, True, True]


# --- sizes in a config; the real models are in tests/integration/test_leak_sweep.py


def mine(**fields):
    return config(**({"model_type": "mine"} | fields))


WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 8}


def test_a_hole_cuts_a_window_short_where_a_row_is_longer():
    assert [holes_cut_reason(mine(**WINDOW), n)[:15] for n in (8, 9)] == ["", "its window of 8"]
    assert holes_cut_reason(mine(), 9) == ""


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
    assert asked(mine(**fields)) == limit


CLASHES = [
    ({}, [5, 99], False), (LONG, [5, 8], False), (LONG, [5, 9], True), (LONG, [8, 9], True), (LONG, [9, 20], False),
    (DYNAMIC, [9, 20], True), (DYNAMIC, [20, 20], False), (LONG, [], False),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "lengths", "clash"), CLASHES)
def test_lengths_clash_where_one_changes_the_frequencies_of_another(fields, lengths, clash):
    assert bool(lengths_clash_reason(mine(**fields), lengths)) == clash
