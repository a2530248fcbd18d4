"""The console: what is interrupted says what it found, and no encoding ends a command. Real processes, real signals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.cli.console import print_in_any_encoding

pytestmark = pytest.mark.models


def started(*args, **env):
    """A process of its own, as a user runs it; in a group of its own, as a terminal starts it."""
    command = [sys.executable, "-m", "collate_npu", "audit", *args]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80", **env}
    streams |= {"encoding": env["PYTHONIOENCODING"], "errors": "replace"}  # click writes UTF-8 where it is told ASCII
    # a shell starts what it sends to the background deaf to Ctrl-C, and children stay so
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=hears, **streams)


def until_a_model_is_done(process):
    line = process.stderr.readline()
    assert line.startswith("[1/"), line + process.stderr.read()


TWO = ["--model", "llama", "--attn", "sdpa", "--attn", "eager", "--batches", "8", "--batch-size", "3", "--max-length", "48"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_audit_says_what_it_found(number):
    with started(*TWO) as process:
        until_a_model_is_done(process)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert re.match(r"\? INTERRUPTED: (\d+) of \1 cases measured until then are right\.\n", out)
    assert re.search(r"✔ +llama +sdpa", out)
    assert max(map(len, out.splitlines())) <= 80
    assert "Traceback" not in err


@pytest.mark.parametrize("wait", [0.5, 2.0, None])
def test_an_interrupted_audit_is_valid_json(wait):
    """While torch loads, before anything is measured, and after a model."""
    with started(*TWO, "--json") as process:
        if wait is None:
            until_a_model_is_done(process)
        time.sleep(wait or 0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if out or wait is None:  # nothing is, where the signal came before the command itself had loaded
        found = json.loads(out)
        assert (found["passed"], found["verdict"], found["interrupted"]) == (False, "INTERRUPTED", True)
        assert wait is not None or found["findings"]


def test_interrupted_ranks_are_ended():
    pytest.importorskip("accelerate")
    args = ["--model", "llama", "--cp", "2", "--batches", "4", "--batch-size", "3", "--max-length", "48", "--side", "right"]
    with started(*args, "--attn", "sdpa") as process:
        deadline = time.monotonic() + 120
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        for rank in ranks:  # they leave Ctrl-C to the process that ends them, and print no traceback of it
            ignored = re.search(r"SigIgn:\s*(\w+)", (rank / "status").read_text())
            assert ignored is not None
            assert int(ignored[1], 16) >> (signal.SIGINT - 1) & 1
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    deadline = time.monotonic() + 20
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(process.pid)


def ranks_of(group):
    return [stat.parent for stat in members(group) if b"spawn_main" in (stat.parent / "cmdline").read_bytes()]


def members(group):
    """Processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(stat)
    return found


def test_a_terminal_of_another_encoding_ends_no_report(tmp_path):
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "没有")
    byte_tokenizer().save_pretrained(tmp_path / "没有")
    args = ["--model", str(tmp_path / "没有"), "--side", "left", "--verbose", "--batches", "1", "--attn", "sdpa"]
    with started(*args, "--no-gradients", PYTHONIOENCODING="ascii") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.startswith("+ PASS: all 3 cases of ours")
    assert re.search(r"no mask *\W +\d\.\d\d !", out)
    assert r"\u6ca1\u6709 (sdpa): 3 of 3 right" in err
    assert out.isascii()


def test_a_stream_takes_what_it_cannot_encode(monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    print_in_any_encoding()
    for stream in streams:
        stream.write("✔ 没")
        stream.flush()
        assert stream.buffer.getvalue() == rb"\u2714 \u6ca1"


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
