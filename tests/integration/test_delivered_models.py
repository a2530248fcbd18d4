"""Delivery on transformers' own models: of a right run nobody says anything, and each lost fact is seen, by every entrance.

Entrances are letters: "c" is `check_delivery`, "a" the same with samples alone, "w" is `watch`, and "i" is
`assert_padding_invariant`. A capital one names the layer, or says what was lost.
"""

import copy
import inspect
import pickle

import pytest
import torch

pytest.importorskip("transformers")
from differential import FAMILIES, PAD, Case, batch_of as stranger, made, model_of, samples_of, wrapped
from trained import trainer_of

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, check_delivery, guard_first_batch
from collate_npu.integrations.transformers import DeliveryCallback
from collate_npu.masks import dense
from collate_npu.proof import watch
from collate_npu.proof.invariance import assert_padding_invariant
from collate_npu.releases import KERNELS_TOLD

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
LENGTHS = ((9,), (5,), (12,))
ROWS = samples_of(Case(lengths=LENGTHS))
DENSE = "qwen3_5_text" if "qwen3_5_text" in FAMILIES["hybrid"] else "qwen3_next"
INDEXED = "deepseek_v32" if "deepseek_v32" in FAMILIES["decoder"] else "qwen3"
"""An indexer picks the keys of each query."""


def fresh(family, attn="sdpa"):
    return copy.deepcopy(model_of(family, "CausalLM", attn))


def collator_of(model, **settings):
    return PaddingCollator(pad_token_id=PAD, padding_side="left", model=model, **settings)


def left_batch(model):
    return {key: value for key, value in BatchAdapter(model)(collator_of(model)(ROWS)).items() if key != "labels"}


def said_by(entrance, model, batch, collate):
    try:
        if entrance == "w":
            with watch(say=False) as seen:
                model(**batch)
            return "; ".join(map(str, seen.faults))
        if entrance == "i":
            assert_padding_invariant(model, collate, [row["input_ids"] for row in ROWS], gradients=False)
        else:
            check_delivery(model, batch, alone=entrance == "a")
    except (CollateError, AssertionError) as error:
        return str(error)
    return ""


# --- faults


def handed(at, in_training=False, **changes):
    """A layer is called with another argument."""

    def plant(model):
        def look(module, args, kwargs):
            named = {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}
            told = {key: change(named[key]) for key, change in changes.items() if named.get(key) is not None}
            return ((), {**named, **told}) if not in_training or module.training else None

        model.get_submodule(at).register_forward_pre_hook(look, with_kwargs=True)

    return plant


def gives(at, change):
    def plant(model):
        model.get_submodule(at).register_forward_hook(lambda module, args, given: change(given))

    return plant


def own_loss(loss):
    def plant(model):
        model.loss_function = lambda logits, labels, **_: loss(logits[:, :-1], labels[:, 1:])

    return plant


