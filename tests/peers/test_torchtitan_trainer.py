"""torchtitan 0.3.0's own trainer, from its command line to the gradients, with our collator in its dataloader.

`titan_train.py` is `python -m torchtitan.train` on a CPU; `titan_jobs.py` is the user's job. Every step is another layout
of two rows, and rank 0 compares the step's loss and gradients with every sample alone. `WITHOUT` is what the same rows
give without us.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchtitan", "torchdata")) or bool(importlib.util.find_spec("fla")),
    reason="torchtitan 0.3.0 with torchdata, and without fla, is not installed (nox -s peers_misc)",
)
EXACT, WITHOUT = 5e-6, 0.1


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Run the trainer in `ranks` processes; what rank 0 found, by step."""
    folder = tmp_path_factory.mktemp("titan")

    def run(config: str, *steps: str, ranks: int = 1, **options: Any) -> dict[str, Any]:
        out = folder / f"{config}-{len(list(folder.iterdir()))}.json"
        given = {"module": "titan_jobs", "config": config, "dataloader.steps": ",".join(steps)}
        given |= {"training.steps": len(steps), "dump_folder": folder / "outputs"}
        given |= {f"parallelism.{name}": value for name, value in options.items()}
        command = [sys.executable, HERE / "titan_train.py", *(str(x) for name in given for x in (f"--{name}", given[name]))]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
            "TITAN_OUT": str(out),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
        }
        workers = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = (folder / f"{out.stem}.{rank}.log").open("w+")
            worker = subprocess.Popen(command, env=environment | place, cwd=folder, stdout=log, stderr=log)
            workers.append((worker, log))
        codes = [worker.wait(timeout=900) for worker, _ in workers]
        logs = [_end_of(log) for _, log in workers]
        assert codes == [0] * ranks, "\n".join(logs)
        found = json.loads(out.read_text())
        print(json.dumps(found))
        return {step["step"]: step for step in found}

    return run


def _end_of(log: Any) -> str:
    log.seek(0)
    return log.read()[-4000:]


def assert_as_alone(found: dict[str, Any], calls: list[list[int]], *steps: str) -> None:
    for name in steps:
        step = found[name]
        assert step["loss error"] <= EXACT, (name, step)
        assert step["gradient error"] <= EXACT, (name, step)
        assert [rank["wrong places"] for rank in step["ranks"]] == [0] * len(calls), (name, step)
        for rank, shape in zip(step["ranks"], calls):
            assert all(mask == shape for mask in rank["masks"]), (name, step)
    assert any(rank["masks"] for rank in found[steps[0]]["ranks"])


def test_qwen3_trains_on_each_sample_alone(train):
    """Positions alone for the first three; holes with segment_ids, through masks_in_forward."""
    ours, theirs = ("right", "left", "packed", "holes:ids"), ("left:theirs", "packed:theirs")
    found = train("qwen3", *ours, *theirs)
    assert_as_alone(found, [[2, 256, 256]], *ours)
    for name in theirs:
        assert found[name]["gradient error"] > WITHOUT
        assert found[name]["ranks"][0]["wrong places"] > 10_000


def test_qwen3_trains_on_two_context_parallel_ranks(train):
    """torchtitan cuts tokens, labels, positions and the BlockMask: head-tail, and by blocks of work (PTRR)."""
    steps = ("left", "packed", "packed:ptrr")
    found = train("qwen3", *steps, ranks=2, context_parallel_degree=2)
    assert_as_alone(found, [[2, 128, 256]] * 2, *steps)


def test_qwen3_5_trains_on_each_sample_alone(train):
    found = train("qwen3_5", "right", "packed", "packed:theirs")
    assert_as_alone(found, [[2, 256, 256]], "right", "packed")
    offsets = [0, 60, 69, 119, 209, 256, 286, 386, 512]
    assert found["packed"]["ranks"][0]["offsets"] == [offsets] * 2
    assert found["packed:theirs"]["ranks"][0]["offsets"] == [[0, 256, 512]] * 2
    assert found["packed:theirs"]["gradient error"] > WITHOUT


def test_qwen3_5_trains_in_two_pipeline_stages(train):
    """1F1B with a row a micro-batch: the recurrent layer in one process, full attention in the other."""
    found = train("qwen3_5", "right", "left", "packed", ranks=2, pipeline_parallel_degree=2)
    assert_as_alone(found, [[1, 256, 256]] * 2, "right", "left", "packed")
    first, last = found["packed"]["ranks"]
    assert first["offsets"][:2] == [[0, 60, 69, 119, 209, 256], [0, 30, 130, 256]]
    assert (first["masks"], last["offsets"]) == ([], [])
