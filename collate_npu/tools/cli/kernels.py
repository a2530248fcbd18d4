"""`collate-npu kernels`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Literal

from collate_npu.tools.cli.console import Option, load

EXAMPLES = (
    "Examples:\n\n`collate-npu kernels --device npu` — every operator that is installed, before you train on a card\n\n"
    "`collate-npu kernels --device npu --operator npu_fusion_attention` — one, in all its forms and layouts\n\n"
    "`collate-npu kernels` — what runs on a CPU"
)
_OPERATOR = "An operator, or a package, for example fla. Repeatable; default: all."


def kernels_command(
    device: Annotated[str, Option("cpu, cuda, npu, or one of several: npu:1.")] = "cpu",
    operator: Annotated[list[str] | None, Option(_OPERATOR)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option("Default: float32 on a CPU, else bfloat16.")
    ] = None,
    verbose: Annotated[bool, Option("Why calls were refused, too.", ("--verbose", "-v"))] = False,
    as_json_: Annotated[bool, Option("One JSON object in the place of the text; passed is first.", ("--json",))] = False,
) -> int:
    """Does each operator compute what our arguments say, on this device?

    Operators of attention and of recurrent layers that are installed are called with this library's masks and boundaries,
    forward and backward, and compared with each sequence alone in float64. Exit code 0: all right, and something was
    measured. 1: something is wrong. 2: something named could not be run; without the card, what would run is listed.
    """
    load("torch", "rich")
    from rich.text import Text

    from collate_npu import __version__
    from collate_npu.tools import kernels
    from collate_npu.tools.audit.terminal import SIGNS, terms
    from collate_npu.tools.paper import put, screen

    chosen, in_dtype = kernels.kernels_named(operator or []), kernels.dtype_of(dtype, device)
    no_card, console = kernels.why_no_card(device, in_dtype), screen(stderr=True)
    found = []
    with console.status("") as status:
        for run in kernels.measured(chosen, device, in_dtype, no_card):
            found.append(run)
            status.update(Text(f"{run.operator}: {run.truth}"))
    code = kernels.exit_code(found, no_card, named=operator or [])
    if as_json_:
        settings = {"device": device, "dtype": str(in_dtype).removeprefix("torch."), "collate_npu": __version__}
        print(json.dumps(kernels.as_json(found, settings, no_card, code), indent=2, allow_nan=False), flush=True)
        return code
    sign, style = SIGNS["right" if code == 0 else "wrong" if code == 1 else "unproved"]
    with suppress(SystemExit):  # how rich ends where nobody reads the pipe any more
        out = screen()
        put(out, Text(f"{sign} {kernels.headline(found, no_card, code)}", f"bold {style}"))
        put(out, terms(kernels.notes(found, no_card, verbose=verbose)), *kernels.tables(found))
    return code
