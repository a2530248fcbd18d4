"""Law 19: packed equals each sequence alone, in logits and gradient, on every hybrid that claims it, without any kernel."""

import copy
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from hypothesis import example, given, strategies as st
from in_float64 import in_float64, neighbour
from rotation import examples, rotating
from strategies import flat_collator, packed_lengths, sides

pytest.importorskip("transformers")
from flat_rows import (
    BY_OFFSETS,
    EXACT,
    GATED_DELTA,
    HERE,
    KDA,
    MIXED,
    PAD,
    RIGHT,
    WRONG,
    alone,
    apart,
    built,
    errors,
    outcome,
    samples,
)
from tiny_vision import MODELS, vision_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, adapt, check_delivery
from collate_npu.consumers.probe import sequences_mix_reason
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels import packed_rows
from collate_npu.proof import watch
from collate_npu.releases import KERNELS_TOLD
from collate_npu.segments import of_lengths
from collate_npu.testing import assert_padding_invariant, tiny_model

TOLD = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="before 5.19 layers hand no boundary on")
pytestmark = [TOLD, pytest.mark.long]
ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": BY_OFFSETS}


def packed(lengths, side="right", more=0):
    """A batch as a stranger sends it, its features, and where their tokens stand."""
    segments = of_lengths(lengths, max(map(sum, lengths)) + more, side)
    features = samples([n for row in lengths for n in row])
    ids = torch.full(segments.shape, PAD)
    ids[segments.keep] = torch.tensor([token for each in features for token in each["input_ids"]])
    return {"input_ids": ids, "segment_ids": segments.ids}, features, segments.indices


def assert_alone(model, lengths, side="right", more=0, **settings):
    """Within the law; or three times as far from float64 as each alone by the worst of nine roundings: one may be small."""
    batch, features, at = packed(lengths, side, more)
    truth = alone(model, features)
    with adapt(model, **settings):
        found = outcome(model, [(batch, at)])
    if max(apart(found, truth)) >= RIGHT:
        exact = in_float64(model, lambda wide: alone(wide, features))
        own = [apart(alone(each, features), exact) for each in (model, *(neighbour(model, seed) for seed in range(8)))]
        assert all(far < max(RIGHT, 3 * most) for far, most in zip(apart(found, exact), map(max, *own))), own


LENGTHS = [[5, 13, 40], [1, 70]]
ROWS = packed_lengths(rows=2, sequences=6, longest=70)


@pytest.mark.parametrize(("name", "attn"), rotating(product(EXACT, ATTENTION), slow=12))
def test_packed_is_each_sequence_alone(name, attn):
    if attn == "flash" and name == "qwen4_exp_text":
        pytest.skip("its indexer reads a dense mask (modeling_qwen4_exp.py:718)")
    model = built(name, ATTENTION[attn])
    settings = {"attn_implementation": "flash_attention_2"} if attn == "flash" else {}

    @examples(8)
    @given(ROWS, sides(), st.integers(0, 3))
    @example([[65, 65]], "left", 0)  # of which bailing_hybrid computes the gradient better than alone
    @example([[2, 1, 2]], "left", 0)  # of which qwen3_next alone is right by chance
    def law(lengths, side, more):
        assert_alone(model, lengths, side, more, **settings)

    law()


PADDED = [{"packing": True, "padding": "max_length", "max_length": 76, "padding_side": side} for side in ("left", "right")]
FLAT = [{"pad_to_multiple_of": 16}, {"multiple": 4}, {"max_sequences": 4}]


@pytest.mark.parametrize(("name", "attn"), rotating(product([*EXACT, "gpt2", "mistral"], ("sdpa", "eager")), 2, slow=12))
def test_padded_rows_of_our_collator_are_proved_on_an_adapted_model(name, attn):
    model = built(name, attn)
    with adapt(model):
        collators = [PaddingCollator(pad_token_id=PAD, model=model, **settings) for settings in PADDED]
        collators += [flat_collator(PAD, model=model, **settings) for settings in FLAT]
        for collator, lengths in product(collators, ([5, 13, 40], [1, 70], [40, 30, 60])):
            assert_padding_invariant(model, collator, [each["input_ids"] for each in samples(lengths)])


