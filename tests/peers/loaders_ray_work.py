"""Run as a program: Ray Data, Ray Train and TransferQueue on two raylets of this machine, as a cluster of two nodes.

Prints JSON: each batch comes back as the rows it holds, the sample's number and the tokens its keep mask calls real.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}

import ray
import ray.data
import torch
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster
from ray.data.collate_fn import ArrowBatchCollateFn

from collate_npu import BatchAdapter, PaddingCollator

LENGTHS = (4, 1, 7, 3, 2, 9, 5, 2, 6, 3, 8, 2)
SAMPLES: list[dict[str, Any]] = [
    {"number": n, "input_ids": [*range(10 + 20 * n, 10 + 20 * n + length)], "labels": [-100, *range(1, length)]}
    for n, length in enumerate(LENGTHS)
]
QUEUED = (0, 2, 3, 6)
"""Of three tokens and more."""


def rows_back(batch: Any) -> list[list[Any]]:
    """`[number, tokens]` of each row, by the batch's own keep mask; the numbers of a batch without any are 0, 1, ..."""
    keep = batch.get("attention_mask_2d")
    keep = torch.as_tensor(batch["attention_mask"] if keep is None else keep).bool()
    numbers = batch.get("number", range(len(keep)))
    return [[int(n), ids[real].tolist()] for n, ids, real in zip(numbers, torch.as_tensor(batch["input_ids"]), keep)]


RESULTS: dict[str, Any] = {}
START = time.time()
LEFT = PaddingCollator(pad_token_id=1, padding_side="left", attention_mask="2d")


class ByArrow(ArrowBatchCollateFn):
    """Ours around a table: Ray then collates off the trainer's process."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        return LEFT(batch)


def told(name: str, found: Any) -> None:
    RESULTS[name] = found
    print(f"{time.time() - START:.0f} s: {name}", file=sys.stderr, flush=True)


def refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def train(settings: dict[str, Any]) -> None:
    """On each worker of Ray Train."""
    import ray.train as api

    rank = api.get_context().get_world_rank()
    shard = api.get_dataset_shard("train")
    rows = [row for batch in shard.iter_torch_batches(batch_size=3, collate_fn=LEFT) for row in rows_back(batch)]
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, (ray.get_runtime_context().get_node_id(), rows))
    if rank == 0:
        with open(settings["path"], "w") as file:
            json.dump(gathered, file)


def data() -> None:
    dataset = ray.data.from_items(SAMPLES, override_num_blocks=2)
    told("iter_torch_batches", [rows_back(batch) for batch in dataset.iter_torch_batches(batch_size=5, collate_fn=LEFT)])
    told("arrow", [rows_back(batch) for batch in dataset.iter_torch_batches(batch_size=5, collate_fn=ByArrow())])
    fixed = PaddingCollator(pad_token_id=1, padding_side="left", attention_mask="omit", padding="max_length", max_length=16)
    nodes = dataset.map_batches(fixed, batch_size=4)
    held = [*nodes.iter_torch_batches(batch_size=6)]
    told("map_batches", [rows_back(batch) for batch in held])
    adapter = BatchAdapter(consumer="transformers", needs_mask_2d=True)
    told("map_batches, adapted", [[ids for _, ids in rows_back(adapter(batch))] for batch in held])
    whole = PaddingCollator(pad_token_id=1, padding="max_length", max_length=16)
    told("map_batches, None", refused(lambda: dataset.map_batches(whole, batch_size=4).take_all()))


def trainer() -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    path = f"{sys.argv[1]}.train"
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD")
    dataset = ray.data.from_items(SAMPLES, override_num_blocks=2)
    config = {"train_loop_config": {"path": path}, "torch_config": TorchConfig(backend="gloo")}
    TorchTrainer(train, scaling_config=scaling, datasets={"train": dataset}, **config).fit()
    with open(path) as file:
        told("train", json.load(file))


@ray.remote(num_cpus=1)
def put(names: list[str], longest: int) -> str:
    """Another process, on the other node: what a rollout hands on."""
    import transfer_queue
    from tensordict import TensorDict

    transfer_queue.init()
    rows = [torch.tensor(SAMPLES[n]["input_ids"][:longest]) for n in QUEUED]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    fields = TensorDict({"input_ids": ids, "number": torch.tensor(QUEUED)}, [len(rows)])
    transfer_queue.kv_batch_put(keys=names, partition_id="train", fields=fields)
    return ray.get_runtime_context().get_node_id()


def queue() -> None:
    import transfer_queue

    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    for name, longest in (("ragged", 20), ("equal", 3)):
        keys = [f"{name} {n}" for n in QUEUED]
        node = ray.get(put.remote(keys, longest))
        batch = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
        ids = batch["input_ids"]
        form = f"{type(batch).__name__} of {ids.layout if ids.is_nested else 'dense'}"
        same = node == ray.get_runtime_context().get_node_id()
        told(f"queue, {name}", {"rows": rows_back(LEFT(batch)), "form": form, "same node": same})
        adapter = BatchAdapter(consumer="transformers", needs_mask_2d=True)
        told(f"queue, {name}, adapter", refused(lambda: adapter(batch)))  # noqa: B023
    transfer_queue.close()


if __name__ == "__main__":
    small = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **small})
    with suppress(Exception):  # Ray waits 30 s (_private/node.py:428); on a busy machine its raylet comes later
        cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        time.sleep(1)
    told("nodes", len(ray.nodes()))
    for part in sys.argv[2:]:
        {"data": data, "train": trainer, "queue": queue}[part]()
    Path(sys.argv[1]).write_text(json.dumps(RESULTS), encoding="utf-8")
    ray.shutdown()
    cluster.shutdown()
