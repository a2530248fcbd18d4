"""Refusals: what somebody else's code raises, in one line of ours; and the name that was meant."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from collate_npu.errors import CollateError, explain

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
    mine = [(name, line) for name, line in places if held & {*Path(name).resolve().parents} and not _installed(name)]
    return f"{mine[-1][0]}, line {mine[-1][1]}: " if mine else ""


def _installed(name: str) -> bool:
    path = Path(name).resolve()
    return _PACKAGE in path.parents or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


@contextmanager
def refused(where: str, what: str, rule: str, remedy: str, *, folders: Sequence[str] = ()) -> Iterator[None]:
    """Whatever is raised here, an exit from Python too, becomes a `CollateError` of one line; an interrupt stays one.

    `what` was asked for, and may be empty. What a file in `folders` raises is told with that line.
    """
    try:
        yield
    except (CollateError, KeyboardInterrupt):
        raise
    except BaseException as error:  # packages raise classes of their own, and some end the process
        why = f"{line_in(error, folders)}{said(error)}"
        raise CollateError(explain(where, f"{what} ({why})" if what else why, rule, remedy)) from None


def did_you_mean(names: Sequence[str], known: Iterable[str], otherwise: str) -> str:
    """A question that names what was meant, or what to say where nothing is near."""
    held = list(known)
    near = sorted({match for name in names for match in get_close_matches(name, held, n=2)})
    return f"Did you mean {' or '.join(near)}?" if near else otherwise