@pytest.mark.parametrize("length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 3, 9])
@pytest.mark.parametrize("name", rotating([name for name in EXACT if name in GATED_DELTA + KDA]))
def test_many_sequences_in_a_chunk_cost_no_digits(name, length):
    assert_alone(built(name), [[length] * (128 // length)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    rotating(product(["qwen3_next", "qwen3_5_text", "kimi_linear", "bamba"], [torch.bfloat16, torch.float16])),
)
def test_autocast_loses_no_more_than_it_does_alone(name, dtype):
    model, (batch, features, at) = built(name), packed(LENGTHS)
    exact = alone(model, features)
    with torch.autocast("cpu", dtype):
        lost = alone(model, features)
        with adapt(model):
            found = outcome(model, [(batch, at)])
    sizes = [float((each[0].float() - exact[0]).square().mean().sqrt()) for each in (lost, found)]
    assert 0 < sizes[1] < 1.5 * sizes[0]


def lora(model):
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    return made.eval()


def compiled(model):
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("wrap", [lora, pytest.param(compiled, marks=[pytest.mark.long, pytest.mark.slow])])
def test_wrapped(wrap):
    assert_alone(wrap(copy.deepcopy(built("qwen3_next"))), LENGTHS, "left", 2)


@pytest.mark.parametrize("name", [name for name in ("qwen3_5",) if name in CONFIG_MAPPING and name in MODELS])
def test_a_vision_model_packs_text(name):
    model, (batch, features, at) = vision_model(name), packed(LENGTHS, "left")
    batch["input_ids"] %= 100
    features = [{"input_ids": [token % 100 for token in each["input_ids"]]} for each in features]
    truth = alone(model, features)
    with adapt(model):
        assert max(errors(model, batch, truth, at)) < RIGHT


def test_collators_of_an_adapted_model_let_packed_rows_through_and_others_name_the_line():
    model, (batch, features, _) = copy.deepcopy(built("qwen3_next")), packed([[5, 13, 40]])
    truth = alone(model, features)
    gc.collect()  # models of other tests, which are adapted as long as they live
    held = vars(sys.modules[type(model).__module__])
    before = dict(held)
    collated = lambda: PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(features)  # noqa: E731
    for make in (collated, lambda: BatchAdapter(model)(batch)):
        with pytest.raises(UnsupportedFormError, match=r"call adapt\(model\) before you make the collator"):
            make()
        with adapt(model) as adapted:
            made = make()
            assert [max(errors(model, made, truth)) < RIGHT, "the package fla: arithmetic" in adapted.packed] == [True, True]
        assert [name for name in held if held[name] is not before[name]] == []  # undone


def test_two_adapted_models_of_a_family_leave_each_other_alone():
    model, (batch, features, at) = copy.deepcopy(built("qwen3_next")), packed(LENGTHS)
    truth, other, found = alone(model, features), adapt(copy.deepcopy(model)), []

    class Asking(BatchAdapter):  # while a probe asks it for a model of the family, this one runs in another thread
        def write(self, *given):
            found.append(ThreadPoolExecutor().submit(errors, model, batch, truth, at).result())
            return super().write(*given)

    with pytest.raises(UnsupportedFormError, match=r"or call adapt\(model\)"):
        BatchAdapter(model)(batch)
    with adapt(model):
        other.remove()
        other.remove()
        model.config.rms_norm_eps *= 1.0000003  # asked anew
        sequences_mix_reason(model.config, Asking)
        assert max(map(max, found)) < RIGHT
        assert max(errors(model, batch, truth, at)) < RIGHT


# --- the probe


@pytest.mark.parametrize("name", rotating(HERE, 6, slow=len(HERE)))
def test_the_probe_says_what_is_known(name):
    try:
        model = tiny_model(name, vocab_size=PAD + 1)
    except ValueError:
        model = tiny_model(name, vocab_size=PAD + 1, attn_implementation="eager")
    assert bool(sequences_mix_reason(model, BatchAdapter, mended=True)) == (name in MIXED)
    assert sequences_mix_reason(model, BatchAdapter)


def test_the_probe_needs_no_parameter():
    whole = built("qwen3_next")
    with torch.device("meta"):
        model = type(whole)(whole.config)
    with adapt(model):
        assert BatchAdapter(model).choose(Segments([[1, 2]])).form == "mapping"


# --- what is broken on purpose


pad = packed_rows.pad
BREAKS = {
    "starts_of": lambda seq_idx: torch.zeros(seq_idx.shape, dtype=torch.bool),
    "pad": lambda x, n, value=None: pad(torch.ones_like(x) if x.dtype == torch.bool else x, n),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_what_does_not_keep_sequences_apart_is_refused_and_found(broken, monkeypatch):
    """Broken before adapt the probe sees it; afterwards watch, where a kernel was told nothing, or the check of delivery."""
    model, (batch, features, at) = copy.deepcopy(built("qwen3_5_text")), packed(LENGTHS)
    truth = alone(model, features)
    handle = adapt(model)
    monkeypatch.setattr(packed_rows, broken, BREAKS[broken])
    assert max(errors(model, batch, truth, at)) > WRONG / 10
    with pytest.raises(CollateError, match="sequence"):
        check_delivery(model, batch, segments=Segments(batch["segment_ids"]))
    if broken == "starts_of":
        with watch(say=False, steps=1) as seen:
            model(**batch)
        assert "gated_delta_rule" in seen.faults[0].kernel
    handle.remove()
    model.config.rms_norm_eps *= 1.0000001  # asked anew
    with adapt(model), pytest.raises(UnsupportedFormError, match=r"rows \[0, 1\] hold several"):
        model(**batch)


def test_right_runs_are_proved():
    model, (batch, _, _) = built("qwen3_next"), packed(LENGTHS, "left", 1)
    with adapt(model):
        assert "rule [14, 19, 32, 73, 74, 144]" in str(check_delivery(model, batch, segments=Segments(batch["segment_ids"])))
        with watch(say=False, steps=1) as seen:
            model(**batch)
    assert seen.faults == []
