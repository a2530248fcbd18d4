"""Scripts in processes of their own, forked from one that has imported what takes seconds."""

import os
import runpy
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

IMPORTED = ["torch", "transformers.modeling_utils", "transformers.trainer"]


def run(script: Path, env: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Exit status and what it printed; it runs in the script's folder."""
    forked = get_context("forkserver")
    forked.set_forkserver_preload(IMPORTED)
    printed = [script.with_suffix(end) for end in (".out", ".err")]
    process = forked.Process(target=_main, args=(script, env, *printed))
    process.start()
    process.join(300)
    process.kill()
    out, err = (path.read_text(encoding="utf-8") for path in printed)
    return process.exitcode, out, err


def _main(script: Path, env: Mapping[str, str], out: Path, err: Path) -> None:
    for fd, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), fd)
    os.environ.update(env)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()
