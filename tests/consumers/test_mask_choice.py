"""Consumers: one table of what each batch becomes on each model, or why it is refused; and what configs tell."""

import re
from types import SimpleNamespace

import pytest

from collate_npu import Pattern, Segments, needs_mask_2d, releases
from collate_npu.consumers import transformers as transformers_room
from collate_npu.consumers.mask_choice import Case, Model, consumers
from collate_npu.errors import UnsupportedFormError

pytestmark = pytest.mark.usefixtures("newest_transformers")
CONSUMERS = consumers()
RIGHT, LEFT = Segments.from_lengths([3, 5]), Segments.from_lengths([3, 5], side="left")
PACKED, FLAT = Segments.from_lengths([[3, 2], [5]]), Segments.from_lengths([[3, 5]])
ONE, HOLE, EQUAL = Segments.from_lengths([[8]]), Segments([[1, 0, 1]]), Segments.from_lengths([4, 4])
ALONE, ALONE_LEFT = Segments.from_lengths([3], 5), Segments.from_lengths([3], 5, "left")
SLIDING, BOTH_WAYS = {"pattern": Pattern.sliding(2)}, {"pattern": Pattern.of("bidirectional")}


def config(**fields):
    return SimpleNamespace(**fields)


def outcome(segments, *, consumer="transformers", version=None, **fields):
    """The form that a batch takes, with what is said of it, or the refusal."""
    known = {name: fields.pop(name) for name in {*fields} & {*Model.__dataclass_fields__}}
    how = {"config": config(model_type="mine"), "needs_mask_2d": False}
    case = {"segments": segments, "model": Model(**how | known)}
    with pytest.MonkeyPatch.context() as patch:
        if version:
            patch.setitem(releases._FOUND, "transformers", version)
        try:
            chosen = CONSUMERS[consumer].choose(Case(**case, **fields))
        except UnsupportedFormError as error:
            return f"refused: {error}"
    return f"{chosen.form}: {chosen.why}"


def padded(*lengths):
    return Segments.from_lengths([*lengths])


