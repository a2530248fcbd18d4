"""Loaders that people feed trainers with, each with our collator in one line: every sample comes back whole, once, and a
loader that resumes goes on where it stood. megatron-energon 7.4.1, mosaicml-streaming 0.13.0, torchdata 0.11.0, webdataset
1.0.2, datasets, Ray Data 2.60.0 and TransferQueue 0.1.11, run here.
"""

import json
import os
import sys
from itertools import groupby, islice

import pytest

NEEDS = ("torchdata", "webdataset", "streaming", "megatron", "datasets", "tensordict", "ray", "transfer_queue")

# ruff: noqa: E402
import numpy as np
import ray.train as ray_train
import torch
import webdataset
from datasets import Dataset
from megatron import energon
from megatron.energon import Cooker, SampleDecoder, TaskEncoder, WorkerConfig, get_train_dataset, stateless
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from torch.utils.data import DataLoader, SequentialSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks import peers
from collate_npu import BatchAdapter, CollateError, PaddingCollator
from collate_npu.collate import BalancedBatchSampler

pytestmark = pytest.mark.filterwarnings("ignore")
STREAMING = peers.streaming()
OURS = PaddingCollator(pad_token_id=1, padding_side="left", attention_mask="2d")
LENGTHS = (4, 1, 7, 3, 2, 9, 5, 2, 6, 3, 8, 2)
SAMPLES = [
    {"number": n, "input_ids": [*range(10 + 20 * n, 10 + 20 * n + length)], "labels": [-100, *range(1, length)]}
    for n, length in enumerate(LENGTHS)
]
TRUTH = [[sample["number"], sample["input_ids"]] for sample in SAMPLES]
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def rows_back(batch):
    """`[number, tokens]` of each row, by the batch's own keep mask; the numbers of a batch without any are 0, 1, ..."""
    keep = batch.get("attention_mask_2d")
    keep = torch.as_tensor(batch["attention_mask"] if keep is None else keep).bool()
    numbers = batch.get("number", range(len(keep)))
    return [[int(n), ids[real].tolist()] for n, ids, real in zip(numbers, torch.as_tensor(batch["input_ids"]), keep)]


def whole(batches, ordered=True):
    """Every sample once, with its own tokens and labels; each row's labels stand with its tokens."""
    rows = [row for batch in batches for row in rows_back(batch)]
    for batch in batches:
        for n, labels, keep in zip(batch["number"], batch["labels"], batch["attention_mask_2d"]):
            assert labels[keep].tolist()[1:] == SAMPLES[int(n)]["labels"][1:]
            assert (labels[~keep] == -100).all()
    assert (rows if ordered else sorted(rows)) == TRUTH


def goes_on(made, taken, ordered=True, state=("state_dict", "load_state_dict")):
    """A second loader with the state of one that gave so many batches gives the rest."""
    truth, loader, again = [*made()], made(), made()
    whole(truth, ordered)
    first = [*islice(iter(loader), taken)]
    getattr(again, state[1])(getattr(loader, state[0])())
    assert [rows_back(batch) for batch in [*first, *again]] == [rows_back(batch) for batch in truth]


# --- torch's own and torchdata


@WORKERS
def test_a_plan_resumes_where_its_user_is(workers):
    make = lambda: StatefulDataLoader(  # noqa: E731
        SAMPLES, batch_sampler=BalancedBatchSampler(LENGTHS, max_tokens=10), collate_fn=OURS, num_workers=workers
    )
    loader, again = make(), make()
    batches = iter(loader)
    begun = [next(batches) for _ in range(2)]
    again.load_state_dict(loader.state_dict())
    rest = list(batches)
    assert [batch["number"].tolist() for batch in again] == [batch["number"].tolist() for batch in rest]
    whole([*begun, *rest], ordered=False)


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@WORKERS
def test_datasets_of_every_format(form, workers):
    dataset = Dataset.from_list(SAMPLES).with_format(form)
    whole([*DataLoader(dataset, collate_fn=OURS, num_workers=workers, batch_size=5)])
    streamed = Dataset.from_list(SAMPLES).to_iterable_dataset(num_shards=2).with_format(form)
    whole([*DataLoader(streamed, batch_size=5, collate_fn=OURS, num_workers=workers)], ordered=not workers)
    whole([OURS(batch) for batch in dataset.iter(batch_size=5)])


def test_rows_that_are_tables_are_refused_with_the_line_that_works():
    dataset = Dataset.from_list(SAMPLES).with_format("arrow")
    samples = [dataset[0], dataset[1]]
    with pytest.raises(CollateError, match=r"row for table in samples for row in table\.to_pylist"):
        OURS(samples)
    assert rows_back(OURS([row for table in samples for row in table.to_pylist()]))[1] == [1, SAMPLES[1]["input_ids"]]


