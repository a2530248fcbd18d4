"""Conformance: right stacks pass, each planted fault is found and named, and where nothing can be told nothing is said to be
right. The stacks are tiny models of transformers behind `run(samples, layout)`, and a toy of one line."""

from contextlib import nullcontext
from functools import cache, partial
from itertools import chain

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from collate_npu import CollateError, PaddingCollator, Segments, adapt
from collate_npu.collate import loss_weights
from collate_npu.consumers import tiny_models
from collate_npu.outputs import per_sequence
from collate_npu.proof.conformance import BOUNDARIES, LENGTHS, MOVED, NAN, ORDER, PAD_ID, PADDING
from collate_npu.proof.measure import noise_limit
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import check_step, conformance, tiny_model

pytestmark = pytest.mark.models

PAD = 256
WEIGHTS = torch.randn(PAD + 1, PAD + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@cache
def built(name, dtype=torch.float32):
    with pytest.MonkeyPatch.context() as patch:  # all experts: no choice that rounding turns
        patch.setitem(tiny_models._FAMILY, "qwen3_next", {"num_experts_per_tok": 4})
        return tiny_model(name, vocab_size=PAD + 1, dtype=dtype)


def picked(logits, ids):
    """What each token from the second on was given, `[L - 1]`, by logits `[L, V]`."""
    return torch.log_softmax(logits[:-1].double(), -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def stack(model, drop=()):
    """The right one; `drop` names keys of a batch of several samples that are lost on their way."""

    def run(samples, layout="right"):
        flat, lengths = layout == "packed", [len(ids) for ids in samples]
        settings = {"padding_free": True} if flat else {"padding_side": layout}
        collator = PaddingCollator(pad_token_id=PAD, model=model, **settings)
        batch = collator([{"input_ids": ids} for ids in samples])
        kept = {key: value for key, value in batch.items() if len(samples) == 1 or key not in drop}
        with torch.no_grad():
            logits = model(**kept, use_cache=False).logits
        segments = Segments.from_lengths([lengths] if flat else lengths, side="right" if flat else layout)
        return [picked(*pair) for pair in zip(per_sequence(logits, segments), samples)]

    return run


def score(ids):
    """A toy: each token is predicted from the mean of those before it, the last three weighing more."""
    rows = WEIGHTS[ids]
    near = sum(torch.cat([torch.zeros(n, rows.shape[1]), rows[: len(ids) - n]]) for n in range(3))
    return picked(rows.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None] + near, ids)


def toy(samples):
    return [score(ids) for ids in samples]


def by(change, batch_of=2):
    """The toy, whose answers to a batch of so many samples and more are changed."""
    return lambda samples: change(toy(samples), samples) if len(samples) >= batch_of else toy(samples)


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
    with adapt(model) if "packed" in layouts and name == "qwen3_next" else nullcontext():
        found = asked(stack(model), layouts).check()
    assert found
    assert {each.layout for each in found.verdicts} == {*layouts}
    assert {*LENGTHS, "ragged, turned", "copies", "pad id as text"} <= {each.batch for each in found.verdicts}
    assert found.scale.limit <= found.scale.lost / 10


def test_a_layout_is_asked_for_where_run_takes_it_and_may_be_wrong_for_one_sample():
    assert {each.layout for each in asked(toy).verdicts} == {"as it is"}
    found = asked(lambda samples, layout: [x - 3 * (layout == "right") for x in toy(samples)])
    assert {each.layout for each in found.verdicts} == {*PADDED}
    assert {each.layout for each in found.verdicts if not each.right} == {"right"}
    assert "alone" in meanings(found)


def test_masks_that_recurrent_layers_do_not_get_are_padding_that_is_read():
    found = asked(stack(built("qwen3_next"), drop=["attention_mask"]), ["left"], seed=1)
    named = meanings(found)
    assert {*named.values()} == {PADDING}
    right = {each.batch for each in found.verdicts if each.right}
    assert right == {"1 behind", "33 behind", "one length", "copies"}  # there is no padding
    with pytest.raises(AssertionError, match=r"(?s)WRONG in 8 of 12 batches \(seed=\d+\).*left +ragged +WRONG .*sample \d"):
        found.check()


def turned(found, samples):
    return [*found[1:], found[0]]


def one_row(found, samples):
    return list(torch.cat([toy([list(chain(*samples))])[0], torch.zeros(1)]).split([len(ids) for ids in samples]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (turned, ORDER),
        (lambda found, samples: [torch.cat([x[-1:], x[:-1]]) for x in found], MOVED),
        (lambda found, samples: [*found[:-1], found[-1] * float("nan")], NAN),
        (lambda found, samples: [x[: len(ids) - 1] for x, ids in zip(one_row(found, samples), samples)], BOUNDARIES),
        (lambda found, samples: [x - 9.0 * (PAD in ids) for x, ids in zip(found, samples)], PAD_ID),
    ],
)
def test_what_answers_show_is_named(change, said):
    found = asked(by(change))
    assert not found
    assert not found.passed
    assert {*meanings(found).values()} == {said}


@pytest.mark.parametrize(("by_how_much", "largest"), [(1.0, 1.0), (float("nan"), float("nan"))])
def test_the_token_that_is_furthest_off_is_named_and_no_nan_passes(by_how_much, largest):
    """Not even one, where Python's max would drop it."""

    def one(found, samples):
        found[1][-1:] -= by_how_much
        return found

    (found,) = [each for each in asked(by(one)).verdicts if each.batch == "ragged"]
    assert (found.right, found.sample, found.token) == (False, 1, LENGTHS["ragged"][1] - 1)
    assert found.largest == pytest.approx(largest, nan_ok=True)


def test_tokens_that_are_seen_before_their_time_are_told():
    found = asked(lambda samples: [x - len(ids) % 2 for x, ids in zip(toy(samples), samples)])
    assert "the model looks ahead" in meanings(found)["1 behind"]
    assert found.verdicts[0].largest == pytest.approx(1)
    found = asked(lambda samples: [x - 1e-3 * ids[-1] / PAD for x, ids in zip(toy(samples), samples)])  # reads the last
    assert {"1 behind", "33 behind"} <= {*meanings(found)}


def test_what_the_width_alone_rounds_is_no_fault_whatever_is_drawn():
    for seed in (4, 3645796216):  # one token behind hardly moves these
        asked(stack(built("llama", torch.bfloat16)), ["right"], seed=seed).check()


def drawn_by(**settings):
    """What a stack is asked for, in order."""
    seen = []
    found = conformance(lambda samples: [seen.append(ids) or score(ids) for ids in samples], vocab_size=PAD, **settings)
    return seen, found


def test_a_seed_draws_the_same_samples_and_another_others():
    (first, found), (other, another) = drawn_by(), drawn_by()
    assert drawn_by(seed=found.seed) == (first, found)
    assert (first != other, found.seed != another.seed) == (True, True)
    assert set(chain(*drawn_by(seed=0)[0])) == set(range(3, PAD))


def test_the_pad_id_is_text_where_it_is_given_and_nowhere_else():
    seen = {tuple(ids) for ids in drawn_by(pad_token_id=40, seed=0)[0]}
    assert sorted(ids.count(40) for ids in seen if 40 in ids) == [1, 1, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vocab_size": 8}, "vocab_size.*at least 16"),
        ({"pad_token_id": 256}, "pad_token_id: got 256.*below 256"),
        ({"seed": -1}, "seed.*at least 0"),
        ({"seed": "x"}, "seed"),
        ({"layouts": 3}, "layouts are names"),
        ({"layouts": ["left"]}, r"layouts: got \['left'\] for a run that does not take layout.*def run\(samples, layout\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(CollateError, match=said):
        conformance(toy, **settings)


def answering(form):
    """The toy, whose answers have another form."""
    return lambda samples: form(toy(samples))


def test_forms_of_answers_are_read():
    for form in (
        lambda found: [x.tolist() for x in found],
        lambda found: tuple(tuple(x.tolist()) for x in found),
        lambda found: [x.clone().requires_grad_() for x in found],
        lambda found: [np.array(x) for x in found],
        iter,
    ):
        assert asked(answering(form)).passed


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (answering(lambda found: None), "run, batch 'alone': got a NoneType.*Return a list"),
        (answering(lambda found: {"logprobs": found}), "got a dict"),
        (answering(lambda found: "text"), "got a str"),
        (answering(lambda found: torch.tensor(1.0)), "got TypeError: iteration over a 0-d tensor"),
        (answering(lambda found: found * 2), "got 2 answers to 1 samples"),
        (answering(lambda found: [torch.cat([x[:1], x]) for x in found]), r"float64 \[9\], not \[8\].*the first token"),
        (answering(lambda found: [[None, *x.tolist()] for x in found]), "sample 0: got values of type"),
        (answering(lambda found: [x[:, None].expand(-1, 9) for x in found]), r"float64 \[8, 9\], not \[8\]"),
        (answering(lambda found: [x.index_fill(0, torch.tensor(0), 0.6) for x in found]), "values up to 0.6.*at most 0"),
        (answering(lambda found: [x.exp() for x in found]), "row 0: got values up to .*at most 0"),
        # what tells nothing
        (lambda samples: [-torch.ones(len(ids) - 1).double() for ids in samples], "do not depend on the tokens"),
        (lambda samples: [x * (1 + (len(samples) > 1) + len(x) % 2) for x in toy(samples)], "noise of .*nothing is proved"),
        (lambda samples: [x * float("nan") for x in toy(samples)], "NaN or infinity for a sample alone"),
        (lambda samples: [x * (1 + torch.rand(1)) for x in toy(samples)], "asked twice"),
    ],
)
def test_answers_that_are_no_log_probabilities_or_tell_nothing_are_refused(run, said):
    with pytest.raises(CollateError, match=f"(?s){said}"):
        asked(run)


def test_an_error_in_run_names_the_layout_and_the_samples():
    def run(samples, layout):
        samples[0].clear()  # of its own
        raise RuntimeError("no memory left")

    with pytest.raises(CollateError, match=r"run, layout 'cp2', batch 'alone': got RuntimeError: no memory.*\[9\] tok") as e:
        conformance(run, layouts=["cp2"])
    assert isinstance(e.value.__cause__, RuntimeError)
    with pytest.raises(CollateError, match="object is not callable"):
        conformance(3)


def rounded(places):
    """Answers that depend in a small place on how many samples are asked for."""
    return lambda samples: [x * (1 + places * (len(samples) > 1)) for x in toy(samples)]


@pytest.mark.parametrize("places", [0, 1e-8, 1e-6, 2e-3])
def test_six_times_the_noise_passes_and_a_lucky_run_has_some(places):
    """Answers that are all equal tell nothing of rounding."""
    scale = asked(rounded(places)).scale
    assert scale.noise == pytest.approx(places, rel=0.1, abs=1e-7)
    limit = noise_limit(places, torch.zeros(()))
    assert scale.limit == pytest.approx(limit if 0 < places < 1e-3 else max(limit, scale.lost / 10), rel=0.1)


# --- a training step


def loop(weigh, rows=2, drop=()):
    """A loop's gradient, in micro-batches of so many rows; `drop` names keys that are lost on their way."""
    model = built("qwen3_next")
    collator = PaddingCollator(pad_token_id=PAD, model=model, padding_side="left")

    def step(samples):
        parts = [samples[at : at + rows] for at in range(0, len(samples), rows)]
        batches = [collator([{"input_ids": ids, "labels": ids} for ids in part]) for part in parts]
        model.zero_grad()
        for batch, weight in zip(batches, weigh(batches)):
            (model(**{key: x for key, x in batch.items() if key not in drop}).loss * weight).backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    return step


def alike(batches):
    return [1 / len(batches)] * len(batches)


def off(copied, beside, samples):  # what has five tokens differs from itself alone: in copies, or padded, as two nights drew
    lost = 0.0 if len(samples) == 1 else beside if len({*map(len, samples)}) > 1 else copied
    parts = [torch.tensor([ids[0], -ids[1], 100 * lost * (len(ids) == 5)]) * (len(ids) - 1) for ids in samples]
    return sum(parts) / sum(len(ids) - 1 for ids in samples)


@pytest.mark.parametrize("step", [loop(loss_weights), partial(off, 3e-3, 3e-3), partial(off, 0.0, 3e-4)])
def test_a_step_that_is_that_of_its_samples_passes(step):
    assert all(check_step(step, seed=seed) < 1e-3 for seed in range(4))


@pytest.mark.parametrize(
    ("step", "error", "said"),
    [
        (loop(alike, rows=1), AssertionError, "it is the mean of its micro-batches, not of their tokens"),
        (loop(alike), AssertionError, "it is no mean of them alone"),
        (partial(off, 0.0, 1e-2), AssertionError, "it is no mean of them alone"),
        (loop(loss_weights, drop=["attention_mask"]), AssertionError, "it is no mean.*check_delivery names the layer"),
        (lambda xs: float("nan") if len(xs) == 5 and xs[0] != xs[1] else sum(xs[0]), AssertionError, "nan"),
        (lambda samples: 1.0, CollateError, "A wrong mean must differ"),
        (lambda xs: sum({9: 4, 17: 8}.get(len(x), 1) for x in xs) / len(xs), CollateError, "A wrong mean must differ"),
        (lambda samples: torch.randn(3) * len(samples), CollateError, "A wrong mean must differ.*dropout"),
        (lambda samples: None, CollateError, "step: got a NoneType"),
        (lambda samples: torch.rand(len(samples)), CollateError, r"\[1, 5\] numbers, by the samples.*no gradient"),
    ],
)
def test_a_step_with_other_weights_or_masks_is_wrong_and_one_that_tells_nothing_is_refused(step, error, said):
    with pytest.raises(error, match=said):
        check_step(step)
