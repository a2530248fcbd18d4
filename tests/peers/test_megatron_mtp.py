"""megatron-core 0.16.1: multi-token prediction on a real `GPTModel`: which batches its own shifts are right for."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from megatron_world import (
    PAD,
    TEDotProductAttention,
    apart,
    aux_losses,
    build,
    far,
    loss_and_gradients,
    packed_rows,
    samples,
)

from collate_npu import PaddingCollator
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.megatron import experts, gpt_batch, packed_seq_params
from collate_npu.masks import dense
from collate_npu.outputs import shift_labels
from collate_npu.parallel import ContextParallel, pad_documents

NEEDS = ("megatron",)
pytestmark = pytest.mark.usefixtures("cpu")

ROWS = samples(7, 3, 5)
DEPTHS = 2
one = PaddingCollator(pad_token_id=PAD)
left = PaddingCollator(pad_token_id=PAD, padding_side="left")
flat = PaddingCollator(pad_token_id=PAD, padding_free=True)
predicting = partial(build, mtp_num_layers=DEPTHS, calculate_per_token_loss=True)


@pytest.fixture(scope="module")
def local(cpu):
    return predicting()


@pytest.fixture(scope="module")
def thd(cpu):
    return predicting(attention=TEDotProductAttention, positions="rope")


def aligned(rows):
    """A flat row with padding behind each sequence, as two ranks would share it."""
    batch, truth = pad_documents(flat(rows), ContextParallel(2, 0).for_documents(), pad_token_id=PAD)
    return {key: batch[key] for key in ("input_ids", "labels", "cu_seqlens", "cu_seqlens_padded")}, truth


def gap(model, inputs, truth, rows=ROWS):
    """Gradients against those of the samples alone; the layers of multi-token prediction must have some."""
    alone = loss_and_gradients(model, [gpt_batch(one([row]), model) for row in rows])
    assert min(float(grad.abs().max()) for name, grad in alone[2].items() if name.startswith("mtp.")) > 1e-3
    found = loss_and_gradients(model, [(inputs, truth)])
    return max(far(found[2], alone[2]), apart(found[1], alone[1]), float(abs(found[0] - alone[0]) / alone[0]))


# --- right


def test_padding_on_the_right_equals_samples_alone(local):
    assert gap(local, *gpt_batch(one(ROWS), local)) <= 1e-5
    assert gap(local, *gpt_batch(PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=16)(ROWS), local)) <= 1e-5


def test_a_flat_row_with_padding_behind_each_sequence_equals_samples_alone(thd):
    """Megatron reads `cu_seqlens_q` there, so it has to say where sequences stand; with real offsets it is wrong."""
    batch, truth = aligned(ROWS)
    inputs, found = gpt_batch(batch, thd, padding_free=True)
    assert found == truth
    assert inputs["packed_seq_params"].cu_seqlens_q.tolist() == [0, 8, 12, 20]
    assert gap(thd, inputs, truth) <= 1e-5
    real = {**inputs, "packed_seq_params": packed_seq_params(truth)}
    assert real["packed_seq_params"].cu_seqlens_q.tolist() == [0, 7, 10, 15]
    assert gap(thd, real, truth) > 1e-2


def learned(labels, keep):
    return torch.where(keep.bool(), labels, -100)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
@settings(max_examples=20, deadline=None)
def test_what_megatron_makes_of_labels_at_each_depth_is_what_shift_labels_says(thd, lengths, padding_free):
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    rows = samples(*lengths, 6)
    batch, whole = aligned(rows) if padding_free else (one(rows), None)
    inputs, truth = gpt_batch(batch, thd, padding_free=padding_free)
    assert whole is None or truth == whole
    labels, keep, params = inputs["labels"], inputs["loss_mask"], inputs.get("packed_seq_params")
    for depth in range(1, DEPTHS + 1):
        labels, keep = (roll_tensor(x, packed_seq_params=params)[0] for x in (labels, keep))
        assert torch.equal(learned(labels, keep), shift_labels(batch["labels"], truth, steps=1 + depth))


# --- refused


@pytest.mark.parametrize("batch", [left(ROWS), packed_rows(ROWS, [[7], [3, 5]])], ids=["left", "packed"])
def test_rows_across_which_megatron_would_move_labels(local, batch):
    with pytest.raises(UnsupportedFormError, match="Multi-token prediction moves labels along the whole row"):
        gpt_batch(batch, local)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "depths", lambda config: 0)
        inputs, truth = gpt_batch(batch, local)
    assert torch.equal(inputs["attention_mask"], dense(truth, polarity="masked"))
    assert gap(local, inputs, truth) > 1e-2  # what is refused: in silence


def test_routers_of_these_layers_hear_of_no_padding(cpu):
    told = {}
    for multiple in (1, 16):
        model = predicting(experts=True)
        wide = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=multiple)(ROWS)
        with pytest.raises(UnsupportedFormError, match="Routers of the multi-token prediction layers count padding"):
            gpt_batch(wide, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "depths", lambda config: 0)
            inputs, truth = gpt_batch(wide, model)
        aux_losses()
        told[multiple] = loss_and_gradients(model, [(inputs, truth)])[2], sum(aux_losses().values())
    assert told[1][1] != pytest.approx(told[16][1], rel=1e-2)
    mtp = {name: grad for name, grad in told[1][0].items() if name.startswith("mtp.") and "router" in name}
    assert far({name: told[16][0][name] for name in mtp}, mtp) > 1e-2


def test_the_remedies_for_experts_work(cpu):
    full = samples(6, 6)
    same, free = predicting(experts=True), predicting(experts=True, attention=TEDotProductAttention)
    quiet = predicting(experts=True, moe_aux_loss_coeff=0.0)
    assert not gpt_batch(one(full), same)[0]["padding_mask"].any()
    assert not gpt_batch(flat(ROWS), free, padding_free=True)[0]["padding_mask"].any()
    assert gap(quiet, *gpt_batch(one(ROWS), quiet)) <= 1e-5


def test_a_batch_without_a_target_is_nan_upstream(cpu):
    model = build(mtp_num_layers=1)
    short = one(samples(2, 2))
    with pytest.raises(UnsupportedFormError, match=r"no target 2 tokens ahead.*calculate_per_token_loss=True"):
        gpt_batch(short, model)
    model.eval()
    inputs, truth = gpt_batch(short, model)
    model.train()
    assert far(*[loss_and_gradients(model, [(inputs, truth)])[2]] * 2) == float("inf")
    per_token = build(mtp_num_layers=1, calculate_per_token_loss=True)
    found = loss_and_gradients(per_token, [gpt_batch(short, per_token)])[2]
    assert far(found, found) == 0


def test_every_rank_says_which_ranks_have_no_target(cpu):
    """Two tokens ahead the answer is learned at places 4 and 5, both of them the second rank's."""
    model = build(mtp_num_layers=1, attention=TEDotProductAttention)
    batch = one([{"input_ids": list(range(1, 9)), "labels": [-100] * 6 + [7, 8]}])
    for rank in (0, 1):
        with pytest.raises(UnsupportedFormError, match=r"on ranks \[0\]"):
            gpt_batch(batch, model, context_parallel=ContextParallel(2, rank))
