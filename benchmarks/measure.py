"""One group, in a process of its own: how fast large memory comes depends on what a process has done before."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import torch

from benchmarks import report
from benchmarks.timing import Absent, Pace, Row, race

GROUPS = ("collate", "dataloader", "dense", "derive", "parallel", "adapter", "neutral", "growth")
Found = tuple[list[Row], list[Absent]]


def apart(group: str, pace: Pace, *, quick: bool, threads: int) -> Found:
    """`measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, group, pace, quick=quick, threads=threads).result()


def measure(group: str, pace: Pace, *, quick: bool, threads: int) -> Found:
    """The rows of all cases, and who could not run. Raises where an output differs from ours."""
    _quiet()
    _settle()
    torch.set_num_threads(threads)
    rows: list[Row] = []
    absent: list[Absent] = []
    for case in import_module(f"benchmarks.groups.{group}").cases(quick):
        report.progress(f"{case.group}: {case.name}")
        gc.collect()  # the last case's loaders end their workers here, before others are forked
        if contestants := case.ready():
            rows += case.rows(race(contestants, pace))
        absent += case.absent
    return rows, absent


def _settle() -> None:
    """glibc takes each piece above 128 KiB fresh from the system until larger ones were freed (mallopt(3),
    M_MMAP_THRESHOLD, at most 32 MiB): a process that trains has done so long ago.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _quiet() -> None:
    """The peers' own messages."""
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "LOG_LEVEL"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
