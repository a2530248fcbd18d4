"""How families of transformers count positions, against `position_rule`: what it says is measured, not believed.

Each family is padded left and right, and laid flat, as its rule says; every logit must be that of its sample alone. And
each rule has power: the positions of another rule move the logits.
"""

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
from tiny_text import PAD, apart, logits_of, place, samples, text_model, worst
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu import CollateError, PaddingCollator
from collate_npu.consumers.forwards import first_position, position_rule, reads_dense_mask
from collate_npu.consumers.models import attention_windows, pattern_of

TOLERANCE, POWER = 1e-4, 0.1
ABSOLUTE = ["gpt2", "opt", "gpt_bigcode", "xglm", "biogpt"]
RELATIVE = ["llama", "qwen2", "gpt_neox", "mistral", "gemma3_text", "phi", "falcon", "llama4_text"]
CAUSAL = {**dict.fromkeys(ABSOLUTE + RELATIVE, "places"), "bloom": "none", "mpt": "none", "xlm-roberta": "padding_idx"}
MASKED = {
    **dict.fromkeys(("bert", "electra", "albert", "modernbert"), "places"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "data2vec-text", "mpnet", "esm", "ibert"), "padding_idx"),
}
CASES = [(name, True, rule) for name, rule in CAUSAL.items()] + [(name, False, rule) for name, rule in MASKED.items()]
CASES = [case for case in CASES if case[0] in CONFIG_MAPPING]
family = pytest.mark.parametrize(
    ("name", "causal", "rule"), CASES, ids=[f"{n}-{'causal' if c else 'masked'}" for n, c, _ in CASES]
)
model_of = cache(text_model)


def zero_based(keep):
    return (keep.cumsum(1) - 1).clamp(min=0)


@family
def test_a_module_and_its_config_tell_the_same_rule(name, causal, rule):
    model = model_of(name, causal=causal)
    assert position_rule(model) == position_rule(model.config) == rule
    assert reads_dense_mask(model) == reads_dense_mask(model.config)
    assert first_position(model) == first_position(model.config) == (PAD + 1 if rule == "padding_idx" else 0)


@family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_right_when_positions_are_given_by_the_rule(name, causal, rule, side):
    model, rows = model_of(name, causal=causal), samples(5, 12)
    ids, keep = place(rows, side)
    given = {"position_ids": zero_based(keep)} if rule == "places" else {}
    assert worst(model, rows, ids, keep, **given) < TOLERANCE
    if rule == "padding_idx":
        counted = {"position_ids": zero_based(keep) + first_position(model)}
        assert worst(model, rows, ids, keep, **counted) < TOLERANCE
        if name != "esm":  # rotary beside them
            assert worst(model, rows, ids, keep, position_ids=zero_based(keep)) > POWER


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_positions_by_place_are_wrong_on_left_padding(name):
    model, rows = model_of(name, causal=name == "gpt2"), samples(5, 12)
    ids, keep = place(rows, "left")
    assert worst(model, rows, ids, keep) > POWER


def flat(model, rows, rule):
    lengths = [len(row) for row in rows]
    starts = torch.cat([torch.full((n,), start) for n, start in zip(lengths, torch.tensor([0, *lengths]).cumsum(0))])
    positions = torch.arange(sum(lengths)) - starts + first_position(model)
    return torch.cat(rows)[None], {} if rule == "none" else {"position_ids": positions[None]}, starts


