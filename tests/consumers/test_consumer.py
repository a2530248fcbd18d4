"""Consumers: the table is whole, every route is the one its source says, and configs tell who needs the 2D mask."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from collate_npu import ContextParallel, Pattern, Segments, debug, needs_mask_2d, releases
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
FLAT, ONE, HOLE = Segments.from_lengths([[3, 5]]), Segments.from_lengths([[8]]), Segments([[1, 0, 1]])
SLIDING = Pattern.sliding(2)


def case_of(segments, pattern="causal", config=None, **model):
    known = Model(config=config or SimpleNamespace(model_type="mine"), needs_mask_2d=False, pattern="causal", **model)
    return room.Case(segments=segments, model=known, pattern=Pattern.of(pattern))


def varied(case, settings, model):
    return replace(case, **settings, model=replace(case.model, **model))


LEARNS = SimpleNamespace(output_router_logits=True)
BOTH, ONE_RANK = ["sliding_attention", "full_attention"], ContextParallel(1, 0)
INDEXER = {"index_topk": 4, "index_n_heads": 2}
SPARSE = {"attention_type": "block_sparse", "num_random_blocks": 1, "block_size": 1}


# --- single rules of transformers, where a route takes the first of several


@pytest.mark.parametrize(
    ("settings", "model", "none"),
    [
        *(({"call": call}, {}, True) for call in ({}, {"input_ids": 1}, {"output_attentions": False}, {"is_causal": True})),
        *(({"call": {key: 1}}, {}, False) for key in ("past_key_values", "state", "pixel_values", "output_router_logits")),
        *(({"call": {"is_causal": causal}}, {}, causal) for causal in (True, False)),
        *((settings, {}, False) for settings in ({"at_model": False}, {"padding_free": True}, {"segments": LEFT})),
        *(({}, {"attn_implementation": kernel}, kernel == "flex_attention") for kernel in ("eager", "flex_attention")),
        *(({}, model, False) for model in ({"looks_ahead": ("types",)}, {"config": LEARNS}, {"pattern": None})),
    ],
)
def test_a_2d_mask_gives_way_to_none_only_where_nobody_reads_it(settings, model, none):
    case = varied(case_of(RIGHT), {"at_model": True, **settings}, model)
    assert bool(transformers_room._by_kernel(case)) == none


@pytest.mark.parametrize("on", [False, True])
def test_that_none_were_faster_is_said_to_who_debugs(monkeypatch, on):
    monkeypatch.setattr(debug, "ON", on)
    for kernel, faster in (("sdpa", on), ("eager", False)):
        why = transformers_room._by_2d(case_of(RIGHT, attn_implementation=kernel))
        assert ("adapt(model)" in why) == faster


@pytest.mark.parametrize(
    ("settings", "model", "told"),
    [
        ({}, {}, True),
        *((settings, {}, False) for settings in ({"padding_free": False}, {"restarts": False}, {"segments": ONE})),
        *((settings, {}, False) for settings in ({"segments": Segments([[1, 2, 0]])}, {"pattern": SLIDING})),
        *((settings, {}, False) for settings in ({"context_parallel": ONE_RANK}, {"call": {"past_key_values": 1}})),
        *(({}, {"attn_implementation": kernel}, kernel == "eager") for kernel in ("eager", "flex_attention")),
        *(({}, model, False) for model in ({"model_type": "gpt_oss"}, {"config": None})),
    ],
)
def test_positions_alone_tell_sequences_only_where_all_else_allows_it(monkeypatch, settings, model, told):
    case = varied(case_of(FLAT, config=LEARNS, model_type="mixtral"), {"padding_free": True, **settings}, model)
    assert transformers_room._by_positions(case) == told
    monkeypatch.setitem(releases._FOUND, "transformers", "5.5.0")
    assert not transformers_room._by_positions(case)


@pytest.mark.parametrize(
    ("fields", "lengths", "depends"),
    [
        *((INDEXER, lengths, lengths == [5, 6]) for lengths in ([5, 6], [3, 5], [4, 6], [6, 6])),
        *((SPARSE, lengths, lengths == [6, 8]) for lengths in ([6, 8], [6, 7], [8, 8])),
    ],
)
def test_the_width_matters_to_sequences_that_are_long_and_not_the_longest(fields, lengths, depends):
    case = case_of(Segments.from_lengths(lengths), config=SimpleNamespace(**fields))
    assert bool(transformers_room._width(case)) == depends


@pytest.mark.parametrize(("longest", "clash"), [(4, False), (5, True)])
def test_rotary_frequencies_of_the_longest_clash_with_those_of_others(longest, clash):
    rope = SimpleNamespace(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 4})
    segments = Segments.from_lengths([3, longest])
    assert form("transformers", segments, config=rope) == ("refused" if clash else "keep_2d")
    assert form("transformers", segments, config=SimpleNamespace()) == "keep_2d"


@pytest.mark.parametrize(
    ("segments", "kernel", "lost"),
    [(PACKED, "flex_attention", True), (RIGHT, "flex_attention", False), (PACKED, "sdpa", False)],
)
def test_a_block_mask_drops_windows_of_packed_rows(segments, kernel, lost):
    config = SimpleNamespace(sliding_window=2, layer_types=BOTH)
    assert bool(transformers_room._lost_window(case_of(segments, config=config, attn_implementation=kernel))) == lost


def test_packed_rows_are_refused_to_models_that_mix_tokens_or_build_their_own_masks():
    why = lambda segments, fields, **model: transformers_room._unplaced(case_of(segments, config=fields, **model))  # noqa: E731
    fourier, plain = SimpleNamespace(model_type="fnet"), SimpleNamespace()
    assert "Fourier" in why(PACKED, fourier)
    assert "its own masks" in why(PACKED, plain, reads_dense=False)
    assert why(RIGHT, fourier) == why(PACKED, plain) == ""
    assert transformers_room._unplaced(varied(case_of(PACKED), {}, {"config": None, "reads_dense": False})) == ""


@pytest.mark.parametrize(("by", "key"), [("images", "pixel_values"), ("types", "token_type_ids")])
def test_a_dense_mask_would_replace_the_sight_of_an_image(by, key):
    for segments, keys, model, refused in (
        (PACKED, (key,), (by,), True),
        (PACKED, (), (by,), False),
        (PACKED, (key,), (), False),
        (RIGHT, (key,), (by,), False),
    ):
        case = replace(case_of(segments, looks_ahead=model), call=dict.fromkeys(keys, 1))
        assert bool(transformers_room._looks_ahead(case)) == refused


def test_a_window_is_made_of_a_2d_mask_where_every_layer_has_it():
    for layers, said in ((BOTH[:1], True), (BOTH, False)):
        case = case_of(LEFT, SLIDING, config=SimpleNamespace(sliding_window=2, layer_types=layers))
        assert bool(transformers_room._by_2d(case)) == said


def test_a_pooler_beside_answers_for_every_token_takes_packed_rows():
    for head, refused in (("pooler", False), ("first", True), ("last", True)):
        assert bool(transformers_room._pooled(case_of(PACKED, pooling=head))) == refused


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
    for recurrent in (False, True):
        assert bool(transformers_room._leak(varied(case_of(HOLE), {}, {"needs_mask_2d": recurrent}))) == recurrent
        assert form("megatron", HOLE, needs_2d=recurrent) == ("refused" if recurrent else "masked")
    assert form("megatron", HOLE, needs_2d=True, padding_free=True) == "none"


def test_a_flat_row_may_carry_state_where_nobody_said():
    for padding_free in (False, True):
        assert [
            room.Case(segments=FLAT, model=Model(needs_mask_2d=needs), padding_free=padding_free).recurrent
            for needs in (None, False, True)
        ] == [padding_free, False, True]


@pytest.mark.parametrize("fields", [None, {}, {"_attn_implementation": "eager"}])
def test_a_kernel_is_said_where_the_config_names_it(fields):
    model = Model(config=None if fields is None else SimpleNamespace(**fields), attn_implementation="eager")
    assert ("eager" in model.said) == bool(fields)


def test_a_2d_mask_says_nothing_of_packed_rows():
    assert transformers_room._by_2d(case_of(PACKED)) == ""
    encoder = Model(config=SimpleNamespace(), needs_mask_2d=False, pattern="bidirectional")
    for segments, said in ((LEFT, "the model looks ahead, and reads the 2D mask"), (PACKED, "")):
        case = room.Case(segments=segments, model=encoder, pattern=Pattern.of("bidirectional"))
        assert transformers_room._by_2d(case) == said


# --- the table


@pytest.mark.parametrize("name", CONSUMERS)
def test_every_consumer_says_what_it_reads_and_where_that_is_written(name):
    consumer = CONSUMERS[name]
    assert all(form.reads for form in consumer.forms)
    assert all(refusal.of and refusal.remedy for refusal in consumer.refuses)
    assert ".py" in consumer.source or "generate_mask" in consumer.source


@pytest.mark.parametrize("name", ["nobody", 5, ["megatron"]])
def test_a_name_that_no_consumer_has(name):
    with pytest.raises(CollateError, match="Known are"):
        room.consumer_named(name)


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
    with pytest.raises(UnsupportedFormError, match=r"Padding there changes the real tokens of this model: its.*pad right"):
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
