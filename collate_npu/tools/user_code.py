"""User code: functions, files and commands that a user names on the command line, and errors of their code in one line.

While user code runs, and only then, modules of the working directory and those beside a named file are found, behind all
that is installed: no file there takes the place of a package. A file is run under a name of its own. Whatever that code
raises is refused with its file and line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import which
from typing import Any

from collate_npu.errors import CollateError, a_type, did_you_mean, explain, printable

_PACKAGE = Path(__file__).resolve().parents[1]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 400 letters of it."""
    try:
        text = str(error)
    except Exception as another:  # of a class of somebody's own
        text = f"no message: {type(another).__name__}"
    return (text.strip().splitlines() or ["no message"])[0][:400]


def describe_error(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def line_in(error: BaseException, folders: Iterable[str]) -> str:
    """Return `mine.py, line 3: `, the last line of a file in these folders that ran, or that Python could not read; "" for
    none. Files of installed packages and of this package do not count."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    held = {Path(folder).resolve() for folder in folders}
    for name, line in reversed(places):
        path = Path(name).resolve()
        installed = _PACKAGE in path.parents or {"site-packages", "dist-packages"} & {*path.parts}
        if held & {*path.parents} and not installed and not name.startswith("<"):  # Python's own
            return f"{path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path}, line {line}: "
    return ""


@contextmanager
def refused(where: str, what: str, rule: str, remedy: str, *, folders: Sequence[str] = ()) -> Iterator[None]:
    """Raise whatever is raised here, an exit from Python too, as a `CollateError` of one line; an interrupt stays one.

    `what` arrived, and may be empty. What a file in `folders` raises stands first, with that line.
    """
    try:
        yield
    except (CollateError, KeyboardInterrupt):
        raise
    except BaseException as error:  # packages raise classes of their own, and some end the process
        why = describe_error(error)
        if place := line_in(error, folders):
            raise CollateError(f"{printable(place + why).rstrip('.')}. {explain(where, what, rule, remedy)}") from None
        raise CollateError(explain(where, f"{what} ({why})" if what else why, rule, remedy)) from None


def check_file(path: Path, endings: Sequence[str], remedy: str) -> None:
    """Raise `CollateError` for a path that is no file with one of these endings; the message names a file that is near."""
    known = [*filter(None, endings)]
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        got = "a folder"
    elif not folder.is_dir():
        got = f"no such folder as {folder}"
    elif not path.exists():
        got = "no such file"
    elif path.is_file() and path.suffix not in endings:
        got = f"a file that ends with {path.suffix!r}"
    else:
        return
    held = [each.name for each in folder.iterdir() if each.suffix in known] if folder.is_dir() else []
    near = did_you_mean([path.name], held, remedy)
    raise CollateError(explain(str(path), got, f"Such files end with {', '.join(known)}.", near))


def find_callable(where: str, spec: str, example: str, remedy: str) -> Callable[..., Any]:
    """Return the function or class that `spec` names, as `where` takes it. Modules of the working directory are found.

    Raises `CollateError`, with an `example` where `spec` has no such form, and a `remedy` where it names no function.
    """
    place, _, name = spec.rpartition(":")
    rule = "It is named as module:function or file.py:function."
    if not place or not name:
        raise CollateError(explain(where, spec, rule, f"For example {example}."))
    if place.endswith(".py") or Path(place).is_file():
        check_file(Path(place), [".py"], "Write the path of its file, from here.")
    path = "Write the path of its file, or run where Python finds the module."
    with run_user_code(where, spec, "It is imported from here, and does not load.", path):
        found: Any = _module(place)
        for part in name.split("."):
            if not hasattr(found, part):
                near = did_you_mean([part], dir(found), "Look at its spelling.")
                raise CollateError(explain(where, f"{spec}: no {part} in {place}", rule, near))
            found = getattr(found, part)
        if not callable(found):
            raise CollateError(explain(where, f"{spec}: {a_type(found)}", rule, remedy))
        return found  # type: ignore[no-any-return]


@contextmanager
def run_user_code(where: str, spec: str, rule: str, remedy: str) -> Iterator[None]:
    """Run user code here: it finds the modules beside it, and its errors are refused."""
    place = spec.rpartition(":")[0]
    folders = [str(Path(place).resolve().parent)] * place.endswith(".py") + [str(Path.cwd())]
    added = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    sys.path += added
    try:
        with refused(where, spec, rule, remedy, folders=folders):
            yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def as_user_code(function: Callable[..., Any], where: str, spec: str, rule: str, remedy: str) -> Callable[..., Any]:
    """Return the function, whose calls find the modules beside it, and whose errors are refused."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with run_user_code(where, spec, rule, remedy):
            return function(*args, **kwargs)

    return called


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return import_module(place)
    file: Any = spec_from_file_location(f"collate_npu: {Path(place).resolve()}", place)  # no import finds it by that
    if file.name not in sys.modules:
        module = sys.modules[file.name] = module_from_spec(file)
        try:
            file.loader.exec_module(module)
        except BaseException:
            del sys.modules[file.name]
            raise
    return sys.modules[file.name]


# --- a command whose every Python starts with `inherited/sitecustomize.py`, by which ours begins in each of them

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
        added = inherited_env(variable, {**settings, "seen": str(seen)})
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


def inherited_env(variable: str, settings: Mapping[str, Any], own: str | None = None) -> dict[str, str]:
    """Return what the environment of a process must have; `own` stands for the PYTHONPATH that a process elsewhere has."""
    inherited = str(Path(__file__).resolve().parent / "inherited")
    path = filter(None, (inherited, os.environ.get("PYTHONPATH"), own))
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
