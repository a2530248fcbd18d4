"""The command line: `collate-npu audit | conformance | watch | show | env | kernels | guide`.

Arguments by argparse, tables and progress bars by rich.
Nothing here imports torch or rich before a command needs it: `env` explains why torch does not load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import getdoc
from typing import Annotated, Any

from collate_npu.tools.cli.audit import EXAMPLES as AUDIT_EXAMPLES, audit_command
from collate_npu.tools.cli.conformance import EXAMPLES as CONFORMANCE_EXAMPLES, conformance_command
from collate_npu.tools.cli.console import Help, Option, Parser, exit_code_of
from collate_npu.tools.cli.guide import EXAMPLES as GUIDE_EXAMPLES, guide_command
from collate_npu.tools.cli.kernels import EXAMPLES as KERNELS_EXAMPLES, kernels_command
from collate_npu.tools.cli.show import EXAMPLES as SHOW_EXAMPLES, show_command
from collate_npu.tools.cli.watch import EXAMPLES as WATCH_EXAMPLES, watch_command


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
