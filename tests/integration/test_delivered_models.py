"""Delivery on transformers' own models: right hand-overs pass, each wrong one is told by the names of the layers."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import Trainer, TrainingArguments  # noqa: E402

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, check_delivery, guard_first_batch  # noqa: E402
from collate_npu.integrations.transformers import DeliveryCallback  # noqa: E402
from collate_npu.masks import dense  # noqa: E402
from collate_npu.proof.delivery import guard_forward  # noqa: E402
from collate_npu.testing import byte_tokenizer, hybrid_model_types, left_out, tiny_model  # noqa: E402

pytestmark = pytest.mark.models

TOKENIZER = byte_tokenizer(padding_side="left", pad_is_eos=False)
TEXTS = ("a short one", "and this one is a good deal longer", "the third")
ROWS = [{"input_ids": ids, "labels": ids} for ids in (TOKENIZER(text)["input_ids"] for text in TEXTS)]
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
FAMILIES = ("qwen3_next", "qwen3_5_text", "lfm2", "bamba", "jamba")
MODELS = [name for name in FAMILIES if name in hybrid_model_types() and (VERSION >= (5, 13) or name not in left_out())]
DENSE = ("qwen3", "mistral", "gemma3_text")


def model_of(name, attn="sdpa"):
    return tiny_model(name, vocab_size=len(TOKENIZER), attn_implementation=attn)


def encoder():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(TOKENIZER), max_position_embeddings=64, pad_token_id=5, **sizes)
    return transformers.BertForMaskedLM(config).eval()


def wire(side="left", rows=ROWS):
    return PaddingCollator(TOKENIZER, padding_side=side, attention_mask="2d")(rows)


def truth_of(batch):
    return Segments.from_keep(batch["attention_mask_2d"])


def bare(batch, mask, **more):
    return {"input_ids": batch["input_ids"], "attention_mask": mask, **more}


def refused(why, model, batch, segments=None):
    with pytest.raises(CollateError, match=why) as error:
        check_delivery(model, batch, segments=segments)
    return str(error.value)


WAYS = [("sdpa", "left"), ("eager", "left"), ("sdpa", "right")]


@pytest.mark.draws(6)
@pytest.mark.parametrize(("name", "attn", "side"), [(name, *way) for name in (*MODELS, *DENSE) for way in WAYS])
def test_right_batches_pass_and_their_rows_are_those_alone(name, attn, side):
    model = model_of(name, attn)
    adapter = BatchAdapter(model)
    found = check_delivery(model, adapter(wire(side)), alone=True)
    assert found.layers or found.leak_free
    assert set(found.alone.errors) == ({1, 2} if side == "left" else {0, 1})  # that with most padding, and the longest
    assert all(error <= found.alone.limit < 1e-3 for error in found.alone.errors.values())


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_encoder_sees_both_sides_and_no_padding(side):
    model, batch = encoder(), wire(side)
    truth = truth_of(batch)
    batch.pop("attention_mask_2d")  # which it does not take before transformers 5
    check_delivery(model, batch, alone=True)
    refused("attends padding", model, bare(batch, None), truth)
    if VERSION >= (5, 0):  # before, a dense mask raises there
        refused("does not attend all of its sequence", model, bare(batch, dense(truth)), truth)


@pytest.mark.skipif(VERSION < (5, 13), reason="a mapping of masks needs transformers 5.13")
def test_a_mapping_is_right_only_where_both_parts_are():
    model, batch = model_of("qwen3_next"), wire()
    truth = truth_of(batch)
    right = {"full_attention": dense(truth), "linear_attention": truth.keep}
    check_delivery(model, bare(batch, right), alone=True)
    losses = {
        "full_attention": r"layers\.\d\.self_attn: .* got nothing: .* goes on from padding",
        "linear_attention": r"layers\.\d\.linear_attn",
    }
    for kind, why in losses.items():
        refused(why, model, bare(batch, right | {kind: None}))
    eager, batch = model_of("qwen3_next", "eager"), wire("right")  # where None is no triangle
    masks = {"full_attention": None, "linear_attention": truth_of(batch).keep}
    refused(r"self_attn: .*row 0 attends", eager, bare(batch, masks), truth_of(batch))


def test_the_layers_of_a_vision_tower_are_not_asked():
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(image_size=8, patch_size=4, **small)
    text = transformers.Qwen3Config(vocab_size=300, num_key_value_heads=2, head_dim=16, **small)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=299)
    config.vision_feature_select_strategy = "full"
    model = transformers.LlavaForConditionalGeneration(config).eval()
    batch = wire(rows=[{"input_ids": [1, 299, 299, 299, 299, 7]}, {"input_ids": [4, 5, 6]}])
    images = {"pixel_values": torch.randn(1, 3, 8, 8)}
    inputs = BatchAdapter(model)(batch)
    found = check_delivery(model, inputs | images)
    assert found.layers
    assert not any("vision" in name for name in found.layers)
    with pytest.raises(CollateError, match="images of a batch"):
        check_delivery(model, inputs | images, alone=True)


def test_a_layer_that_ignores_its_mask_is_told(monkeypatch):
    model = model_of("qwen3_next")
    batch = BatchAdapter(model)(wire())
    module = __import__(type(model).__module__, fromlist=["x"])
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda hidden, mask: hidden)
    refused(r"layers\.0\.linear_attn.*goes on from padding", model, batch)


def test_chunks_that_the_mask_forgets_are_told():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "head_dim": 16, "num_local_experts": 2}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "attention_chunk_size": 4}
    config = transformers.Llama4TextConfig(vocab_size=len(TOKENIZER), pad_token_id=5, **sizes, **heads)
    model, batch = transformers.Llama4ForCausalLM(config).eval(), wire()
    check_delivery(model, BatchAdapter(model)(batch))
    chunks = r"layers\.2\.self_attn: .*attends more than chunked\(4\)"
    said = refused(chunks, model, bare(batch, dense(truth_of(batch))), truth_of(batch))
    assert "layers.3" not in said  # it attends to all


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"])
def test_models_without_logits_of_tokens(kind):
    try:
        model = getattr(transformers, kind).from_config(model_of("qwen3_next").config).eval()
    except ValueError:
        pytest.skip(f"no {kind} of it in this release")
    with torch.no_grad():
        model.get_input_embeddings().weight[TOKENIZER.pad_token_id] = 1  # a row of zeros is no padding to see
    batch = wire("left")
    found = check_delivery(model, BatchAdapter(model)(batch), alone=True)
    assert found.layers
    assert not found.unchecked
    refused(r"layers\.0\.linear_attn", model, bare(batch, dense(truth_of(batch))), truth_of(batch))


def test_a_token_whose_embedding_is_zero_may_count_for_nothing():
    model = model_of("qwen3_next")
    ids = torch.tensor([[257, 257, 9, 9, 7], [4, 9, 5, 6, 9]])
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = 0
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])}
    check_delivery(model, batch, alone=True)
    truth = Segments.from_keep(batch["attention_mask"] > 0)
    refused("goes on from padding", model, bare(batch, None), truth)
    made_of_ids = batch["attention_mask"] * (ids != 9)  # as where the end of a text is the pad token
    refused(r"layers\.2\.linear_attn.*is real, and the kernel treats it as padding", model, bare(batch, made_of_ids), truth)


def test_layers_of_other_names_are_asked_what_they_were_handed():
    model, batch = model_of("qwen3"), wire()
    for layer in model.model.layers:
        own = type(layer.self_attn)
        layer.self_attn.__class__ = type("Looker", (own,), {"__module__": own.__module__})
    found = check_delivery(model, BatchAdapter(model)(batch))
    assert [name.rpartition(".")[2] for name in found.layers] == ["self_attn"] * len(model.model.layers)
    refused("goes on from padding", model, bare(batch, None), truth_of(batch))


def test_the_model_is_left_as_it_was_and_nan_is_wrong():
    model = model_of("qwen3").train()
    batch = BatchAdapter(model)(wire())
    check_delivery(model, batch, alone=True)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.get_output_embeddings().weight[3].fill_(float("nan"))
    with pytest.raises(CollateError, match="nan"):
        check_delivery(model, batch, alone=True)


def test_numbers_prove_where_no_kernel_is_known():
    model = tiny_model("rwkv", vocab_size=len(TOKENIZER), attn_implementation="eager")
    batch = BatchAdapter(model)(wire("right"))
    found = check_delivery(model, batch, alone=True)
    assert "no known kernel ran, and no tokens leak: what padding" in str(found)
    assert found.unchecked
    assert max(found.alone.errors.values()) <= found.alone.limit


def test_what_is_embedded_by_place_and_by_a_name():
    """Tokens that a layer of positions is called with are none."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "pad_token_id": 5}
    model = transformers.TrOCRForCausalLM(transformers.TrOCRConfig(vocab_size=len(TOKENIZER), **sizes)).eval()
    check_delivery(model, BatchAdapter(model)(wire("right")), alone=True)


