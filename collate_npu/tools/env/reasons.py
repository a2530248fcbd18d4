"""Reasons: why something does not load, in a line."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """Why, down to the first cause.

    torch ends its own import with a RuntimeError where it cannot load an installed torch_npu
    (torch/__init__.py, `_import_device_backends`); the missing CANN library is the cause of that error.
    """
    last = error
    while cause := last.__cause__ or last.__context__:
        last = cause
    return said(error) if last is error else f"{said(error)} ({said(last)})"


def said(error: BaseException) -> str:
    """Kind and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
