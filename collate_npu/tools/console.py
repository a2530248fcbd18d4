"""Console: what every command shares: its options, which are read off its signature, and how it ends.

Exit codes: 0 done and right; 1 something of ours, or of what you gave, is wrong (`audit`, `conformance`); 2 it could not do
what was named, and a line says why; 130 interrupted.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, HelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import inf
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from collate_npu.errors import CollateError, printable
from collate_npu.tools.user_code import said

Side = Literal["left", "right"]

INTERRUPTED = 130
WORDS = {0: "PASS", 1: "FAIL", 2: "NOT PROVED", INTERRUPTED: "INTERRUPTED"}
"""The verdict by exit code."""


@dataclass(frozen=True)
class Option:
    """What a parameter is on the command line: `--its-name`, or `names`; a name without a dash is given by its place."""

    help: str
    names: tuple[str, ...] = ()
    panel: str = "options"
    least: int = 0
    most: float = inf

    def whole_number(self, text: str) -> int:
        """Read one of the range."""
        if not self.least <= int(text) <= self.most:
            raise ArgumentTypeError(f"{int(text)} is not in the range {self.least}..{self.most}.")
        return int(text)


class Parser(ArgumentParser):
    """Its options are the parameters of a command, `Annotated[type, Option(...)]`. What was typed is shown escaped."""

    def add_command(self, command: Callable[..., int]) -> None:
        """Each parameter is added; the command itself stands as `called` beside them."""
        panels: dict[str, Any] = {"options": self}
        for name, each in inspect.signature(command, eval_str=True).parameters.items():
            kind, option = get_args(each.annotation)
            how = _read(get_args(kind)[0] if NoneType in get_args(kind) else kind, option, each.default)
            names = option.names or (f"--{name.replace('_', '-')}",)
            panel = panels.get(option.panel) or panels.setdefault(option.panel, self.add_argument_group(option.panel))
            shown = "" if each.default in (each.empty, None) or each.default is False else f" [default: {each.default}]"
            added = panel.add_argument(*names, **how)
            added.help = f"{option.help}{shown}".replace("%", "%%")  # argparse writes the default of a switch by itself
            added.dest, added.default = name, None if each.default is each.empty else each.default
        self.set_defaults(called=command)

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"Try '{self.prog} --help' for help.\n\nError: {message}\n"))


def _read(kind: Any, option: Option, default: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if kind is bool:
        return {"action": BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is list:
        return {"nargs": "*" if default is None else "..."} if option.names else {"action": "append", "metavar": "TEXT"}
    how = {"type": option.whole_number if kind is int else kind}
    shown = {str: "TEXT", int: f"{option.least}..{option.most}"}
    return how if option.names else how | {"metavar": shown.get(kind, kind.__name__.upper())}


class Help(HelpFormatter):
    """Each paragraph is filled by itself."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(Help, self)._fill_text(part, width, indent) for part in text.replace("`", "").split("\n\n"))


def load(*packages: str) -> None:
    """Import what a command needs. Raises `CollateError` for the first that does not load."""
    for package in packages:
        try:
            import_module(package)
        except (Exception, SystemExit) as error:  # torch raises RuntimeError where it cannot load torch_npu
            absent = isinstance(error, ModuleNotFoundError) and error.name == package
            remedy = f"pip install {package}." if absent else "`collate-npu env` says more."
            raise CollateError(f"{package} does not load: {said(error)}. {remedy}") from None


def exit_code_of(command: Callable[..., int], asked: dict[str, Any]) -> int:
    """Run it; where it is refused or fails, a line on stderr says why."""
    # the commands hand the neutral form to an adapter or to the reader's eyes, never to a model
    warnings.filterwarnings("ignore", message="collate_npu: this batch has a 4D")
    code = 2
    try:
        return command(**asked)
    except KeyboardInterrupt:  # before there was anything to report
        code, message = INTERRUPTED, "INTERRUPTED: nothing was measured."
    except CollateError as error:
        message = str(error)
    except BaseException as error:  # a fault, here or elsewhere: the code must say neither pass nor fail
        message = said(error)
    print(printable(f"collate-npu: {message}"), file=sys.stderr, flush=True)
    return code
