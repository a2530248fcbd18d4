"""What families of transformers do with positions and padding, measured on tiny models, against what is said of them.

Each family is padded left and right, and laid flat, as `position_rule` says; every logit must be that of its sample alone.
Each rule has power: the positions of another rule move the logits. And where padding reaches the tokens of a model is what
its tiny copy and its sizes say.
"""

import inspect
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, testing
from collate_npu.consumers import model_traits, tiny_models
from collate_npu.consumers.model_traits import first_position, position_rule, rope_limit, text_config, width_dependence
from collate_npu.errors import UnsupportedFormError
from collate_npu.releases import KERNELS_TOLD, installed, numbers

pytestmark = [pytest.mark.models, pytest.mark.draws(6)]

TOLERANCE, POWER, MOVED = 1e-4, 0.1, 1e-2
BYTES = 257
"""Ids of hybrid models; those of dense families are fewer."""
VOCAB, PAD = 99, 1
WINDOW = {
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    "llama4_text": {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"]}
    | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
}


def text_model(model_type, *, attn="sdpa", **fields):
    """Its weights scaled until a wrong mask or position moves the logits, its pad row not zero."""
    tiny = testing.tiny_config(model_type, vocab_size=VOCAB)
    told = tiny.to_dict() | {"pad_token_id": PAD, "is_decoder": True}
    config, auto = type(tiny)(**(told | WINDOW.get(model_type, {}) | fields)), AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            model = auto.from_config(config, attn_implementation=attn).float().eval()
        except ValueError:  # families without sdpa
            model = auto.from_config(config, attn_implementation="eager").float().eval()
        tiny_models.make_honest(model, 5.0)
    return model


def samples(*lengths):
    """Token ids [L] for each length, none of them the pad id."""
    return [torch.arange(n) * 7 % 90 + 5 for n in lengths]


def place(rows, where, *, hole=3):
    """The ids and the keep mask [B, S] of samples padded on a side, or with a hole in the first and shortest."""
    width = max(map(len, rows)) if where != "holes" else len(rows[0]) + hole
    ids, keep = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        places = torch.arange(len(row)) + (width - len(row) if where == "left" else 0)
        if where == "holes" and b == 0:
            places[4:] += hole
        ids[b, places], keep[b, places] = row, 1
    return ids, keep


@torch.no_grad()
def logits_of(model, input_ids, **given):
    """`use_cache` off where the model knows it: with a cache, 5.23 does not look for packed positions."""
    cached = given.pop("use_cache", False)
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = cached
    return model(input_ids=input_ids, **given).logits


def apart(model, rows, pieces):
    """The largest difference of a logit to its sample alone; NaN counts as wrong."""
    alone = [logits_of(model, row[None], attention_mask=torch.ones(1, len(row)).long())[0] for row in rows]
    gaps = [(a - b).abs().flatten() for a, b in zip(pieces, alone, strict=True)]
    return float(torch.cat(gaps).nan_to_num(torch.inf).max())


def worst(model, rows, ids, keep, **given):
    """The same for padded rows."""
    logits = logits_of(model, ids, **{"attention_mask": keep, **given})
    return apart(model, rows, [row[kept > 0] for row, kept in zip(logits, keep)])


ABSOLUTE = ["gpt2", "opt", "gpt_bigcode", "xglm", "biogpt"]
RELATIVE = ["llama", "qwen2", "gpt_neox", "mistral", "gemma3_text", "phi", "falcon", "llama4_text"]
RULES = {**dict.fromkeys(ABSOLUTE + RELATIVE, "places"), "bloom": "none", "mpt": "none"}
RULES |= dict.fromkeys(("roberta", "xlm-roberta"), "padding_idx")
CASES = [(name, rule) for name, rule in RULES.items() if name in CONFIG_MAPPING]
family = pytest.mark.parametrize(("name", "rule"), CASES)
model_of = cache(text_model)


PACKED = Segments.from_lengths([[2, 3]])


def said(model, rows=PACKED):
    """Why rows like these are refused."""
    try:
        BatchAdapter(model, consumer="transformers").choose(rows)
    except UnsupportedFormError as error:
        return str(error)
    return ""


def zero_based(keep):
    return (keep.cumsum(1) - 1).clamp(min=0)


@family
def test_a_module_and_its_config_tell_the_same_rule(name, rule):
    model = model_of(name)
    assert position_rule(model) == position_rule(model.config) == rule
    assert said(model) == said(model.config)
    assert first_position(model) == first_position(model.config) == (PAD + 1 if rule == "padding_idx" else 0)


def flat_error(model, rows, ids, **given):
    return apart(model, rows, logits_of(model, ids, **given)[0].split([len(row) for row in rows]))


def collated(model, rows, **settings):
    collate = PaddingCollator(pad_token_id=PAD, model=model, **settings)
    return collate([{"input_ids": row.tolist()} for row in rows])


@family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_the_collator(name, rule, side):
    model = model_of(name)
    for lengths in ((5, 12, 1), (1,), (7,)):
        rows = samples(*lengths)
        batch = collated(model, rows, padding_side=side)
        ids, keep = place(rows, side)
        assert torch.equal(batch.pop("input_ids"), ids)
        assert worst(model, rows, ids, keep, **batch) < TOLERANCE
        if rule == "padding_idx" and len(rows) > 1:  # the power
            assert worst(model, rows, ids, keep, position_ids=zero_based(keep)) > POWER


@pytest.mark.parametrize("settings", [{"padding_side": "left"}, {"padding_free": True}], ids=str)
def test_a_token_with_the_id_that_is_not_counted_stands_where_it_stood_alone(settings):
    """RoBERTa's family leaves it at `padding_idx`, and counts on behind it."""
    model, rows = model_of("roberta"), [torch.tensor([9, PAD, 7, 8]), torch.tensor([5, 6])]
    if "padding_free" in settings and said(model):
        pytest.skip("4.57's builds its own masks: a flat row is refused, as the next test says")
    positions = collated(model, rows, **settings)["position_ids"].flatten().tolist()
    padding = [PAD] * (len(positions) - 6)
    assert positions == [PAD + 1, PAD, PAD + 2, PAD + 3, *padding, PAD + 1, PAD + 2]


@family
def test_a_flat_row_of_the_collator_keeps_its_sequences_apart_or_is_refused(name, rule):
    """Each kind of layer has its mask: windows are counted inside the sequence. Positions alone say it to nobody whose cache
    is made (masking_utils.py:876)."""
    model, rows = model_of(name), samples(9, 12, 1)
    if said(model):
        with pytest.raises(CollateError):
            collated(model, rows, padding_free=True)
        return
    batch = collated(model, rows, padding_free=True)
    ids = batch.pop("input_ids")
    for cached in (False, True):
        assert flat_error(model, rows, ids, **{**batch, "use_cache": cached}) < TOLERANCE
    assert flat_error(model, rows, ids, position_ids=batch.get("position_ids"), use_cache=True) > POWER


@cache
def hybrid(model_type, turned=""):
    """A tiny model with one switch of its config turned, and no bias left at zero."""
    config = testing.tiny_config(model_type, vocab_size=BYTES)
    if turned:
        setattr(text_config(config), turned, not getattr(text_config(config), turned))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = tiny_models.build(config, "sdpa").float().eval()
        tiny_models.make_honest(model, 5.0)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and "dt" not in name and not parameter.any():
                parameter.normal_(std=0.5)
    return model


def displaced(model, where):
    """By how much padding moves logits, and which places are real."""
    rows = samples(11, 20)
    ids, keep = place(rows[:1] if where == "holes" else rows, where)
    if where == "holes":  # a second row, whole: before 5.15 recurrent layers drop the mask of a single one
        rows = [rows[0], *samples(ids.shape[1])]
        ids, keep = torch.cat([ids, rows[1][None]]), torch.cat([keep, torch.ones_like(keep)])
    ids = ids.where(keep > 0, text_config(model.config).vocab_size - 1)
    given = {"position_ids": zero_based(keep)} if "position_ids" in inspect.signature(model.forward).parameters else {}
    return worst(model, rows, ids, keep, **given), keep


FAMILIES = testing.hybrid_model_types()
DENSE = ["llama", "gpt2", "mistral", "gemma3_text", "llama4_text"]
SWITCHED = [(name, "") for name in (*FAMILIES, *DENSE)]
SWITCHED += [(name, field) for name in FAMILIES for field, on in vars(text_config(CONFIG_MAPPING[name]())).items()
          if "bias" in field and isinstance(on, bool)]  # fmt: skip
OLD = numbers(installed("transformers")) < (5, 0)
NOT_THERE = (ValueError if KERNELS_TOLD.holds() else Exception,)  # no sdpa; some families do not run on older releases


@pytest.mark.parametrize("where", ["left", "right", "holes"])
@pytest.mark.parametrize(("name", "turned"), SWITCHED)
def test_padding_leaks_where_it_is_said_to(name, turned, where):
    try:
        model = text_model(name) if name in DENSE else hybrid(name, turned)
        error, keep = displaced(model, where)
    except NOT_THERE as error:
        pytest.skip(str(error))
    why = said(model, Segments.from_keep(keep))
    assert (error > MOVED) if why else (error < TOLERANCE), (error, why)
    assert why == said(model.config, Segments.from_keep(keep))


def test_a_window_that_no_row_fills_is_not_cut_short_by_a_hole():
    model, rows = text_model("mistral"), samples(4, 5)
    ids, keep = place(rows, "holes", hole=1)
    assert worst(model, rows, ids, keep, position_ids=zero_based(keep)) < TOLERANCE
    assert said(model, Segments.from_keep(keep)) == ""
    assert "window" in said(model, Segments.from_keep(place(samples(9, 5), "holes", hole=1)[1]))


INDEXED = [name for name in ("glm5_next", "deepseek_v32", "axk2") if name in CONFIG_MAPPING]


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_of_few_heads_depends_on_the_width(name, heads, monkeypatch):
    """Beyond its budget, appended real tokens move earlier logits as padding does: scores of exactly zero tie."""
    fields = {"index_topk": 8, "index_n_heads": heads} | ({"index_kpool": 4} if name == "glm5_next" else {})
    monkeypatch.setitem(tiny_models._FAMILY, text_config(CONFIG_MAPPING[name]()).model_type, fields)
    errors = {length: [] for length in (8, 24)}
    for seed in range(3):
        model = testing.tiny_model(name, vocab_size=BYTES, seed=seed)
        for length, found in errors.items():
            rows = samples(length, 40)
            found.append(worst(model, rows, *place(rows, "right")))
    assert width_dependence(model) == width_dependence(model.config) == (8 if heads == 2 else None)
    assert max(errors[8]) < TOLERANCE
    assert (max(errors[24]) > MOVED) == (heads == 2)


ROPE = {"dynamic": {"factor": 4.0}, "yarn": {"factor": 4.0}}
ROPE["longrope"] = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}


