"""Named: code of the user's by name, `module:function` or `file.py:function`.

While it runs, and only then, modules of the working directory and those beside a named file are found, behind all that is
installed: no file there takes the place of a package. A file is run under a name of its own. Whatever that code raises is
refused with its file and line.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from collate_npu.errors import CollateError, explain
from collate_npu.tools.refusals import check_file, did_you_mean, refused


def named(where: str, spec: str, example: str, remedy: str) -> Callable[..., Any]:
    """The function or class of a name, which `where` was given. Modules of the working directory are found.

    Raises `CollateError`, with an `example` where the name has no such form, and a `remedy` where it is no function.
    """
    place, _, name = spec.rpartition(":")
    rule = "It is named as module:function or file.py:function."
    if not place or not name:
        raise CollateError(explain(where, spec, rule, f"For example {' or '.join(_held(spec)) or example}."))
    if place.endswith(".py") or Path(place).is_file():
        check_file(Path(place), [".py"], "Write the path of its file, from here.")
    path = "Write the path of its file, or run where Python finds the module."
    with theirs(where, spec, "It is imported from here, and does not load.", path):
        found: Any = _module(place)
        for part in name.split("."):
            if not hasattr(found, part):
                near = did_you_mean([part], dir(found), "Look at its spelling.")
                raise CollateError(explain(where, f"{spec}: no {part} in {place}", rule, near))
            found = getattr(found, part)
        return check_callable(where, spec, found, rule, remedy)


def _held(spec: str) -> list[str]:
    """The first functions and classes of a file that was named alone, as they are to be named."""
    with suppress(OSError, SyntaxError, ValueError):
        body = ast.parse(Path(spec).read_bytes()).body
        names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"]
        return [f"{spec}:{name}" for name in names[:3]]
    return []


def check_callable(where: str, spec: str, found: Any, rule: str, remedy: str) -> Callable[..., Any]:
    """What was found. Raises `CollateError` where it is no function."""
    if not callable(found):
        raise CollateError(explain(where, f"{spec}: a {type(found).__name__}", rule, remedy))
    return found  # type: ignore[no-any-return]


@contextmanager
def theirs(where: str, spec: str, rule: str, remedy: str) -> Iterator[None]:
    """Code of the user's runs here."""
    place = spec.rpartition(":")[0]
    folders = [str(Path(place).resolve().parent)] * place.endswith(".py") + [str(Path.cwd())]
    added = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    sys.path += added
    end, process = os._exit, os.getpid()

    def raise_here(status: int) -> None:  # a process of its own may end; this one has a verdict to give
        if os.getpid() != process:
            end(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raise_here  # type: ignore[assignment]
    try:
        with refused(where, spec, rule, remedy, folders=folders):
            yield
    finally:
        os._exit = end
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return import_module(place)
    file = spec_from_file_location(f"collate_npu: {Path(place).resolve()}", place)  # no import finds it by that
    assert file is not None
    assert file.loader is not None
    if file.name not in sys.modules:
        module = sys.modules[file.name] = module_from_spec(file)
        try:
            file.loader.exec_module(module)
        except BaseException:
            del sys.modules[file.name]
            raise
    return sys.modules[file.name]


# --- bounded: somebody else's code runs so long, and in so much memory, at most


@contextmanager
def bounded(seconds: float, more_bytes: int) -> Iterator[None]:
    """Raise `TimeoutError`, or let Python raise `MemoryError`, in what runs here beyond that.

    Time is bound on the main thread of a Unix, memory on Linux; elsewhere nothing is.
    """

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with _memory(more_bytes):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory(more: int) -> Iterator[None]:
    held = Path("/proc/self/statm")
    if not held.exists():
        yield
        return
    resource = import_module("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(held.read_text().split()[0]) * resource.getpagesize() + more
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
