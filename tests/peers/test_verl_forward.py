"""verl 0.9.1's forwards, taken from its registry as its engine takes them, on real megatron-core models (CPU).

Every row equals its logits alone, and the layers say which mask they received.
"""

import pytest
import torch
from cells import Stack, verdict, worst
from cpu_world import Attention, received, seen, watch
from megatron_world import PAD, gpt
from verl.models.mcore import model_forward_fused, mtp_patch, registry, util
from verl_models import LENGTHS, ValueHead, Vision, alone, config, error, jagged, left_padded

from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import verl as engine

NEEDS = ("verl", "megatron")
pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH, SQUARE = (len(LENGTHS), 7), (len(LENGTHS), 1, 7, 7)
NEAR = 2e-5


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


def older(model, values, data_format="bshd", vision=False, dtype=torch.bool, **more):
    """The forward for rows padded on the left; its output, `[B, S, V]`, as rows."""
    ids, keep, positions = left_padded(values)
    forward = registry.get_mcore_forward_fn(config(vision))
    output = forward(
        model, ids, keep.to(dtype), positions, more.pop("multi_modal_inputs", {}), data_format=data_format, **more
    )
    return [row[real] for row, real in zip(output, keep)]


# --- padded rows: None on an NPU, the 2D mask elsewhere, and the way back


@pytest.mark.parametrize("kinds", ["aa", "ga", "gag"])
def test_padded_text_rows_are_each_sample_alone(kinds, device, verl_ours):
    model, values = watch(gpt(kinds)), jagged()
    expected = alone(model, values)
    assert error(padded(model, values), expected) <= NEAR
    mask = None if device == "npu" else WIDTH
    assert seen(model) == {"attention": [mask] * kinds.count("a"), "recurrent": [mask] * kinds.count("g")}


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
def test_its_cells(family, kinds, layout, forward, monkeypatch):
    """The worst of an NPU and of other devices, with attention that computes where its kernel would be."""
    stack = Stack("verl, Megatron", ("verl", "megatron-core"), "peers_misc")
    both = {who: worst(run_in(who, forward, kinds, monkeypatch, **way) for way in WAYS) for who in ("alone", "ours")}
    stack.tell(family, layout, **both, line="actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin")


@pytest.mark.parametrize("kinds", ["aa", "ga"])
@pytest.mark.parametrize("forward", [padded, older], ids=["engine", "older"])
def test_padded_vision_rows_are_each_sample_alone(kinds, forward, device, verl_ours):
    model, values = Vision(watch(gpt(kinds))), jagged()
    pixels = torch.randn(len(LENGTHS), 32)
    expected = alone(model, values, pixels)
    output = forward(model, values, vision_model=True, multi_modal_inputs={"pixel_values": pixels}) if forward is padded \
        else older(model, values, vision=True, multi_modal_inputs={"pixel_values": pixels})  # fmt: skip
    assert error(output, expected) <= NEAR
    assert received(model) == {None if device == "npu" else WIDTH}


@pytest.mark.parametrize("kinds", ["aa", "ga"])
def test_rows_padded_on_the_left_are_each_sample_alone(kinds, device, verl_ours):
    model, values = watch(gpt(kinds)), jagged()
    expected = alone(model, values)
    for dtype in (torch.bool, torch.int64):
        assert error(older(model, values, dtype=dtype), expected) <= NEAR
        assert received(model) == {None if device == "npu" else WIDTH}


@pytest.mark.parametrize("lengths", [(7,), (5, 3, 4, 1, 2), (7, 3)])
@pytest.mark.parametrize("forward", [padded, older], ids=["engine", "older"])
def test_local_kernels_are_not_handed_a_mask_that_they_read_the_other_way_round(lengths, forward, device, verl_ours):
    """Rows as many as tokens, or one: upstream such a mask fits, and blocks the real tokens."""
    model, values = gpt(flash=False), jagged(*lengths)
    assert error(forward(model, values), alone(model, values)) <= NEAR


@pytest.mark.parametrize("lengths", [(7,), (5, 3, 4, 1, 2)])
def test_upstream_local_kernels_block_the_real_tokens_in_silence(lengths):
    model, values = gpt(flash=False), jagged(*lengths)
    assert error(padded(model, values), alone(model, values)) > 0.1


def test_the_format_may_be_given_by_place(verl_npu, verl_ours):
    model, values = gpt(), jagged()
    expected = alone(model, values)
    forward = registry.get_mcore_engine_forward_fn(config())
    assert error(forward(model, values, {}, None, None, False, False, None, "bshd"), expected) <= NEAR
    assert seen(model)["attention"] == [None, None]


def test_a_value_model(verl_npu, verl_ours):
    model, values = gpt("ga"), jagged()
    model.output_layer = ValueHead(32, 1)
    expected = [row.squeeze(-1) for row in alone(model, values)]
    assert error(padded(model, values, value_model=True), expected) <= NEAR
    assert error(older(model, values, value_model=True), expected) <= NEAR


