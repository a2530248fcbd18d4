"""Packed hybrids: transformers' own models with reference kernels, where an installed package would stand, on our flat rows.

Every sequence gives the logits and the gradients it gives alone, or the row is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DataCollatorWithFlattening

from collate_npu import BatchAdapter, CollateError, PaddingCollator, UnsupportedFormError, check_delivery
from collate_npu.consumers.models import transformers_version
from collate_npu.testing import reference_kernels, tiny_model

pytestmark = pytest.mark.skipif(transformers_version() < (5, 19), reason="before 5.19 kernels are resolved in other ways")
LOUD = transformers_version() >= (5, 20)
"""Does transformers itself raise where a kernel that is told is missing?"""
PAD = 256
RIGHT, WRONG = 1e-4, 0.5
TWO_KEYS = ["olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"]
"""Gated DeltaNet: the convolution reads `seq_idx`, the rule `cu_seq_lens_q`."""
ONE_KEY = ["bamba", "granitemoehybrid", "lfm2", "lfm2_moe"]
"""Mamba-2 and convolutions alone: both read `seq_idx`, and the dense mask keeps attention apart."""
ROWS = {
    "short": (6, 8, 5),
    "turned": (5, 8, 6),
    "single tokens": (1, 7, 1, 1, 9),
    "shorter than the taps": (3, 2, 1, 4, 3),
    "chunk borders": (63, 64, 65, 2),
    "a long one first": (127, 1, 17),
}
FORGOTTEN = {"cu alone": ("seq_idx",), "seq_idx alone": ("cu_seq_lens_q",), "neither": ("cu_seq_lens_q", "seq_idx")}


@cache
def built(name, attn="sdpa"):
    return tiny_model(name, vocab_size=PAD + 1, attn_implementation=attn)


def samples(lengths):
    drawn = torch.randint(3, PAD, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in drawn.split(lengths)]


def ours(model, **settings):
    return PaddingCollator(pad_token_id=PAD, model=model, padding_free=True, **settings)


def theirs(model):
    """transformers' own collator tells positions, unless asked for more."""
    adapter, flatten = BatchAdapter(model, padding_free=True), DataCollatorWithFlattening()
    return lambda features: adapter(flatten(features))


def outcome(model, batches):
    """Logits of the tokens, and the gradient of every parameter that got one, over all batches together."""
    model.zero_grad()
    found, start = [], 0
    for batch, T in batches:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[0, :T]
        drawn = torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(1)) / logits.shape[1] ** 0.5
        torch.sin(logits @ drawn + torch.arange(start, start + T)).sum().backward()  # another weight for each place
        found.append(logits.detach())
        start += T
    return torch.cat(found), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model, features):
    ids = [torch.tensor([each["input_ids"]]) for each in features]
    return outcome(model, [({"input_ids": own}, own.shape[1]) for own in ids])


def errors(model, batch, truth):
    """The largest difference of a logit; and of a gradient, as a part of the largest gradient."""
    logits, gradients = outcome(model, [(batch, len(truth[0]))])
    assert gradients.keys() == truth[1].keys()
    largest = max(float(each.abs().max()) for each in truth[1].values())
    wrong = [(gradients[name] - own).abs().max().nan_to_num(torch.inf) / largest for name, own in truth[1].items()]
    return float((logits - truth[0]).abs().max().nan_to_num(torch.inf)), float(max(wrong))


def without(batch, *keys):
    return {key: value for key, value in batch.items() if key not in keys}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TWO_KEYS + ONE_KEY)
def test_every_sequence_of_a_flat_row_is_as_alone(name, attn):
    model = built(name, attn)
    with reference_kernels(model):
        for row, lengths in ROWS.items():
            features = samples(lengths)
            truth = alone(model, features)
            rows = {"ours": ours(model)(features), "theirs": theirs(model)(features)}
            width = sum(lengths) + 7
            rows["a tail"] = ours(model, padding="max_length", max_length=width)(features)
            assert rows["a tail"]["input_ids"].shape == (1, width)
            for who, batch in rows.items():
                assert max(errors(model, batch, truth)) < RIGHT, (row, who)


@pytest.mark.parametrize("name", TWO_KEYS + ONE_KEY)
def test_each_forgotten_boundary_is_seen(name):
    """Recurrent layers of one key read `seq_idx` alone: there `cu_seq_lens_q` is for flash attention."""
    model, features = built(name), samples(ROWS["short"])
    with reference_kernels(model):
        truth, batch = alone(model, features), ours(model)(features)
        for what, keys in FORGOTTEN.items():
            found = errors(model, without(batch, *keys), truth)
            print(f"{name}, {what}: logits {found[0]:.1e}, gradients {found[1]:.1e}")
            needed = name in TWO_KEYS or "seq_idx" in keys
            assert min(found) > WRONG if needed else max(found) < RIGHT, what
        assert min(errors(model, batch | {"attention_mask": None}, truth)) > WRONG  # attention runs on


