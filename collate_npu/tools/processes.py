"""Processes: a command whose every Python starts with `inherited/sitecustomize.py`, by which ours begins in each of them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

from collate_npu.errors import CollateError

_POLL = 0.2
_PATIENCE = 15
"""Seconds that a command gets to end by itself."""
Records = list[dict[str, Any]]


def run_processes(
    command: Sequence[str], variable: str, settings: Mapping[str, Any], stops: Callable[[Records], bool] = lambda _: False
) -> tuple[int, Records]:
    """Run a command with these settings in a variable of its environment, until it ends or what its processes wrote `stops`
    it. Return its exit code, and what they wrote."""
    command = command[command[:1] == ["--"] :]
    if not command or which(command[0]) is None:
        remedy = f"Write what you would type, behind --: collate-npu {variable[12:].lower()} -- python train.py"
        raise CollateError(f"{command[0] if command else 'COMMAND'}: no such command. {remedy}")
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.jsonl"
        added = environment(variable, {**settings, "seen": str(seen)})
        child = subprocess.Popen(command, env={**os.environ, **added})
        interrupts = 0
        while child.poll() is None:
            try:
                time.sleep(_POLL)
                if stops(_records(seen)):
                    _end(child)
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1:  # the first one it got as well, from the terminal, and may be saving what it has
                    _end(child)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode, _records(seen)


def environment(variable: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what the environment of a process must have."""
    inherited = str(Path(__file__).resolve().parent / "inherited")
    path = filter(None, (inherited, os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(path), variable: json.dumps(settings)}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _records(seen: Path) -> Records:
    """Return what the processes wrote; a line that is half written is left out."""
    found = []
    for line in seen.read_text(encoding="utf-8").splitlines() if seen.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
