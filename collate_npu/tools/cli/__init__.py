"""The command line: `collate-npu audit | conformance | watch | show | env | kernels | guide`.

Tables and progress bars by rich, arguments by typer.
Nothing here imports torch before a command needs it: `env` explains why it does not load.
"""

from __future__ import annotations

from typing import Annotated

import typer

from collate_npu.tools.cli.audit import EXAMPLES as AUDIT_EXAMPLES, audit_command
from collate_npu.tools.cli.conformance import EXAMPLES as CONFORMANCE_EXAMPLES, conformance_command
from collate_npu.tools.cli.guide import EXAMPLES as GUIDE_EXAMPLES, guide_command
from collate_npu.tools.cli.kernels import EXAMPLES as KERNELS_EXAMPLES, kernels_command
from collate_npu.tools.cli.show import EXAMPLES as SHOW_EXAMPLES, show_command
from collate_npu.tools.cli.watch import EXAMPLES as WATCH_EXAMPLES, watch_command

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from collate_npu import __version__

        typer.echo(f"collate-npu {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Batches whose padding means the same to every layer, kernel and trainer."""


def _env(as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False) -> None:
    """What is installed, which kernels it can run, and known hazards; made for pasting into an issue.

    Also where torch, typer or rich do not load: `python -m collate_npu env`.
    """
    from collate_npu.tools.env import written

    typer.echo(written(as_json=as_json))


app.command("audit", epilog=AUDIT_EXAMPLES)(audit_command)
app.command("conformance", epilog=CONFORMANCE_EXAMPLES)(conformance_command)
app.command("watch", epilog=WATCH_EXAMPLES, context_settings={"allow_interspersed_args": False})(watch_command)
app.command("show", epilog=SHOW_EXAMPLES)(show_command)
app.command("env")(_env)
app.command("kernels", epilog=KERNELS_EXAMPLES)(kernels_command)
app.command("guide", epilog=GUIDE_EXAMPLES)(guide_command)