def test_the_guard_looks_once_and_at_positional_arguments_too():
    model, batch = model_of("qwen3"), wire()
    wrong = batch["input_ids"], dense(truth_of(batch), polarity="masked")
    guard_first_batch(model)
    with pytest.raises(CollateError, match="attends padding"):
        model(*wrong)
    model(*wrong)  # it is gone
    guard_first_batch(model)()
    model(*wrong)


def test_the_guard_waits_for_the_batch_whose_truth_it_holds(capsys):
    """ms-swift's KTO runs another batch in between."""
    model, batch = model_of("qwen3"), BatchAdapter(model_of("qwen3"))(wire())
    ids = batch["input_ids"]
    guard_forward(model, lambda given: given["input_ids"] is ids, segments=truth_of(wire()))
    model(input_ids=ids[:1].clone())
    assert not capsys.readouterr().out
    model(**batch)
    assert capsys.readouterr().out.count("got what the batch says") == 1


def train(tmp_path, model, collator, **settings):
    arguments = TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=3)
    return Trainer(model, arguments, train_dataset=ROWS, **{"data_collator": collator, **settings})


def test_a_trainer_stops_at_the_first_batch_that_is_wrong(tmp_path):
    model = model_of("qwen3_next")
    right = PaddingCollator(TOKENIZER, model=model)
    train(tmp_path, model, right, callbacks=[DeliveryCallback(right, alone=True)]).train()
    neutral = PaddingCollator(TOKENIZER, attention_mask="4d")
    bare_4d = lambda features: {k: v for k, v in neutral(features).items() if k != "attention_mask_2d"}  # noqa: E731
    with pytest.raises(CollateError, match=r"layers\.0\.linear_attn"):
        train(tmp_path, model, bare_4d, callbacks=[DeliveryCallback()]).train()


