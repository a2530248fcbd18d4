"""megatron-core 0.16.1: a real `GPTModel` (local spec, CPU), forward and backward: our batches against samples alone."""

from functools import partial
from typing import Any

import megatron_world as world
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from megatron_world import PAD, TEDotProductAttention, aux_losses, build, far, gaps, outcome, packed_rows, samples
from torch import Tensor

from collate_npu import CollateError, PaddingCollator, check_delivery
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, split_batch

NEEDS = ("megatron",)

pytestmark = pytest.mark.usefixtures("cpu")

LENGTHS = (7, 3, 5)


@pytest.fixture(scope="module")
def model(cpu):
    return build()


def strangers(rows, side):
    """As transformers' collators pad: a 2D mask, positions by place."""
    batch = ours(rows, side)
    places = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape)
    labels = batch["input_ids"].masked_fill(~batch["attention_mask_2d"], -100)  # the first of a row, too
    return {**batch, "labels": labels, "attention_mask": batch.pop("attention_mask_2d").long(), "position_ids": places}


def several(rows, side):
    """Rows of one sequence, two, one ..., with segment ids."""
    lengths = [len(row["input_ids"]) for row in rows]
    return packed_rows(rows, [lengths[:1], *([lengths[1:]] if rows[1:] else [])])


def ours(rows, side):
    return PaddingCollator(pad_token_id=PAD, padding_side=side)(rows)


LAYOUTS = [ours, strangers, several]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    laid=st.sampled_from(LAYOUTS),
)
@settings(max_examples=30, deadline=None)
def test_any_batch_equals_its_samples_alone_in_logits_loss_and_gradients(model, lengths, side, laid):
    """Law 15 at this door; the model's positions are learned, one by one."""
    collator = PaddingCollator(pad_token_id=PAD)
    rows = samples(*lengths)
    found = outcome(model, gpt_batch(laid(rows, side), model))
    alone = outcome(model, *(gpt_batch(collator([row]), model) for row in rows))
    assert max(gaps(found, alone).values()) <= 1e-5


@pytest.mark.parametrize("ends", [True, False], ids=["ends learned", "ends not learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_and_a_loss_mask_as_megatrons_datasets_move_them_are_not_moved_again(model, side, ends):
    """miles 3219, Megatron-LM 5298: the loss mask is of predictions."""
    rows = samples(*LENGTHS)
    batch = strangers(rows, side)
    learned = batch["labels"] if ends else batch["labels"].masked_fill(batch["input_ids"] == rows[0]["input_ids"][-1], -100)
    moved = torch.nn.functional.pad(learned[:, 1:], (0, 1), value=-100)
    whole = torch.nn.functional.pad(batch["input_ids"][:, 1:], (0, 1), value=0)
    found = gpt_batch({**batch, "labels": whole, "loss_mask": (moved >= 0).float()}, model)
    wanted = gpt_batch({**batch, "labels": learned}, model)
    assert max(gaps(outcome(model, found), outcome(model, wanted)).values()) <= 1e-6
    with pytest.raises(CollateError, match="a second one would be lost"):  # of tokens, or of predictions?
        gpt_batch({**batch, "labels": learned, "loss_mask": (learned >= 0).float()}, model)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("masked_softmax_fusion", True, "run local kernels with masked_softmax_fusion=False"),
        ("linear_attention_freq", 2, "GatedDeltaNet of megatron-core reads no padding mask"),
    ],
)
def test_the_fused_local_softmax_and_gated_delta_net_read_no_left_padding(model, monkeypatch, setting, value, said):
    monkeypatch.setattr(model.config, setting, value)
    right, left = (ours(samples(*LENGTHS), side) for side in ("right", "left"))
    assert (gpt_batch(right, model)[0]["attention_mask"] is None) == (setting == "masked_softmax_fusion")
    with pytest.raises(UnsupportedFormError, match=said):
        gpt_batch(left, model)