def dense(model, starts, positions, *, causal=True):
    """One mask for each kind of layer: sequences apart, causal or not, windows counted inside the sequence."""
    assert pattern_of(model) in (None, "causal" if causal else "bidirectional")
    places = torch.arange(len(starts))
    keep = starts[:, None] == starts[None]
    keep = keep.tril() if causal else keep
    masks = {}
    for kind, window in attention_windows(model).items():
        seen = keep
        if window is not None and kind == "chunked_attention":
            seen = keep & (positions[:, None] // window == positions[None] // window)
        elif window is not None:
            seen = keep & ((places[:, None] - places[None]).abs() < (window if causal else window + 1))
        masks[kind] = seen[None, None]
    if model.config._attn_implementation == "eager":
        low = torch.finfo(torch.float32).min
        masks = {kind: torch.zeros(seen.shape).masked_fill(~seen, low) for kind, seen in masks.items()}
    return masks.get("", masks)


def flat_error(model, rows, ids, **given):
    return apart(model, rows, logits_of(model, ids, **given)[0].split([len(row) for row in rows]))


@family
def test_a_flat_row_is_right_with_a_dense_mask_for_each_kind_of_layer(name, causal, rule):
    model, rows = model_of(name, causal=causal), samples(9, 12)
    if not reads_dense_mask(model):
        pytest.skip("it takes no dense mask")
    ids, given, starts = flat(model, rows, rule)
    masks = dense(model, starts, torch.arange(len(starts)) - starts, causal=causal)
    for cached in (False, True) if causal else (False,):
        assert flat_error(model, rows, ids, attention_mask=masks, use_cache=cached, **given) < TOLERANCE


def test_positions_alone_do_not_keep_a_flat_row_apart_where_a_cache_is_made():
    """masking_utils.py looks for packed positions only `if past_key_values is None`, and `use_cache` is on by default."""
    model, rows = model_of("llama", causal=True), samples(9, 12)
    ids, given, _ = flat(model, rows, "places")
    assert flat_error(model, rows, ids, use_cache=False, **given) < TOLERANCE
    assert flat_error(model, rows, ids, use_cache=True, **given) > POWER


@pytest.mark.parametrize("name", ["opt", "biogpt", "xlm-roberta"])
def test_positions_alone_never_reach_the_mask_of_these(name):
    model, rows = model_of(name, causal=True), samples(9, 12)
    ids, given, _ = flat(model, rows, position_rule(model))
    assert flat_error(model, rows, ids, **given) > POWER


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text"])
def test_one_dense_mask_takes_the_window_away(name):
    model, rows = model_of(name, causal=True), samples(12)
    keep = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    assert flat_error(model, rows, rows[0][None], attention_mask=keep) > POWER


# --- encoders, by the collator: they attend both ways, and half of them count from `padding_idx + 1` over the ids themselves


def collated(model, rows, **settings):
    collate = PaddingCollator(pad_token_id=PAD, pattern="bidirectional", model=model, **settings)
    return collate([{"input_ids": row.tolist()} for row in rows])


encoder = pytest.mark.parametrize("name", [name for name in MASKED if name in CONFIG_MAPPING])


@encoder
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_the_collator(name, side):
    model = model_of(name, causal=False)
    for lengths in ((5, 12, 1), (1,), (7,)):
        rows = samples(*lengths)
        batch = collated(model, rows, padding_side=side)
        ids, keep = place(rows, side)
        assert torch.equal(batch.pop("input_ids"), ids)
        assert worst(model, rows, ids, keep, **batch) < TOLERANCE


@pytest.mark.parametrize("settings", [{"padding_side": "left"}, {"padding_free": True}], ids=str)
def test_a_token_with_the_id_that_is_not_counted_stands_where_it_stood_alone(settings):
    """RoBERTa's family leaves it at `padding_idx`, and counts on behind it."""
    model, rows = model_of("roberta", causal=False), [torch.tensor([9, PAD, 7, 8]), torch.tensor([5, 6])]
    if "padding_free" in settings and not reads_dense_mask(model):
        pytest.skip("4.57's builds its own masks: a flat row is refused, as the next test says")
    positions = collated(model, rows, **settings)["position_ids"].flatten().tolist()
    padding = [PAD] * (len(positions) - 6)
    assert positions == [PAD + 1, PAD, PAD + 2, PAD + 3, *padding, PAD + 1, PAD + 2]


@encoder
def test_a_flat_row_of_the_collator_keeps_its_sequences_apart_or_is_refused(name):
    """transformers finds packed positions for causal masks alone, so that a dense mask is what keeps these apart."""
    model, rows = model_of(name, causal=False), samples(5, 12, 1)
    if reads_dense_mask(model):
        batch = collated(model, rows, padding_free=True)
        assert flat_error(model, rows, batch.pop("input_ids"), **batch) < TOLERANCE
    else:
        with pytest.raises(CollateError):
            collated(model, rows, padding_free=True)
