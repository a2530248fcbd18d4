"""megatron-core 0.16.1: what routers count on a real `GPTModel`, and which batches multi-token prediction is right for."""

from types import SimpleNamespace

import pytest
import torch
from megatron_world import PAD, TEDotProductAttention, build, gaps, outcome, packed_rows, samples

from collate_npu import PaddingCollator, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron
from collate_npu.integrations.megatron import gpt_batch

NEEDS = ("megatron",)

pytestmark = pytest.mark.usefixtures("cpu")

ROWS = samples(7, 3, 5)
FULL = samples(6, 6, 6)


def padded(side="right", multiple=1):
    return PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=multiple)


LOSSES = {
    "aux_loss": {},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss"},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "z_loss": {"moe_z_loss_coeff": 1.0, "moe_aux_loss_coeff": 0.0},
    "per_token": {"calculate_per_token_loss": True},
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_routers_logits_and_gradients_are_the_same_with_more_padding(kind):
    narrow, wide = build(experts=True, **LOSSES[kind]), build(experts=True, **LOSSES[kind])
    before = outcome(narrow, gpt_batch(padded("left")(ROWS), narrow))
    inputs, truth = gpt_batch(padded("left", 16)(ROWS), wide)
    assert torch.equal(inputs["padding_mask"], ~truth.keep)
    assert before["aux"].all()
    assert max(gaps(outcome(wide, (inputs, truth)), before).values()) <= 1e-5


@pytest.fixture
def biased():
    return build(
        experts=True, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_aux_loss_coeff=0.0
    )


def test_the_bias_of_experts_counts_real_tokens(biased):
    routers = [module for name, module in biased.named_modules() if name.endswith("router")]
    counts = {}
    with pytest.raises(UnsupportedFormError, match=r"issue 6111.*collate_npu\.integrations\.megatron\.install\(\)"):
        gpt_batch(padded("left")(ROWS), biased)
    megatron.install()
    with torch.compiler.set_stance("force_eager"):
        for multiple in (1, 16):
            inputs, _ = gpt_batch(padded("left", multiple)(ROWS), biased)
            biased(**inputs)
            counts[multiple] = torch.stack([router.local_tokens_per_expert.clone() for router in routers])
            [router.local_tokens_per_expert.zero_() for router in routers]
        megatron.uninstall()
        inputs, truth = gpt_batch(padded()(FULL), biased)
        assert "padding_mask" not in inputs  # the router would stop at it
        biased(**inputs)
        with pytest.raises(RuntimeError, match="must match"):  # upstream
            biased(**inputs, padding_mask=~truth.keep)
    assert torch.equal(counts[1], counts[16])
    assert counts[1].sum(1).tolist() == [15 * 2, 15 * 2]


PLACES = {
    "moe_expert_capacity_factor=0.5": {"moe_expert_capacity_factor": 0.5, "moe_token_dispatcher_type": "alltoall"},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
}


@pytest.mark.parametrize("setting", PLACES)
def test_settings_by_which_padding_moves_real_tokens_to_other_experts(setting, monkeypatch):
    """Upstream logits are wrong, in silence."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    model = build(experts=True, **PLACES[setting])
    with pytest.raises(UnsupportedFormError, match=f"With {setting} padding takes experts' places"):
        gpt_batch(padded(multiple=16)(FULL), model)
    free = build(experts=True, attention=TEDotProductAttention, **PLACES[setting])
    none = PaddingCollator(pad_token_id=PAD, padding_free=True)(ROWS)
    assert not gpt_batch(none, free, padding_free=True)[0]["padding_mask"].any()


def test_quantile_balancing_of_0_19_takes_no_padding_mask_at_all():
    """Its router asserts that there is none (router.py:768-772 of 0.19.2)."""
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(num_moe_experts=4, moe_router_load_balancing_type="quantile_balancing")
    assert megatron.router_padding_mask(Segments.from_lengths([4, 4]), model) is None
    with pytest.raises(UnsupportedFormError, match="With quantile_balancing padding"):
        megatron.router_padding_mask(Segments.from_lengths([3, 4]), model)


def test_seq_aux_loss_is_of_rows_and_not_of_sequences():
    """Upstream: two samples of 7 and 3 against each alone, and both in one row."""
    model = build(experts=True, **LOSSES["seq_aux_loss"])
    alone = [outcome(model, gpt_batch(padded()([row]), model))["aux"].sum() for row in ROWS[:2]]
    rows = outcome(model, gpt_batch(padded()(ROWS[:2]), model))["aux"].sum()
    assert float(rows) != pytest.approx(float(sum(alone) / 2), rel=1e-2)


# --- multi-token prediction: upstream learns across sequences and counts padding, in silence


REFUSED = {
    "left": (padded("left")(ROWS), False, "Multi-token prediction moves labels along the whole row"),
    "packed": (packed_rows(ROWS, [[7], [3, 5]]), False, "Multi-token prediction moves labels along the whole row"),
    "experts": (padded()(ROWS), True, "Routers of the multi-token prediction layers count padding"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_multi_token_prediction_would_learn_wrong_is_refused(how):
    batch, experts, said = REFUSED[how]
    model = build(mtp_num_layers=2, calculate_per_token_loss=True, experts=experts)
    with pytest.raises(UnsupportedFormError, match=said):
        gpt_batch(batch, model)
