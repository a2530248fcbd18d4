"""`collate-npu env`."""

from __future__ import annotations

from typing import Annotated

import typer


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """What is installed, which kernels it can run, and known hazards; made for pasting into an issue.

    Also where torch, typer or rich do not load: `python -m collate_npu env`.
    """
    from collate_npu.tools.env.markdown import written

    print(written(as_json=as_json))