@pytest.mark.parametrize("kind", [*ROPE][not (OLD or KERNELS_TOLD.holds()) :])  # between "dynamic" never shrinks
def test_rotary_frequencies_follow_the_longest_sequence_where_it_is_said(kind):
    """And the width of the tensor, where the model is left to count."""
    longrope = kind == "longrope"
    settings = ROPE[kind] | {"rope_type": kind}
    if OLD:
        fields = {"rope_scaling": {key: settings[key] for key in settings if not longrope or key != "rope_type"}}
        fields["rope_scaling"] |= {"type": kind} if longrope else {}
    else:
        fields = {"rope_parameters": settings | {"rope_theta": 10000.0}}
    fields |= {"original_max_position_embeddings": 8, "max_position_embeddings": 64 if longrope else 8}
    model = text_model("phi3" if longrope else "llama", **fields)
    limit = rope_limit(model)
    assert limit == (None if kind == "yarn" else 8)
    for lengths in ((5, 7), (5, 20)):
        rows = samples(*lengths)
        ids, keep = place(rows, "right")
        error = worst(model, rows, ids, keep)
        assert (error > MOVED) if model_traits.lengths_clash_reason(model, lengths) else (error < TOLERANCE)
    rows = samples(5, 7)
    ids, keep = (torch.nn.functional.pad(tensor, (0, 20)) for tensor in place(rows, "right"))
    assert worst(model, rows, ids, keep, position_ids=zero_based(keep)) < TOLERANCE
    assert (worst(model, rows, ids, keep) > MOVED) == (limit is not None)
