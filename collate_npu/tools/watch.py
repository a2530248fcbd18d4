"""Watch: `collate-npu watch` runs a command and sums up what its kernels were told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

from collate_npu.errors import CollateError, printable

_INHERITED = Path(__file__).resolve().parent / "inherited"
"""What every Python of the run starts with."""
_POLL = 0.2
_MOST = 6
"""Layers with a fault that the last line names."""
_PATIENCE = 15
"""Seconds that a command gets to end by itself."""
_NO_PASS = "This is not a pass."


def watch_processes(command: Sequence[str], *, steps: int, stop: bool, out: Path | None) -> int:
    """Run a command with the kernels of all its processes watched, and return the exit code of `collate-npu watch`."""
    command = command[command[:1] == ["--"] :]
    if not command or which(command[0]) is None:
        remedy = "Write what you would type, behind --: collate-npu watch -- python train.py"
        raise CollateError(f"{command[0] if command else 'COMMAND'}: no such command. {remedy}")
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.jsonl"
        settings = {"steps": steps, "seen": str(seen), "out": None if out is None else str(out.resolve())}
        path = os.pathsep.join(filter(None, (str(_INHERITED), os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "COLLATE_NPU_WATCH": json.dumps(settings)})
        _wait(child, seen, stop)
        records = _records(seen)
    print(printable(f"collate-npu watch: {_summary(records)}"), file=sys.stderr, flush=True)
    if stop and any(record["faults"] for record in records):
        return 1
    if stop and not any(record["judged"] for record in records):
        return 2
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _wait(child: subprocess.Popen[bytes], seen: Path, stop: bool) -> None:
    """Wait until the command ends, or end it at a fault."""
    interrupts = 0
    while child.poll() is None:
        try:
            time.sleep(_POLL)
            if stop and any(record["faults"] for record in _records(seen)):
                _end(child)
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 1:  # the first one it got as well, from the terminal, and may be saving what it has
                _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _records(seen: Path) -> list[dict[str, Any]]:
    """Return what the processes wrote; a line that is half written is left out."""
    found = []
    for line in seen.read_text(encoding="utf-8").splitlines() if seen.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _summary(records: list[dict[str, Any]]) -> str:
    kernels = sum((Counter(record["kernels"]) for record in records), Counter[str]())
    wrong = [record for record in records if record["faults"]]
    if not kernels and not wrong:
        return f"NOTHING WAS SEEN: no known kernel ran in any process that could be watched. {_NO_PASS}"
    if not wrong and not any(record["judged"] for record in records):
        why = next((record["unsaid"] for record in records if record["unsaid"]), "no kernel had its tokens").splitlines()[0]
        return f"NOT JUDGED: {len(records)} forwards, none compared with its batch: {why} {_NO_PASS}"
    own = [record["judged"] for record in records if not record["again"]]
    faults = f"no fault in {sum(own)} of {len(own)} forwards"
    if wrong:
        places = [*dict.fromkeys(f"{each['layer']}, {each['kernel']}" for record in wrong for each in record["faults"])]
        more = "; ..." if len(places) > _MOST else ""
        faults = f"{len(wrong)} of {len(own)} forwards with a fault ({'; '.join(places[:_MOST])}{more})"
    counted = ", ".join(f"{name} {n}" for name, n in kernels.most_common())
    return f"{len({record['pid'] for record in records})} processes, {faults}; kernels: {counted}"
