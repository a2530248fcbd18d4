"""Probe: questions that import torch or more, asked in a process of their own: a library that crashes ends that one alone.

A driver or a half-installed package may raise, abort, or never come back. Each question is answered in a line of JSON. Where
the process dies, the question it died of gets the reason as its answer, and the rest go to a new process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 120
"""How long a process may take."""
_ROOT = str(Path(__file__).resolve().parents[3])
_CODE = "import sys; from collate_npu.tools.env.answers import answer; answer(sys.argv[1:])"


def ask(questions: Sequence[str], *, seconds: float = SECONDS, **settings: str) -> dict[str, Any]:
    """The answer to each question of `answers.ANSWERS`, or `{"fails": why}`; `settings` go to the environment."""
    found: dict[str, Any] = {}
    while left := [question for question in questions if question not in found]:
        lines, died = _run(left, seconds, settings)
        found |= lines
        if lost := next((question for question in left if question not in found), None):
            found[lost] = {"fails": died}
    return found


def _run(questions: Sequence[str], seconds: float, settings: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What a process answered, and how it ended."""
    command = [sys.executable, "-c", _CODE, *questions]
    path = [os.environ.get("PYTHONPATH", ""), *sys.path, _ROOT]
    env = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(path)))}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        return dict(_answers(error.stdout or b"")), f"no answer within {seconds:.0f} s"
    return dict(_answers(done.stdout)), _ended(done.returncode, done.stderr)


def _answers(out: bytes) -> Iterator[tuple[str, Any]]:
    for line in out.decode("utf-8", "replace").splitlines():
        try:
            question, found = json.loads(line)
        except ValueError:  # the process died in the middle of it
            continue
        yield question, found


def _ended(code: int, err: bytes) -> str:
    """`ended by SIGSEGV (the last line it said)`."""
    try:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:
        how = f"ended by signal {-code}"
    said = err.decode("utf-8", "replace").strip().splitlines()
    return f"{how} ({said[-1].strip()[:300]})" if said else how