LEARNS = config(output_router_logits=True)
RECURRENT = {"config": config(layer_types=["linear_attention", "full_attention"]), "needs_mask_2d": True}
BY_SEQUENCE = {"apart": True}
FREE = {"padding_free": True}
FLASH, FLEX, EAGER = ({"attn_implementation": f"{kernel}"} for kernel in ("flash_attention_2", "flex_attention", "eager"))
MINE = {"attn_implementation": "my_kernel"}
INDEXER = {"config": config(index_topk=4, index_n_heads=2)}
ROPE = {"config": config(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 4})}
WINDOWS = {"config": config(sliding_window=2, layer_types=["sliding_attention", "full_attention"])}
WINDOW = {"config": config(sliding_window=2, layer_types=["sliding_attention"])}
CHUNKS = {"config": config(attention_chunk_size=2, layer_types=["chunked_attention"])}
LEAKS = {"leaks": {"left": "it was measured", "packed": "its own masks"}}
IMAGES, TYPES = ({"looks_ahead": (by,)} for by in ("images", "types"))
ROUTED = {"config": LEARNS}
NO_2D = "refused.*rows \\[0\\] hold several sequences"
TABLE = [
    ("keep_2d", RIGHT, {}), ("keep_2d", LEFT, {}), ("keep_2d", RIGHT, EAGER), ("keep_2d", RIGHT, ROUTED),
    ("refused.*router.*Set output_router_logits=False, or keep plain", PACKED, ROUTED),
    ("refused.*router", FLAT, {**ROUTED, **FREE}),
    # by sequence any rows are right, but for what is as wrong on rows of one sequence
    *(("keep_2d: adapt", rows, {**BY_SEQUENCE, **more}) for rows in (LEFT, PACKED, HOLE)
      for more in (RECURRENT, ROUTED, FLEX)),
    ("none", FLAT, {**BY_SEQUENCE, **FREE, **RECURRENT}),
    ("refused.*one answer a row", PACKED, {**BY_SEQUENCE, "pooling": "last_by_id"}),
    # the width, and the longest
    ("refused.*indexer.*Batch sequences of one length", padded(5, 6), INDEXER),
    *(("keep_2d", padded(*n), INDEXER) for n in ((3, 5), (4, 6), (6, 6))),
    ("keep_2d", padded(3, 4), ROPE), ("refused.*frequencies", padded(3, 5), ROPE), ("keep_2d", padded(3, 5), {}),
    # windows
    ("refused.*window.*or rows no longer than the window", PACKED, {**WINDOWS, **FLEX}),
    ("block_mask", Segments.from_lengths([[2, 1]]), {**WINDOWS, **FLEX}),
    ("keep_2d", RIGHT, {**WINDOWS, **FLEX}), ("mapping", PACKED, WINDOWS),
    ("keep", PACKED, WINDOW), ("keep_2d: the model makes its own window", LEFT, {**WINDOW, **SLIDING}),
    ("keep_2d", LEFT, {**CHUNKS, "pattern": Pattern.chunked(2)}), ("refused.*window of 2 of", LEFT, {**CHUNKS, **SLIDING}),
    ("mapping", LEFT, {**WINDOWS, **SLIDING}), ("refused.*window of 2 of their own", padded(3), {**WINDOW, **BOTH_WAYS}),
    ("keep", padded(2), {**WINDOW, **BOTH_WAYS}),
    # models that mix tokens, see an image ahead, or take one token of a row
    ("refused.*measured.*pad right", LEFT, LEAKS), ("keep_2d", RIGHT, LEAKS), ("keep_2d", EQUAL, LEAKS),
    *(("refused.*its own masks", rows, {"leaks": {"packed": "its own masks"}, **more}) for rows, more in (
        (PACKED, {}), (LEFT, SLIDING))),
    ("refused.*it was measured", PACKED, {**LEAKS, "config": config()}),
    *(("refused.*image's tokens", PACKED, {**by, "call": {key: 1}}) for by, key in (
        (IMAGES, "pixel_values"), (TYPES, "token_type_ids"))),
    *(("keep", PACKED, {**IMAGES, "call": call}) for call in ({}, {"token_type_ids": 1})),
    ("keep", PACKED, {"call": {"pixel_values": 1}}), ("keep_2d", RIGHT, {**IMAGES, "call": {"pixel_values": 1}}),
    *(("refused.*one answer a row", PACKED, {"pooling": head}) for head in ("last_by_id", "counted_by_id")),
    ("bias", PACKED, EAGER),
    ("refused.*Use attn_implementation='sdpa' or 'eager'; or, .*padding_free=True on flash", PACKED, FLASH),
    # flat rows of a pattern that no layer makes
    *((form, rows, {**SLIDING, **FREE, **kernel}) for kernel, form in (({}, "keep"), (FLASH, "refused.*attention is"))
      for rows in (padded(5), FLAT)),
    # recurrent layers: holes, packed rows, windows
    ("keep_2d", HOLE, {}), ("refused.*changes the state", HOLE, RECURRENT), ("masked", HOLE, {"consumer": "megatron"}),
    ("refused.*changes the state", HOLE, {"consumer": "megatron", **RECURRENT}),
    ("none", HOLE, {"consumer": "megatron", **RECURRENT, **FREE}),
    *((NO_2D, PACKED, {"consumer": name, **RECURRENT}) for name in CONSUMERS),
    *((form, LEFT, {**SLIDING, **kernel, **needs}) for needs, forms in (
        ({}, ("keep", "bias", "block_mask", "refused", "refused")), (RECURRENT, ("refused",) * 5))
      for form, kernel in zip(forms, ({}, EAGER, FLEX, FLASH, MINE))),
    *(("keep_2d", LEFT, kernel) for kernel in (EAGER, FLEX, FLASH, MINE)),
    ("refused", LEFT, {"consumer": "torchtitan", **RECURRENT, **SLIDING}),
    # releases of transformers
    *((form, ALONE_LEFT, {**RECURRENT, "leaks": {"one": why}}) for why, form in (
        ("it was measured", "refused.*it was measured"), ("", "keep_2d"))),
    *(("keep_2d", *case) for version in ("4.57.1", "5.15.0") for case in (
        (ALONE, {**RECURRENT, "version": version}), (LEFT, {**RECURRENT, "version": version}),
        (ALONE_LEFT, {"version": version}))),
    *(("refused.*hold several", FLAT, {**RECURRENT, **FREE, **kernel}) for kernel in ({}, FLASH)),
    ("keep", FLAT, FREE), ("none", FLAT, {**FREE, **FLASH}), ("none", ONE, {**RECURRENT, **FREE}),
    ("none", FLAT, {"consumer": "megatron", **RECURRENT, **FREE}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "segments", "fields"), TABLE)
