"""Python runs this when it starts under `collate-npu watch`, whose folder stands first on PYTHONPATH: watching begins when
torch is imported, in this process and in all that it starts. Whatever fails here, the run goes on.
"""

import contextlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _run_the_next() -> None:
    """The `sitecustomize` that would have run without ours."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "COLLATE_NPU_WATCH" in os.environ:
    with contextlib.suppress(ImportError):  # another Python of this run, in which nothing of ours is installed
        import wrapt

        wrapt.register_post_import_hook("collate_npu.proof.watching:arm", "torch")
_run_the_next()