def test_recurrent_layers_get_the_tokens_whose_zigzag_they_undo(model, monkeypatch):
    right = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=8)(samples(*LENGTHS))
    slices, zigzag = ContextParallel(2, 0, layout="contiguous"), ContextParallel(2, 0)
    assert gpt_batch(right, model, context_parallel=slices)[0]["input_ids"].shape[1] == 4
    monkeypatch.setattr(model.config, "linear_attention_freq", 2)
    assert gpt_batch(right, model, context_parallel=zigzag)[0]["input_ids"].shape[1] == 4
    with pytest.raises(UnsupportedFormError, match=r"got 'contiguous'\. .*layout='zigzag'"):
        gpt_batch(right, model, context_parallel=slices)
    flat = PaddingCollator(pad_token_id=PAD, padding_free=True)(samples(*LENGTHS))
    monkeypatch.setattr(model, "modules", list)  # its local attention takes no flat row
    monkeypatch.setattr(model.config, "linear_num_key_heads", 1, raising=False)
    with pytest.raises(UnsupportedFormError, match=r"got 'contiguous'\. .*layout='document_zigzag'"):
        gpt_batch(flat, model, context_parallel=slices, padding_free=True)
    with pytest.raises(CollateError, match=r"heads: got \[1"):
        gpt_batch(flat, model, context_parallel=zigzag, padding_free=True)


# --- delivery: what `gpt_batch` hands over passes, other hand-overs name the layers


@pytest.fixture(scope="module")
def fused(cpu):
    return build(attention=TEDotProductAttention)


def test_check_delivery_of_a_dense_mask(model):
    inputs, segments = gpt_batch(ours(samples(*LENGTHS), "left"), model)
    found = check_delivery(model, inputs, segments=segments, alone=True)
    assert set(found.layers) == {f"decoder.layers.{n}.self_attention" for n in range(2)}
    assert max(found.alone.errors.values()) <= found.alone.limit < 1e-4
    keep = dense(segments, polarity="keep")
    with pytest.raises(CollateError, match=r"decoder\.layers\.0\.self_attention.*attends (padding|more than causal)"):
        check_delivery(model, inputs | {"attention_mask": keep}, segments=segments)


def test_check_delivery_of_a_kernel_that_reads_no_mask(model, fused):
    """Right padding and a flat row pass; left padding beside a dense mask, and a row without offsets, do not."""
    flat = PaddingCollator(padding_free=True)(samples(4, 3, 5))
    for batch, padding_free in ((ours(samples(*LENGTHS), "right"), False), (flat, True)):
        inputs, segments = gpt_batch(batch, fused, padding_free=padding_free)
        check_delivery(fused, inputs, segments=segments, alone=True)
    with pytest.raises(CollateError, match="goes on from another sequence"):
        check_delivery(fused, inputs | {"packed_seq_params": None}, segments=segments)
    left, truth = gpt_batch(ours(samples(*LENGTHS), "left"), model)
    with pytest.raises(CollateError, match="goes on from padding"):
        check_delivery(fused, left, segments=truth)


# --- two Gloo processes: context parallelism, or tensor and sequence parallelism, against one process
#
# Attention is the test's own in the place of a GPU kernel's (megatron_world.py). What stands here runs on each rank.


ROWS, ODD = samples(7, 3, 6), samples(7, 3, 5)
DENSE = {"attention": world.DotProductAttention, "positions": "rope"}
KERNEL = {"attention": TEDotProductAttention, "positions": "rope"}
MTP = {"mtp_num_layers": 2, "calculate_per_token_loss": True}


def of_rows(side: str = "right") -> dict[str, Any]:
    return PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=4)(ROWS)


def of_packs() -> dict[str, Any]:
    return packed_rows(samples(7, 1, 3, 5), [[7, 1], [3, 5]])


def of_flat(rows: Any = ROWS) -> dict[str, Any]:
    return PaddingCollator(pad_token_id=PAD, padding_free=True)(rows)


CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "right padding": (of_rows, KERNEL, False),
    "right padding, learned positions": (of_rows, {**KERNEL, "positions": "learned_absolute"}, False),
    "left padding, dense": (partial(of_rows, "left"), DENSE, False),
    "left padding, dense, learned positions": (partial(of_rows, "left"), {**DENSE, "positions": "learned_absolute"}, False),
    "packed rows, dense": (of_packs, DENSE, False),
    "flat": (of_flat, KERNEL, True),
    "flat, learned positions": (of_flat, {**KERNEL, "positions": "learned_absolute"}, True),
    "flat, padding behind the last alone": (partial(of_flat, samples(8, 4, 6)), KERNEL, True),
    "experts": (of_rows, {**KERNEL, "experts": True}, False),
    "experts, left padding, dense": (partial(of_rows, "left"), {**DENSE, "experts": True}, False),
    "experts, flat": (of_flat, {**KERNEL, "experts": True}, True),
    "multi-token prediction": (of_rows, {**KERNEL, **MTP}, False),
    "multi-token prediction, flat": (of_flat, {**KERNEL, **MTP}, True),
}


