"""User code: found by name (`module:function`, `file.py:function`), and refused in one line.

While it runs, and only then, modules of the working directory and those beside a named file are found, behind all that is
installed: no file there takes the place of a package. A file is run under a name of its own. Whatever that code raises is
refused with its file and line.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from collate_npu.errors import CollateError, explain, printable

_PACKAGE = Path(__file__).resolve().parents[1]


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 400 letters."""
    try:
        text = str(error)
    except Exception as another:  # of a class of somebody's own
        text = f"no message: {type(another).__name__}"
    return (text.strip().splitlines() or ["no message"])[0][:400]


def said(error: BaseException) -> str:
    """Its class, and its first line."""
    return f"{type(error).__name__}: {first_line(error)}"


def line_in(error: BaseException, folders: Iterable[str]) -> str:
    """`mine.py, line 3: `, the last line that ran of a file in these folders, or that Python could not read; "" for none.
    Installed packages are not meant, nor is this one."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    held = {Path(folder).resolve() for folder in folders}
    written = [(Path(name).resolve(), line) for name, line in places if not name.startswith("<")]  # Python's own
    mine = [(path, line) for path, line in written if held & {*path.parents} and not _installed(path)]
    return f"{_near(mine[-1][0])}, line {mine[-1][1]}: " if mine else ""


def _near(path: Path) -> Path:
    """Return the path as one would type it here."""
    return path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path


def _installed(path: Path) -> bool:
    return _PACKAGE in path.parents or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


@contextmanager
def refused(where: str, what: str, rule: str, remedy: str, *, folders: Sequence[str] = ()) -> Iterator[None]:
    """Whatever is raised here, an exit from Python too, becomes a `CollateError` of one line; an interrupt stays one.

    `what` was asked for, and may be empty. What a file in `folders` raises stands first, with that line.
    """
    try:
        yield
    except (CollateError, KeyboardInterrupt):
        raise
    except BaseException as error:  # packages raise classes of their own, and some end the process
        why = said(error)
        if place := line_in(error, folders):
            raise CollateError(f"{printable(place + why).rstrip('.')}. {explain(where, what, rule, remedy)}") from None
        raise CollateError(explain(where, f"{what} ({why})" if what else why, rule, remedy)) from None


def check_file(path: Path, endings: Sequence[str], remedy: str) -> None:
    """Refuse a name with nothing behind it, a folder, and a file that ends otherwise, and name one that lies near."""
    named = [*filter(None, endings)]
    known = f"Such files end with {', '.join(named)}."
    if path.is_dir():
        held = sorted(each for each in path.iterdir() if each.suffix in named)
        raise CollateError(explain(str(path), "a folder", known, f"Name one file in it: {held[0]}." if held else remedy))
    if path.is_fifo() and path.parts[:2] not in (("/", "dev"), ("/", "proc")):  # not the shell's own `<(...)`
        raise CollateError(explain(str(path), "a pipe", f"It may never end. {known}", remedy))
    if not path.exists():
        held = [each for each in path.parent.iterdir() if each.suffix in named] if path.parent.is_dir() else []
        near = sorted(each.name for each in held if get_close_matches(path.stem, [each.stem]))[:2]
        got = "no such file" if path.parent.is_dir() else f"no such folder as {path.parent}"
        raise CollateError(explain(str(path), got, known, f"Did you mean {' or '.join(near)}?" if near else remedy))
    if path.is_file() and path.suffix not in endings:
        raise CollateError(explain(str(path), f"a file that ends with {path.suffix!r}", known, remedy))


def did_you_mean(names: Sequence[str], known: Iterable[str], otherwise: str) -> str:
    """A question that names what was meant, or what to say where nothing is near."""
    held = list(known)
    near = sorted({match for name in names for match in get_close_matches(name, held, n=2)})
    return f"Did you mean {' or '.join(near)}?" if near else otherwise


def named(where: str, spec: str, example: str, remedy: str) -> Callable[..., Any]:
    """The function or class of a name, which `where` was given. Modules of the working directory are found.

    Raises `CollateError`, with an `example` where the name has no such form, and a `remedy` where it is no function.
    """
    place, _, name = spec.rpartition(":")
    rule = "It is named as module:function or file.py:function."
    if not place or not name:
        raise CollateError(explain(where, spec, rule, f"For example {example}."))
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
