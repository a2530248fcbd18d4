"""Refusals: what somebody else's code raises, in one line of ours; and the name that was meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

from collate_npu.errors import CollateError, explain


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 400 letters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:400]


def said(error: BaseException) -> str:
    """Its class, and its first line."""
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def refused(where: str, what: str, rule: str, remedy: str) -> Iterator[None]:
    """Whatever is raised here becomes a `CollateError` of one line; `what` was asked for, and may be empty."""
    try:
        yield
    except CollateError:
        raise
    except Exception as error:  # packages raise classes of their own
        got = f"{what} ({said(error)})" if what else said(error)
        raise CollateError(explain(where, got, rule, remedy)) from None


def did_you_mean(names: Sequence[str], known: Iterable[str], otherwise: str) -> str:
    """A question that names what was meant, or what to say where nothing is near."""
    held = list(known)
    near = sorted({match for name in names for match in get_close_matches(name, held, n=2)})
    return f"Did you mean {' or '.join(near)}?" if near else otherwise