@WORKERS
def test_a_stateful_dataloader_goes_on_where_it_stood(workers):
    goes_on(lambda: StatefulDataLoader(SAMPLES, batch_size=3, collate_fn=OURS, num_workers=workers), 2)


def test_nodes_go_on_where_they_stood():
    def made():
        rows = nodes.Batcher(nodes.SamplerWrapper(SequentialSampler(SAMPLES)), batch_size=5, drop_last=False)
        held = nodes.Mapper(rows, lambda places: [SAMPLES[n] for n in places])
        return nodes.Loader(nodes.Prefetcher(nodes.ParallelMapper(held, OURS, num_workers=2, method="thread"), 2))

    goes_on(made, 1)


# --- files


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A webdataset of two shards, JSON samples."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for sample in SAMPLES[6 * shard : 6 * shard + 6]:
                writer.write({"__key__": f"{sample['number']:04d}", "json": json.dumps(sample).encode()})
    return folder


def test_webdataset_takes_ours_where_its_samples_are_dicts(shards):
    def opened():
        return webdataset.WebDataset([str(path) for path in sorted(shards.glob("*.tar"))], shardshuffle=False).decode()

    whole([*opened().map(lambda sample: sample["json"]).batched(5, collation_fn=OURS)])
    with pytest.raises(CollateError, match=r"sample\['json'\]"):
        next(iter(opened().batched(5, collation_fn=OURS)))
    tuples = opened().map(lambda sample: (sample["json"]["input_ids"], sample["json"]["labels"]))
    with pytest.raises(CollateError) as refusal:
        next(iter(tuples.batched(3, collation_fn=OURS)))
    line = str(refusal.value).split("with webdataset: ")[1].rstrip(".")
    batch = next(iter(eval(line, {"dataset": tuples, "dict": dict, "zip": zip}).batched(3, collation_fn=OURS)))
    assert [ids for _, ids in rows_back(batch)] == [sample["input_ids"] for sample in SAMPLES[:3]]


@stateless
def cook(sample):
    return {**energon.basic_sample_keys(sample), **sample["json"]}


class Encoder(TaskEncoder):
    """Energon's, with ours as its `batch`."""

    cookers = (Cooker(cook),)
    decoder = SampleDecoder()

    def batch(self, samples):
        return OURS(samples)


