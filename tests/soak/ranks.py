"""Four ranks on Gloo, rounds of random calls, and in some a fault whose true outcome is known: it must be raised on every
rank, in time; and no healthy round may be refused. `python -m soak ranks --minutes 10`."""

import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import ranks_work as work
from gloo_pool import START, Pool

SIZE, CALLS, TIMEOUT, SLACK = 4, 12, 2.0, 4.0
"""Ranks; calls of a round; the group's timeout in seconds; and what a loaded machine may add."""
ILLS = [(name, fault) for name in work.CALLS for fault in work.FAULTS[name]]


class Soak:
    def __init__(self, seed: int) -> None:
        self.draw, self.counts, self.problems = random.Random(seed), Counter[str](), list[str]()
        self.begin()

    def begin(self) -> None:
        self.pool, self.rounds = Pool(SIZE), 0
        self.pool(work.warm, seconds=START)
        self.path = tempfile.NamedTemporaryFile(prefix="soak-", delete=False).name  # noqa: SIM115

    def run(self, minutes: float) -> None:
        until = monotonic() + 60 * minutes
        while monotonic() < until and len(self.problems) < 10:
            self.round()
        self.pool.close()

    def round(self) -> None:
        if not self.rounds:
            self.pool(work.meet, self.path, 0, TIMEOUT)
        self.rounds += 1
        calls = [self.draw.choice(work.CALLS) for _ in range(CALLS)]
        at, odd, seed = self.draw.randrange(CALLS - 1), self.draw.randrange(SIZE), self.draw.randrange(1 << 30)
        fault = self.draw.choice(work.HARMLESS)
        if self.draw.random() < 0.5:
            ills = [self.draw.choice(ILLS) for _ in range(2)]
            calls[at], fault = ills["kill" in ills[0][1]]  # twice for a kill, behind which four processes begin again
        pair = {*calls[at : at + 2]}  # nothing tells one from the other, nor a rank's part of other rows
        alike = pair <= {"objects", "plan"} or pair == {"shared"}
        fault = "" if fault in ("skip", "swap") and alike else fault
        said = self.said(seed, calls, fault, odd, at)
        self.judge(said, f"seed {seed}, {calls}, {fault or 'healthy'} at call {at} of rank {odd}", fault, odd)
        if None in said:
            self.pool.close()
            self.begin()
        elif fault not in work.HARMLESS:
            self.pool(work.meet, self.path, self.rounds, TIMEOUT)

    def said(self, seed: int, calls: list[str], fault: str, odd: int, at: int) -> list[Any]:
        """What each rank answers; None of one that is gone."""
        for pipe in self.pool._pipes:
            pipe.send((work.round_of, (seed, calls, fault, odd, at, TIMEOUT)))
        if fault.startswith("stop"):
            pid = self.pool._workers[odd].pid
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                sleep(0.01)
            sleep(2 * TIMEOUT)
            os.kill(pid, signal.SIGCONT)
        return [_answer(pipe, 6 * TIMEOUT + SLACK) for pipe in self.pool._pipes]

    def judge(self, said: list[Any], what: str, fault: str, odd: int) -> None:
        self.counts[f"rounds: {fault or 'healthy'}"] += 1
        self.counts["calls of a rank that were right"] += sum(answer[1] for answer in said if isinstance(answer, tuple))
        heard = [answer for rank, answer in enumerate(said) if not (fault.startswith("kill") and rank == odd)]
        if fault in work.HARMLESS:
            right = [answer == ("", CALLS, 0.0) for answer in heard]
        else:
            right = [isinstance(a, tuple) and a[0].startswith("refused") and a[2] < 3 * TIMEOUT + SLACK for a in heard]
        if not all(right):
            self.problems.append(f"{what}: {said}")


def _answer(pipe: Any, seconds: float) -> Any:
    try:
        return pipe.recv()[1] if pipe.poll(seconds) else "no answer"
    except EOFError:
        return None