@pytest.mark.parametrize("missing", ["fla", "causal_conv1d"])
@pytest.mark.parametrize("name", TWO_KEYS)
def test_a_missing_kernel_is_refused_where_the_model_is_known(name, missing):
    """What would come of it: from 5.20 on transformers raises, but not for `cu_seq_lens_q` alone; before, never."""
    model, features = built(name), samples(ROWS["short"])
    with reference_kernels(model):
        truth, batch = alone(model, features), ours(model)(features)
    with reference_kernels(model, without=(missing,)):
        for collate in (ours(model), theirs(model)):
            with pytest.raises(UnsupportedFormError, match=f"without the package {missing}[.]") as caught:
                collate(features)
            assert "Give each sequence its own row (padding_free=False)" in str(caught.value)
        for what, keys in {"both": (), **FORGOTTEN}.items():
            told = without(batch, *keys)
            if LOUD and (("seq_idx" in told) or (missing == "fla" and "cu_seq_lens_q" in told)):
                with pytest.raises(ValueError, match="can't keep packed sequences apart"):
                    model(**without(told, "labels"))
            else:
                assert min(errors(model, told, truth)) > WRONG, what
        padded = PaddingCollator(pad_token_id=PAD, model=model, padding_side="left")(features)  # the remedy
        keep = padded["attention_mask"] > 0
        logits = model(**without(padded, "labels")).logits[keep].detach()
        assert float((logits - truth[0]).abs().max()) < RIGHT


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_a_config_does_not_tell_which_kernels_are_here(name):
    """From 5.20 on transformers asks them itself; before, nobody would."""
    model, features = built(name), samples(ROWS["short"])
    collate = PaddingCollator(pad_token_id=PAD, model=model.config, consumer="transformers", padding_free=True)
    if not LOUD:
        with pytest.raises(UnsupportedFormError, match="a config does not tell"):
            collate(features)
        return
    batch = collate(features)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**without(batch, "labels"))
    with reference_kernels(model):
        assert max(errors(model, batch, alone(model, features))) < RIGHT


def test_kernels_are_put_back():
    model = built("qwen3_next")
    before = ask(model)
    with reference_kernels(model):
        with reference_kernels(model, without=("fla",)):
            assert "without the package fla" in ask(model)
        assert ask(model) == ""
        with pytest.raises(RuntimeError, match="mine"), reference_kernels(model):
            raise RuntimeError("mine")
        assert ask(model) == ""
    assert ask(model) == before != ""


def test_delivery_tells_that_a_kernel_is_missing():
    """transformers before 5.20 runs on; later ones raise while the check runs the model."""
    model, features = built("qwen3_5_text"), samples(ROWS["short"])
    with reference_kernels(model):
        batch = without(ours(model)(features), "labels")
        assert len(check_delivery(model, batch).layers) == 3
    with reference_kernels(model, without=("causal_conv1d",)):
        with pytest.raises(CollateError if not LOUD else ValueError, match="without") as caught:
            check_delivery(model, batch)
        assert LOUD or "causal_conv1d_fn is plain torch" in str(caught.value)


def test_delivery_tells_that_a_kernel_is_not_asked():
    """Kimi Linear hands its rule `cu_seq_lens_q`, and the kernel takes `cu_seqlens`."""
    model, features = built("kimi_linear"), samples(ROWS["short"])
    with reference_kernels(model):
        adapter = BatchAdapter(model, padding_free=True)
        adapter.model = replace(adapter.model, model_type="qwen3_next")
        batch = adapter(without(DataCollatorWithFlattening()(features), "labels"))
        with pytest.raises(CollateError, match="kimi_linear do not ask where a sequence begins"):
            check_delivery(model, batch)


def ask(model):
    return BatchAdapter(model).model.boundaries_unread


# --- packages that are installed: transformers resolves them itself


@cache
def run(*packages):
    """What a process sees that has stand-ins for these packages on its path."""
    code = os.path.join(os.path.dirname(__file__), "kernel_packages.py")
    done = subprocess.run([sys.executable, code, *packages], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_installed_packages_are_found_and_make_flat_rows_right(name):
    found = run("fla", "causal_conv1d")[name]
    print(name, found)
    assert (found["unread"], found["refused"]) == ("", "")
    assert found["ours"] < RIGHT
    assert found["called"] == ["causal_conv1d_fn", "chunk_gated_delta_rule"]
    assert "chunk_size" not in found["got"]  # what a kernel does not take is dropped in silence
    assert {"cu_seqlens", "seq_idx"} <= set(found["got"])
    assert min(found[what] for what in FORGOTTEN) > WRONG


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_fla_without_causal_conv1d_is_refused(name):
    """transformers raises for `seq_idx` from 5.20 on, and for `cu_seq_lens_q` alone never."""
    found = run("fla")[name]
    print(name, found)
    assert found["unread"] == "causal_conv1d_fn is plain torch, without the package causal_conv1d"
    assert found["unread"] in found["refused"]
    assert found["cu alone"] > WRONG
    assert "can't keep packed sequences apart" in found["both"] if LOUD else found["both"] > WRONG
