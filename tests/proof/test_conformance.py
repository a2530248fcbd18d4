"""Right stacks pass, each planted fault is found and named, and where nothing can be told nothing is said to be right."""

import math
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from scoring import PAD, built, by, picked, stack, toy

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.proof.conformance import (
    BOUNDARIES,
    CHUNK,
    ENDS,
    FADES,
    LENGTHS,
    MOVED,
    NAN,
    ORDER,
    PAD_ID,
    PADDING,
    STAYS,
    TAIL,
)
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import conformance, reference_kernels, tiny_config

pytestmark = pytest.mark.models

PADDED = ("left", "right")
packs = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="no older release hands boundaries to kernels")


def asked(run, layouts=None, **settings):
    return conformance(run, vocab_size=PAD + 1, pad_token_id=PAD, layouts=layouts, **settings)


def meanings(found):
    return {each.batch: each.meaning for each in found.verdicts if not each.right}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("llama", (*PADDED, "packed")),
        pytest.param("mistral", (*PADDED, "packed"), marks=pytest.mark.slow),
        pytest.param("mamba2", PADDED, marks=pytest.mark.slow),
        pytest.param("qwen3_next", PADDED, marks=pytest.mark.slow),
        pytest.param("qwen3_next", (*PADDED, "packed"), marks=[pytest.mark.slow, packs]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_right_stacks_pass_in_every_layout(name, layouts, dtype):
    model = built(name, dtype)
    with reference_kernels(model) if "packed" in layouts and name == "qwen3_next" else nullcontext():
        found = asked(stack(model), layouts).check()
    assert found
    assert {each.layout for each in found.verdicts} == {*layouts}
    assert {*LENGTHS, "ragged, turned", "copies", "pad id as text"} <= {each.batch for each in found.verdicts}
    assert found.scale.limit <= found.scale.lost / 10


def test_a_layout_is_asked_for_where_run_takes_it():
    assert {each.layout for each in asked(stack(built("llama"))).verdicts} == {*PADDED}
    assert {each.layout for each in asked(toy).verdicts} == {"as it is"}


def test_a_layout_that_is_wrong_even_for_one_sample_is_told():
    found = asked(lambda samples, layout: [x - 3 * (layout == "right") for x in toy(samples)], PADDED)
    assert {each.layout for each in found.verdicts if not each.right} == {"right"}
    assert "alone" in meanings(found)


def test_masks_that_recurrent_layers_do_not_get_are_padding_that_is_read():
    found = asked(stack(built("qwen3_next"), drop=["attention_mask"]), ["left"], seed=1)
    named = meanings(found)
    assert {text.partition(";")[0] for text in named.values()} == {PADDING}
    assert named["chunk edges"] == PADDING + FADES
    right = {each.batch for each in found.verdicts if each.right}
    assert right == {"1 behind", "33 behind", "one length", "copies"}  # there is no padding
    with pytest.raises(AssertionError, match=r"(?s)WRONG in 8 of 12 batches \(seed=\d+\).*left +ragged +WRONG .*sample \d"):
        found.check()


def test_boundaries_that_attention_loses_stay():
    named = meanings(asked(stack(built("llama"), drop=["attention_mask", "position_ids"]), ["packed"], seed=1))
    assert named["chunk edges"] == BOUNDARIES + STAYS
    assert named["two"] == named["many short"] == named["copies"] == BOUNDARIES


@packs
@pytest.mark.slow
@pytest.mark.parametrize("drop", ["seq_idx", "cu_seq_lens_q"])  # what the convolution, and the rule, are told
def test_boundaries_that_a_recurrent_layer_loses_fade(drop):
    model = built("qwen3_next")
    with reference_kernels(model):
        named = meanings(asked(stack(model, drop=[drop]), ["packed"], seed=1))
    assert named["chunk edges"] == BOUNDARIES + FADES
    assert named["two"] == BOUNDARIES


def test_a_convolution_that_runs_on_ends_after_its_taps():
    from transformers import AutoModelForCausalLM

    config = tiny_config("lfm2", vocab_size=PAD + 1)
    config.layer_types = ["conv"] * config.num_hidden_layers
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.ndim > 1 else 1)

    def flat(samples):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*chain(*samples)]]), use_cache=False).logits[0]
        return [picked(*pair) for pair in zip(logits.split([len(ids) for ids in samples]), samples)]

    named = meanings(asked(flat, seed=1))
    assert named["chunk edges"] == BOUNDARIES + ENDS


