"""Consumers: the table is whole, every route is the one its source says, and configs tell who needs the 2D mask."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from collate_npu import Pattern, Segments, needs_mask_2d, releases
from collate_npu.consumers import consumer as room, transformers as transformers_room
from collate_npu.consumers.consumer import Model, consumers
from collate_npu.consumers.models import family_needs_mask_2d, layer_masks, text_config
from collate_npu.errors import CollateError, UnsupportedFormError

pytestmark = pytest.mark.usefixtures("newest_transformers")
CONSUMERS = consumers()


def route(consumer, segments, *, pattern="causal", padding_free=False, needs_2d=False, aux_loss=False, config=None, **model):
    """The route of a model that is described in words."""
    if aux_loss:
        config = SimpleNamespace(
            output_router_logits=True, layer_types=["linear_attention", "full_attention"] if needs_2d else []
        )
    if needs_2d and config is None and not model.get("model_type"):
        config = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    known = Model(config=config, needs_mask_2d=needs_2d, **model)
    case = room.Case(segments=segments, model=known, pattern=Pattern.of(pattern), padding_free=padding_free)
    return CONSUMERS[consumer].route(case)


RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
PACKED = Segments.from_lengths([[3, 2], [5]])
SLIDING = Pattern.sliding(2)


def case_of(segments, pattern="causal", config=None, **model):
    known = Model(config=config or SimpleNamespace(model_type="mine"), needs_mask_2d=False, pattern="causal", **model)
    return room.Case(segments=segments, model=known, pattern=Pattern.of(pattern))


# --- single rules of transformers, where a route takes the first of several


def test_the_lowest_float64_is_no_number_to_eager_attention_where_a_row_begins_with_padding():
    double = {"dtype": torch.float64, "attn_implementation": "eager"}
    for segments, refused in ((RIGHT, False), (LEFT, True), (Segments([[1, 1], [0, 0]]), True), (PACKED, False)):
        assert bool(transformers_room._lowest_is_infinite(case_of(segments, **double))) == refused
    assert not transformers_room._lowest_is_infinite(case_of(LEFT, dtype=torch.float32, attn_implementation="eager"))


def test_only_some_routers_index_tokens_by_their_mask():
    learning = SimpleNamespace(output_router_logits=True)
    for family, refused in (("gpt_oss", True), ("mine", False)):
        assert bool(transformers_room._routers_loss(case_of(PACKED, config=learning, model_type=family))) == refused


def test_padding_leaks_where_there_is_some():
    fourier = {"config": SimpleNamespace(model_type="fnet"), "model_type": "fnet"}
    for segments, leaks in ((LEFT, True), (Segments.from_lengths([4, 4]), False)):
        assert bool(transformers_room._leak(case_of(segments, **fourier))) == leaks


def test_a_2d_mask_says_nothing_of_packed_rows():
    assert transformers_room._by_2d(case_of(PACKED)) == ""
    encoder = Model(config=SimpleNamespace(), needs_mask_2d=False, pattern="bidirectional")
    for segments, said in ((LEFT, "an encoder reads the 2D mask"), (PACKED, "")):
        case = room.Case(segments=segments, model=encoder, pattern=Pattern.of("bidirectional"))
        assert transformers_room._by_2d(case) == said


# --- the table


@pytest.mark.parametrize("name", CONSUMERS)
def test_every_consumer_says_what_it_reads_and_where_that_is_written(name):
    consumer = CONSUMERS[name]
    assert all(form.reads for form in consumer.forms)
    assert all(refusal.of and refusal.remedy for refusal in consumer.refuses)
    assert ".py" in consumer.source or "generate_mask" in consumer.source


def form(consumer, segments, **settings):
    try:
        return route(consumer, segments, **settings).form
    except UnsupportedFormError:
        return "refused"


CAUSAL_KERNEL = ("none", "refused", "refused", "refused")


@pytest.mark.parametrize(
    ("consumer", "forms", "kept"),
    [
        ("megatron", ("none", "masked", "masked", "masked"), (False, True)),
        ("mindspeed", CAUSAL_KERNEL, (False, True)),
        ("mindspeed_dense", ("masked",) * 4, (False, True)),
        ("mindspeed_llm", CAUSAL_KERNEL, (False, False)),
        ("mindspeed_llm_fsdp2", ("keep_2d", "refused", "refused", "refused"), (False, False)),
        ("mindspeed_mm", CAUSAL_KERNEL, (False, False)),
        ("transformer_engine", CAUSAL_KERNEL, (False, True)),
        ("transformer_engine_npu", CAUSAL_KERNEL, (False, True)),
        ("transformers", ("keep_2d", "keep_2d", "keep", "keep"), (False, False)),
        ("verl", ("keep_2d", "keep_2d", "refused", "refused"), (True, True)),
        ("verl_npu", CAUSAL_KERNEL, (True, True)),
        ("torchtitan", ("block_mask",) * 4, (False, False)),
    ],
)
def test_the_form_of_each_consumer_and_who_keeps_the_2d_mask(consumer, forms, kept):
    """Right and left padding, packed rows, a pattern of its own; without and with recurrent layers."""
    found = (form(consumer, segments) for segments in (RIGHT, LEFT, PACKED))
    assert (*found, form(consumer, RIGHT, pattern=SLIDING)) == forms
    assert tuple(route(consumer, RIGHT, needs_2d=needs).keeps_mask_2d for needs in (False, True)) == kept
    if consumer != "mindspeed_dense":
        assert not route(consumer, RIGHT, needs_2d=True, padding_free=True).keeps_mask_2d


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_recurrent_layers_never_get_packed_rows(consumer):
    with pytest.raises(UnsupportedFormError, match=r"rows \[0\] hold several sequences"):
        route(consumer, PACKED, needs_2d=True)


@pytest.mark.parametrize(
    ("kernel", "expected", "recurrent"),
    [
        ("sdpa", "keep", "mapping"),
        ("eager", "bias", "mapping"),
        ("flex_attention", "block_mask", "block_mask"),
        ("flash_attention_2", "refused", "refused"),
        ("my_kernel", "refused", "refused"),
    ],
)
def test_transformers_kernels(kernel, expected, recurrent):
    settings = {"attn_implementation": kernel, "pattern": SLIDING}
    assert form("transformers", LEFT, **settings) == expected
    assert form("transformers", LEFT, attn_implementation=kernel) == "keep_2d"
    if kernel != "flex_attention":
        assert form("transformers", LEFT, needs_2d=True, **settings) == recurrent


def test_recurrent_layers_never_get_a_block_mask_alone():
    flex = {"attn_implementation": "flex_attention", "pattern": SLIDING}
    assert form("transformers", LEFT, needs_2d=True, **flex) == form("torchtitan", LEFT, needs_2d=True) == "refused"


def test_older_transformers(monkeypatch):
    one_row = Segments.from_lengths([3], 5, "left")
    for version, single in (("4.57.1", "refused"), ("5.14.1", "refused"), ("5.15.0", "keep_2d")):
        monkeypatch.setitem(releases._FOUND, "transformers", version)
        assert form("transformers", one_row, needs_2d=True) == single
        assert form("transformers", Segments.from_lengths([3], 5), needs_2d=True) == "keep_2d"
        assert form("transformers", one_row) == form("transformers", LEFT, needs_2d=True) == "keep_2d"


def test_flat_rows_on_recurrent_models_need_layers_that_ask_where_a_sequence_begins(monkeypatch):
    flat = Segments.from_lengths([[3, 5]])
    hybrid = {"config": config(layer_types=["linear_attention", "full_attention"]), "needs_2d": True, "padding_free": True}
    flash = {"attn_implementation": "flash_attention_2"}
    for version in ("4.57.1", "5.19.0", "5.20.0"):
        monkeypatch.setitem(releases._FOUND, "transformers", version)
        newer = version == "5.20.0"
        assert form("transformers", flat, model_type="qwen3_next", **hybrid) == ("mapping" if newer else "refused")
        assert form("transformers", flat, model_type="qwen3_next", **hybrid, **flash) == ("none" if newer else "refused")
        assert form("transformers", flat, **hybrid, **flash) == "refused"
        assert form("transformers", flat, model_type="jamba", **hybrid, **flash) == "refused"
        assert form("transformers", flat, padding_free=True) == "keep"
        assert form("transformers", flat, padding_free=True, **flash) == "none"
        assert form("transformers", Segments.from_lengths([[8]]), needs_2d=True, padding_free=True) == "none"
        assert form("megatron", flat, needs_2d=True, padding_free=True) == "none"


def test_older_transformers_take_no_mapping(monkeypatch):
    layers = config(layer_types=["conv", "full_attention"])
    monkeypatch.setitem(releases._FOUND, "transformers", "5.13.0")
    assert layer_masks(layers)["conv"] == "recurrent"
    monkeypatch.setitem(releases._FOUND, "transformers", "5.12.1")
    with pytest.raises(UnsupportedFormError, match=r"from 5\.13 on"):
        layer_masks(layers)
    zamba2 = config(model_type="zamba2", layer_types=["linear_attention", "hybrid"])
    monkeypatch.setitem(releases._FOUND, "transformers", "5.15.0")
    assert layer_masks(zamba2)["full_attention"] == "attention"
    monkeypatch.setitem(releases._FOUND, "transformers", "5.14.0")
    with pytest.raises(UnsupportedFormError, match="got hybrid"):
        layer_masks(zamba2)


@pytest.mark.parametrize(
    ("model_type", "mended"), [("rwkv", False), ("xlstm", False), ("recurrent_gemma", False), ("lfm2", True)]
)
def test_models_that_no_mask_reaches(model_type, mended, monkeypatch):
    settings = {"needs_2d": True, "model_type": model_type}
    assert form("transformers", RIGHT, **settings) == "keep_2d"
    assert form("transformers", LEFT, **settings) == ("keep_2d" if mended else "refused")
    assert form("megatron", LEFT, **settings) == "masked"
    monkeypatch.setitem(releases._FOUND, "transformers", "4.57.1")
    with pytest.raises(UnsupportedFormError, match=r"Padding there changes the real tokens of this model: its.*Pad right"):
        route("transformers", LEFT, **settings)


# --- who needs the 2D mask


def config(**fields):
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        (config(layer_types=["full_attention", "sliding_attention"]), False),
        (config(layer_types=["full_attention", "linear_attention"]), True),
        (config(layer_types=["conv", "full_attention"]), True),
        (config(layer_types=["hybrid", "hybrid_sliding"]), True),
        (config(layer_types=["attention"], mamba_d_state=16), False),  # its layers decide over its family
        (config(layers_block_type=["mamba", "attention"]), True),
        (config(layers_block_type=["attention"]), False),
        (config(block_types=["recurrent", "attention"]), True),
        (config(mamba_d_state=16), True),
        (config(mamba_d_state=None), False),
        (config(linear_attention_freq=None), False),
        (config(linear_attention_freq=4), True),
        (config(linear_attention_freq=[0, 0]), False),
        (config(linear_attention_freq=[0, 1]), True),
        (config(linear_attention_freq=None, experimental_attention_variant="gated_delta_net"), True),
        (config(linear_attention_freq=None, experimental_attention_variant="dsa"), False),
        (config(linear_attention_freq=None, is_hybrid_model=True, mamba_head_dim=64), True),
        (config(linear_attention_freq=None, mamba_head_dim=64), False),  # every Megatron config carries the sizes
        (config(hidden_size=8), False),
        (config(text_config=config(layer_types=["linear_attention"])), True),
    ],
)
def test_configs_tell_whether_layers_carry_state(model, needed):
    assert needs_mask_2d(model) == needed
    wrapped = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(config=model)))
    assert needs_mask_2d(wrapped) == needed


def test_a_family_needs_what_one_of_its_configs_may_need_and_modalities_what_their_text_part_does():
    assert family_needs_mask_2d(config(layer_types=["full_attention"], conv_L_cache=3))
    assert not needs_mask_2d(config(layer_types=["full_attention"], conv_L_cache=3))
    inner = config(layer_types=["conv"])
    outer = config(get_text_config=lambda decoder: inner if decoder else None, layer_types=["full_attention"])
    assert text_config(outer) is inner
    assert needs_mask_2d(outer)


def test_the_keys_of_a_mapping():
    assert layer_masks(config(layer_types=["conv", "full_attention", "conv"])) == {
        "conv": "recurrent",
        "full_attention": "attention",
    }
    linear = config(text_config=config(layer_types=["linear_attention", "full_attention"]))
    assert layer_masks(linear) == {"linear_attention": "recurrent", "full_attention": "attention"}
    both = {"full_attention": "attention", "linear_attention": "recurrent"}
    assert layer_masks(config(model_type="falcon_h1", layer_types=["hybrid"])) == both
    moe = config(model_type="nemotron_h", layer_types=["linear_attention", "moe", "mlp", "full_attention"])
    assert layer_masks(moe) == both
    indexed = config(model_type="qwen4_exp_text", layer_types=["linear_attention", "indexed_attention"])
    assert layer_masks(indexed) == {"linear_attention": "recurrent", "indexed_attention": "attention"}
    for layers in (["hybrid"], ["full_attention", "sliding_attention"], ["linear_attention"], []):
        with pytest.raises(UnsupportedFormError, match="layer_types"):
            layer_masks(config(layer_types=layers))


# --- windows that a kernel drops


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("kernel", ["flash_attention_2", "sdpa"])
@pytest.mark.parametrize("longest", [4, 5])
def test_flash_attention_on_npu_drops_windows_so_it_is_refused(monkeypatch, installed, kernel, longest):
    """Source: transformers integrations/npu_flash_attention.py:54-104, which reads no `sliding_window`."""
    monkeypatch.setattr(transformers_room, "find_spec", lambda name: object() if installed else None)
    config = SimpleNamespace(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    refused = installed and kernel.startswith("flash") and longest > 4
    with pytest.raises(UnsupportedFormError, match="look back 4 places") if refused else nullcontext():
        route("transformers", Segments.from_lengths([3, longest]), config=config, attn_implementation=kernel)


def test_a_window_of_its_own_beside_another_pattern_is_refused_where_rows_are_longer():
    model = Model(config=SimpleNamespace(sliding_window=2), needs_mask_2d=False, attn_implementation="sdpa")
    for longest, refused in ((2, False), (3, True)):
        case = transformers_room.Case(
            segments=Segments.from_lengths([longest]), model=model, pattern=Pattern.of("bidirectional")
        )
        with pytest.raises(UnsupportedFormError, match="window of 2 of their own") if refused else nullcontext():
            transformers_room.patterns_by_kind(case)


@pytest.mark.parametrize("layers", [["sliding_attention", "full_attention"], ["sliding_attention"]], ids=str)
def test_each_kind_of_layer_gets_a_mask_of_its_own(layers):
    config = SimpleNamespace(sliding_window=2, layer_types=layers)
    model = Model(config=config, needs_mask_2d=False, attn_implementation="sdpa")
    packed = Segments.from_lengths([[3, 5]])
    found = transformers_room.patterns_by_kind(transformers_room.Case(segments=packed, model=model))
    windows = {"sliding_attention": Pattern.sliding(2), "full_attention": Pattern.of("causal")}
    assert found == ({kind: windows[kind] for kind in layers} if len(layers) > 1 else {"": Pattern.sliding(2)})


def test_a_config_is_asked_once_for_each_side():
    """What right padding does to a model says nothing of the left; one that is asked again answers as before."""
    config = SimpleNamespace(model_type="qwen3_next", layer_types=["linear_attention", "full_attention"], use_bias=True)
    model = Model(config=config, needs_mask_2d=True, model_type="qwen3_next")
    right, left = (room.Case(segments=segments, model=model) for segments in (RIGHT, LEFT))
    for _ in range(2):
        assert CONSUMERS["transformers"].route(right).form == "keep_2d"
        with pytest.raises(UnsupportedFormError, match="use_bias"):
            CONSUMERS["transformers"].route(left)


def test_layers_that_no_config_tells_are_not_guessed():
    with pytest.raises(CollateError, match="A model's config says which layers it has"):
        needs_mask_2d(torch.nn.Linear(2, 2))
