"""twinkle-kit 0.5.1: what reaches the model, whichever of the things a user holds stands for it, and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from torch import nn
from twinkle_rows import feature, features, grid, npu, platform, processor  # noqa: F401

from collate_npu import CollateError, ContextParallel
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import twinkle
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.parallel import query_rows

NEEDS = ("twinkle", "megatron")

# --- what reaches the model


def test_a_model_without_recurrent_layers_gets_no_2d_mask():
    assert "attention_mask_2d" not in processor(needs=False)(features([5, 3]))[0]
    with pytest.raises(CollateError, match="needs_mask_2d="):
        twinkle.install(processor(ours=False))


DotProductAttention, TEDotProductAttention, GatedDeltaNet = (
    type(name, (nn.Module,), {}) for name in ("DotProductAttention", "TEDotProductAttention", "GatedDeltaNet")
)


def gpt_model(*layers, forward, **config):
    """A wrapped model with layers of these kinds, as Megatron-core names them."""
    model = type("GPTModel", (nn.Module,), {"forward": forward})()
    model.layers = nn.ModuleList(layer() for layer in layers)
    model.config = SimpleNamespace(**config)
    return SimpleNamespace(module=model)


def through_extras(self, input_ids, extra_block_kwargs=None): ...
def through_keywords(self, input_ids, **kwargs): ...
def through_nothing(self, input_ids): ...


def installed(model, mesh=None, **settings):
    made = processor(mesh, ours=False, **settings)
    twinkle.install(made, model, needs_mask_2d=True)
    return made


def test_the_2d_mask_goes_through_the_door_the_model_has():
    rows = features([5, 3])
    for forward, reach in ((through_extras, lambda out: out["extra_block_kwargs"]), (through_keywords, lambda out: out)):
        out = installed(gpt_model(forward=forward))(copy.deepcopy(rows))[0]
        assert reach(out)["attention_mask_2d"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
        assert ("attention_mask_2d" in out) == (reach(out) is out)
    with pytest.raises(UnsupportedFormError, match="no layer would see it"):
        installed(gpt_model(forward=through_nothing))(copy.deepcopy(rows))


def test_routers_of_moe_models_are_told_the_padding(monkeypatch):
    model = gpt_model(DotProductAttention, forward=through_extras, num_moe_experts=4, sequence_parallel=True)
    out = installed(model)(features([5, 3]))[0]
    assert out["extra_block_kwargs"]["padding_mask"].tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    parts = []
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        parts.append(installed(model, grid(2, 2, 1))(features([5, 3]))[0]["extra_block_kwargs"]["padding_mask"])
    padding = torch.arange(8) >= torch.tensor([5, 3])[:, None]
    assert torch.equal(torch.cat(parts, 1), padding[:, query_rows(8, ContextParallel(2, 1))])
    left = installed(model, padding_side="left")(features([5, 3]))[0]
    assert "padding_mask" not in left["extra_block_kwargs"], "the dense mask says it"


@pytest.mark.parametrize(
    ("layers", "reader"),
    [
        ((TEDotProductAttention,), "fused softmax, read no dense mask"),
        ((DotProductAttention, GatedDeltaNet), "GatedDeltaNet of megatron-core reads no padding mask"),
    ],
)
def test_padding_that_no_kernel_reads_is_refused(layers, reader):
    made = installed(gpt_model(*layers, forward=through_keywords), padding_side="left")
    with pytest.raises(UnsupportedFormError, match=reader):
        made(features([5, 3]))
    assert made(features([4, 4]))[0]["attention_mask"] is None
    right = installed(gpt_model(*layers, forward=through_keywords))
    assert right(features([5, 3]))[0]["attention_mask"] is None


def test_fused_softmax_is_refused_as_megatron_refuses_it_and_without_fusion_it_is_computed():
    rows = features([5, 3])
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])}
    fused = gpt_model(DotProductAttention, forward=through_keywords, masked_softmax_fusion=True)
    with pytest.raises(UnsupportedFormError, match="masked_softmax_fusion=False") as megatrons:
        gpt_batch(batch, fused.module)
    for model in (fused, fused.module.config):
        with pytest.raises(UnsupportedFormError) as ours:
            installed(model, padding_side="left")(copy.deepcopy(rows))
        assert str(ours.value) == str(megatrons.value)
    fused.module.config.masked_softmax_fusion = False
    expected = gpt_batch(batch, fused.module)[0]["attention_mask"]
    assert torch.equal(installed(fused, padding_side="left")(copy.deepcopy(rows))[0]["attention_mask"], expected)


@pytest.mark.usefixtures("npu")
def test_npu_drops_the_mask_only_where_that_is_exact():
    causal = {"attention_mask_type": "causal"}
    out = processor()(features([5, 3]), **causal)[0]
    assert out["attention_mask"] is None
    assert out["attention_mask_2d"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    with pytest.raises(UnsupportedFormError, match="Pad right"):
        processor(padding_side="left")(features([5, 3]), **causal)


# --- several chunks, and whatever else stands for a model


def chunk(*layers, forward=through_extras, **config):
    return gpt_model(*layers, forward=forward, **config).module


def held(chunks):
    """The ways in which a user holds them: a list, a ModuleList, twinkle's model, one wrapped as DDP wraps it."""
    twinkles = SimpleNamespace(optimizer_group={}, model=chunks, forward=through_keywords)
    wrapped = [SimpleNamespace(module=each) for each in chunks]
    return chunks, tuple(chunks), nn.ModuleList(chunks), twinkles, wrapped


