"""Law 19: any layout equals each sequence alone, in logits and gradient, on every causal mixer, in every mode."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given, strategies as st
from in_float64 import in_float64, neighbour
from rotation import examples
from strategies import packed_lengths, sides

pytest.importorskip("transformers")
from flat_rows import BY_OFFSETS, HERE, PAD, RIGHT, WRONG, alone, apart, built, errors, outcome, samples
from tiny_vision import MODELS, vision_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from watching import known

from collate_npu import BatchAdapter, PaddingCollator, Segments, adapt
from collate_npu.consumers import by_sequence
from collate_npu.consumers.mixers import mixers_of, way_of
from collate_npu.errors import UnsupportedFormError
from collate_npu.segments import of_lengths
from collate_npu.testing import assert_padding_invariant, tiny_model

pytestmark = pytest.mark.models
ATTENTION = ["llama", "mistral", "qwen3_moe", "gemma3_text", "llama4_text", "gpt2", "phi3"]
EAGER = ["gpt_oss", "gemma2", "cohere2"]
FAMILIES = [*((name, None) for name in (*HERE, *ATTENTION)), *((name, "eager") for name in EAGER), ("llama", BY_OFFSETS)]
PADDED_WAY = {"inkling2_text"}
"""It mixes tokens outside of layers."""


def batch_of(lengths, side="right", more=0, holes=False):
    """A batch as a stranger sends it, its features, and where their tokens stand."""
    segments = of_lengths(lengths, max(map(sum, lengths)) + more, side)
    if holes:  # padding behind the first token of each row
        ids = torch.cat([segments.ids, torch.zeros_like(segments.ids[:, :2])], 1)
        at = segments.keep.to(torch.uint8).argmax(1)
        rows = [torch.cat([row[: n + 1], row.new_zeros(2), row[n + 1 : -2]]) for row, n in zip(ids, at.tolist())]
        segments = Segments(torch.stack(rows))
    features = samples([n for row in lengths for n in row])
    ids = torch.full(segments.shape, PAD)
    ids[segments.keep] = torch.tensor([token for each in features for token in each["input_ids"]])
    told = {"segment_ids": segments.ids} if segments.packed else {"attention_mask": segments.keep.long()}
    return {"input_ids": ids, **told}, features, segments.indices


def assert_alone(model, given, settings):
    """Within the law; or three times as far from float64 as each alone by the worst of nine roundings: one may be small."""
    batch, features, at = given
    truth = alone(model, features)
    with adapt(model, **settings) as adapted:
        assert adapted.way == "by sequence"
        found = outcome(model, [(batch, at)])
    if max(apart(found, truth)) >= RIGHT:
        exact = in_float64(model, lambda wide: alone(wide, features))
        own = [apart(alone(each, features), exact) for each in (model, *(neighbour(model, seed) for seed in range(8)))]
        assert all(far < max(RIGHT, 3 * most) for far, most in zip(apart(found, exact), map(max, *own))), own


def trained(model, reentrant):
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if reentrant is not None and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch):
    """Calls that cost nothing: else short rows share one bucket."""
    monkeypatch.setattr(by_sequence, "CALL_COST", 4)


MODES = {
    "evaluated": lambda model: model,
    "trained": lambda model: trained(model, None),
    "checkpointed": lambda model: trained(model, False),
    "reentrant": lambda model: trained(model, True),
}
LENGTHS = [[5, 13, 40], [1, 70]]


@pytest.mark.draws(6)
@pytest.mark.parametrize(("family", "mode"), [*product(FAMILIES, MODES)])
def test_any_layout_is_each_sequence_alone(family, mode):
    name, attn = family
    if name not in CONFIG_MAPPING or name in PADDED_WAY:
        pytest.skip("not in this release, or the padded way")
    model = MODES[mode](copy.deepcopy(built(name, attn)))
    settings = {"attn_implementation": "flash_attention_2"} if attn == BY_OFFSETS else {}

    @examples(6)
    @given(packed_lengths(rows=3, sequences=6, longest=70), sides(), st.integers(0, 3), st.booleans())
    @example([[65], [64]], "left", 0, False)
    @example([[2, 1, 2]], "left", 0, False)  # of which qwen3_next alone is right by chance
    @example([[9], [40], [3]], "right", 1, True)  # a row of one token more than a window
    def law(lengths, side, more, holes):
        assert_alone(model, batch_of(lengths, side, more, holes and all(len(row) == 1 for row in lengths)), settings)

    law()


@pytest.mark.draws(4)
@pytest.mark.parametrize("name", HERE)
def test_every_hybrid_family_says_which_way_it_goes(name):
    try:
        model = tiny_model(name, vocab_size=PAD + 1)
    except ValueError:
        model = tiny_model(name, vocab_size=PAD + 1, attn_implementation="eager")
    with adapt(model) as adapted:
        assert (adapted.way == "by sequence") == (name not in PADDED_WAY), adapted.way
    if name == "zaya":  # each attention is asked: its masks are a dict, which eager reads
        assert "padded" in adapt(tiny_model(name, vocab_size=PAD + 1, attn_implementation="eager")).way


@pytest.mark.parametrize("length", [1, 3, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "llama"])
def test_many_sequences_cost_no_digits(name, length):
    assert_alone(built(name), batch_of([[length] * (300 if length < 64 else 20)]), {})


@pytest.mark.parametrize("name", sorted({"qwen3_next", "kimi_linear", "bamba"} & {*HERE}))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_loses_no_more_than_it_does_alone(name, dtype):
    model, (batch, features, at) = built(name), batch_of(LENGTHS)
    exact = alone(model, features)
    with torch.autocast("cpu", dtype):
        lost = alone(model, features)
        with adapt(model):
            found = outcome(model, [(batch, at)])
    sizes = [float((each[0].float() - exact[0]).square().mean().sqrt()) for each in (lost, found)]
    assert 0 < sizes[1] < 1.2 * sizes[0]


def lora(model):
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    return made.eval()


def sharded(model):
    """As ZeRO-3 marks parameters that ranks gather together."""
    for parameter in model.parameters():
        parameter.ds_id = 0
    return model


@pytest.mark.parametrize("wrap", [lora, sharded, lambda model: pickle.loads(pickle.dumps(model))])
def test_wrapped(wrap):
    assert_alone(wrap(copy.deepcopy(built("qwen3_next"))), batch_of(LENGTHS, "left", 2), {})


def test_where_ranks_gather_parameters_each_mixer_is_called_once():
    model, calls = sharded(copy.deepcopy(built("qwen3_next"))), []
    model.model.layers[0].linear_attn.in_proj_qkvz.register_forward_hook(known(lambda *_: calls.append(1)))
    with adapt(model), torch.no_grad():
        model(**batch_of([[1, 70, 3], [300]])[0], use_cache=False)
    assert len(calls) == 1


@pytest.mark.parametrize("name", [name for name in ("qwen3_5",) if name in CONFIG_MAPPING and name in MODELS])
def test_a_vision_model_packs_text(name):
    model, (batch, features, at) = vision_model(name), batch_of(LENGTHS, "left")
    batch["input_ids"] %= 100
    features = [{"input_ids": [token % 100 for token in each["input_ids"]]} for each in features]
    truth = alone(model, features)
    with adapt(model):
        assert max(errors(model, batch, truth, at)) < RIGHT


@pytest.mark.parametrize("how", [{"padding_free": True}, {"packing": True, "padding": "max_length", "max_length": 76}])
def test_collators_of_an_adapted_model_let_packed_rows_through_and_others_name_the_line(how):
    model, (batch, features, _) = copy.deepcopy(built("qwen3_next")), batch_of([[5, 13, 40]])
    collated = lambda: PaddingCollator(pad_token_id=PAD, model=model, **how)  # noqa: E731
    for make in (lambda: collated()(features), lambda: BatchAdapter(model)(batch)):
        with pytest.raises(UnsupportedFormError, match=r"call adapt\(model\) before you make the collator"):
            make()
    with adapt(model):
        assert_padding_invariant(model, collated(), [each["input_ids"] for each in features])
        assert_padding_invariant(model, lambda _: BatchAdapter(model)(batch), [each["input_ids"] for each in features])


def test_a_backward_after_the_end_of_with_is_right():
    for mode in ("checkpointed", "reentrant"):
        model, (batch, features, at) = MODES[mode](copy.deepcopy(built("qwen3_next"))), batch_of(LENGTHS, "left")
        truth = alone(model, features)
        model.zero_grad()
        with adapt(model):
            logits = model(**batch, use_cache=False).logits.flatten(0, 1)[at]
        drawn = torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(1)).to(logits) / logits.shape[1] ** 0.5
        torch.sin(logits @ drawn + torch.arange(len(at))).sum().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert max(apart((logits.detach(), found), truth)) < RIGHT


def test_threads_two_models_copies_and_forwards_that_raise_leave_each_other_alone():
    model, (batch, features, at) = copy.deepcopy(built("qwen3_next")), batch_of(LENGTHS)
    truth, other = alone(model, features), copy.deepcopy(model)
    with adapt(model), adapt(other):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[3, PAD + 5]]), attention_mask=torch.tensor([[0, 1]]), use_cache=False)
        assert by_sequence.running() == (None, None)
        model.model.layers[1].register_forward_hook(known(lambda *_: other(**batch_of([[3, 9]])[0]) and None))
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(lambda: errors(copy.deepcopy(model), batch, truth, at)) for _ in range(4)]
    assert max(max(run.result()) for run in runs) < RIGHT


def test_what_comes_out_has_the_shape_that_came_in():
    model, (batch, features, _) = built("qwen3_next"), batch_of([[5], [13], [1]], "left")
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        rows = [torch.tensor([each["input_ids"]]) for each in features]
        states = torch.cat([model(input_ids=row, output_hidden_states=True).hidden_states[-1][0] for row in rows])
        with adapt(model):
            out = model(**batch, output_hidden_states=True, use_cache=False)
            plain = model(**batch, use_cache=False, return_dict=False)
            embedded = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]), **batch}
            embedded.pop("input_ids")
            again = model(**embedded, use_cache=False).logits
            last = {n: model(**batch, use_cache=False, logits_to_keep=n).logits for n in (1, 3)}
            places = model(**batch, use_cache=False, logits_to_keep=torch.tensor([2, 12])).logits
    assert torch.allclose(out.hidden_states[-1][keep], states, atol=1e-4)
    assert {tuple(each.shape[:2]) for each in out.hidden_states} == {(3, 13)}
    assert not out.logits[~keep].any()
    assert all(torch.allclose(each, out.logits, atol=1e-4) for each in (plain[0], again))
    for n, found in last.items():
        assert torch.allclose(found[keep[:, -n:]], out.logits[:, -n:][keep[:, -n:]], atol=1e-4)
    assert torch.allclose(places[keep[:, [2, 12]]], out.logits[:, [2, 12]][keep[:, [2, 12]]], atol=1e-4)


CUTS = {"the last": lambda mask_S: int(len(mask_S) - mask_S.nonzero()[0, 0]), "a mask": lambda mask_S: mask_S,
        "places": lambda mask_S: mask_S.nonzero().flatten()}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("layout", [[[9, 4, 13]], [[9], [4], [13]]], ids=["flat", "padded left"])
def test_labels_that_are_cut_to_the_logits_kept_are_learned_as_alone(layout, cut):
    """As ms-swift cuts them by default: the logits that predict a label, and the last; -100 before the labels."""
    model, (batch, _, at) = copy.deepcopy(built("qwen3_next")), batch_of(layout, "left")
    labels = torch.full_like(batch["input_ids"], -100)
    labels.view(-1)[at] = batch["input_ids"].view(-1)[at]
    labels[:, :3] = -100
    learned_S = (labels != -100).any(0)
    kept = CUTS[cut](torch.cat([learned_S[1:], torch.tensor([True])]))
    places = torch.arange(len(learned_S))[-kept:] if isinstance(kept, int) else torch.arange(len(learned_S))[kept]
    given = torch.cat([torch.full((len(labels), 1), -100), labels[:, (places + 1)[:-1]]], 1)
    with adapt(model):
        found = model(**batch, labels=given, logits_to_keep=kept, use_cache=False)
        wanted = model(**batch, labels=labels, use_cache=False)
    assert found.logits.shape[:2] == given.shape
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-4)


def test_a_batch_without_padding_or_packing_runs_as_it_came():
    model, seen = copy.deepcopy(built("qwen3_next")), []
    model.model.layers[0].linear_attn.register_forward_pre_hook(known(lambda *_: seen.append(by_sequence.running()[0])))
    with adapt(model), torch.no_grad():
        model(**batch_of([[5], [5]])[0], use_cache=False)
        model(**batch_of([[5], [6]])[0], use_cache=False)
    assert [plan is None for plan in seen] == [True, False]


ASKED = [("llama", {"use_cache": True}), ("llama", {"output_attentions": True})]  # the padded way
ASKED += [("qwen3_moe", {"use_cache": False, "output_router_logits": True})]


@pytest.mark.parametrize(("name", "more"), ASKED)
def test_what_a_call_asks_for_comes_and_a_routers_loss_counts_no_padding(name, more):
    model, (batch, _, _) = copy.deepcopy(built(name, "eager")), batch_of([[5], [13], [7]], "left")
    with torch.no_grad():
        wanted = model(**batch, **more)
        with adapt(model):
            found = model(**batch, **more)
    keep = batch["attention_mask"].bool()
    assert torch.allclose(found.logits[keep], wanted.logits[keep], atol=0.1)
    assert [*found] == [*wanted]
    assert "aux_loss" not in found or torch.allclose(found.aux_loss, wanted.aux_loss, rtol=1e-4)


def test_padding_that_is_added_costs_next_to_nothing():
    """Law 22, in the tokens that layers see."""
    model, seen = copy.deepcopy(built("qwen3_next")), []
    for module in (model.model.layers[0].mlp, *mixers_of(model, way_of(model)).values()):
        note = known(lambda _, args, kwargs: seen.append([*args, *kwargs.values()][0]))
        module.register_forward_pre_hook(note, with_kwargs=True)
    count = []
    with adapt(model), torch.no_grad():
        for more in (1, 1000):
            seen.clear()
            model(**batch_of([[30], [50], [45]], "left", more)[0], use_cache=False)
            count.append(sum(each.shape[0] * each.shape[1] for each in seen))
    assert count[0] == count[1]


BREAKS = {
    "a row of two sequences": lambda plan: plan.place_T.roll(1, 0),
    "two tokens swapped": lambda plan: plan.place_T[torch.tensor([1, 0, *range(2, plan.total)])],
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_the_law_sees_a_plan_that_is_wrong(name, broken, monkeypatch):
    model, (batch, features, at) = built(name), batch_of(LENGTHS)
    truth, made = alone(model, features), by_sequence.plan_of
    with adapt(model):
        wrong = lambda *a: replace(made(*a), place_T=BREAKS[broken](made(*a)))  # noqa: E731
        monkeypatch.setattr("collate_npu.consumers.flat_row.plan_of", wrong)
        assert max(errors(model, batch, truth, at)) > WRONG / 100