@pytest.mark.slow
def test_a_tail_that_a_chunked_layer_drops_is_named():
    model = built("qwen3_next")

    def cut(layer, args, out):
        whole = out.shape[1] // 64 * 64
        return out if len(out) == 1 or whole < 64 else torch.cat([out[:, :whole], 0 * out[:, whole:]], dim=1)

    held = [layer.linear_attn.register_forward_hook(cut) for layer in model.model.layers if hasattr(layer, "linear_attn")]
    try:
        found = asked(stack(model), PADDED)
    finally:
        [each.remove() for each in held]
    said = {(each.layout, each.batch): each.meaning for each in found.verdicts if not each.right}
    assert {batch for _, batch in said} == {"chunk edges", "one long"}
    assert {said["right", batch] for batch in ("chunk edges", "one long")} == {CHUNK.format(64)}
    assert said["left", "chunk edges"] == TAIL.format(1)


def turned(found, samples):
    return [*found[1:], found[0]]


def moved(found, samples):
    return [torch.cat([x[-1:], x[:-1]]) for x in found]


def no_number(found, samples):
    return [*found[:-1], found[-1] * float("nan")]


def one_row(found, samples):
    return list(torch.cat([toy([list(chain(*samples))])[0], torch.zeros(1)]).split([len(ids) for ids in samples]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (turned, ORDER),
        (moved, MOVED),
        (no_number, NAN),
        (lambda found, samples: [x[: len(ids) - 1] for x, ids in zip(one_row(found, samples), samples)], BOUNDARIES),
        (lambda found, samples: [x - 9.0 * (PAD in ids) for x, ids in zip(found, samples)], PAD_ID),
    ],
)
def test_what_answers_show_is_named(change, said):
    found = asked(by(change))
    assert not found
    assert not found.passed
    assert {text.partition(";")[0] for text in meanings(found).values()} == {said}


def test_what_is_not_a_number_never_passes():
    """Not even one, where Python's max would drop it."""

    def one(found, samples):
        found[0][-1:] = float("nan")
        return found

    found = {each.batch: each for each in asked(by(one)).verdicts}
    assert not found["ragged"].right
    assert not found["copies"].right
    assert (found["ragged"].sample, found["ragged"].token) == (0, LENGTHS["ragged"][0] - 1)
    assert math.isnan(found["ragged"].largest)


def test_the_token_that_is_furthest_off_is_named():
    def one(found, samples):
        found[1][-1:] -= 1
        return found

    (found,) = [each for each in asked(by(one)).verdicts if each.batch == "ragged"]
    assert (found.sample, found.token, found.largest) == (1, LENGTHS["ragged"][1] - 1, pytest.approx(1))


def test_tokens_that_are_seen_before_their_time_are_told():
    found = asked(lambda samples: [x - len(ids) % 2 for x, ids in zip(toy(samples), samples)])
    assert "the model looks ahead" in meanings(found)["1 behind"]
    assert found.verdicts[0].largest == pytest.approx(1)


def test_a_model_of_transformers_with_dropout_is_told_to_switch_it_off():
    from transformers import AutoModelForCausalLM

    config = tiny_config("gpt2", vocab_size=PAD + 1)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    with pytest.raises(CollateError, match=r"asked twice for the same sample alone.*Switch dropout off"):
        asked(stack(AutoModelForCausalLM.from_config(config).train()), ["right"])


def test_a_seed_draws_the_same_samples_and_another_others():
    seen = []

    def run(samples):
        seen.append(samples)
        return toy(samples)

    first, again, other = asked(run), None, None
    calls, seen[:] = list(seen), []
    again = asked(run, seed=first.seed)
    assert (seen, again) == (calls, first)
    seen.clear()
    other = asked(run)
    assert seen != calls
    assert other.seed != first.seed


def test_the_pad_id_is_text_where_it_is_given_and_nowhere_else():
    seen = set()

    def run(samples):
        seen.update(map(tuple, samples))
        return toy(samples)

    conformance(run, vocab_size=PAD + 1, pad_token_id=40, seed=0)
    assert sorted(ids.count(40) for ids in seen if 40 in ids) == [1, 1, 2]
    seen.clear()
    conformance(run, vocab_size=PAD, seed=0)
    assert set(chain(*seen)) == set(range(3, PAD))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vocab_size": 8}, "vocab_size.*at least 16"),
        ({"pad_token_id": 300}, "pad_token_id: got 300.*below 256"),
        ({"pad_token_id": 256}, "pad_token_id: got 256.*below 256"),
        ({"seed": -1}, "seed.*at least 0"),
        ({"seed": "x"}, "seed"),
        ({"layouts": ["left"]}, r"layouts: got \['left'\] for a run that does not take layout.*def run\(samples, layout\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(CollateError, match=said):
        conformance(toy, **settings)
