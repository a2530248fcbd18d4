"""Work of a peer test in processes of their own: what each of them found."""

import json
import os
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any

from rotation import NIGHTLY

import collate_npu

HERE = Path(__file__).parent
_ARGV = [*sys.argv]
"""As this process was started: work gives its stack other words."""
QUIET = {"RAY_ADDRESS": "local", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
QUIET |= dict.fromkeys(("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"), "1")


def found_by(work: str, folder: Path, *words: Any, variants: Any = ({},), ranks: int = 0) -> list[Any]:
    """`python WORK.py OUT WORDS ...`, once for each variant of the environment, all at once: the JSON that each wrote.

    A variant with RUN goes through `collate-npu run`; the stack as it is beside it, in which nothing of ours runs, runs at
    night, and is None else. With `ranks` a variant is that many processes; the environment of each names its place as
    torchrun does, and STORE. The first one writes.
    """
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    running, outs = [], [folder / f"{work}-{n}.json" for n in range(len(variants))]
    runs = [NIGHTLY or "RUN" in one or not any("RUN" in each for each in variants) for one in variants]
    for out, variant in compress(zip(outs, variants), runs):
        env = {**os.environ, **QUIET, "PYTHONPATH": path, **variant}
        if ranks:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "STORE": f"{out}.store"}
            env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        for rank in range(max(ranks, 1)):
            place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if ranks else {}
            through = [sys.executable, "-m", "collate_npu", "run", "--no-check", "--"] if "RUN" in variant else []
            command = [*through, sys.executable, str(HERE / f"{work}.py"), str(out), *map(str, words)]
            log = out.with_suffix(f".{rank}.log").open("w+")
            running.append((subprocess.Popen(command, env=env | place, cwd=folder, stdout=log, stderr=log), log))
    for process, log in running:
        code = process.wait(timeout=1200)
        log.seek(0)
        assert code == 0, log.read()[-4000:]
    return [json.loads(out.read_text(encoding="utf-8")) if run else None for out, run in zip(outs, runs)]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


# --- for work that trains from YAML files: `python WORK.py OUT FOLDER JOB ...`


TEXTS = ["1 a short one", "2 and another that is a little longer than it", "3 three", "4 four four"]
"""What trainers are given."""


def saved_model(folder: Path, name: str, *, pad_is_eos: bool = True, **config: Any) -> str:
    """Where a tiny model and its tokenizer lie, as on a hub; with these fields in its config besides."""
    from collate_npu.testing import byte_tokenizer, tiny_model

    if not (folder / name).exists():
        tokenizer = byte_tokenizer(pad_is_eos=pad_is_eos)
        model = tiny_model(name, vocab_size=len(tokenizer))
        model.config.update(config)
        made = folder / f"{os.getpid()}.{name}"  # whole before another process sees it
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        with suppress(OSError):  # another was first
            made.rename(folder / name)
    return str(folder / name)


def refusal(act: Any) -> str:
    """The error that an act ends with, as text; "" where it goes through."""
    try:
        act()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def watched(watch: Any, rows: Any, refused: str) -> dict[str, Any]:
    """What a job gave: each sequence against itself alone, and the masks that layers received (`watching.Watch`)."""
    watch.__exit__()
    watch.base.eval()
    error, compared = watch.error(rows := set(rows))
    masks = {kind: sorted(forms) for kind, forms in watch.masks.items()}
    found = {"refused": refused, "error": error, "compared": compared, "masks": masks}
    return found | {"gradient": None if refused else watch.gradient_error(rows)}


def process_group() -> tuple[int, int]:
    """Gloo among the ranks of `found_by`, in each of them: its rank, and how many there are."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], size), rank=rank, world_size=size)
    return rank, size


def run_jobs(run: Any) -> None:
    """The work of each job, written by the first rank."""
    _, folder, *jobs = sys.argv[1:]
    write({job: run(Path(folder), *job.split()) for job in jobs})


def write(found: Any) -> None:
    """The answer of a process that `found_by` started, by the first rank."""
    if os.environ.get("RANK", "0") == "0":
        Path(_ARGV[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")


# --- the launch scripts of the guide, run with a program in the place of the one that they start: the words it is given

LAUNCH = Path(collate_npu.__file__).parent / "guide" / "launch"
JOBS = {"dense": (2, 2, 1, 2, 1), "moe": (2, 2, 1, 2, 4), "moe-cp": (2, 1, 2, 2, 4)}
"""Tensor, pipeline, context, data and expert parallelism."""
CARDS = 8
_TOLD = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['TOLD'], 'w'))"


def words_of(script: str, program: str, job: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What `program` is started with, and in which environment."""
    stand_in = folder / program
    stand_in.write_text(f"#!{sys.executable}\n{_TOLD}\n")
    stand_in.chmod(0o755)
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would leave its environment
    (folder / "python").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "TOLD": str(folder / "told.json")}
    subprocess.run(["bash", str(LAUNCH / script), job, "MODEL", "DATASET"], env=env, check=True, cwd=folder)
    words, told = json.loads((folder / "told.json").read_text())
    return words, told


def check_sizes(job: str, tensor: int, pipeline: int, context: int, data: int, expert: int) -> None:
    """Megatron's: experts are shared out over the cards of a stage (megatron-core 0.16.1 parallel_state.py:585-600)."""
    assert (tensor, pipeline, context, data, expert) == JOBS[job]
    assert tensor * pipeline * context * data == CARDS
    assert CARDS // pipeline % expert == 0
