"""Where padding reaches the tokens of a model: what its tiny copy and its sizes say, against the model itself."""

import inspect
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
from tiny_text import place, samples, text_model, worst
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu import BatchAdapter, Segments, UnsupportedFormError, testing
from collate_npu.consumers import probe
from collate_npu.consumers.model_traits import lengths_clash_reason, rope_limit, text_config, width_dependence
from collate_npu.releases import installed, numbers

VOCAB = 257
TOLERANCE, POWER = 1e-4, 1e-2


@cache
def hybrid(model_type, turned=""):
    """A tiny model with one switch of its config turned, and no bias left at zero."""
    config = testing.tiny_config(model_type, vocab_size=VOCAB)
    if turned:
        setattr(text_config(config), turned, not getattr(text_config(config), turned))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = testing.build(config, "sdpa").float().eval()
        testing.make_honest(model, 5.0)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and "dt" not in name and not parameter.any():
                parameter.normal_(std=0.5)
    return model


def said(model, keep):
    """Why rows like these are refused."""
    try:
        BatchAdapter(model, consumer="transformers").route(Segments.from_keep(keep))
    except UnsupportedFormError as error:
        return str(error)
    return ""


def moved(model, where):
    """By how much padding moves logits, and which places are real."""
    rows = samples(11, 20)
    ids, keep = place(rows[:1] if where == "holes" else rows, where)
    if where == "holes":  # a second row, whole: before 5.15 recurrent layers drop the mask of a single one
        rows = [rows[0], *samples(ids.shape[1])]
        ids, keep = torch.cat([ids, rows[1][None]]), torch.cat([keep, torch.ones_like(keep)])
    ids = ids.where(keep > 0, VOCAB - 1)
    takes = "position_ids" in inspect.signature(model.forward).parameters
    given = {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)} if takes else {}
    return worst(model, rows, ids, keep, **given), keep


LEFT_OUT = testing.left_out()
FAMILIES = [name for name in testing.hybrid_model_types() if "left padding" in LEFT_OUT.get(name, "left padding")]
CASES = [(name, "") for name in FAMILIES]
CASES += [(name, field) for name in FAMILIES for field, on in vars(text_config(CONFIG_MAPPING[name]())).items()
          if "bias" in field and isinstance(on, bool)]  # fmt: skip
OLD = numbers(installed("transformers")) < (5, 0)


@pytest.mark.parametrize("where", ["left", "holes"])
@pytest.mark.parametrize(("name", "turned"), CASES, ids=[f"{name}-{turned or 'default'}" for name, turned in CASES])
def test_padding_leaks_where_it_is_said_to(name, turned, where):
    try:
        model = hybrid(name, turned)
    except ValueError as error:  # no sdpa
        pytest.skip(str(error))
    error, keep = moved(model, where)
    why = said(model, keep)
    assert (error > POWER) if why else (error < TOLERANCE), (error, why)
    assert why == said(model.config, keep)


@pytest.mark.parametrize("where", ["left", "right", "holes"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mistral", "gemma3_text", "llama4_text", "mpnet", "funnel"])
def test_dense_families_leak_where_it_is_said_to(name, where):
    model = text_model(name, causal=name not in ("bert", "mpnet", "funnel"))
    rows = samples(12, 15)
    ids, keep = place(rows, where)
    given = {} if name in ("mpnet", "funnel") else {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)}
    why, error = said(model, keep), worst(model, rows, ids, keep, **given)
    assert (error > POWER) if why else (error < TOLERANCE), (error, why)


def test_a_window_that_no_row_fills_is_not_cut_short_by_a_hole():
    model, rows = text_model("mistral"), samples(4, 5)
    ids, keep = place(rows, "holes", hole=1)
    assert worst(model, rows, ids, keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0)) < TOLERANCE
    assert said(model, keep) == ""
    assert "window" in said(model, place(samples(9, 5), "holes", hole=1)[1])


INDEXED = [name for name in ("glm5_next", "deepseek_v32", "axk2") if name in CONFIG_MAPPING]


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("name", INDEXED)
def test_an_indexer_of_few_heads_depends_on_the_width(name, heads, monkeypatch):
    """Beyond its budget, appended real tokens move earlier logits as padding does: scores of exactly zero tie."""
    fields = {"index_topk": 8, "index_n_heads": heads} | ({"index_kpool": 4} if name == "glm5_next" else {})
    monkeypatch.setitem(probe._FAMILY, text_config(CONFIG_MAPPING[name]()).model_type, fields)
    errors = {length: [] for length in (8, 24)}
    for seed in range(3):
        model = testing.tiny_model(name, vocab_size=VOCAB, seed=seed)
        for length, found in errors.items():
            rows = samples(length, 40)
            found.append(worst(model, rows, *place(rows, "right")))
    assert width_dependence(model) == width_dependence(model.config) == (8 if heads == 2 else None)
    assert max(errors[8]) < TOLERANCE
    assert (max(errors[24]) > POWER) == (heads == 2)


ROPE = {
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", ROPE)
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
        assert (error > POWER) if lengths_clash_reason(model, lengths) else (error < TOLERANCE)
    rows = samples(5, 7)
    ids, keep = (torch.nn.functional.pad(tensor, (0, 20)) for tensor in place(rows, "right"))
    assert worst(model, rows, ids, keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0)) < TOLERANCE
    assert (worst(model, rows, ids, keep) > POWER) == (limit is not None)
