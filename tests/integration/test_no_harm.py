"""Law 18: nobody loses by adding our line. Drawn cases, each seed another, and the trainers that count or keep labels."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from rotation import SEED

pytest.importorskip("transformers", minversion="5.2")
pytest.importorskip("peft")
import differential
import transformers
from differential import FAMILIES, OPTIONS, PAD, WRAPPERS, Case, SkippedError, batch_of, drawn, harm, judged
from trained import gradient_of, step_of, trainer_of

from collate_npu import PaddingCollator, adapt, wrap_collator
from collate_npu.consumers import flat_row
from collate_npu.errors import UnsupportedFormError
from collate_npu.testing import left_out

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]


def case_of(**fixed):
    """The first case from this run's seed on that a family runs at all, and what came of it."""
    for seed in range(SEED * 1000, SEED * 1000 + 400):
        case = drawn(seed, **fixed)
        if case.family not in left_out():
            with suppress(SkippedError):
                return case, judged(case)
    raise LookupError(fixed)


DRAWN = [*({"kind": kind} for kind in FAMILIES), *({"option": option} for option in dict.fromkeys(OPTIONS))]
DRAWN += [{"wrapper": wrapper} for wrapper in dict.fromkeys(WRAPPERS) if wrapper != "none"]


@pytest.mark.slow
@pytest.mark.draws(6)
@pytest.mark.parametrize("fixed", DRAWN, ids=lambda fixed: next(iter(fixed.values())))
def test_what_is_right_without_us_is_right_with_us(fixed):
    case, doors = case_of(**fixed)
    assert harm(doors) == {}, case


ALWAYS = {"side": "right", "attn": "sdpa", "option": "none", "wrapper": "none", "lengths": (9, 4, 13), "prompt": 0}
ALWAYS |= {"head": "CausalLM", "labels_side": "right", "seed": 5, "kind": "decoder", "family": "llama"}
ENCODER, SEQ2SEQ = {"kind": "encoder", "family": "bert"}, {"kind": "encoder-decoder", "head": "Seq2SeqLM"}
TAIL = {"side": "packed", "head": "base", "lengths": (9,), "tail": 16}
HYBRID = {"kind": "hybrid", "family": "qwen3_next"}
KNOWN = {
    "an embedding model by its config": {"option": "config.is_causal", "head": "base"},
    "one by the call": {"option": "is_causal", "head": "base"},
    "an encoder's flat row of one sample": {**ENCODER, **TAIL},
    "one that is packed": {"option": "config.is_causal", "side": "packed"},
    "one that is packed, by the call": {"option": "is_causal", "side": "packed", "attn": "eager"},
    "a hybrid one": {**HYBRID, "option": "is_causal", "head": "base"},
    "EmbeddingGemma, packed": {"family": "gemma3_text", "option": "config.ahead", "head": "base", "side": "packed"},
    "a router's loss by the call": {"family": "mixtral", "option": "router"},
    "one by the config": {"family": "qwen3_moe", "option": "config.router"},
    "one padded left": {"family": "mixtral", "option": "router", "side": "left"},
    "prefix tuning": {"side": "left", "wrapper": "prefix"},
    "prompt tuning of completions": {"side": "left", "wrapper": "prompt", "prompt": 1},
    "attention weights": {"option": "attentions", "attn": "eager"},
    "a static cache": {"family": "gemma3_text", "option": "static", "side": "left"},
    "a hybrid's": {**HYBRID, "option": "static", "side": "left"},
    "a prompt in chunks": {"option": "chunks", "side": "left", "lengths": (3, 11, 12)},
    "choices": {**ENCODER, "head": "MultipleChoice"},
    "a pooler": {**ENCODER, "family": "roberta", "head": "base", "side": "left"},
    "a head of spans": {**ENCODER, "family": "yoso", "head": "QuestionAnswering"},
    "LED, its source left": {**SEQ2SEQ, "family": "led", "side": "left", "attn": "eager"},
    "T5, its labels left": {**SEQ2SEQ, "family": "t5", "labels_side": "left"},
    "a decoder whose copy is short": {"family": "prophetnet", "option": "keep", "side": "left"},
    "a static cache, of a model that counts places": {"family": "trocr", "option": "static", "side": "left"},
    "BART generates, its source left": {**SEQ2SEQ, "family": "bart", "side": "left", "option": "generate"},
}


