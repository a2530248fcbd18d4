"""What a command line names is checked before any model is built, and refused with the reason."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.audit.candidates import (
    MOST_IDS,
    build,
    candidates,
    check_attention,
    check_checkpoint,
    check_is_run,
    check_named,
    load_checkpoint,
    load_tokenizer,
    resolved_kernels,
)

pytestmark = pytest.mark.models


def test_names_are_taken_as_they_are_and_the_default_leaves_out_what_cannot_be_tested():
    assert candidates(["rwkv"], ["eager"]) == ([("rwkv", "eager")], {})
    chosen, excluded = candidates([], ["eager"])
    assert "rwkv (eager)" in excluded
    assert ("qwen3_next", "eager") in chosen
    assert candidates([], ["flex_attention"])[1] == {}, "what may have to compile is not measured"


HOW = {"tokenizer": None, "device": "cpu", "dtype": torch.float32, "seed": 0, "trust": False}


def test_a_tiny_model_has_an_embedding_for_the_largest_id_and_for_no_more_than_a_million(monkeypatch):
    with pytest.raises(CollateError, match=f"token id {MOST_IDS}"):
        build("llama", "sdpa", **HOW, largest_id=MOST_IDS)
    assert build("llama", "sdpa", **HOW, largest_id=700)[0].get_input_embeddings().num_embeddings == 701
    pair = SimpleNamespace(is_encoder_decoder=True)
    monkeypatch.setattr("collate_npu.tools.audit.candidates.tiny_config", lambda *_, **__: pair)
    with pytest.raises(CollateError, match="encoder"):
        build("llama", "sdpa", **HOW, largest_id=5)


def test_the_id_of_padding_is_the_tokenizers_else_the_models_else_0(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.audit.candidates.byte_tokenizer", lambda **_: Reader())
    for of_config, told in ((3, 3), (None, 0)):
        model = tiny_model("llama", vocab_size=8)
        model.config.pad_token_id = of_config
        monkeypatch.setattr("collate_npu.tools.audit.candidates.tiny_model", lambda *_, made=model, **__: made)
        assert build("llama", "sdpa", **HOW, largest_id=5)[2] == told


class Reader:
    pad_token_id = None

    def __len__(self):
        return 5


@pytest.mark.parametrize(("name", "said"), [("owner/model", "hf download"), *((name, "spelling") for name in (
    "./owner", "/no/model", "~/model", "owner/folder/model"))])  # fmt: skip
def test_what_looks_like_a_path_is_not_sought_on_the_hub(name, said):
    with pytest.raises(CollateError, match=said):
        check_named([name], ["sdpa"], tokenizer=None, device="cpu", dtype=torch.float32, trust=False)


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [
        ("flash_attention_2", "cpu", r"\(ImportError: .* does not run there"),
        ("sdp", "cpu", r"Did you mean sdpa\?"),
        ("mine", "cpu", "Name one of them"),
        ("owner/kernel", "cpu", r"\(RuntimeError: only Ampere GPUs\)"),
    ],
)
def test_attention_that_cannot_run_is_refused_with_the_reason(monkeypatch, name, device, said):
    """A kernel may fail only when it is called."""

    def broken(*args, **kwargs):
        model = tiny_model(*args, **{**kwargs, "attn_implementation": "sdpa"})
        model.forward = lambda **kwargs: exec("raise RuntimeError('only Ampere GPUs')")
        return model

    if name == "owner/kernel":  # no look on the hub from a test
        monkeypatch.setattr("collate_npu.tools.audit.candidates.tiny_model", broken)
    with pytest.raises(CollateError, match=said):
        check_attention(name, device, torch.float32)


@pytest.mark.parametrize(("name", "shared"), [("llama", True), ("bert", False)])
def test_a_language_model_is_padded_with_its_end_as_most_checkpoints_are(name, shared):
    how = {"tokenizer": None, "device": "cpu", "dtype": torch.float32, "seed": 0, "trust": False, "largest_id": 5}
    _, reader, pad_token_id = build(name, "sdpa", **how)
    assert pad_token_id == reader.pad_token_id
    assert (pad_token_id == reader.eos_token_id) == shared


def test_a_model_that_runs_another_attention_was_not_audited_with_the_one_named(monkeypatch):
    def runs(name, **fields):
        return SimpleNamespace(config=SimpleNamespace(_attn_implementation=name, **fields))

    heads = {"num_attention_heads": 2}
    with pytest.raises(ValueError, match="runs eager in the place of sdpa"):
        check_is_run(runs("eager", **heads), "sdpa")
    check_is_run(runs("kernels-community/flash-attn2", **heads), "flash_attention_2")
    check_is_run(runs("sdpa"), "eager")  # no attention at all
    for one, other in (("flash_attention_2", "sdpa"), ("eager", "flash_attention_2")):
        with pytest.raises(ValueError, match=f"runs {one} in the place of {other}"):
            check_is_run(runs(one, **heads), other)
    monkeypatch.setattr("collate_npu.tools.audit.candidates.tiny_model", lambda *_, **__: runs("eager", **heads))
    with pytest.raises(ValueError, match="runs eager in the place of sdpa"):
        build("llama", "sdpa", **HOW, largest_id=5)


def test_a_checkpoint_is_of_the_class_that_it_names_and_has_one_stack(tmp_path):
    tiny_model("bert", vocab_size=8).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    kinds = {"BertForMaskedLM": ["BertForMaskedLM"], "BertModel": ["Gone", "BertModel"], "BertLMHeadModel": None}
    for made, named in kinds.items():
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": named}), encoding="utf-8")
        assert type(load_checkpoint(str(tmp_path), trust=False)).__name__ == made
    (tmp_path / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    with pytest.raises(CollateError, match="t5"):
        check_checkpoint(str(tmp_path), trust=False)


def test_a_tokenizer_pads_with_its_own_token_else_with_its_eos(tmp_path):
    reader = byte_tokenizer(pad_is_eos=False)
    for pad, padded_with in (("<|pad|>", 257), (None, 256)):
        reader.pad_token = pad
        reader.save_pretrained(tmp_path)
        assert load_tokenizer(tmp_path).pad_token_id == padded_with
    reader.eos_token = None
    reader.save_pretrained(tmp_path)
    with pytest.raises(CollateError, match="neither pad nor eos"):
        load_tokenizer(tmp_path)


@pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="an older transformers does not say")
def test_where_each_function_comes_from():
    assert resolved_kernels(tiny_model("qwen3_next", vocab_size=8))["causal_conv1d_fn"] == "torch"
    assert resolved_kernels(tiny_model("llama", vocab_size=8)) == resolved_kernels(torch.nn.Linear(1, 1)) == {}