def on_ranks(case: str) -> dict[str, Any]:
    """The outcome of a case, and the shapes that this rank's model is given."""
    batch, settings, padding_free = CASES[case]
    model = build(**settings)
    inputs, truth = gpt_batch(batch(), model, padding_free=padding_free)
    shapes = {key: list(x.shape) for key, x in inputs.items() if isinstance(x, Tensor)}
    return {**outcome(model, (inputs, truth)), "shapes": shapes}


def check_split(side: str) -> None:
    """What `gpt_batch` hands this rank is what Megatron's own split makes of the whole batch, key by key."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    model = build(**DENSE, experts=True)
    alone = ContextParallel(1, 0)
    whole, _ = gpt_batch(of_rows(side), model, context_parallel=alone)
    theirs = get_batch_on_this_cp_rank({key: value.clone() for key, value in whole.items()})
    ours, _ = gpt_batch(of_rows(side), model)
    assert ours.keys() == theirs.keys() == {*split_batch(whole, alone)}
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def sequence_parallel(multiple: int, padding_free: bool = False) -> dict[str, Any]:
    """Loss, losses of routers and their gradients: each rank's routers see half the tokens."""
    tp = dist.get_world_size()
    settings = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, "add_bias_linear": False}
    model = build(**KERNEL, experts=True, **settings)
    batch = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=multiple, padding_free=padding_free)(ODD)
    inputs, _ = gpt_batch(batch, model, padding_free=padding_free)
    aux_losses()
    loss = (model(**inputs) * inputs["loss_mask"]).sum()
    loss.backward()
    routers = {name: p.grad for name, p in model.named_parameters() if name.endswith("router.weight")}
    aux = torch.tensor(list(aux_losses().values()))
    if tp > 1:
        for value in (aux, *routers.values()):
            dist.all_reduce(value)
    return {"loss": loss.detach(), "aux": aux, "routers": routers, "shape": list(inputs["padding_mask"].shape)}


IMPORTS = 120


@pytest.fixture
def pool(ranks):
    """Two ranks of a context-parallel group."""
    ranks(2)("megatron_world.start_ranks", 1, seconds=IMPORTS)
    return ranks(2)


@pytest.fixture
def tensor_ranks(ranks):
    """Two ranks of a tensor-parallel group."""
    ranks(2)("megatron_world.start_ranks", 2, seconds=IMPORTS)
    return ranks(2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_in_loss_logits_and_gradients(pool, case):
    alone = on_ranks(case)
    for found in pool("test_megatron.on_ranks", case, seconds=IMPORTS):
        apart = gaps(found, alone)
        assert max(apart.values()) <= 1e-5, apart
        B, S = alone["shapes"]["input_ids"]
        assert found["shapes"]["input_ids"][0] == B
        assert S / 2 <= found["shapes"]["input_ids"][1] <= (S + 3 * 4) / 2  # flat: alignment behind each sequence


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_key_is_what_megatrons_own_split_gives_the_rank(pool, side):
    pool("test_megatron.check_split", side, seconds=IMPORTS)


@pytest.mark.parametrize(
    ("multiple", "padding_free", "shape"), [(8, False, [3, 8]), (16, False, [3, 16]), (1, True, [1, 16])]
)
def test_routers_under_sequence_parallelism_count_no_padding(tensor_ranks, multiple, padding_free, shape):
    """GPTModel shares the mask out itself, so it takes that of all tokens; a flat row is padded to what it can share."""
    alone = sequence_parallel(multiple, padding_free)
    for found in tensor_ranks("test_megatron.sequence_parallel", multiple, padding_free, seconds=IMPORTS):
        assert found["shape"] == shape
        assert abs(found["loss"] - alone["loss"]) <= 1e-5 * alone["loss"]
        assert (found["aux"] - alone["aux"]).abs().max() <= 1e-5
        assert far(found["routers"], alone["routers"]) <= 1e-5
