"""A group, in a process of its own: how fast large memory comes depends on what a process has done before."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import torch

from benchmarks import report
from benchmarks.timing import Absent, Pace, Row, race

GROUPS = (
    "step", "collate", "dataloader", "loaders", "wire", "dense", "derive", "parallel", "adapter", "proof", "neutral",
    "growth", "long",
)  # fmt: skip
Found = tuple[list[Row], list[Absent]]


def apart(groups: Sequence[str], pace: Pace, *, quick: bool, threads: int) -> Found:
    """`measure` of these groups in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin, initargs=(threads,)) as process:
        found = [process.submit(measure, group, pace, quick=quick).result() for group in groups]
    return [row for rows, _ in found for row in rows], [one for _, absent in found for one in absent]


def measure(group: str, pace: Pace, *, quick: bool) -> Found:
    """The rows of all cases, and who could not run. Raises where an output differs from ours."""
    rows: list[Row] = []
    absent: list[Absent] = []
    for case in import_module(f"benchmarks.groups.{group}").cases(quick):
        report.progress(f"{case.group}: {case.name}")
        gc.collect()  # the last case's loaders end their workers here, before others are forked
        if contestants := case.ready():
            rows += case.rows(race(contestants, pace))
        absent += case.absent
    return rows, absent


def _begin(threads: int) -> None:
    """As in a process that trains: glibc takes each piece above 128 KiB fresh from the system until a larger one was
    freed (mallopt(3), M_MMAP_THRESHOLD, at most 32 MiB). And without the peers' own messages.
    """
    torch.set_num_threads(threads)
    torch.empty(31 << 20, dtype=torch.uint8)
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "LOG_LEVEL"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
