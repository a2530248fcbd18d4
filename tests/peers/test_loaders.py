"""Loaders that people feed trainers with, each with our collator in one line: every sample comes back whole, once, and a
loader that resumes goes on where it stood. megatron-energon 7.4.1, mosaicml-streaming 0.13.0, torchdata 0.11.0, webdataset
1.0.2 and datasets, run here. Ray 2.60.0 and TransferQueue 0.1.11 run on two raylets of this machine, two nodes to Ray.
"""

import json
from itertools import islice

import pytest

NEEDS = ("torchdata", "webdataset", "streaming", "megatron", "datasets", "tensordict", "ray", "transfer_queue")

# ruff: noqa: E402
import numpy as np
import torch
import webdataset
from datasets import Dataset
from loaders_ray_work import QUEUED, SAMPLES, rows_back
from megatron.energon import (
    Cooker,
    SampleDecoder,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from processes import found_by
from torch.utils.data import DataLoader, SequentialSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks import peers
from collate_npu import CollateError, PaddingCollator

pytestmark = pytest.mark.filterwarnings("ignore")
STREAMING = peers.streaming()
OURS = PaddingCollator(pad_token_id=1, padding_side="left", attention_mask="2d")
TRUTH = [[sample["number"], sample["input_ids"]] for sample in SAMPLES]
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])


def whole(batches, ordered=True):
    """Every sample once, with its own tokens and labels; each row's labels stand with its tokens."""
    rows = [row for batch in batches for row in rows_back(batch)]
    for batch in batches:
        for n, labels, keep in zip(batch["number"], batch["labels"], batch["attention_mask_2d"]):
            assert labels[keep].tolist()[1:] == SAMPLES[int(n)]["labels"][1:]
            assert (labels[~keep] == -100).all()
    assert (rows if ordered else sorted(rows)) == TRUTH


def same(found, truth):
    assert [rows_back(batch) for batch in found] == [rows_back(batch) for batch in truth]


def goes_on(made, taken, ordered=True, state=("state_dict", "load_state_dict")):
    """A second loader with the state of one that gave so many batches gives the rest; the batches of a whole epoch."""
    truth, loader, again = [*made()], made(), made()
    whole(truth, ordered)
    first = [*islice(iter(loader), taken)]
    getattr(again, state[1])(getattr(loader, state[0])())
    same([*first, *again], truth)
    return truth


# --- torch's own and torchdata


@pytest.mark.parametrize("form", [None, "torch", "numpy", "arrow"])
@WORKERS
def test_datasets_of_every_format(form, workers):
    """A map-style dataset gives lists of dicts; of Arrow's format each batch is a table."""
    dataset = Dataset.from_list(SAMPLES).with_format(form)
    places = [[*range(12)][n : n + 5] for n in range(0, 12, 5)]
    by_table = {"batch_size": None, "sampler": places} if form == "arrow" else {}
    whole([*DataLoader(dataset, collate_fn=OURS, num_workers=workers, **{"batch_size": 5, **by_table})])
    streamed = Dataset.from_list(SAMPLES).to_iterable_dataset(num_shards=2).with_format(None if form == "arrow" else form)
    whole([*DataLoader(streamed, batch_size=5, collate_fn=OURS, num_workers=workers)], ordered=not workers)
    whole([OURS(batch) for batch in dataset.iter(batch_size=5)])


def test_rows_that_are_tables_are_refused_with_the_line_that_works():
    dataset = Dataset.from_list(SAMPLES).with_format("arrow")
    with pytest.raises(CollateError, match="got a Table"):
        OURS([dataset[0], dataset[1]])
    import pyarrow

    assert rows_back(OURS(pyarrow.concat_tables([dataset[0], dataset[1]])))[1] == [1, SAMPLES[1]["input_ids"]]


@WORKERS
def test_a_stateful_dataloader_goes_on_where_it_stood(workers):
    def made():
        return StatefulDataLoader(SAMPLES, batch_size=3, collate_fn=OURS, num_workers=workers)

    goes_on(made, 2)


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
    inside = opened().map(lambda sample: sample["json"])
    whole([*webdataset.WebLoader(inside, batch_size=5, collate_fn=OURS)])
    with pytest.raises(CollateError, match=r"sample\['json'\]"):
        next(iter(opened().batched(5, collation_fn=OURS)))


