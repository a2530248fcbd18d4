"""Flat rows in mcore-bridge's Gated DeltaNets: offsets that a layer would misread in silence are refused.

Its own layer takes the padded offsets where they fit the row, and else, without a word, `cu_seqlens_q` as they are (1.6.5
modules/gated_delta_net.py:240-251): real ones stand elsewhere in a padded row, and behind the last one nothing is written.
The two of transformers (`USE_MCORE_GDN=0`) take `cu_seqlens_q` alone (gpts/qwen3_next.py:477, mm_gpts/qwen3_5.py:79).
`packed_seq_params` and `gpt_batch` make neither; this is for the offsets of others. Costs a look at N numbers a layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.models import transformers_version
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations import patching

_REMEDY = "Build them with packed_seq_params(segments, padding_counts=True), or take gpt_batch's inputs."


def install(holder: str) -> None:
    """Patch the three layers, for `mcore_bridge.install`."""
    from mcore_bridge.model.gpts.qwen3_next import Qwen3NextGatedDeltaNet
    from mcore_bridge.model.mm_gpts.qwen3_5 import Qwen3_5MoeGatedDeltaNet
    from mcore_bridge.model.modules import GatedDeltaNet

    patching.patch(holder, GatedDeltaNet, "_resolve_cu_seqlens", _resolved)
    patching.patch(holder, Qwen3NextGatedDeltaNet, "forward", _by_places)
    patching.patch(holder, Qwen3_5MoeGatedDeltaNet, "forward", _by_places)


def refuse_unseparated(modules: Iterable[Any]) -> None:
    """Raise for a layer whose convolution runs across the sequences of a flat row.

    transformers from 5.15 on has no place left for the convolution that mcore-bridge puts into Qwen3.5's layer
    (mm_gpts/qwen3_5.py:31, 48), and gives its own one `seq_idx` alone, which nobody sends (modeling_qwen3_5_moe.py:582-588
    of 5.19; measured: 2.8 off).
    """
    if transformers_version() < (5, 15):
        return
    for module in modules:
        if type(module).__name__ == "Qwen3_5MoeGatedDeltaNet" and type(module).__module__.startswith("mcore_bridge"):
            got = f"{os.environ.get('USE_MCORE_GDN', '0')} and a flat row"
            rule = (
                f"With transformers {version('transformers')} the convolution of {type(module).__name__} is not told where "
            )
            rule += "sequences end, and runs across them."
            remedy = "Unset it: Megatron's own layer takes flat rows. Or set padding_free=False."
            raise UnsupportedFormError(explain("USE_MCORE_GDN", got, rule, remedy))


def _resolved(
    original: Callable[..., Any], padded: Tensor | None, actual: Tensor | None, total: int, cp_size: int = 1
) -> Any:
    """Every sequence a multiple of 2 * cp: it is cut into so many parts (core/ssm/mamba_context_parallel.py:362-374)."""
    found = original(padded, actual, total, cp_size=cp_size)
    given = actual if padded is None else padded
    if given is None:  # the object carries other things than offsets
        return found
    parts = 2 * cp_size if cp_size > 1 else 1
    lengths = torch.diff(given if found is None else found)
    if found is None or not bool(((lengths >= 0) & (lengths % parts == 0)).all()):
        rule = f"Gated DeltaNet takes offsets that rise from 0 to the {total} tokens of the row"
        rule += f", in steps of {parts} on {cp_size} ranks." if cp_size > 1 else "."
        raise CollateError(explain("packed_seq_params", str(given.tolist())[:80], rule, _REMEDY))
    return found


def _by_places(original: Callable[..., Any], self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    params = kwargs.get("packed_seq_params")
    if params is not None and params.qkv_format == "thd":
        taken = params.cu_seqlens_q
        if taken.numel() > 2:
            refuse_unseparated([self])
        total = hidden_states.shape[0] * (self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1)
        if int(taken[-1]) != total:  # real ones end early wherever there is padding
            rule = f"{type(self).__name__} takes cu_seqlens_q for places in the row, and the row has {total} tokens."
            raise CollateError(explain("cu_seqlens_q", str(taken.tolist())[:80], rule, _REMEDY))
    return original(self, hidden_states, **kwargs)
