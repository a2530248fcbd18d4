"""Progress: a bar on a terminal; where there is none, as in the log of a CI job, a line a model as it finishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from collate_npu.tools.audit.ways import shortened


class Steps:
    """Where an audit stands: `models` of them, `steps` each. It is said on `console`, which is not that of the report."""

    def __init__(self, console: Console, models: int, steps: int) -> None:
        self._console, self._models, self._steps = console, models, steps
        self._live = console.is_terminal and not console.is_dumb_terminal
        layout = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*layout, console=console, transient=True, disable=not self._live)
        self._task = self._bar.add_task("", total=models * steps)
        self._done = 0

    @contextmanager
    def shown(self) -> Iterator[Steps]:
        """While the audit runs."""
        with self._bar:
            yield self

    def advance(self) -> None:
        """A step of a model is done."""
        self._bar.advance(self._task)

    @contextmanager
    def model(self, name: str, told: Callable[[], str]) -> Iterator[None]:
        """A model, and after it, whatever steps it took, the line that `told` gives."""
        self._bar.update(self._task, description=shortened(name, 32), completed=self._done * self._steps)
        began = monotonic()
        yield
        self._done += 1
        if not self._live:
            line = f"[{self._done}/{self._models}] {shortened(name, 60)}: {told()} ({monotonic() - began:.1f} s)"
            self._console.print(Text(line), soft_wrap=True)