def summed(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def by_head(mask):
    heads = mask.repeat(1, 4, 1, 1)
    heads[:, 1] = torch.eye(mask.shape[-1]).bool() & mask[:, 0]
    return heads


def in_4d(polarity):
    return lambda keep: dense(Segments.from_keep(keep), polarity=polarity)


def mapping_of(**lost):
    def made_of(keep):
        return {"full_attention": in_4d("keep")(keep), "linear_attention": keep.bool(), **lost}

    return made_of


def one_axis(positions):
    positions = (positions[None] if positions.ndim == 2 else positions).repeat(3 if positions.ndim == 2 else 1, 1, 1)
    return torch.cat([positions[:-1], positions[-1:].flip(-1)])


none, ones = lambda x: None, torch.ones_like
ATTENTION, RULE, OUT = "model.layers.1.self_attn", "model.layers.0.linear_attn", "model.layers.1.mlp"
FAULTS = {
    "no mask in one layer": ("qwen3_next", handed(ATTENTION, attention_mask=none), "CWai", ATTENTION),
    "no mask in training": ("qwen3_next", handed(ATTENTION, True, attention_mask=none), "CWai", ATTENTION),
    "no mask of eager attention": ("llama/eager", handed(ATTENTION, attention_mask=none), "CWai", ATTENTION),
    "no mask behind an indexer": (INDEXED, handed("model", attention_mask=none, position_ids=none), "CWai", "self_attn"),
    "a 2D mask rolled": ("qwen3_next", handed(RULE, attention_mask=lambda x: x.roll(1, 1)), "CWai", RULE),
    "a 2D mask turned round": ("qwen3_next", handed(RULE, attention_mask=lambda x: x == 0), "CW", RULE),
    "a mask turned round": ("llama", handed(ATTENTION, attention_mask=lambda x: x == 0), "CW", ATTENTION),
    "no mask in a scan": ("bamba", handed("model.layers.0.mamba", attention_mask=none), "CWai", "layers.0.mamba"),
    "no mask in a convolution": ("lfm2", handed("model.layers.0.conv", attention_mask=none), "CWai", "0.conv"),
    "a 2D mask of ones": ("qwen3_next", handed(RULE, attention_mask=ones), "CWai", RULE),
    "no 2D mask in training": ("qwen3_next", handed(RULE, True, attention_mask=none), "CWai", RULE),
    "a mask that one head has not": ("qwen3_next", handed(ATTENTION, attention_mask=by_head), "CWai", ATTENTION),
    "numbers for True and False": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.float()), "CWai", ATTENTION),
    "a mask that is too weak": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: -5.0 * ~x), "CWai", ATTENTION),
    "another row's mask": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.roll(1, 0)), "CWai", ATTENTION),
    "a mask cut by one": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.roll(-1, -1)), "CWai", ATTENTION),
    "states rolled behind a layer": ("qwen3", gives(OUT, lambda x: x.roll(1, 1)), "cai", ""),
    "rows swapped behind a layer": ("qwen3", gives(OUT, lambda x: x.flip(0)), "cai", ""),
    "states less their mean": ("qwen3", gives("model.norm", lambda x: x - x.mean((0, 1))), "cai", ""),
    "states times the width": ("qwen3", gives("model.norm", lambda x: x * x.shape[1] / 8), "ai", ""),
    "no mask at all": ("qwen3_next", handed("model", attention_mask=none), "CW", RULE),
    "a bare 4D mask": ("qwen3_next", handed("model", attention_mask=in_4d("keep")), "CW", RULE),
    "a bare additive 4D mask": ("qwen3_next", handed("model", attention_mask=in_4d("bias")), "CW", RULE),
    "a bare 4D mask of Megatron's": ("qwen3_next", handed("model", attention_mask=in_4d("masked")), "CW", RULE),
    "a mapping without attention's": ("qwen3_next", handed("model", attention_mask=mapping_of(full_attention=None)), "CW",
                                      ATTENTION),
    "half a mapping": ("qwen3_next", handed("model", attention_mask=mapping_of(linear_attention=None)), "CW", RULE),
    "a window lost by a mask": ("mistral", handed("model", attention_mask=in_4d("keep")), "CW", "more than sliding(6)"),
    "a window lost by a bias": ("gemma3_text/eager", handed("model", attention_mask=in_4d("bias")), "CW", "sliding(6)"),
    "chunks lost by a mask": ("llama4_text", handed("model", attention_mask=in_4d("keep")), "CW", "more than chunked(6)"),
    "one axis of positions turned": (DENSE, handed("model", position_ids=one_axis), "CWa", "rotary_emb"),
    "positions turned round": ("llama", handed("model", position_ids=lambda x: x.flip(1)), "CWai", "rotary_emb"),
    "positions that count padding": ("gpt2", handed("transformer", position_ids=lambda x: ones(x).cumsum(1)), "CWai", "wpe"),
    "a loss by padded tokens": ("qwen3", own_loss(lambda x, y: summed(x, y) / y.numel()), "i", ""),
    "a loss of padding": ("qwen3", own_loss(lambda x, y: summed(x, y.clamp(min=0)) / y.numel()), "i", ""),
    "a loss by rows": ("qwen3", own_loss(lambda x, y: summed(x, y) / len(y) ** 2 / 9), "i", ""),
}  # fmt: skip
HERE = [name for name in FAULTS if DENSE != "qwen3_next" or "axis" not in name]
HERE = [x for x in HERE if KERNELS_TOLD.holds() or (FAULTS[x][0] not in ("bamba", "lfm2") and "mapping" not in x)]
"""Before 5.19 these get other masks from transformers itself."""


@pytest.mark.draws(6)
@pytest.mark.parametrize("name", HERE)
def test_who_claims_to_see_a_fault_in_a_model_sees_it(name):
    family, plant, claims, word = FAULTS[name]
    for entrance in claims:
        model = fresh(*family.split("/")).train("train" in name)
        batch, collate = left_batch(model), collator_of(model)
        plant(model)
        said = said_by(entrance.lower(), model, batch, collate)
        assert said, entrance
        assert not entrance.isupper() or word in said, (entrance, said)


@pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="other masks")
def test_a_layer_that_ignores_its_mask_is_told(monkeypatch):
    batch = left_batch(model := fresh("qwen3_next"))  # the copy is asked before
    monkeypatch.setattr(inspect.getmodule(type(model)), "apply_mask_to_padding_states", lambda hidden, mask: hidden)
    assert "goes on from padding" in said_by("c", model, batch, None)


def test_sequences_by_positions_or_by_a_dense_mask_reach_attention_alone():
    """As in radixark/miles, pull request 2213, and in LLaMA-Factory, pull request 10436."""
    flat, model = Segments.from_lengths([[6, 5, 5]]), fresh("qwen3_next")
    for mask in ({}, {"attention_mask": dense(flat, polarity="bias")}):
        with watch(say=False) as seen:
            model(input_ids=torch.arange(1, 17)[None], position_ids=flat.position_ids, use_cache=False, **mask)
        assert {each.layer for each in seen.faults} == {RULE, RULE.replace("0", "2")}


def test_a_batch_that_does_not_tell_is_judged_by_the_config():
    """Rows that look padded."""
    model, full = fresh("mistral", "eager"), torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    bias = torch.where(full, 0.0, torch.finfo(torch.float32).min)
    with watch(say=False) as seen:
        for ids in ([1] * 12, [1, 1, *range(10)]):
            model(input_ids=torch.tensor([ids]), attention_mask=bias)
    assert "it attends 12 tokens back, and the config says sliding(6)" in {each.why for each in seen.faults}


# --- right runs

BASE = ["qwen3_next", DENSE, "qwen3", "mistral", "gemma3_text", "llama4_text", INDEXED]
BASE += ["bamba", "jamba", "lfm2"] if KERNELS_TOLD.holds() else []
RIGHT = {f"{name}, {side}": {"family": name, "side": side} for name in BASE for side in ("left", "right")}
RIGHT |= {f"{name}, eager": {"family": name, "attn": "eager", "side": "left"} for name in BASE}
RIGHT |= {f"{name}, trained": {"family": name, "wrapper": "trained", "side": "left"} for name in BASE}
RIGHT |= {f"{name}, flat": {"family": name, "told": "positions", "lengths": ((9, 5, 12),)}
          for name in ("qwen3", "mistral", "llama4_text")}  # fmt: skip
RIGHT |= {f"a {head} head": {"family": "qwen3_next", "head": head, "side": "left"}
          for head in ("base", "SequenceClassification", "TokenClassification")}  # fmt: skip
RIGHT |= {name: {"family": name, "head": "ImageTextToText", "side": "left", "prompt": 0} for name in FAMILIES["vision"]}
RIGHT |= {f"{name}, encoder": {"family": name, "head": "MaskedLM"} for name in ("bert", "modernbert")}
RIGHT |= {f"{name}, no known kernel": {"family": name, "attn": "eager"} for name in ("trocr",)}


@pytest.mark.draws(6)
@pytest.mark.parametrize("name", RIGHT)
def test_nobody_says_anything_of_a_right_run(name, capsys):
    """Windows and chunks of 6; the layers of a vision tower have other tokens."""
    case = Case(**{"lengths": LENGTHS, "prompt": None} | RIGHT[name])
    model, rows = wrapped(case), samples_of(case)
    batch = made("collator" if case.packed else "adapter", case, model, rows, stranger(case, rows))
    batch.pop("labels", None)
    found = check_delivery(model, batch, alone=not case.vision)
    assert found.layers or found.leak_free
    assert not any("vis" in layer for layer in found.layers)
    if case.vision:
        with pytest.raises(CollateError, match="images of a batch"):
            check_delivery(model, batch, alone=True)
    else:
        assert all(error <= found.alone.limit < 1e-3 for error in found.alone.errors.values())
    unknown = "no known kernel" in name
    assert not unknown or "no known kernel ran, and no tokens leak: what padding" in str(found)
    if not unknown:
        guard_first_batch(model)
    with watch(say=False) as seen:
        model(**batch)
    assert seen.faults == []
    assert ("got what the batch says" in capsys.readouterr().out) != unknown
    if case.head == "CausalLM" and not unknown:
        collate = collator_of(model, **({"padding_free": True} if case.packed else {}))
        assert said_by("i", model, batch, collate) == ""