def test_webdataset_tuples_are_refused_with_the_map_that_works(shards):
    paths = [str(path) for path in sorted(shards.glob("*.tar"))]
    tuples = (
        webdataset.WebDataset(paths, shardshuffle=False)
        .decode()
        .map(lambda sample: (sample["json"]["input_ids"], sample["json"]["labels"]))
    )
    with pytest.raises(CollateError) as refusal:
        next(iter(tuples.batched(3, collation_fn=OURS)))
    line = str(refusal.value).split("with webdataset: ")[1].rstrip(".")
    batch = next(iter(eval(line, {"dataset": tuples, "dict": dict, "zip": zip}).batched(3, collation_fn=OURS)))
    assert [ids for _, ids in rows_back(batch)] == [sample["input_ids"] for sample in SAMPLES[:3]]


@stateless
def cook(sample):
    return {**basic_sample_keys(sample), **sample["json"]}


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
        return get_savable_loader(dataset)

    truth = goes_on(made, 1, ordered=False, state=("save_state_rank", "restore_state_rank"))
    assert all(len(batch["__key__"]) == len(batch["input_ids"]) for batch in truth)


def test_a_sample_that_is_a_dataclass_is_refused_with_the_line_that_works():
    from megatron.energon import TextSample

    sample = TextSample(__key__="a", __restore_key__=(), __subflavors__={}, text="x")
    with pytest.raises(CollateError, match=r"Pass vars\(sample\) of each"):
        OURS([sample])


@pytest.fixture(scope="module")
def mds(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("mds") / "rows")
    columns = {"number": "int", "input_ids": "ndarray:int64", "labels": "ndarray:int64"}
    with STREAMING.MDSWriter(out=folder, columns=columns) as writer:
        for sample in SAMPLES:
            writer.write({"number": sample["number"], **{key: np.array(sample[key]) for key in ("input_ids", "labels")}})
    return folder


@WORKERS
def test_a_streaming_dataset_goes_on_where_it_stood(mds, workers):
    def made(collate=OURS):
        dataset = STREAMING.StreamingDataset(local=mds, batch_size=4, shuffle=False)
        return STREAMING.StreamingDataLoader(dataset, batch_size=4, collate_fn=collate, num_workers=workers)

    loader, truth, state = made(), [], {}
    for n, batch in enumerate(loader):
        truth.append(batch)
        state = loader.state_dict() if n == 0 else state
    whole(truth)
    again = made()
    again.load_state_dict(state)
    same([*again], truth[1:])


class ByRows(STREAMING.StreamingDataLoader):
    def _get_batch_size(self, batch):
        return len(batch["seq_lens"])


def test_a_streaming_loader_counts_the_samples_of_a_flat_row_where_it_is_told_to(mds):
    """streaming 0.13.0 base/dataloader.py:36-52 counts `len` of the first value: one, for a flat row of four samples."""
    for loader, counted in ((STREAMING.StreamingDataLoader, 1), (ByRows, 4)):
        dataset = STREAMING.StreamingDataset(local=mds, batch_size=4, shuffle=False)
        made = loader(dataset, batch_size=4, collate_fn=PaddingCollator(padding_free=True))
        batch = next(iter(made))
        assert torch.diff(batch["cu_seq_lens_q"]).tolist() == [len(sample["input_ids"]) for sample in SAMPLES[:4]]
        assert made.state_dict()["sample_in_epoch"] == counted


# --- Ray and TransferQueue: nothing of ours schedules


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Everything in one cluster."""
    return found_by("loaders_ray_work", tmp_path_factory.mktemp("ray"), "data", "train", "queue")[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["iter_torch_batches", "arrow", "map_batches"])
def test_ray_data_gives_every_sample_back(found, way):
    batches = found[way]
    assert sorted(row for batch in batches for row in batch) == TRUTH
    assert max(map(len, batches)) == (6 if way == "map_batches" else 5)


@pytest.mark.slow
def test_rows_collated_on_ray_keep_their_mask_and_ray_itself_refuses_none_as_a_column(found):
    assert sorted(row for batch in found["map_batches, adapted"] for row in batch) == [ids for _, ids in TRUTH]
    assert "corresponding to key 'attention_mask' is of type <class 'NoneType'>" in found["map_batches, None"]


@pytest.mark.slow
def test_two_workers_of_ray_train_share_the_samples_out(found):
    assert found["nodes"] == 2
    assert len({node for node, _ in found["train"]}) == 2
    assert sorted(row for _, rows in found["train"] for row in rows) == TRUTH
    assert all(rows for _, rows in found["train"])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "longest"), [("ragged", 20), ("equal", 3)])
def test_a_batch_of_a_transfer_queue_collates_as_it_is(found, rows, longest):
    got = found[f"queue, {rows}"]
    assert got["form"].startswith("TensorDict")
    assert got["rows"] == [[n, SAMPLES[n]["input_ids"][:longest]] for n in QUEUED]
    assert "PaddingCollator takes such a batch as it is" in found[f"queue, {rows}, adapter"]
