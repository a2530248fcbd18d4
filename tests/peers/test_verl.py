"""verl 0.9.1 with Megatron: its forwards and engine on real megatron-core models (CPU), without ours and with.

Forwards are taken from verl's registry as its engine takes them: every row equals its logits alone, and the layers say which
mask they received. The engine is made by its constructor; its `initialize` builds the model with Megatron-Bridge, which
needs CUDA: here it is a megatron-core model.
"""

import pytest
import torch
from cells import Stack, scores, verdict, worst
from megatron_world import PAD, Attention, far as relative, gpt, received, seen, watch
from processes import saved_model
from tensordict import TensorDict
from verl.models.mcore import registry, util
from verl_models import LENGTHS, Vision, alone, config, error, jagged, left_padded

from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import verl as engine

NEEDS = ("verl", "megatron")
pytestmark = pytest.mark.usefixtures("cpu")

WIDTH, SQUARE = (len(LENGTHS), 7), (len(LENGTHS), 1, 7, 7)
NEAR = 2e-5


# --- forwards. Padded rows: None on an NPU, the 2D mask elsewhere, and the way back


@pytest.fixture(params=["npu", "other"])
def device(request, monkeypatch):
    """What verl decides once, at import, by looking for torch_npu."""
    monkeypatch.setattr(util, "is_npu_available", request.param == "npu")
    monkeypatch.setattr(Attention, "lenient", request.param != "npu")
    return request.param


def padded(model, values, **more):
    vision = isinstance(model, Vision)
    forward = registry.get_mcore_engine_forward_fn(config(vision))
    given = {"vision_model": vision, "pad_token_id": PAD, "data_format": "bshd", **more}
    return forward(model, values, given.pop("multi_modal_inputs", {}), **given)


def older(model, values, data_format="bshd", dtype=torch.bool, **more):
    """The forward for rows padded on the left; its output, `[B, S, V]`, as rows."""
    ids, keep, positions = left_padded(values)
    forward = registry.get_mcore_forward_fn(config(isinstance(model, Vision)))
    output = forward(
        model, ids, keep.to(dtype), positions, more.pop("multi_modal_inputs", {}), data_format=data_format, **more
    )
    return [row[real] for row, real in zip(output, keep)]


@pytest.mark.parametrize("forward", [padded, older])
@pytest.mark.parametrize("vision", [False, True])
def test_padded_rows_are_each_sample_alone(forward, vision, device, verl_ours):
    language, values = watch(gpt("ga")), jagged()
    model, pixels = (Vision(language), torch.randn(len(LENGTHS), 32)) if vision else (language, None)
    expected, mask = alone(model, values, pixels), None if device == "npu" else WIDTH
    for more in ({"dtype": torch.bool}, {"dtype": torch.int64}) if forward is older else ({},):
        more |= {"multi_modal_inputs": {"pixel_values": pixels}} if vision else {}
        assert error(forward(model, values, **more), expected) <= NEAR
        assert seen(model) == {"attention": [mask], "recurrent": [mask]}


WAYS = (
    {"npu": True}, {"npu": False}, {"npu": False, "local": True}, {"npu": False, "local": True, "lengths": (7,)},
    {"npu": False, "local": True, "lengths": (5, 3, 4, 1, 2)},
)  # fmt: skip
"""Beside torch_npu; elsewhere with attention like TransformerEngine's, or with Megatron's own; rows as many as tokens."""


def run_in(who, forward, kinds, monkeypatch, *, npu, local=False, lengths=LENGTHS):
    monkeypatch.setattr(util, "is_npu_available", npu)
    monkeypatch.setattr(Attention, "lenient", not npu)
    model, values = gpt(kinds, **({"flash": False} if local else {})), jagged(*lengths)
    expected = alone(model, values)
    try:
        engine.install() if who == "ours" else None
        return verdict(error(forward(model, values), expected))
    except Exception as raised:
        return verdict(refused=f"{type(raised).__name__}: {raised}")
    finally:
        engine.uninstall()


@pytest.mark.parametrize(("layout", "forward"), [("padded right", padded), ("padded left", older)])
@pytest.mark.parametrize(("family", "kinds"), [("attention", "aa"), ("Gated DeltaNet hybrid", "ga")])
def test_cells(family, kinds, layout, forward, monkeypatch):
    """The worst of an NPU and of other devices, with attention that computes where its kernel would be."""
    stack = Stack("verl, Megatron", ("verl", "megatron-core"), "peers_misc")
    both = {who: worst(run_in(who, forward, kinds, monkeypatch, **way) for way in WAYS) for who in ("alone", "ours")}
    stack.tell(family, layout, **both, line="actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin")


def aux_loss_gradient(model, values, **more):
    """Of the router's weights, by the aux loss alone."""
    model.train()
    model.zero_grad()
    (padded(model, values, **more).values() * 0).sum().backward()
    return torch.cat([layer.mlp.router.weight.grad.flatten() for layer in model.decoder.layers])


EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss",
}  # fmt: skip


