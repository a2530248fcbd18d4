"""slime, miles, vime, Relax: the first step is watched, and stops where a kernel gets other sequences than the batch has.

    --custom-megatron-before-train-step-hook-path collate_npu.integrations.slime.before_train_step
    --custom-megatron-before-log-prob-hook-path collate_npu.integrations.slime.before_log_prob

All four hand `model(input_ids [1, T], attention_mask=None, packed_seq_params=...)`: the samples behind one another, padding
behind as one more sequence, `cu_seqlens_q` of all context-parallel ranks together (slime 624b824 slime/backends/
megatron_utils/data.py:53-113, model.py:619-639). What goes wrong there goes wrong behind the batch: a layer that passes
boundaries to its convolution and not to its rule (slime pull request 1686), or keeps those of the batch before (miles 2213).
So every kernel is asked, in each micro-batch up to the first step of the optimizer; then all of it is taken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from collate_npu.consumers.megatron import start_problem
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.proof.delivery import Watch
from collate_npu.proof.kernel_calls import keeps_state


@dataclass
class _Process:
    watch: Watch | None = None
    steps: int = 0
    """How often a step was to begin."""


_HERE = _Process()


def before_log_prob(args: Any, model: Iterable[Any], store_prefix: str) -> None:
    """Before log-probabilities are computed: `custom_before_log_prob_hook(args, model, store_prefix)` (model.py:458).

    >>> before_log_prob(args, model, "ref_")  # doctest: +SKIP
    """
    if _HERE.watch is None:
        _check_start(args, model)
        _HERE.watch = Watch(steps=1, stop=True, keeps=False)
        _HERE.watch.start()


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Iterable[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Before each step, with these arguments (model.py:561). Watching begins at the first one, if `before_log_prob` did not
    begin it, and ends at the second: one line says what was seen. A fault raises `CollateError` out of its forward.

    >>> before_train_step(args, 0, 0, model, optimizer, scheduler)  # doctest: +SKIP
    """
    before_log_prob(args, model, "")
    _HERE.steps += 1
    if _HERE.steps == 2 and _HERE.watch is not None:
        _HERE.watch.end()
        if os.environ.get("RANK", "0") == "0" or not _HERE.watch.kernels:
            print(f"collate_npu: {_HERE.watch.summary()}", flush=True)


def _check_start(args: Any, model: Iterable[Any]) -> None:
    """Raise for what no kernel call shows: patches that came too late, and tokens in another order than recurrent layers
    take.

    `--allgather-cp` gives each rank a run of the row; their layers, and Megatron's, put zigzag chunks in order
    (slime_plugins/models/hf_attention.py:128-143; megatron-core 0.19.2 core/ssm/gated_delta_net/common.py:564-600).
    """
    if late := start_problem():
        rule = "Ascend's patches must be applied before any module imports Megatron's functions."
        raise CollateError(explain("start", late, rule, "Correct the order of imports, and start again."))
    runs = getattr(args, "allgather_cp", False) and (getattr(args, "context_parallel_size", 1) or 1) > 1
    if runs and (kept := keeps_state(model)):
        rule = f"Each rank gets one part of the row, but {kept} expects the chunks of a zigzag: their order would be wrong."
        raise UnsupportedFormError(explain("allgather_cp", "True", rule, "Leave --allgather-cp out."))
