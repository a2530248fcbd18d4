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

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, UnsupportedFormError
from collate_npu.consumers.model_traits import first_position, position_rule

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


def reads_dense_mask(model):
    """Does it say so, asked with packed rows?"""
    adapter = BatchAdapter(model, consumer="transformers")
    try:
        adapter.route(Segments.from_lengths([[2, 3]]))
    except UnsupportedFormError:
        return False
    return True


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


def flat_error(model, rows, ids, **given):
    return apart(model, rows, logits_of(model, ids, **given)[0].split([len(row) for row in rows]))


# --- by the collator


def collated(model, rows, causal, **settings):
    pattern = None if causal else "bidirectional"
    collate = PaddingCollator(pad_token_id=PAD, pattern=pattern, model=model, **settings)
    return collate([{"input_ids": row.tolist()} for row in rows])


@family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_the_collator(name, causal, rule, side):
    model = model_of(name, causal=causal)
    for lengths in ((5, 12, 1), (1,), (7,)):
        rows = samples(*lengths)
        batch = collated(model, rows, causal, padding_side=side)
        ids, keep = place(rows, side)
        assert torch.equal(batch.pop("input_ids"), ids)
        assert worst(model, rows, ids, keep, **batch) < TOLERANCE


@pytest.mark.parametrize("settings", [{"padding_side": "left"}, {"padding_free": True}], ids=str)
def test_a_token_with_the_id_that_is_not_counted_stands_where_it_stood_alone(settings):
    """RoBERTa's family leaves it at `padding_idx`, and counts on behind it."""
    model, rows = model_of("roberta", causal=False), [torch.tensor([9, PAD, 7, 8]), torch.tensor([5, 6])]
    if "padding_free" in settings and not reads_dense_mask(model):
        pytest.skip("4.57's builds its own masks: a flat row is refused, as the next test says")
    positions = collated(model, rows, False, **settings)["position_ids"].flatten().tolist()
    padding = [PAD] * (len(positions) - 6)
    assert positions == [PAD + 1, PAD, PAD + 2, PAD + 3, *padding, PAD + 1, PAD + 2]


@family
def test_a_flat_row_of_the_collator_keeps_its_sequences_apart_or_is_refused(name, causal, rule):
    """Each kind of layer has its mask: windows are counted inside the sequence. Positions alone say it to nobody whose cache
    is made (masking_utils.py:876), and never to an encoder."""
    model, rows = model_of(name, causal=causal), samples(9, 12, 1)
    if not reads_dense_mask(model):
        with pytest.raises(CollateError):
            collated(model, rows, causal, padding_free=True)
        return
    batch = collated(model, rows, causal, padding_free=True)
    ids = batch.pop("input_ids")
    for cached in (False, True) if causal else (False,):
        assert flat_error(model, rows, ids, **{**batch, "use_cache": cached}) < TOLERANCE
    told = {key: value for key, value in batch.items() if key == "position_ids"}
    assert flat_error(model, rows, ids, **told, use_cache=causal) > POWER