def test_routers_count_no_padding_and_upstream_they_do(device):
    """The same rows in two widths."""
    model, values = gpt("aa", **EXPERTS), jagged()
    upstream = [aux_loss_gradient(model, values, forced_max_seqlen=width) for width in (7, 21)]
    engine.install()
    try:
        ours = [aux_loss_gradient(model, values, forced_max_seqlen=width) for width in (7, 21)]
    finally:
        engine.uninstall()
    scale = ours[0].abs().max()
    assert (ours[0] - ours[1]).abs().max() <= 1e-5 * scale
    assert (upstream[0] - upstream[1]).abs().max() > 1e-2 * scale


# --- sliding windows


FORWARDS = {
    "padded": padded,
    "packed": lambda model, values: padded(model, values, data_format="thd"),
    "older": older,
    "older packed": lambda model, values: older(model, values, "thd"),
    "fused": lambda model, values: registry.get_mcore_forward_fused_model_engine_fn(config())(
        model, values, values, {}, 1.0, False, PAD
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_window_shorter_than_the_rows_is_refused_on_an_npu(name, verl_npu, verl_ours):
    with pytest.raises(UnsupportedFormError, match="longer than 4") as refusal:
        FORWARDS[name](gpt(window_size=(4, 0)), jagged())
    assert "Keep rows to 5 tokens" in str(refusal.value)


def test_a_window_no_row_reaches_is_computed_and_elsewhere_it_is_verls_own_business(verl_npu, verl_ours, monkeypatch):
    for window in ((6, 0), (-1, 0)):
        model, values = gpt(window_size=window), jagged()
        assert error(padded(model, values), alone(model, values)) <= NEAR
    monkeypatch.setattr(util, "is_npu_available", False)
    monkeypatch.setattr(Attention, "lenient", True)
    padded(gpt(window_size=(4, 0)), jagged())


def test_what_was_taken_from_the_registry_before_an_uninstall_is_verls_own_again(verl_npu):
    model, values = gpt("aa"), jagged()
    engine.install()
    forwards = [registry.get_mcore_forward_fn(config()), registry.get_mcore_engine_forward_fn(config())]
    engine.uninstall()
    ids, keep, positions = left_padded(values)
    with pytest.raises(AssertionError, match="invalid"):
        forwards[0](model, ids, keep, positions, {}, data_format="bshd")
    forwards[1](model, values, {}, data_format="bshd")
    assert seen(model)["attention"] == [SQUARE] * 2


# --- the engine: log-probabilities, entropy and gradients of a batch


@pytest.fixture(scope="module")
def checkpoint(cpu, tmp_path_factory):
    """A tiny Qwen3 and a tokenizer: what verl's `HFModelConfig` reads."""
    cpu.setattr("verl.workers.engine.megatron.transformer_impl.get_device_id", lambda: "cpu")
    return saved_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def engine_of(checkpoint, model, **settings):
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.engine import MegatronEngineWithLMHead

    config = McoreEngineConfig(use_dynamic_bsz=False, **settings)
    made = MegatronEngineWithLMHead(HFModelConfig(path=checkpoint, model_type="language_model"), config, None, None)
    made.module, made.tf_config = [model], model.config
    return made


def batch(values):
    from verl.utils import tensordict_utils as tu

    ones = torch.nested.nested_tensor_from_jagged(torch.ones_like(values.values()), values.offsets())
    held = {"input_ids": values, "loss_mask": ones, "temperature": torch.ones(len(LENGTHS))}
    data = TensorDict(held, batch_size=len(LENGTHS))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, calculate_entropy=True)
    return data


def of_tokens(rows, values):
    """Log probability of each next token, and the entropy, of each row."""
    logs = [torch.log_softmax(row, -1) for row in rows]
    chosen = [scores(row, ids.tolist()) for row, ids in zip(rows, values.unbind())]
    return chosen, [-(row.exp() * row).sum(-1) for row in logs]


def far(output, expected):
    """The last token of a row has no next one; verl learns nothing there."""
    rows = [row[: len(other)] for row, other in zip(output.unbind(), expected)]
    return max(float((row - other).detach().abs().max()) for row, other in zip(rows, expected) if len(other))


def test_log_probabilities_entropy_and_gradients_are_those_of_each_sample_alone(checkpoint, verl_npu, verl_ours):
    model, values = watch(gpt("ga")), jagged()
    chosen, entropy = of_tokens(alone(model, values), values)
    made = engine_of(checkpoint, model, use_remove_padding=False)
    output = made.forward_backward_batch(batch(values), None, forward_only=True)["model_output"]
    assert far(output["log_probs"], chosen) <= NEAR
    assert far(output["entropy"], entropy) <= NEAR
    assert received(model) == {None}

    def loss(model_output, data, dp_group):
        rows = model_output["log_probs"].unbind()
        return -sum((row[:-1].sum() for row in rows), torch.zeros(())), {}

    made.forward_backward_batch(batch(values), loss, forward_only=False)
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (-sum(row.sum() for row in chosen)).backward()
    assert relative(got, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}) <= NEAR
