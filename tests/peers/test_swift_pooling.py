"""ms-swift 4.6.0 on Megatron: the last token of each row is told by the batch that is pooled, and by no other."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from swift_world import LOCAL, Recorder, arguments, as_kind, pooling_trainer, trainer_of

from collate_npu import CollateError, Segments
from collate_npu.integrations import swift
from collate_npu.masks import dense

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def prepared(args, trainer, rows, side):
    """A batch that its trainer has run forward: where each of its tokens stands, and the loss that is to come."""
    data, truth = as_kind(args, "2d", rows, side)  # a bare 4D mask of one short row has two readings
    data["labels"] = torch.zeros(len(rows), dtype=torch.long)
    loss = trainer.forward_step(iter([data]), Recorder())[1]
    return truth.position_ids.unsqueeze(-1).float(), loss


@given(batches=st.lists(lengths, min_size=1, max_size=4), backend=st.sampled_from(["local", "flash"]), data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_batches_prepared_in_any_order_and_pooled_in_any_order_give_their_own_tokens(
    batches, backend, data, world, installed
):
    """Local kernels read a dense mask, and padding may stand on either side; flash reads none, and padding is right."""
    world.npu()
    args = arguments("qwen3", task_type="seq_cls", **(LOCAL if backend == "local" else {}))
    trainer = pooling_trainer(args)
    sides = st.sampled_from(["left", "right"] if backend == "local" else ["right"])
    ran = [prepared(args, trainer, rows, data.draw(sides)) for rows in batches]
    for i in data.draw(st.permutations(range(len(batches)))):
        places, loss = ran[i]
        assert loss(places).flatten().tolist() == [float(n - 1) for n in batches[i]]


@pytest.mark.parametrize("task", ["seq_cls", "embedding", "generative_reranker"])
@pytest.mark.parametrize("backend", ["flash", "local"])
def test_a_prepared_batch_answers_as_each_trainer_asks_and_the_model_gets_what_it_reads(world, installed, task, backend):
    """Three of the trainers ask for either mask, the reward trainer for `attention_mask` alone."""
    world.npu()
    args = arguments("qwen3_next", task_type=task, attention_backend=backend)
    trainer = trainer_of(args)
    batch = trainer._prepare_batch(as_kind(args, "template")[0])
    truth = Segments.from_lengths((7, 3, 5)).keep
    assert torch.equal(batch.get("attention_mask"), truth)
    assert torch.equal(batch.get("attention_mask_2d"), truth)
    assert batch.get("packed_seq_params") is None
    read = dict(**batch)["attention_mask"]
    assert read is None if backend == "flash" else read.shape == (3, 1, 7, 7)


def test_the_mask_that_is_given_is_obeyed_and_anything_else_is_refused(world, installed):
    world.npu()
    args = arguments("qwen3", task_type="seq_cls")
    trainer, (data, truth) = trainer_of(args), as_kind(args, "template")
    trainer._prepare_batch(data)
    places = truth.position_ids.unsqueeze(-1).float()
    other = Segments.from_lengths((2, 6, 1), truth.shape[1])
    for mask in (other.keep, other.keep.long()):
        assert trainer.get_last_tokens(places, None, mask).flatten().tolist() == [1.0, 5.0, 0.0]
    refused = [None, other.keep[:2], other.keep[:, :5], dense(other, polarity="masked")]
    for mask in refused:
        with pytest.raises(CollateError, match=r"this output has 3 rows of 7 \(1 ranks\). .* unsplit"):
            trainer.get_last_tokens(places, None, mask)
    with pytest.raises(CollateError, match="row 1: got padding alone"):
        trainer.get_last_tokens(places, None, other.keep & torch.tensor([[1], [0], [1]]).bool())


def test_a_rank_that_holds_part_of_a_row_is_not_pooled_by_its_part_of_the_mask(world, installed):
    world.npu()
    world.rank(0, 2)
    trainer = trainer_of(arguments("qwen3", cp=2, task_type="seq_cls"))
    with pytest.raises(CollateError, match=r"this output has 3 rows of 8 \(2 ranks\)"):
        trainer.get_last_tokens(torch.zeros(3, 4, 1), None, torch.ones(3, 4))


@pytest.mark.long("two ranks pool")
@pytest.mark.parametrize("backend", ["flash", "local"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_two_ranks_pool_the_last_token_of_rows_they_share(ranks, layout, backend):
    """Upstream's own gather, on Gloo; two batches are prepared before the first of them is pooled."""
    batches = [(7, 3, 5), (2, 8, 1)]
    for found in ranks(2)("swift_work.last_tokens", layout, backend, batches, [1, 0], seconds=180):
        assert found == [[1.0, 7.0, 0.0], [6.0, 2.0, 4.0]]


def test_token_losses_get_a_plain_dict(world):
    world.npu()
    swift.install()
    args = arguments("qwen3")
    assert type(trainer_of(args)._prepare_batch(as_kind(args, "template")[0])) is dict
    swift.uninstall()