def test_every_chunk_is_asked_whether_it_reads_the_padding():
    """Virtual pipeline stages: what the second one cannot read is refused too, however the list is held."""
    local, gdn, fused = chunk(DotProductAttention), chunk(GatedDeltaNet), chunk(TEDotProductAttention)
    for chunks, reader in (([local, gdn], "GatedDeltaNet of megatron-core"), ([local, fused], "read no dense mask")):
        for model in held(chunks):
            with pytest.raises(UnsupportedFormError, match=reader):
                installed(model, padding_side="left")(features([5, 3]))
            assert installed(model)(features([5, 3]))[0]["attention_mask"] is None
    for model in held([local, chunk(DotProductAttention)]):
        assert installed(model, padding_side="left")(features([5, 3]))[0]["attention_mask"].shape == (2, 1, 5, 5)


def test_a_chunk_without_attention_has_no_say_in_the_dense_mask():
    for model in held([chunk(), chunk(DotProductAttention)]):
        assert installed(model, padding_side="left")(features([5, 3]))[0]["attention_mask"].shape == (2, 1, 5, 5)


def test_a_mask_that_the_forward_of_any_chunk_does_not_take_is_refused():
    for model in held([chunk(DotProductAttention), chunk(DotProductAttention, forward=through_nothing)]):
        with pytest.raises(UnsupportedFormError, match="no layer would see it"):
            installed(model)(features([5, 3]))


def test_twinkles_own_wrapper_is_looked_into_and_not_taken_for_the_model():
    """Its forward takes any keyword, and drops them all (megatron.py:254)."""
    wrapper = SimpleNamespace(optimizer_group={}, model=[chunk(forward=through_nothing)], forward=through_keywords)
    with pytest.raises(UnsupportedFormError, match="no layer would see it"):
        installed(wrapper)(features([5, 3]))


@pytest.mark.usefixtures("npu")
def test_recurrent_layers_are_asked_on_an_npu_too(monkeypatch):
    """Where MindSpeed's own attention reads a dense mask."""
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "own", raising=False)
    model = [chunk(DotProductAttention), chunk(GatedDeltaNet)]
    with pytest.raises(UnsupportedFormError, match="GatedDeltaNet of megatron-core"):
        installed(model, padding_side="left")(features([5, 3]), attention_mask_type="general")


def test_what_is_no_model_is_refused_with_what_to_pass():
    with pytest.raises(CollateError, match=r"install\(processor, model\)"):
        twinkle.install(chunk())
    with pytest.raises(CollateError, match=r"Call install\(model\)"):
        twinkle.install(processor(ours=False), SimpleNamespace(_actors=[object()], optimizer_group={}))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_transformers_model_gets_the_2d_mask_under_the_only_name_twinkle_passes_on(side):
    rows = [{key: value for key, value in row.items() if key != "attention_mask"} for row in features([5, 3])]
    rows = [{**row, "attention_mask_2d": [1] * len(row["input_ids"])} for row in rows]
    told = {"framework": "transformers", "padding_side": side}
    assert "attention_mask" not in processor(ours=False, **told)(copy.deepcopy(rows)), "upstream drops it"
    out = processor(**told)(copy.deepcopy(rows))
    pad = [0, 0]
    assert out["attention_mask"].tolist() == [[1] * 5, [*pad, 1, 1, 1] if side == "left" else [1, 1, 1, *pad]]
    assert out["attention_mask"].dtype is torch.int64


def test_several_sequences_in_a_row_of_a_transformers_model_need_padding_free_and_then_count_anew():
    row = feature(4, mask=[1, 1, 2, 2])
    with pytest.raises(UnsupportedFormError, match="padding_free=True"):
        processor(framework="transformers")([copy.deepcopy(row)])
    out = processor(framework="transformers", padding_free=True)([copy.deepcopy(row)])
    assert out["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert out.get("attention_mask") is None


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("side", ["left", "right"])
def test_general_attention_of_mindspeed_gets_a_dense_mask_always(monkeypatch, side):
    """None would meet the 2048 triangle in sparse_mode 1, which the card refuses; by release (consumers/mindspeed.py)."""
    general = {"attention_mask_type": "general"}
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "own")
    out = processor(padding_side=side)(features([5, 3]), **general)[0]
    assert out["attention_mask"].shape == (2, 1, 5, 5)
    assert not out["attention_mask"].all(-1).any(), "no query without a key"
    with pytest.raises(UnsupportedFormError, match="Set attention_mask_type=causal"):
        processor(grid(1, 2), padding_side=side)(features([5, 3]), **general)
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "separate")
    assert processor()(features([5, 3]), **general)[0]["attention_mask"] is None
