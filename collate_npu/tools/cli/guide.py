"""`collate-npu guide`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table

from collate_npu.tools.cli.console import needs
from collate_npu.tools.guide import listed, page
from collate_npu.tools.paper import screen

EXAMPLES = (
    "Examples:\n\n`collate-npu guide` — the list\n\n`collate-npu guide ms-swift`\n\n`collate-npu guide errors#polarity`\n\n"
    "`collate-npu guide masked_select` — the words of an error\n\n`collate-npu guide zh/index`"
)


class _Folded(TableElement):
    """A table whose long names go on in the next line: rich would cut them, and a reader has to type them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for drawn in super().__rich_console__(console, options):
            for column in drawn.columns if isinstance(drawn, Table) else ():
                column.overflow = "fold"
            yield drawn


class Page(Markdown):
    """A page of the guide, as a terminal shows it."""

    elements = Markdown.elements | {"table_open": _Folded}


@needs()
def guide_command(
    name: Annotated[list[str] | None, typer.Argument(help="A page, page#section, words of an error; or the list.")] = None,
) -> None:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means."""
    text, console = page(" ".join(name)) if name else listed(), screen()
    if console.is_terminal:
        console.print(Page(text))
    else:
        typer.echo(text, nl=False)
