"""The command line in this process: what is typed, and what comes of it."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest import mock

from collate_npu.tools.cli import run_command_line


def typed(*args: object, given: bytes = b"", encoding: str = "utf-8", **env: str | None) -> SimpleNamespace:
    """`collate-npu` with these arguments, what is given on stdin, and these variables; None takes one away."""
    out, err, stdin = (io.TextIOWrapper(io.BytesIO(held), encoding, "backslashreplace") for held in (b"", b"", given))
    variables = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    there = (mock.patch.dict(os.environ, variables, clear=True), mock.patch("sys.stdin", stdin))
    with there[0], there[1], redirect_stdout(out), redirect_stderr(err):
        try:
            code = run_command_line([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code or 0
    for stream in (out, err):
        stream.seek(0)
    said = {"stdout": out.read(), "stderr": err.read()}
    return SimpleNamespace(exit_code=code, output="".join(said.values()), **said)
