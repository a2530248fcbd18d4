"""Workers end with their trainer, however it ends and whatever waits in the pipe; a full /dev/shm loses no batch."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from collate_npu import PaddingCollator
from collate_npu.collate.transport import INLINE_BYTES

TRAINER = Path(__file__).with_name("killed_trainer.py")
SECONDS = 40
"""Nine on an idle machine; without an end they stay for ever."""


def runs(pid):
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_killed_trainer_end(start_method):
    killed = [signal.SIGKILL, signal.SIGTERM]
    command = [sys.executable, str(TRAINER), start_method]
    trainers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in killed]
    workers = [[int(pid) for pid in trainer.stdout.readline().split()] for trainer in trainers]
    everyone = [pid for pids in workers for pid in pids]
    try:
        assert [len(pids) for pids in workers] == [3, 3]
        time.sleep(2)  # what is prefetched is in the pipe
        for trainer, sent in zip(trainers, killed):
            trainer.send_signal(sent)
            trainer.wait()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and any(map(runs, everyone)):
            time.sleep(0.2)
        assert [list(map(runs, pids)) for pids in workers] == [[False] * 3] * 2
    finally:
        for pid in filter(runs, everyone):
            os.kill(pid, signal.SIGKILL)
        for trainer in trainers:
            trainer.kill()
            trainer.wait()


class Long(torch.utils.data.Dataset):
    """Batches of one row: ids that become shorter, and a mask of their length that does not."""

    def __len__(self):
        return 4

    def __getitem__(self, n):
        return {"input_ids": torch.full((2 * INLINE_BYTES,), n + 1), "labels": torch.full((2 * INLINE_BYTES,), 2**40)}


def small_files(_):
    """No file longer than 64 KiB: what a full /dev/shm does to `posix_fallocate`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_without_room_in_shared_memory_the_batch_arrives_and_says_so(capfd):
    loader = DataLoader(
        Long(), 1, num_workers=2, collate_fn=PaddingCollator(pad_token_id=0), worker_init_fn=small_files, timeout=60
    )
    batches = list(loader)
    assert [batch["input_ids"][0, -1].item() for batch in batches] == [1, 2, 3, 4]
    assert all(batch["labels"][0, -1].item() == 2**40 for batch in batches)
    said = capfd.readouterr().err
    assert said.count("no shared memory for a batch") == 2, said
    assert "--shm-size" in said
