"""`collate-npu watch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from shutil import which
from typing import Annotated, Any

from collate_npu.errors import CollateError, printable
from collate_npu.tools.console import Option, load

WATCH_EXAMPLES = (
    "Examples:\n\n`collate-npu watch -- torchrun --nproc-per-node 8 train.py --config my.yaml`\n\n"
    "`collate-npu watch --stop -- python train.py` — ends the run at the first fault, with exit code 1\n\n"
    "`collate-npu watch --steps 5 --out seen.jsonl -- accelerate launch train.py`"
)
_INHERITED = Path(__file__).resolve().parent / "inherited"
"""What every Python of the run starts with."""
_POLL = 0.2
_MOST = 6
"""Layers with a fault that the last line names."""
_PATIENCE = 15
"""Seconds that a command gets to end by itself."""


def watch_command(
    command: Annotated[list[str], Option("What to run, unchanged, behind --.", ("command",))],
    steps: Annotated[int, Option("Steps that are looked at, in each process.", least=1, most=1 << 20)] = 2,
    stop: Annotated[bool, Option("End the run at the first fault.")] = False,
    out: Annotated[Path | None, Option("Append a line of JSON for each forward.")] = None,
) -> int:
    """Run a command, and say what each kernel was told of sequences and padding, in all its processes.

    Any stack is seen, without an integration: flash-attn, fla, causal-conv1d, mamba, TransformerEngine, torch_npu, torch's
    own attention and transformers' plain functions. The first steps are looked at; then everything is taken off.
    The exit code is the command's own; with --stop 1 after a fault or a batch that contradicts itself, 2 if none is judged.
    """
    load("wrapt", "torch")
    command = command[command[:1] == ["--"] :]
    if not command or which(command[0]) is None:
        remedy = "Write what you would type, behind --: collate-npu watch -- python train.py"
        raise CollateError(f"{command[0] if command else 'COMMAND'}: no such command. {remedy}")
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.jsonl"
        settings = {"steps": steps, "seen": str(seen), "out": None if out is None else str(out.resolve())}
        path = os.pathsep.join(filter(None, (str(_INHERITED), os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "COLLATE_NPU_WATCH": json.dumps(settings)})
        _waited(child, seen, stop)
        records = _records(seen)
    print(printable(f"collate-npu watch: {_summary(records)}"), file=sys.stderr, flush=True)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    unjudged = 2 if not any(record["judged"] for record in records) else code
    return code if not stop else 1 if any(record["faults"] for record in records) else unjudged


def _waited(child: subprocess.Popen[bytes], seen: Path, stop: bool) -> None:
    """Until it ends, or is ended at a fault."""
    interrupts = 0
    while child.poll() is None:
        try:
            time.sleep(_POLL)
            if stop and any(record["faults"] for record in _records(seen)):
                _ended(child)
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 1:  # the first one it got as well, from the terminal, and may be saving what it has
                _ended(child)


def _ended(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _records(seen: Path) -> list[dict[str, Any]]:
    """What the processes wrote; a line that is half written is left out."""
    try:
        lines = seen.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _summary(records: list[dict[str, Any]]) -> str:
    kernels = sum((Counter(record["kernels"]) for record in records), Counter[str]())
    if not kernels and not any(record["faults"] for record in records):
        return "NOTHING WAS SEEN: no known kernel ran in any process that could be watched. This is not a pass."
    if not any(record["judged"] or record["faults"] for record in records):
        why = next((record["unsaid"] for record in records if record["unsaid"]), "no kernel had its tokens").splitlines()[0]
        return f"NOT JUDGED: {len(records)} forwards, none compared with its batch: {why} This is not a pass."
    wrong = sum(bool(record["faults"]) for record in records)
    processes = len({record["pid"] for record in records})
    told = ", ".join(f"{name} {n}" for name, n in kernels.most_common())
    own = [record["judged"] for record in records if not record["again"]]
    faults = f"{wrong} of {len(own)} forwards with a fault" if wrong else f"no fault in {sum(own)} of {len(own)} forwards"
    said = dict.fromkeys(f"{each['layer']}, {each['kernel']}" for record in records for each in record["faults"])
    where = f" ({'; '.join([*said][:_MOST])}{'; ...' * (len(said) > _MOST)})" * bool(said)
    return f"{processes} processes, {faults}{where}; kernels: {told}"
