"""The command line: `collate-npu audit | conformance | watch | show | env | kernels | guide`.

Arguments by argparse, tables and progress bars by rich.
Nothing here imports torch or rich before a command needs it: `env` explains why torch does not load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from inspect import getdoc
from typing import Annotated, Any

from collate_npu.tools.cli.audit import (
    AUDIT_EXAMPLES,
    CONFORMANCE_EXAMPLES,
    KERNELS_EXAMPLES,
    audit_command,
    conformance_command,
    kernels_command,
)
from collate_npu.tools.cli.console import Help, Option, Parser, exit_code_of
from collate_npu.tools.cli.show import SHOW_EXAMPLES, show_command
from collate_npu.tools.cli.watch import WATCH_EXAMPLES, watch_command
from collate_npu.tools.guide import listed, page

GUIDE_EXAMPLES = (
    "Examples:\n\n`collate-npu guide` — the list\n\n`collate-npu guide ms-swift`\n\n`collate-npu guide errors#polarity`\n\n"
    "`collate-npu guide masked_select` — the words of an error\n\n`collate-npu guide zh/index`"
)


def guide_command(
    name: Annotated[list[str] | None, Option("A page, page#section, words of an error; or the list.", ("name",))] = None,
) -> int:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means."""
    text = page(" ".join(name)) if name else listed()
    if find_spec("rich"):
        from collate_npu.tools.paper import Page, screen

        if screen().is_terminal:
            screen().print(Page(text))
            return 0
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def env_command(as_json: Annotated[bool, Option("Print the same as JSON.", names=("--json",))] = False) -> int:
    """What is installed, which kernels it can run, and known hazards; made for pasting into an issue.

    Also where torch or rich do not load: `python -m collate_npu env`.
    """
    from collate_npu.tools.env import written

    print(written(as_json=as_json), flush=True)
    return 0


COMMANDS: dict[str, tuple[Callable[..., int], str | None]] = {
    "audit": (audit_command, AUDIT_EXAMPLES),
    "conformance": (conformance_command, CONFORMANCE_EXAMPLES),
    "watch": (watch_command, WATCH_EXAMPLES),
    "show": (show_command, SHOW_EXAMPLES),
    "env": (env_command, None),
    "kernels": (kernels_command, KERNELS_EXAMPLES),
    "guide": (guide_command, GUIDE_EXAMPLES),
}


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and each command by its name."""
    from collate_npu import __version__

    how: Any = {"formatter_class": Help, "allow_abbrev": False}
    whole = Parser(
        "collate-npu", description="Batches whose padding means the same to every layer, kernel and trainer.", **how
    )
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="Print the version and end.")
    adding = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (command, examples) in COMMANDS.items():
        words = str(getdoc(command))
        adding.add_parser(name, help=words.partition("\n")[0], description=words, epilog=examples, **how).add_command(
            command
        )
    return whole, adding.choices


def run(args: Sequence[str]) -> int:
    """Run a command, and return its exit code. Raises `SystemExit` for help, the version and what is typed wrongly."""
    whole, _ = parsers()
    if not args:
        whole.print_help()
        return 2
    asked = vars(whole.parse_args(args))
    return exit_code_of(asked.pop("called"), asked)
