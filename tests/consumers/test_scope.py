"""The scope: what is no causal language model, backbone of one or head on one is left as it came, and that is said once."""

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402

from collate_npu import BatchAdapter, CollateError, ContextParallel, PaddingCollator, adapt, wrap_collator  # noqa: E402
from collate_npu.consumers.model_traits import out_of_scope_reason  # noqa: E402
from collate_npu.errors import UnsupportedFormError  # noqa: E402
from collate_npu.testing import byte_tokenizer, tiny_model  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
AHEAD, TWO, SPAN = "its tokens attend later tokens", "it has an encoder beside its decoder", "its head predicts a span"
KINDS = {
    **dict.fromkeys(("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification", "GPT2ForTokenClassification"), ""),
    **dict.fromkeys(("MambaForCausalLM", "BloomForCausalLM", "BartForCausalLM", "Qwen2_5_VLForConditionalGeneration"), ""),
    **dict.fromkeys(("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "XLNetLMHeadModel"), AHEAD),
    **dict.fromkeys(("T5ForConditionalGeneration", "BartModel", "WhisperForConditionalGeneration"), TWO),
    "LlamaForQuestionAnswering": SPAN,
}
SAMPLES = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8, 9], "labels": [7, 8, 9]}]


def bert(**fields):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 257}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **fields)).eval()


def left_batch():
    keep = torch.tensor([[0, 1, 1], [1, 1, 1]])
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    return {"input_ids": ids, "attention_mask": keep, "labels": ids.clone(), "mine": "a string"}


def said(make):
    """What it makes, and what is warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(each.message) for each in caught if "collate_npu" in str(each.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_tells_whether_it_is_in_scope(kind):
    cls = getattr(transformers, kind, None) or pytest.skip("this transformers has none")
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert out_of_scope_reason(model)[: len(SPAN)] == KINDS[kind][: len(SPAN)]
    if kind != "LlamaForQuestionAnswering":
        assert bool(out_of_scope_reason(model.config)) == bool(KINDS[kind])


HEADS = ("MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
IN_SCOPE = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")


def test_a_family_of_heads_without_a_causal_language_model_is_out_of_scope():
    """Whatever its layers say: those of MarkupLM, LiLT and CANINE say nothing, on 4.57 those of BERT neither."""
    headed, known = (
        {name for head in heads for name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")}
        for heads in (HEADS, IN_SCOPE)
    )
    assert len(headed - known) > 30
    for name in sorted(headed - known):
        assert out_of_scope_reason(transformers.CONFIG_MAPPING[name]()), name


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str)
def test_a_causal_family_whose_config_says_that_it_attends_both_ways_is_out_of_scope(fields):
    model = tiny_model("gemma3_text", vocab_size=60)
    vars(model.config).update(fields)
    assert out_of_scope_reason(model) == out_of_scope_reason(model.config) == AHEAD


@pytest.mark.parametrize("given", [{"model": "module"}, {"model": "config"}, {"model_type": "bert"}], ids=str)
def test_an_adapter_returns_the_batch_that_it_got(given):
    model, batch = bert(), left_batch()
    named = {"module": model, "config": model.config}
    settings = {name: named.get(value, value) for name, value in given.items()}
    adapter, told = said(lambda: BatchAdapter(**settings, consumer="transformers"))
    assert len(told) == 1
    assert "collate-npu guide scope" in told[0]
    for out in (adapter(batch), adapter.with_segments(batch)[0]):
        assert [*out] == [*batch]
        assert all(out[key] is value for key, value in batch.items())
    assert adapter.with_segments(batch)[1].lengths == ((2,), (3,))
    assert AHEAD in adapter.choose(adapter.with_segments(batch)[1]).why
    with pytest.raises(UnsupportedFormError, match="left as they came"):
        BatchAdapter(**settings, consumer="transformers", context_parallel=ContextParallel(2, 0))


def test_adapt_puts_nothing_on_the_model():
    model = bert()
    before = [dict(vars(module)) for module in model.modules()]
    handle, told = said(lambda: adapt(model))
    assert len(told) == 1
    assert [dict(vars(module)) for module in model.modules()] == before
    handle.remove()


@pytest.mark.parametrize("side", ["left", "right"])
def test_collators_pad_as_those_of_transformers(side):
    model, tokenizer = bert(), byte_tokenizer(padding_side=side)
    inner = transformers.DataCollatorForSeq2Seq(tokenizer)
    expected = dict(inner([dict(sample) for sample in SAMPLES]))
    for make in (lambda: PaddingCollator(tokenizer, model), lambda: wrap_collator(inner, model=model)):
        collator, told = said(make)
        assert len(told) == 1
        found = collator([dict(sample) for sample in SAMPLES])
        assert {*found} == {*expected}
        assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected)


def test_samples_of_choices_pass():
    choices = {"input_ids": torch.ones(2, 2, 3, dtype=torch.long), "labels": torch.tensor([0, 1])}
    wrapped = wrap_collator(lambda samples: choices, model=bert())
    assert wrapped([{"input_ids": [[5, 6], [5, 7, 8]]}] * 2).keys() == choices.keys()


@pytest.mark.parametrize("settings", [{"padding_free": True}, {"packing": True, "max_length": 8}], ids=str)
def test_rows_of_several_samples_are_refused_when_the_collator_is_made(settings):
    with pytest.raises(UnsupportedFormError, match=AHEAD):
        PaddingCollator(byte_tokenizer(), bert(), **settings)


def test_a_call_that_is_not_causal_passes_as_it_is():
    model, batch = tiny_model("qwen3", vocab_size=60), left_batch() | {"is_causal": False}
    assert all(value is batch[key] for key, value in BatchAdapter(model)(batch).items())
    assert wrap_collator(lambda _: batch, model=model)([{"input_ids": [1]}] * 2)["labels"] is batch["labels"]
    seen = []
    with adapt(model):
        model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
        batch.pop("mine")
        model(**batch)
    assert all(seen[0][key] is value for key, value in batch.items())


def test_learned_tokens_of_peft_before_the_rows_are_out_of_scope():
    peft = pytest.importorskip("peft")
    for settings in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        made = settings(task_type="CAUSAL_LM", num_virtual_tokens=3)
        tuned = peft.get_peft_model(tiny_model("qwen3", vocab_size=60), made)
        handle, told = said(lambda tuned=tuned: adapt(tuned))
        assert "learned tokens" in told[0]
        handle.remove()
    lora = peft.get_peft_model(tiny_model("qwen3", vocab_size=60), peft.LoraConfig(target_modules="all-linear"))
    assert out_of_scope_reason(lora) == ""


def test_a_wrapped_collator_that_flattens_is_refused():
    with pytest.raises(CollateError, match="only padded"):
        wrap_collator(lambda samples: left_batch(), model=bert(), padding_free=True)
