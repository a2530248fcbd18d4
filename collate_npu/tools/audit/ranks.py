"""Ranks: processes that run one function together, under a deadline. One that hangs or fails ends them all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class RanksError(RuntimeError):
    """A rank raised, ended or did not come in time; none of them runs any more."""


def together(
    function: Callable[..., Any], size: int, *args: Any, device: str, seconds: float, plugins: Sequence[str] = ()
) -> Any:
    """What rank 0 returns of `function(*args)`, run by `size` processes of one process group on this machine.

    The function is one of a module that a new process can import, its arguments and its result can be pickled. A rank
    finds its number in RANK and LOCAL_RANK too. Raises `RanksError`.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="collate-npu-", ignore_cleanup_errors=True) as folder:
        ends = [spawn.Pipe() for _ in range(size)]
        places = [(rank, size, str(Path(folder, "store")), device, seconds) for rank in range(size)]
        workers = [
            spawn.Process(target=_work, args=(theirs, place, tuple(plugins), function, args), daemon=True)
            for place, (_, theirs) in zip(places, ends)
        ]
        try:
            for worker, (_, theirs) in zip(workers, ends):
                with _deaf_to_interrupts():
                    worker.start()
                theirs.close()  # held open here, the end of that process would not be seen
            return _answers([ours for ours, _ in ends], seconds)[0]
        finally:
            for worker in workers:
                with suppress(ValueError, AttributeError):  # not started
                    worker.kill()
                    worker.join()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process started here inherits that: Ctrl-C goes to a terminal's whole group, and this process ends the ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _answers(pipes: list[Connection], seconds: float) -> dict[int, Any]:
    """What each rank returns, as soon as all have; the first that fails speaks for all, since the others wait for it."""
    deadline = monotonic() + seconds
    answers: dict[int, Any] = {}
    while late := [rank for rank in range(len(pipes)) if rank not in answers]:
        ready = wait([pipes[rank] for rank in late], max(deadline - monotonic(), 0))
        if not ready:
            raise RanksError(f"no answer of rank {', '.join(map(str, late))} within {seconds:g} s")
        for rank in [rank for rank in late if pipes[rank] in ready]:
            right, answers[rank] = _received(pipes[rank])
            if not right:
                # where a rank ends, the others raise that they lost it, and may say so first
                ended = [n for n in late if n != rank and pipes[n].poll(1) and _received(pipes[n]) == (False, _ENDED)]
                raise RanksError(f"rank {ended[0]}: {_ENDED}" if ended else f"rank {rank}: {answers[rank]}")
    return answers


_ENDED = "it ended without an answer"


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        found: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, _ENDED
    return found


def _work(
    pipe: Connection, place: tuple[int, int, str, str, float], plugins: tuple[str, ...], function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    rank, size, store, device, seconds = place
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        import torch
        import torch.distributed as dist

        from collate_npu.tools.audit.attentions import import_plugins

        torch.set_num_threads(1)
        if device == "npu":
            import torch_npu  # noqa: F401
        if device != "cpu":
            getattr(torch, device).set_device(rank)
        import_plugins(plugins)
        late = timedelta(seconds=seconds)
        dist.init_process_group(BACKENDS[device], f"file://{store}", late, size, rank)
        pipe.send((True, function(*args)))
    except BaseException as error:
        text = (str(error).strip().splitlines() or ["no message"])[0][:300]
        pipe.send((False, f"{type(error).__name__}: {text}"))
