"""What `adapt` does to a call: shapes, labels, options, threads and cost. That numbers are right: test_differential."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from watching import known

pytest.importorskip("transformers")
import differential
from differential import IGNORED, PAD, Case, alone, batch_of, measured, read, run, samples_of, verdict

from collate_npu import adapt
from collate_npu.consumers.mixers import mixers_of, way_of

pytestmark = pytest.mark.models
FIVE = Case("qwen3_next", lengths=((5, 13, 40), (1, 70)), told="segments", prompt=None)
LEFT = Case("qwen3_next", lengths=((5,), (13,), (1,)), side="left", prompt=None)


def world(case):
    """The model, the samples, their batch, and where their tokens stand in it."""
    model, rows = differential.wrapped(case), samples_of(case)
    return model, rows, batch_of(case, rows), torch.cat(differential.places_of(case, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_loses_no_more_than_it_does_alone(dtype):
    model, rows, batch, _ = world(FIVE)
    exact = alone(FIVE, model, rows)
    with torch.autocast("cpu", dtype):
        lost = alone(FIVE, model, rows)
        with adapt(model):
            _, answers = run(FIVE, model, batch, rows)
    found = measured(FIVE, model, [each.float() for each in answers], torch.zeros(()))
    assert 0 < differential.errors(found[:1], exact[:1])[0] < 1.2 * differential.errors(lost[:1], exact[:1])[0]


@pytest.mark.parametrize("wrapper", ["checkpointed", "reentrant"])
def test_a_backward_after_the_end_of_with_is_right(wrapper):
    case = replace(FIVE, wrapper=wrapper)
    model, rows, batch, _ = world(case)
    wanted = alone(case, model, rows)
    with adapt(model):
        _, answers = run(case, model, batch, rows)
    assert verdict(measured(case, model, answers, read(answers, 0)), wanted) == "right"


def test_threads_two_models_copies_and_forwards_that_raise_leave_each_other_alone():
    model, rows, batch, _ = world(FIVE)
    wanted, other = alone(FIVE, model, rows), copy.deepcopy(model)
    again = batch_of(LEFT, samples_of(LEFT))

    def work():
        own = copy.deepcopy(model)
        _, answers = run(FIVE, own, batch, rows)
        return verdict(measured(FIVE, own, answers, read(answers, 0)), wanted)

    with adapt(model), adapt(other):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[3, PAD + 5]]), attention_mask=torch.tensor([[0, 1]]), use_cache=False)
        model.model.layers[1].register_forward_hook(known(lambda *_: other(**again) and None))
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(work) for _ in range(4)]
    assert [run.result() for run in runs] == ["right"] * 4


def test_labels_that_are_no_copies_of_the_tokens_are_learned_as_alone():
    """They tell nobody whether they are moved. Padded right, nothing stands before a sequence but in the flat row."""
    case = replace(LEFT, side="right", prompt=0)
    model, rows = differential.wrapped(case), samples_of(case)
    for row in rows:
        row["labels"] = [3 + token * 7 % 50 for token in row["input_ids"]]
    wanted = alone(case, model, rows)
    with adapt(model):
        out, answers = run(case, model, batch_of(case, rows), rows)
    assert verdict(measured(case, model, answers, out.loss), wanted) == "right"


@torch.no_grad()
def test_what_comes_out_has_the_shape_that_came_in():
    model, rows, batch, _ = world(LEFT)
    keep = batch["attention_mask"].bool()
    states = [
        model(input_ids=torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states[-1][0] for row in rows
    ]
    embedded = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]), "attention_mask": batch["attention_mask"]}
    with adapt(model):
        out = model(**batch, output_hidden_states=True, use_cache=False)
        same = [model(**batch, use_cache=False, return_dict=False)[0], model(**embedded, use_cache=False).logits]
        cut = {n: model(**batch, use_cache=False, logits_to_keep=n).logits for n in (1, 3)}
        places = model(**batch, use_cache=False, logits_to_keep=torch.tensor([2, 12])).logits
    assert torch.allclose(out.hidden_states[-1][keep], torch.cat(states), atol=1e-4)
    assert {tuple(each.shape[:2]) for each in out.hidden_states} == {(3, 13)}
    assert not out.logits[~keep].any()
    assert all(torch.allclose(each, out.logits, atol=1e-4) for each in same)
    for n, found in cut.items():
        assert torch.allclose(found[keep[:, -n:]], out.logits[:, -n:][keep[:, -n:]], atol=1e-4)
    assert torch.allclose(places[keep[:, [2, 12]]], out.logits[:, [2, 12]][keep[:, [2, 12]]], atol=1e-4)


CUTS = {"the last": lambda mask_S: int(len(mask_S) - mask_S.nonzero()[0, 0]), "a mask": lambda mask_S: mask_S,
        "places": lambda mask_S: mask_S.nonzero().flatten()}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("side", "layout"), [("left", ((9, 4, 13),)), ("left", ((9,), (13,))), ("right", ((9,), (13,)))])
def test_labels_that_are_cut_to_the_logits_kept_are_learned_as_alone(layout, side, cut):
    """As ms-swift cuts them by default: the logits that predict a label, and the last; -100 before the labels."""
    case = Case("qwen3_next", lengths=layout, side=side, told="segments", prompt=0)
    model, _, batch, _ = world(case)
    labels = batch.pop("labels")
    labels[:, :3] = IGNORED
    learned_S = (labels != IGNORED).any(0)
    kept = CUTS[cut](torch.cat([learned_S[1:], torch.tensor([True])]))
    places = torch.arange(len(learned_S))[-kept:] if isinstance(kept, int) else torch.arange(len(learned_S))[kept]
    given = torch.cat([torch.full((len(labels), 1), IGNORED), labels[:, (places + 1)[:-1]]], 1)
    with adapt(model):
        found = model(**batch, labels=given, logits_to_keep=kept, use_cache=False)
        wanted = model(**batch, labels=labels, use_cache=False)
    assert found.logits.shape[:2] == given.shape
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-4)


ASKED = [("llama", {"use_cache": True}), ("llama", {"output_attentions": True})]  # the padded way
ASKED += [("qwen3_moe", {"use_cache": False, "output_router_logits": True})]


@torch.no_grad()
@pytest.mark.draws(3)
@pytest.mark.parametrize(("name", "more"), ASKED)
def test_what_a_call_asks_for_comes_and_a_routers_loss_counts_no_padding(name, more):
    model, _, batch, at = world(Case(name, attn="eager", side="left", prompt=None))
    wanted = model(**batch, **more)
    with adapt(model):
        found = model(**batch, **more)
    assert torch.allclose(*(each.logits.flatten(0, 1)[at] for each in (found, wanted)), atol=0.1)
    assert [*found] == [*wanted]
    assert "aux_loss" not in found or torch.allclose(found.aux_loss, wanted.aux_loss, rtol=1e-4)


# --- cost


@torch.no_grad()
def test_padding_that_is_added_costs_next_to_nothing():
    """Law 22, in the tokens that layers see."""
    model, seen, count = copy.deepcopy(differential.model_of("qwen3_next", "CausalLM", "sdpa")), [], []
    for module in (model.model.layers[0].mlp, *mixers_of(model, way_of(model)).values()):
        note = known(lambda _, args, kwargs: seen.append([*args, *kwargs.values()][0]))
        module.register_forward_pre_hook(note, with_kwargs=True)
    with adapt(model):
        for more in (1, 1000):
            seen.clear()
            case = Case("qwen3_next", lengths=((30,), (50,), (45,)), side="left", more=more, prompt=None)
            model(**batch_of(case, samples_of(case)), use_cache=False)
            count.append(sum(each.shape[0] * each.shape[1] for each in seen))
    assert count[0] == count[1]


@torch.no_grad()
def test_where_ranks_gather_parameters_each_mixer_is_called_once():
    case = Case("qwen3_next", lengths=((1, 70, 3), (300,)), told="segments", prompt=None, wrapper="sharded")
    (model, _, batch, _), calls = world(case), []
    model.model.layers[0].linear_attn.in_proj_qkvz.register_forward_hook(known(lambda *_: calls.append(1)))
    with adapt(model):
        model(**batch, use_cache=False)
    assert len(calls) == 1
