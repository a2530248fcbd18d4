"""ms-swift 4.6.0 on Megatron: the last token of each row is told by the batch that is pooled, and by no other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
if importlib.util.find_spec("swift") is None:
    pytest.skip("ms-swift is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before Megatron is imported)
import torch  # noqa: E402
from gloo_pool import Pool  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from swift.megatron.trainers.reward_trainer import MegatronRewardTrainer  # noqa: E402
from swift_fixtures import LOCAL, as_kind  # noqa: E402
from swift_world import Recorder, arguments, trainer_of  # noqa: E402

from collate_npu import CollateError, Segments, dense  # noqa: E402
from collate_npu.integrations import swift  # noqa: E402

pytest_plugins = "swift_fixtures"
pytestmark = pytest.mark.usefixtures("nothing_left_behind")
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def prepared(args, trainer, rows, side):
    """A batch that its trainer has run forward: where each of its tokens stands, and the loss that is to come."""
    data, truth = as_kind(args, "2d", rows, side)  # a bare 4D mask of one short row has two readings
    data["labels"] = torch.zeros(len(rows), dtype=torch.long)
    loss = trainer.forward_step(iter([data]), Recorder())[1]
    return truth.position_ids.unsqueeze(-1).float(), loss


def pooling_trainer(args):
    """Its loss gives back what it pools, with the mask that `forward_step` found in its batch."""
    trainer = trainer_of(args)
    trainer.seq_cls_loss_func = lambda output, *, attention_mask, packed_seq_params, labels: trainer.get_last_tokens(
        output, packed_seq_params, attention_mask
    )
    return trainer


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


def test_the_reward_trainers_loss_pools_the_batch_it_holds(world, installed, monkeypatch):
    world.npu()
    args = arguments("qwen3", task_type="seq_cls")
    args.center_rewards_coefficient = None
    trainer, seen = trainer_of(args), []
    monkeypatch.setattr(trainer, "_all_reduce_metric", lambda metric: metric)
    tokens = trainer.get_last_tokens
    monkeypatch.setattr(trainer, "get_last_tokens", lambda *given: seen.append(tokens(*given)) or seen[-1])
    batches = [trainer._prepare_batch(as_kind(args, "2d", rows)[0]) for rows in ((7, 3), (2, 5))]
    for rows, batch in zip(((7, 3), (2, 5)), batches):
        width = batch["input_ids"].shape[1]
        MegatronRewardTrainer.loss_func(trainer, torch.arange(width).float().expand(2, -1).unsqueeze(-1), data=batch)
        assert seen[-1].flatten().tolist() == [n - 1.0 for n in rows]


def test_the_mask_that_is_given_is_obeyed_and_anything_else_is_refused(world, installed):
    world.npu()
    args = arguments("qwen3", task_type="seq_cls")
    trainer, (data, truth) = trainer_of(args), as_kind(args, "template")
    trainer._prepare_batch(data)
    places = truth.position_ids.unsqueeze(-1).float()
    other = Segments.from_lengths((2, 6, 1), truth.shape[1])
    for mask in (other.keep, other.keep.long(), dense(other, polarity="masked")):
        assert trainer.get_last_tokens(places, None, mask).flatten().tolist() == [1.0, 5.0, 0.0]
    refused = [None, other.keep[:2], other.keep[:, :5], dense(other, polarity="masked")[:, :, :4]]
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


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("backend", ["flash", "local"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_two_ranks_pool_the_last_token_of_rows_they_share(pool, layout, backend):
    """Upstream's own gather, on Gloo; two batches are prepared before the first of them is pooled."""
    batches = [(7, 3, 5), (2, 8, 1)]
    for found in pool("swift_work.last_tokens", layout, backend, batches, [1, 0], seconds=180):
        assert found == [[1.0, 7.0, 0.0], [6.0, 2.0, 4.0]]


def test_token_losses_get_a_plain_dict(world):
    world.npu()
    swift.install()
    args = arguments("qwen3")
    assert type(trainer_of(args)._prepare_batch(as_kind(args, "template")[0])) is dict
    swift.uninstall()
