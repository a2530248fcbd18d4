"""Python runs this when it starts under `collate-npu run` or `watch`, whose folder stands first on PYTHONPATH: they begin
when torch is imported, in this process and in all that it starts. Whatever fails here, the run goes on.
"""

import importlib
import importlib.util
import os
import sys
from functools import partial
from importlib.machinery import PathFinder

ARMED = {
    "COLLATE_NPU_RUN": ("adapted", "collate_npu.integrations.every_model"),
    "COLLATE_NPU_WATCH": ("watched", "collate_npu.proof.delivery"),
}
"""By the variable that asks: what is done, and the module that does it."""


def _run_the_next() -> None:
    """The `sitecustomize` that would have run without ours."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _say(done: str, error: Exception) -> None:
    print(f"collate_npu: {sys.executable} is not {done}: {type(error).__name__}: {error}", file=sys.stderr)


def _arm(done: str, name: str, torch: object) -> None:
    """An error of ours must not be one of `import torch`: this may be another Python, without this library."""
    try:
        importlib.import_module(name).arm(torch)
    except Exception as error:
        _say(done, error)


for _variable, _ours in ARMED.items():
    if _variable in os.environ:
        try:
            import wrapt

            wrapt.register_post_import_hook(partial(_arm, *_ours), "torch")
        except ImportError as _error:
            if importlib.util.find_spec("torch") is not None:  # else no model runs in this Python
                _say(_ours[0], _error)
_run_the_next()
