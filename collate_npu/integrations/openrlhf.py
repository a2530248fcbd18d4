"""OpenRLHF 0.11.2: each model that it builds is adapted, in every process; `Actor`, reward and critic models.

    deepspeed --module collate_npu.integrations.openrlhf openrlhf.cli.train_sft ...
    ray job submit --runtime-env-json='{"worker_process_setup_hook": "collate_npu.integrations.openrlhf.arm"}' -- python3 -m
        openrlhf.cli.train_ppo_ray ...

OpenRLHF has no setting for code of a user. Both of its builders pass the model, or PEFT's wrapper around it, to
`set_z3_leaf_modules` before DeepSpeed gets it (models/actor.py:206, models/model.py:156).
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from collate_npu.integrations import patching
from collate_npu.integrations.adapt import adapt

PACKAGE, TESTED = "openrlhf", "0.11.2"


def arm() -> None:
    """Adapt each model that OpenRLHF builds in this process from now on. Imports nothing of OpenRLHF.

    Ray's `worker_process_setup_hook` takes its name, and runs it in every worker, those of vLLM too.

    >>> arm()  # doctest: +SKIP
    """
    patching.once_imported(PACKAGE, "openrlhf.models.utils", _patch)


def disarm() -> None:
    """Adapt no model that is built from now on."""
    patching.release(PACKAGE)


def _patch() -> None:
    from openrlhf.models import utils

    patching.patch(PACKAGE, utils, "set_z3_leaf_modules", _then_adapt, everywhere=PACKAGE)


def _then_adapt(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    adapt(model)


def main() -> None:
    """Run a module with its arguments after `arm()`: `python -m collate_npu.integrations.openrlhf MODULE ...`. DeepSpeed's
    launcher puts `--local_rank=N` first (launcher/launch.py), so the first word without dashes is the module."""
    arm()
    name = next(word for word in sys.argv[1:] if not word.startswith("-"))
    sys.argv.remove(name)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
