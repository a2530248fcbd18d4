"""The launch scripts of the guide, run with a program in the place of the one that they start: the words it was given."""

import json
import os
import subprocess
import sys
from pathlib import Path

import collate_npu

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