@pytest.mark.slow  # it compiles
@torch.no_grad()
def test_flex_attention_is_seen():
    model = fresh("llama", "flex_attention")
    batch = left_batch(model)
    assert said_by("w", model, batch, None) == ""
    handed(ATTENTION, attention_mask=none)(model)
    assert ATTENTION in said_by("w", model, batch, None)


def test_a_token_whose_embedding_is_zero_may_count_for_nothing():
    model, keep = fresh("qwen3_next"), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.tensor([[PAD, PAD, 9, 9, 7], [4, 9, 5, 6, 9]])
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = 0
    check_delivery(model, {"input_ids": ids, "attention_mask": keep}, alone=True)
    for mask, why in ((None, "goes on from padding"), (keep * (ids != 9), "is real, and the kernel treats it as padding")):
        with pytest.raises(CollateError, match=why):  # the second as where the end of a text is the pad token
            check_delivery(model, {"input_ids": ids, "attention_mask": mask}, segments=Segments.from_keep(keep > 0))


def test_layers_of_other_names_are_asked_what_they_were_handed():
    model = fresh("qwen3")
    for layer in model.model.layers:
        own = type(layer.self_attn)
        layer.self_attn.__class__ = type("Looker", (own,), {"__module__": own.__module__})
    batch = left_batch(model)
    assert len(check_delivery(model, batch).layers) == len(model.model.layers)
    with pytest.raises(CollateError, match="goes on from padding"):
        check_delivery(model, batch | {"attention_mask": None}, segments=Segments.from_keep(batch["input_ids"] != PAD))


# --- what is left behind


def test_the_model_is_left_as_it_was_and_nan_is_wrong():
    model = fresh("qwen3").train()
    check_delivery(model, batch := left_batch(model), alone=True)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.get_output_embeddings().weight[3].fill_(float("nan"))
    assert "nan" in said_by("a", model, batch, None)


def test_steps_end_with_the_optimizer_and_then_all_is_as_it_was(capsys):
    """A full disk, and copies of the model that are probed meanwhile, change nothing."""
    sdpa, call = torch.nn.functional.scaled_dot_product_attention, torch.nn.Module._call_impl
    with watch(steps=2, out="/dev/full") as seen:
        assert torch.nn.functional.scaled_dot_product_attention is not sdpa
        model = fresh("llama").train()
        model.config.rms_norm_eps = 1.25e-6  # no other test has probed it
        optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), left_batch(model)
        for _ in range(4):
            for _ in range(2):
                model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert [forward.step for forward in seen.forwards] == [0, 0, 1, 1]
    assert torch.nn.Module._call_impl is call
    assert pickle.loads(pickle.dumps(model.config)).model_type == "llama"
    assert "nothing more is written there" in capsys.readouterr().err


def test_the_guard_looks_once_and_at_positional_arguments_too():
    model = fresh("qwen3")
    batch = left_batch(model)
    wrong = batch["input_ids"], in_4d("masked")(batch["attention_mask"])
    guard_first_batch(model)
    with pytest.raises(CollateError, match="attends padding"):
        model(*wrong)
    model(*wrong)  # it is gone
    guard_first_batch(model)()
    model(*wrong)
    guard_first_batch(model)
    with pytest.raises(CollateError, match="compiled"):  # after it was guarded, as a Trainer compiles
        torch.compile(model, backend="eager")(**batch)


def test_a_trainer_stops_at_the_first_batch_that_is_wrong(tmp_path, monkeypatch):
    """Or at another collator, at one that is none, and at a compiled model."""
    model = fresh("qwen3_next")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which transformers 4 sets, for all that follows
    right = collator_of(model)
    neutral = PaddingCollator(pad_token_id=PAD, padding_side="left", attention_mask="4d")
    bare = lambda rows: {key: value for key, value in neutral(rows).items() if key != "attention_mask_2d"}  # noqa: E731
    for collate, callback, why, how in (
        (right, DeliveryCallback(right, alone=True), "", {}),
        (bare, DeliveryCallback(), "linear_attn", {}),
        (bare, DeliveryCallback(right), "a function that you did not pass", {}),
        (right, DeliveryCallback(right), "compiled", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ):
        trainer = trainer_of(copy.deepcopy(model), collate, tmp_path, ROWS, max_steps=1, save_strategy="no", **how)
        trainer.add_callback(callback)
        if why:
            with pytest.raises(CollateError, match=why):
                trainer.train()
        else:
            trainer.train()
    with pytest.raises(CollateError, match="int"):
        DeliveryCallback(3)
