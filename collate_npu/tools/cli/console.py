"""Console: what every command shares: how it ends, and what its options mean.

Exit codes: 0 done and right; 1 something of ours, or of the collator you gave, is wrong (`audit` alone); 2 it could not do
what was named, and a line says why; 130 interrupted.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn, TypeVar

import typer

from collate_npu.errors import CollateError

Command = TypeVar("Command", bound=Callable[..., None])

INTERRUPTED = 130
_NOTHING = {"passed": False, "verdict": "INTERRUPTED", "exit_code": INTERRUPTED, "interrupted": True, "findings": []}


class Side(str, Enum):
    """On which side rows are padded."""

    left = "left"
    right = "right"


def needs(*packages: str) -> Callable[[Command], Command]:
    """Import these before the command runs; end with one line and exit code 2 if one does not load, or on a refusal."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*args: Any, **kwargs: Any) -> None:
            # the commands hand the neutral form to an adapter or to the reader's eyes, never to a model
            warnings.filterwarnings("ignore", message="collate_npu: this batch has a 4D")
            try:
                with _terminable():
                    with _uninterrupted():
                        _import(packages)
                    command(*args, **kwargs)
            except typer.Exit:
                raise
            except KeyboardInterrupt:  # before there was anything to report
                if kwargs.get("as_json_"):
                    typer.echo(json.dumps(_NOTHING, indent=2))
                stop("INTERRUPTED: nothing was measured.", INTERRUPTED)
            except CollateError as error:
                stop(str(error))
            except Exception as error:  # a fault, here or in a package: the exit code must not say that the audit failed
                stop(f"{type(error).__name__}: {error}")

        return checked  # type: ignore[return-value]

    return decorate


def _import(packages: Sequence[str]) -> None:
    for package in packages:
        try:
            import_module(package)
        except Exception as error:  # torch raises RuntimeError where it cannot load torch_npu
            stop(f"{package} does not load: {type(error).__name__}: {error} `collate-npu env` says more.")


def stop(message: str, code: int = 2) -> NoReturn:
    """End with a line on stderr."""
    typer.echo(f"collate-npu: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C: what was found by then is still said."""
    with _handled(signal.SIGTERM, signal.default_int_handler):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C comes through after this: a package that is interrupted while it loads may load as a broken one."""
    held: list[int] = []
    with _handled(signal.SIGINT, lambda number, frame: held.append(number)):
        yield
    if held:
        raise KeyboardInterrupt


@contextmanager
def _handled(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """In the main thread alone: Python knows no signals in any other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def print_in_any_encoding() -> None:
    """A letter that stdout or stderr cannot encode is written as its escape, and ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