@pytest.mark.draws(4)
@pytest.mark.parametrize("what", KNOWN)
def test_known_harm_is_gone(what):
    found = judged(Case(**{**ALWAYS, **KNOWN[what]}))
    assert harm(found) == {}
    assert "right" in {found[door][0] for door in found} or found["plain"][0] == "wrong"


def test_the_law_sees_harm(monkeypatch):
    """A door that lays tokens at other places than those of their sequences."""
    made = flat_row.plan_of
    monkeypatch.setattr(flat_row, "plan_of", lambda *a: replace(made(*a), place_T=made(*a).place_T.roll(1)))
    found = judged(Case(**ALWAYS))
    assert (found["plain"][0], *harm(found)) == ("right", "adapt")


def loss_of(logits, labels, smoothing):
    targets, scores = labels[1:], logits[:-1].log_softmax(-1)
    kept = targets >= 0
    nll = -scores[kept].gather(1, targets[kept][:, None]).sum()
    return (1 - smoothing) * nll - smoothing * scores[kept].mean(1).sum()


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits
    each = zip(logits, labels)
    return sum(loss_of(one, own, 0.0) for one, own in each) / num_items_in_batch


SETTINGS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.2},
    "own loss": {"compute_loss_func": summed},
    "averaged": {"average_tokens_across_devices": True, "gradient_accumulation_steps": 2},
}
SAMPLES = [{"input_ids": [3 + (7 * n + k) % 50 for k in range(length)]} for n, length in enumerate((5, 9, 3, 12))]
for _row in SAMPLES:
    _row["labels"] = list(_row["input_ids"])


def stranger(rows, side="left"):
    """As DataCollatorForSeq2Seq: the first label of each sample is there."""
    case = SimpleNamespace(head="CausalLM", labels_side=side, stranger="")
    return batch_of(case, rows, side)


def stepped(tmp_path, model, collator, setting, adapted=False):
    how = {"max_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0, **setting}
    how["per_device_train_batch_size"] = 4 // how.get("gradient_accumulation_steps", 1)
    made = partial(transformers.Trainer, compute_loss_func=how.pop("compute_loss_func", None))
    with adapt(model) if adapted else nullcontext():
        return step_of(trainer_of(model, collator, tmp_path, SAMPLES, made=made, **how))[1]


def wanted(model, smoothing):
    model.zero_grad(set_to_none=True)
    total = sum(len(row["labels"]) - 1 for row in SAMPLES)
    for row in SAMPLES:
        ids = torch.tensor(row["input_ids"])
        (loss_of(model(input_ids=ids[None]).logits[0], ids, smoothing) / total).backward()
    return gradient_of(model)


STEPS = product(["llama", "qwen3_next", "qwen3_moe"], SETTINGS, ["collator", "wrapped", "adapt", "adapt, padded right"])


@pytest.mark.draws(6)
@pytest.mark.parametrize(("family", "setting", "door"), [*STEPS])
def test_a_step_of_the_trainer_is_that_of_the_samples_or_is_told(family, setting, door, tmp_path):
    """The Trainer counts the labels of a step before any forward, and may keep them from it."""
    case = {**ALWAYS, "family": family, "kind": "hybrid" if "next" in family else "decoder"}
    model = differential.wrapped(Case(**case))
    reference = wanted(model, SETTINGS[setting].get("label_smoothing_factor", 0.0))
    doors = {
        "collator": PaddingCollator(pad_token_id=PAD, padding_side="left", model=model),
        "wrapped": wrap_collator(stranger, model=model),
        "adapt": stranger,
        "adapt, padded right": lambda rows: stranger(rows, "right"),
    }
    step = lambda adapted: stepped(tmp_path, model, doors[door], SETTINGS[setting], adapted)  # noqa: E731
    if door == "adapt":
        if setting in ("smoothed", "own loss"):
            with pytest.warns(UserWarning, match=r"keeps the labels from the forward.*data_collator=wrap_collator"):
                step(True)
            return
        with pytest.raises(UnsupportedFormError, match=r"data_collator=wrap_collator\(your collator, model=model\)"):
            step(True)
        return
    assert float((step("adapt" in door) - reference).norm() / reference.norm()) < 1e-3


def test_labels_of_a_head_of_ones_own_are_its_own():
    """Classes of tokens are read in place, so the first counts."""
    model = differential.wrapped(Case(**{**ALWAYS, "head": "TokenClassification"}))
    batch = stranger([{**row, "labels": [1] * len(row["labels"])} for row in SAMPLES])
    plain = model(**batch).loss
    with adapt(model.base_model):
        assert torch.allclose(model(**batch).loss, plain, atol=1e-5)
