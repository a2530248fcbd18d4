"""Plain: the commands that need torch and numpy alone, as text, for environments where typer or rich do not load.

The whole command line is the same there but for `show`, which takes what makes a batch, and draws it for no consumer and no
rank.
"""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentParser
from pathlib import Path

from collate_npu.errors import CollateError, printable
from collate_npu.tools.refusals import said

INSTALL = "pip install typer rich transformers accelerate wrapt"
"""What the package depends on beside torch and numpy."""


def run(args: list[str], why: Exception) -> int:
    """Answer these arguments, and return the exit code; `why` says what keeps the whole command line from running."""
    try:
        text = _answer(args)
    except CollateError as error:
        return _stop(str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # torch raises RuntimeError where it cannot load torch_npu
        return _stop(f"{said(error)}. `collate-npu env` says more.")
    if text is None:
        needs = " ".join(["collate-npu", *args])
        return _stop(f"{said(why)}. `{needs}` needs: {INSTALL} (--version, env, guide and show --lengths do not)")
    print(text)
    return 0


def _answer(args: list[str]) -> str | None:
    """What is printed; None for what only the whole command line knows."""
    match args:
        case ["--version"]:
            from collate_npu import __version__

            return f"collate-npu {__version__}"
        case ["env"] | ["env", "--json"]:
            from collate_npu.tools.env import written

            return written(as_json="--json" in args)
        case ["guide", *words] if not words or words[0][:1] != "-":
            from collate_npu.tools.guide import listed, page

            return (page(" ".join(words)) if words else listed()).removesuffix("\n")
        case ["show", *options]:
            return _shown(options)
    return None


def _shown(options: list[str]) -> str | None:
    """A batch or a mask in words and signs."""
    parser = ArgumentParser("collate-npu show", add_help=False, allow_abbrev=False)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--lengths")
    one.add_argument("--batch", type=Path)
    one.add_argument("--mask", type=Path)
    parser.add_argument("--side", choices=("left", "right"), default="right")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--row", type=int)
    asked, more = parser.parse_known_args(options)
    if more or (asked.lengths, asked.batch, asked.mask) == (None, None, None):
        return None
    from collate_npu.tools.describe import describe
    from collate_npu.tools.saved import batch_of_file, mask_of_file
    from collate_npu.tools.show import picture
    from collate_npu.tools.show.inputs import collated, features_of_lengths

    warnings.filterwarnings("ignore", message="collate_npu: this batch has a 4D")  # no model reads it
    if asked.mask:
        return picture(mask_of_file(asked.mask), row=asked.row)
    given = {"side": asked.side, "packed": asked.packed, "ranks": None}
    shown = batch_of_file(asked.batch) if asked.batch else collated(features_of_lengths(asked.lengths), **given)
    return f"{describe(shown)}\n\n{picture(shown, row=asked.row)}\n\n■ attends, real   ⬚ blocked, padding"


def _stop(message: str) -> int:
    print(printable(f"collate-npu: {message}"), file=sys.stderr)
    return 2
