"""The console: what is interrupted says what it found. Real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.xdist_group("console")]


def started(*args):
    """A process of its own, as a user runs it; in a group of its own, as a terminal starts it."""
    command = [sys.executable, "-m", "collate_npu", "audit", *args]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a shell starts what it sends to the background deaf to Ctrl-C, and children stay so
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, start_new_session=True, preexec_fn=hears, **streams)


def until_a_model_is_done(process):
    line = process.stderr.readline()
    assert line.startswith("[1/"), line + process.stderr.read()


TWO = ["--model", "llama", "--attn", "sdpa", "--attn", "eager", "--batches", "8", "--batch-size", "3", "--max-length", "48"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_audit_says_what_it_found(name):
    """What it says in words: test_report."""
    with started(*TWO, "--json") as process:
        until_a_model_is_done(process)
        os.killpg(process.pid, signal.Signals[name])
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    found = json.loads(out)
    assert (found["passed"], found["verdict"], found["interrupted"]) == (False, "INTERRUPTED", True)
    assert found["findings"]


@pytest.mark.long
def test_a_reader_who_leaves_does_not_make_it_fail():
    """`collate-npu audit | head -1` under pipefail: the exit code stays the audit's."""
    with started(
        "--model", "llama", "--attn", "sdpa", "--batches", "1", "--batch-size", "3", "--max-length", "48"
    ) as process:
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