def test_multi_token_prediction_is_given_none_too(verl_npu, verl_ours):
    """As the engine does it: verl's own postprocess is put on the model (transformer_impl.py:596)."""
    values = jagged()
    model = gpt("aa", mtp_num_layers=1)
    mtp_patch.patch_postprocess(model)
    given = {"label": values.clone(), "loss_mask": torch.ones_like(values), "response_attention_mask": None}

    def logits(output, label):
        return {"logits": output}

    expected = alone(model, values)
    output = padded(model, values, mtp_enable_train=True, logits_processor=logits, logits_processor_args=given)
    assert error(output["logits"], expected) <= NEAR
    assert seen(model)["attention"] == [None] * 3, "two layers and the one that predicts"


# --- routers


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


# --- packed rows: as verl gives them


@pytest.mark.parametrize("vision", [False, True])
def test_packed_rows_are_each_sample_alone(vision, device, verl_ours):
    model, values = gpt(), jagged()
    model = Vision(model) if vision else model
    expected = alone(model, values)
    assert error(padded(model, values, data_format="thd"), expected) <= NEAR
    assert seen(model)["attention"] == [None, None]
    assert error(older(model, values, "thd", vision=vision), expected) <= NEAR


def plain_cross_entropy(hidden, weight, labels, temperature, reduction, group):
    """In the place of verl's Triton kernel: log probabilities and entropy of each token."""
    logs = torch.log_softmax(hidden.transpose(0, 1) @ weight.T / temperature, -1)
    chosen = logs.gather(-1, labels[..., None]).squeeze(-1)
    return chosen, -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("vision", [False, True])
def test_the_fused_forward_packs_its_rows_and_takes_each_sample_alone(vision, device, verl_ours, monkeypatch):
    monkeypatch.setattr(model_forward_fused, "linear_cross_entropy", plain_cross_entropy)
    language, values = gpt(), jagged()
    model = Vision(language) if vision else language
    expected = [torch.log_softmax(row, -1) for row in alone(model, values)]
    model_forward_fused.patch_fused_forward(model)
    forward = registry.get_mcore_forward_fused_model_engine_fn(config(vision))
    output = forward(model, values, values.clone(), {}, 1.0, True, PAD)
    entropy = [-(row.exp() * row).sum(-1) for row in expected]
    assert error(output["entropy"], entropy) <= NEAR
    chosen = [row[:-1].gather(-1, ids[1:, None]).squeeze(-1) for row, ids in zip(expected, values.unbind())]
    assert error([row[:-1] for row in output["log_probs"].unbind()], chosen) <= NEAR
    assert seen(model)["attention"] == [None, None]


def test_recurrent_layers_take_no_packed_rows_and_say_so(verl_npu, verl_ours):
    with pytest.raises(NotImplementedError, match="packed sequence"):
        padded(gpt("ga"), jagged(), data_format="thd")


# --- sliding windows


WINDOWED = [
    ("padded", lambda model, values: padded(model, values)),
    ("packed", lambda model, values: padded(model, values, data_format="thd")),
    ("older", lambda model, values: older(model, values)),
    ("older packed", lambda model, values: older(model, values, "thd")),
    ("fused", lambda model, values: registry.get_mcore_forward_fused_model_engine_fn(config())(
        model, values, values, {}, 1.0, False, PAD)),
]  # fmt: skip


@pytest.mark.parametrize("forward", [forward for _, forward in WINDOWED], ids=[name for name, _ in WINDOWED])
def test_a_window_shorter_than_the_rows_is_refused_on_an_npu(forward, verl_npu, verl_ours, monkeypatch):
    model = gpt(window_size=(4, 0))
    with pytest.raises(UnsupportedFormError, match="longer than 4") as refusal:
        forward(model, jagged())
    assert "Keep rows to 5 tokens" in str(refusal.value)


def test_a_window_no_row_reaches_is_computed(verl_npu, verl_ours):
    for window in ((6, 0), (-1, 0)):
        model, values = gpt(window_size=window), jagged()
        assert error(padded(model, values), alone(model, values)) <= NEAR


def test_a_window_elsewhere_is_verls_own_business(verl_ours, monkeypatch):
    monkeypatch.setattr(Attention, "lenient", True)
    padded(gpt(window_size=(4, 0)), jagged())


# --- without us


def test_upstream_the_engine_builds_a_square_mask_and_the_older_forward_a_mask_no_npu_kernel_takes(verl_npu):
    model, values = watch(gpt("ga")), jagged()
    expected = alone(model, values)
    assert error(padded(model, values), expected) <= NEAR
    assert seen(model) == {"attention": [SQUARE], "recurrent": [SQUARE]}
    for call in (older, lambda *args: older(*args, vision=True)):
        with pytest.raises(AssertionError, match="invalid"):
            call(Vision(gpt()) if call is not older else gpt(), values)


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
