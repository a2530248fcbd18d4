"""`python titan_train.py OUT`: `python -m torchtitan.train` on a CPU, several times in the same two processes.

First on both ranks, which RANK, WORLD_SIZE and STORE tell, then once more in each of them alone. Beside OUT stands a JSON
for each job; OUT itself says that all are done.
"""

import os
import sys
from pathlib import Path

import titan_cpu  # noqa: F401
import torch
import torch.distributed as dist
import torchtitan.trainer
from processes import free_port
from rotation import part
from torchtitan.train import main

FAMILIES = part(("llama3", "deepseek_v3", "gpt_oss"), 1)
TOGETHER = {
    "qwen3 shared": ("qwen3", ("left", "packed", "packed:ptrr", "full:own"), "context"),
    **{f"{family} shared": (family, ("left", "packed", "full:own"), "context") for family in FAMILIES},
    "qwen3_5 shared": ("qwen3_5", ("right", "left", "packed"), "pipeline"),
}
LAYOUTS = ("right", "left", "packed", "full:own")
ALONE = (
    {"qwen3": ("qwen3", (*LAYOUTS, "holes:ids", "left:theirs", "packed:theirs"), "")},
    {"qwen3_5": ("qwen3_5", (*LAYOUTS, "packed:theirs"), ""), **{family: (family, LAYOUTS, "") for family in FAMILIES}},
)


def train(folder: Path, name: str, config: str, steps: tuple[str, ...], shared: str) -> None:
    """By the words a user types."""
    given = {"module": "titan_jobs", "config": config, "dataloader.steps": ",".join(steps), "training.steps": len(steps)}
    given["dump_folder"] = folder / f"outputs of {name}"
    if shared:
        given[f"parallelism.{shared}_parallel_degree"] = 2
    sys.argv[1:] = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    os.environ["TITAN_OUT"] = str(folder / f"{name}.json")
    torch.manual_seed(0)
    main()


if __name__ == "__main__":
    out, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # rank 0 waits for the others at the end: here their exit codes tell
    torchtitan.trainer.time.sleep = lambda seconds: None
    store = dist.FileStore(os.environ["STORE"], size)
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
    for name, job in TOGETHER.items():
        if rank == 0:  # just before it is used: a port that is kept for later somebody else takes
            store.set(name, str(free_port()))
        os.environ["MASTER_PORT"] = store.get(name).decode()
        train(out.parent, name, *job)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    out.write_text("true")
    for name, job in ALONE[rank].items():
        os.environ["MASTER_PORT"] = str(free_port())
        train(out.parent, name, *job)
