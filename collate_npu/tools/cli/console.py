"""Console: what every command shares: how it ends, and what its options mean.

Exit codes: 0 done and right; 1 something of ours, or of what you gave, is wrong (`audit`, `conformance`); 2 it could not do
what was named, and a line says why; 130 interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, Literal, NoReturn, TypeVar

import typer

from collate_npu.errors import CollateError, printable
from collate_npu.tools.refusals import said

Command = TypeVar("Command", bound=Callable[..., None])
Side = Literal["left", "right"]

INTERRUPTED = 130


def needs(*packages: str) -> Callable[[Command], Command]:
    """Import these before the command runs; end with one line and exit code 2 if one does not load, or on a refusal."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*args: Any, **kwargs: Any) -> None:
            # the commands hand the neutral form to an adapter or to the reader's eyes, never to a model
            warnings.filterwarnings("ignore", message="collate_npu: this batch has a 4D")
            try:
                _import(packages)
                command(*args, **kwargs)
            except typer.Exit:
                raise
            except KeyboardInterrupt:  # before there was anything to report
                stop("INTERRUPTED: nothing was measured.", INTERRUPTED)
            except CollateError as error:
                stop(str(error))
            except BaseException as error:  # a fault, here or elsewhere: the code must say neither pass nor fail
                stop(said(error))

        return checked  # type: ignore[return-value]

    return decorate


def _import(packages: Sequence[str]) -> None:
    for package in packages:
        try:
            import_module(package)
        except (Exception, SystemExit) as error:  # torch raises RuntimeError where it cannot load torch_npu
            absent = isinstance(error, ModuleNotFoundError) and error.name == package
            remedy = f"pip install {package}." if absent else "`collate-npu env` says more."
            stop(f"{package} does not load: {said(error)}. {remedy}")


def stop(message: str, code: int = 2) -> NoReturn:
    """End with a line on stderr."""
    typer.echo(printable(f"collate-npu: {message}"), err=True)
    raise typer.Exit(code)