# --- the Trainer's callback looks at what it is given before the first step

OURS = PaddingCollator(pad_token_id=0, consumer="transformers")


def begins(callback, loader=None, *, compiled=False, model=None):
    args = SimpleNamespace(torch_compile=True) if compiled else SimpleNamespace()
    model = torch.nn.Linear(1, 1) if model is None else model
    callback.on_train_begin(args, None, None, model=model, train_dataloader=loader)


def test_another_collator_is_refused_as_what_is_none_and_one_around_it_is_not():
    with pytest.raises(CollateError, match="int"):
        DeliveryCallback(3)
    wrapped = SimpleNamespace(data_collator=SimpleNamespace(data_collator=OURS))
    for found in (OURS, wrapped):
        begins(DeliveryCallback(OURS), SimpleNamespace(collate_fn=found))
    with pytest.raises(CollateError, match="a function that you did not pass"):
        begins(DeliveryCallback(OURS), SimpleNamespace(collate_fn=list))


def test_compiled_models_are_refused():
    for compiled in ({"compiled": True}, {"model": torch.compile(torch.nn.Linear(1, 1))}):
        with pytest.raises(CollateError, match="compiled"):
            begins(DeliveryCallback(), **compiled)
    begins(DeliveryCallback())
    guard_first_batch(model := model_of("qwen3"))
    with pytest.raises(CollateError, match="compiled"):  # after it was guarded, as a Trainer compiles
        torch.compile(model, backend="eager")(**wire())