@WORKERS
def test_energon_batches_with_ours_and_goes_on_where_it_stood(shards, workers):
    if not (shards / ".nv-meta" / "dataset.yaml").exists():
        names = sorted(path.name for path in shards.glob("*.tar"))
        WebdatasetPreparator.prepare_dataset(shards, names, split_parts_ratio=[("train", 1.0)], workers=1)
        (shards / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    settings = {"batch_size": 5, "shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}

    def made():
        dataset = get_train_dataset(shards, worker_config=config, task_encoder=Encoder(), **settings)
        return energon.get_savable_loader(dataset)

    goes_on(made, 1, ordered=False, state=("save_state_rank", "restore_state_rank"))


def test_a_sample_that_is_a_dataclass_is_refused_with_the_line_that_works():
    from megatron.energon import TextSample

    sample = TextSample(__key__="a", __restore_key__=(), __subflavors__={}, text="x")
    with pytest.raises(CollateError, match=r"Pass dicts"):
        OURS([sample])


class ByRows(STREAMING.StreamingDataLoader):
    def _get_batch_size(self, batch):
        return len(batch["seq_lens"])


def test_a_streaming_loader_goes_on_and_counts_the_samples_of_a_flat_row_where_it_is_told_to(tmp_path):
    """streaming 0.13.0 base/dataloader.py:36-52 counts `len` of the first value: one, for a flat row of four samples."""
    folder, columns = str(tmp_path / "rows"), {"number": "int", "input_ids": "ndarray:int64", "labels": "ndarray:int64"}
    with STREAMING.MDSWriter(out=folder, columns=columns) as writer:
        for sample in SAMPLES:
            writer.write({"number": sample["number"], **{key: np.array(sample[key]) for key in ("input_ids", "labels")}})

    def made(loader=STREAMING.StreamingDataLoader, collate=OURS):
        dataset = STREAMING.StreamingDataset(local=folder, batch_size=4, shuffle=False)
        return loader(dataset, batch_size=4, collate_fn=collate)

    loader, again = made(), made()
    first = next(batches := iter(loader))
    again.load_state_dict(loader.state_dict())
    rest = [*batches]
    whole([first, *rest])
    assert [rows_back(batch) for batch in again] == [rows_back(batch) for batch in rest]
    for kind, counted in ((STREAMING.StreamingDataLoader, 1), (ByRows, 4)):
        flat = made(kind, PaddingCollator(padding_free=True))
        batch = next(iter(flat))
        assert torch.diff(batch["cu_seq_lens_q"]).tolist() == [len(sample["input_ids"]) for sample in SAMPLES[:4]]
        assert flat.state_dict()["sample_in_epoch"] == counted


# --- Ray Data and TransferQueue: nothing of ours schedules


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_ADDRESS": "local"}
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=4, object_store_memory=80 << 20, **quiet)
    yield ray
    ray.shutdown()


@pytest.mark.together("ray")
def test_ray_data_gives_every_sample_back(ray):
    """Rows collated on its nodes keep their mask; None is no column to Ray."""
    import ray.data

    dataset = ray.data.from_items(SAMPLES, override_num_blocks=2)
    whole([*dataset.iter_torch_batches(batch_size=5, collate_fn=OURS)], ordered=False)
    settings = {"pad_token_id": 1, "padding": "max_length", "max_length": 16}
    on_nodes = dataset.map_batches(PaddingCollator(**settings, attention_mask="omit"), batch_size=4)
    held = [*on_nodes.iter_torch_batches(batch_size=6)]
    assert sorted(row for batch in held for row in rows_back(batch)) == TRUTH
    adapter = BatchAdapter(consumer="transformers", needs_mask_2d=True)
    adapted = [ids for batch in held for _, ids in rows_back(adapter(batch))]
    assert sorted(adapted) == [ids for _, ids in TRUTH]
    with pytest.raises(Exception, match="corresponding to key 'attention_mask' is of type <class 'NoneType'>"):
        dataset.map_batches(PaddingCollator(**settings), batch_size=4).take_all()


def train_planned(config):
    """A worker of Ray Train: its batches of the plan, each a step; then every step again, sample by sample."""
    from collate_npu.collate import loss_weights
    from collate_npu.testing import tiny_model

    def gradient(model):
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    model, seen = ray_train.torch.prepare_model(tiny_model("qwen3_next", vocab_size=400)), []
    rank = ray_train.get_context().get_world_rank()
    for _, rows in groupby(config["shards"][rank].iter_rows(), key=lambda row: row["batch"]):
        batch = OURS([{"input_ids": row["input_ids"], "labels": row["input_ids"], "number": row["number"]} for row in rows])
        seen.append(sorted(batch.pop("number").tolist()))
        batch["attention_mask"] = batch.pop("attention_mask_2d").long()
        (model(**batch).loss * loss_weights([batch])[0]).backward()
    alone, plan = tiny_model("qwen3_next", vocab_size=400), config["plan"]
    for step in ([*one, *other] for one, other in zip(plan[::2], plan[1::2])):
        for n in (n for n in step if LENGTHS[n] > 1):
            row, weight = torch.tensor([SAMPLES[n]["input_ids"]]), (LENGTHS[n] - 1) / sum(LENGTHS[n] - 1 for n in step)
            (alone(input_ids=row, labels=row).loss * weight).backward()
    gap = (gradient(model) - gradient(alone)).norm() / gradient(alone).norm()
    with open(os.path.join(config["out"], f"{rank}.json"), "w") as file:
        json.dump([seen, float(gap)], file)


@pytest.mark.together("ray")
def test_two_workers_of_ray_train_get_the_batches_of_a_plan(ray, tmp_path):
    """Each step's gradient is that of its samples. Rows stay in Ray, and only their lengths are planned."""
    import ray.data
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    plan = [*BalancedBatchSampler(LENGTHS, max_tokens=14, num_replicas=2, rank=None)]
    batch_of = {n: k for k, batch in enumerate(plan) for n in batch}
    planned = ray.data.from_items(SAMPLES, override_num_blocks=2).map(lambda row: row | {"batch": batch_of[row["number"]]})
    shards = [planned.filter(lambda row, rank=rank: row["batch"] % 2 == rank).sort("batch") for rank in (0, 1)]
    TorchTrainer(
        train_planned,
        train_loop_config={"shards": shards, "plan": plan, "out": str(tmp_path)},
        torch_config=TorchConfig("gloo"),
        scaling_config=ray_train.ScalingConfig(num_workers=2),
        run_config=ray_train.RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    for rank in (0, 1):
        seen, gap = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (seen, gap < 1e-5) == ([sorted(batch) for batch in plan[rank::2]], True)


@pytest.mark.together("ray")
def test_a_batch_of_a_transfer_queue_collates_as_it_is(ray):
    import transfer_queue
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    for name, longest in (("ragged", 20), ("equal", 3)):
        places, keys = (0, 2, 3, 6), [f"{name} {n}" for n in range(4)]
        ids = [torch.tensor(SAMPLES[n]["input_ids"][:longest]) for n in places]
        rows = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
        fields = TensorDict({"input_ids": rows, "number": torch.tensor(places)}, [4])
        transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=fields)
        batch = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
        assert rows_back(OURS(batch)) == [[n, SAMPLES[n]["input_ids"][:longest]] for n in places]
        with pytest.raises(CollateError, match="PaddingCollator, which takes them"):
            BatchAdapter(consumer="transformers", needs_mask_2d=True)(batch)
    transfer_queue.close()