def test_what_a_batch_becomes_on_a_model(expected, segments, fields):
    assert re.match(expected if "refused" in expected else f"{expected}\\b", outcome(segments, **fields))


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(("kernel", "longest"), [("flash_attention_2", 2), ("flash_attention_2", 3), ("sdpa", 3)])
def test_flash_attention_on_npu_drops_windows_so_it_is_refused(monkeypatch, installed, kernel, longest):
    """Source: transformers integrations/npu_flash_attention.py:54-104, which reads no `sliding_window`."""
    monkeypatch.setattr(transformers_room, "find_spec", lambda name: object() if installed else None)
    found = outcome(padded(1, longest), attn_implementation=kernel, **WINDOWS)
    assert ("look back 2 places" in found) == (installed and kernel != "sdpa" and longest > 2)


CAUSAL_KERNEL = ("none", "refused", "refused", "refused")


@pytest.mark.parametrize(
    ("consumer", "forms", "kept"),
    [
        ("megatron", ("none", "masked", "masked", "masked"), (False, True)),
        ("mindspeed", CAUSAL_KERNEL, (False, True)),
        ("mindspeed_dense", ("masked",) * 4, (False, True)),
        ("mindspeed_llm", CAUSAL_KERNEL, (False, False)),
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
    found = [outcome(segments, consumer=consumer).partition(":")[0] for segments in (RIGHT, LEFT, PACKED)]
    assert (*found, outcome(RIGHT, consumer=consumer, **SLIDING).partition(":")[0]) == forms
    choose = lambda known, **how: CONSUMERS[consumer].choose(Case(segments=RIGHT, model=Model(**known), **how))  # noqa: E731
    assert tuple(choose(known).keeps_mask_2d for known in ({"needs_mask_2d": False}, RECURRENT)) == kept
    if consumer != "mindspeed_dense":
        assert not choose(RECURRENT, **FREE).keeps_mask_2d


# --- who needs the 2D mask


MEGATRON = {"linear_attention_freq": None}  # every config of it carries the sizes of its layers
CARRIES = [
    ({"layer_types": ["full_attention", "sliding_attention"]}, False), ({"layer_types": ["full_attention", "conv"]}, True),
    ({"layer_types": ["full_attention", "linear_attention"]}, True), ({"layer_types": ["hybrid", "hybrid_sliding"]}, True),
    ({"layer_types": ["attention"], "mamba_d_state": 16}, False),  # its layers decide over its family
    ({"layers_block_type": ["mamba", "attention"]}, True), ({"layers_block_type": ["attention"]}, False),
    ({"block_types": ["recurrent", "attention"]}, True), ({"mamba_d_state": 16}, True), ({"mamba_d_state": None}, False),
    (MEGATRON, False), ({"linear_attention_freq": 4}, True), ({"linear_attention_freq": [0, 0]}, False),
    ({"linear_attention_freq": [0, 1]}, True), ({**MEGATRON, "experimental_attention_variant": "gated_delta_net"}, True),
    ({**MEGATRON, "experimental_attention_variant": "dsa"}, False),
    ({**MEGATRON, "is_hybrid_model": True, "mamba_head_dim": 64}, True), ({**MEGATRON, "mamba_head_dim": 64}, False),
    ({"hidden_size": 8}, False), ({"text_config": config(layer_types=["linear_attention"])}, True),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "needed"), CARRIES)
def test_configs_tell_whether_layers_carry_state(fields, needed):
    model = config(**fields)
    assert needs_mask_2d(model) == needed
    wrapped = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(config=model)))
    assert needs_mask_2d(wrapped) == needed
