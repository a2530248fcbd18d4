"""Loaders that people feed trainers with, each with our collator in one line: what they hand to it (`test_recorded`), and a
plan that resumes. megatron-energon 7.4.1, mosaicml-streaming 0.13.0, torchdata 0.11.0, webdataset 1.0.2, Ray Data 2.60.0,
TransferQueue 0.1.11, and megatron-core 0.16.1's indexed datasets.
"""

import json
import os
from itertools import islice

import pytest

NEEDS = ("torchdata", "webdataset", "streaming", "megatron", "datasets", "tensordict", "ray", "transfer_queue")

# ruff: noqa: E402
import numpy as np
import torch
import webdataset
from datasets import Dataset
from test_recorded import LENGTHS, ROWS, SAMPLES, remade
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks import peers
from collate_npu import CollateError, PaddingCollator
from collate_npu.collate import BalancedBatchSampler

pytestmark = pytest.mark.filterwarnings("ignore")
STREAMING = peers.streaming()
COLLATOR = PaddingCollator(pad_token_id=1, padding_side="left", attention_mask="2d")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plan_resumes_where_its_user_is(workers):
    """torchdata counts what its user took, not what its workers read ahead."""

    def made():
        plan = BalancedBatchSampler(LENGTHS * 3, max_tokens=10)
        return StatefulDataLoader(SAMPLES * 3, batch_sampler=plan, collate_fn=COLLATOR, num_workers=workers)

    whole, loader, again = ([batch["number"].tolist() for batch in made()] for _ in range(1)), made(), made()
    (whole,), begun = whole, [*islice(iter(loader), 2)]
    again.load_state_dict(loader.state_dict())
    assert [batch["number"].tolist() for batch in [*begun, *again]] == whole
    assert sorted(n for batch in whole for n in batch) == sorted([*range(len(LENGTHS))] * 3)


def test_rows_that_are_tables_are_refused_with_the_line_that_works():
    dataset = Dataset.from_list(SAMPLES).with_format("arrow")
    samples = [dataset[n] for n in range(len(SAMPLES))]
    with pytest.raises(CollateError, match=r"Pass the rows of the tables") as refusal:
        COLLATOR(samples)
    line = str(refusal.value).split("tables: ")[1].rstrip(".")
    batch = COLLATOR(eval(line, {"samples": samples}))
    assert batch["attention_mask_2d"].sum(1).tolist() == [*LENGTHS]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A webdataset of JSON samples."""
    folder = tmp_path_factory.mktemp("shards")
    with webdataset.TarWriter(str(folder / "0.tar")) as writer:
        for sample in SAMPLES:
            writer.write({"__key__": f"{sample['number']:04d}", "json": json.dumps(sample).encode()})
    return folder


def test_webdataset(shards):
    """Its samples, and tuples by the line that the refusal names."""
    opened = webdataset.WebDataset(str(shards / "0.tar"), shardshuffle=False).decode()
    remade("webdataset", next(iter(opened.map(lambda sample: sample["json"]).batched(4, collation_fn=list))))
    tuples = opened.map(lambda sample: (sample["json"]["input_ids"], sample["json"]["labels"]))
    with pytest.raises(CollateError) as refusal:
        next(iter(tuples.batched(4, collation_fn=COLLATOR)))
    line = str(refusal.value).split("with webdataset: ")[1].rstrip(".")
    remade("webdataset, tuples", next(iter(eval(line, {"dataset": tuples}).batched(4, collation_fn=list))))


def test_energon(shards):
    remade("megatron-energon", next(iter(peers.energon(shards, 4, lambda sample: sample["json"], list))))


def test_streaming(tmp_path):
    folder, columns = str(tmp_path / "rows"), {"number": "int", "input_ids": "ndarray:int64", "labels": "ndarray:int64"}
    with STREAMING.MDSWriter(out=folder, columns=columns) as writer:
        for sample in SAMPLES:
            writer.write({"number": sample["number"], **{key: np.array(sample[key]) for key in ("input_ids", "labels")}})
    dataset = STREAMING.StreamingDataset(local=folder, batch_size=4, shuffle=False)
    remade("mosaicml-streaming", next(iter(STREAMING.StreamingDataLoader(dataset, batch_size=4, collate_fn=list))))


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_ADDRESS": "local"}
    import ray.data

    ray.init(num_cpus=4, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.together("ray")
def test_ray_data(ray):
    """Its columns, and a batch that its nodes collated: None is no column to Ray."""
    dataset = ray.data.from_items(SAMPLES, override_num_blocks=1)
    remade("Ray Data", next(iter(dataset.iter_torch_batches(batch_size=4, collate_fn=dict))))
    settings = {"pad_token_id": 1, "padding": "max_length", "max_length": 8, "attention_mask": "omit"}
    on_nodes = dataset.map_batches(PaddingCollator(**settings), batch_size=4)
    remade("Ray Data, collated on its nodes", next(iter(on_nodes.iter_torch_batches(batch_size=4))), "read")


@pytest.mark.together("ray")
def test_a_transfer_queue(ray):
    import transfer_queue
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    for name, rows in {"": ROWS, ", equal rows": [row[:3] for row in ROWS if len(row) > 2]}.items():
        nested = torch.nested.as_nested_tensor(list(map(torch.tensor, rows)), layout=torch.jagged)
        names = {"keys": [f"{name} {n}" for n in range(len(rows))], "partition_id": "train"}
        transfer_queue.kv_batch_put(**names, fields=TensorDict({"input_ids": nested}, [len(rows)]))
        remade(f"TransferQueue{name}", transfer_queue.kv_batch_get(**names), rows=rows)
    transfer_queue.close()


# --- Megatron's rows of eight tokens (datasets/gpt_dataset.py:225-296), of six documents that each end in EOD

EOD = 1
PARTED = {"reset_position_ids": True}
ASKED = {"": {}, ", masks": {"create_attention_mask": True}, ", positions anew": PARTED}
ASKED[", masks and positions anew"] = PARTED | {"reset_attention_mask": True, "create_attention_mask": True}


class Tokens:
    vocab_size, eod, pad, unique_identifiers = 300, EOD, 2, {"class": "numbers"}


@pytest.mark.parametrize("asked", ASKED)
def test_indexed_datasets_of_megatron(asked, tmp_path):
    import megatron_world  # noqa: F401  triton for Megatron from 0.18 on; the other loaders do not ask for it
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    path, settings = str(tmp_path / "documents"), ASKED[asked]
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for n, length in enumerate((5, 7, 3, 9, 4, 6)):
        builder.add_document(torch.tensor([*range(10 + 20 * n, 9 + 20 * n + length), EOD], dtype=torch.int32), [length])
    builder.finalize(f"{path}.idx")
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    where = {"blend": ([path], None), "split": "1,0,0", "tokenizer": Tokens(), "random_seed": 1, "sequence_length": 8}
    config = GPTDatasetConfig(**where, **{**dict.fromkeys(names, False), **settings})
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config).build()[0]
    rows = [dataset[n] for n in range(4)]
    told = [documents(row["tokens"]) if "reset_position_ids" in settings else [row["tokens"].tolist()] for row in rows]
    remade(f"Megatron's indexed dataset{asked}", rows, "wrap", [each for row in told for each in row])


def documents(tokens):
    """Of a row, each with its end."""
    ends = [n + 1 for n, token in enumerate(tokens.tolist()) if token == EOD]
    return [part.tolist() for part in tokens.tensor_split(ends) if len(part)]
