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


def _arm(torch: object) -> None:
    """An error of ours must not be one of `import torch`: this may be another Python, without this library."""
    try:
        from collate_npu.proof.delivery import arm

        arm(torch)
    except Exception as error:
        print(f"collate_npu watch: {sys.executable} is not watched: {type(error).__name__}: {error}", file=sys.stderr)


if "COLLATE_NPU_WATCH" in os.environ:
    with contextlib.suppress(ImportError):
        import wrapt

        wrapt.register_post_import_hook(_arm, "torch")
_run_the_next()
