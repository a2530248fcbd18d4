"""ms-swift 4.6.0: one `install()`, or `--external_plugins` with the path of `plugin.py` beside this file.

Its transformers backend is right or refused (`transformers_backend.py`). On Megatron the template sends lengths as one 2D
mask (no `[B, 1, S, S]` in a worker), and `prepare_batch` makes of it, or of whatever mask a custom collator sent, what this
model and this kernel read (`masks.py`); what has no right form raises. `pooling.py`: the last token of each row.
Sources: swift/template/base.py:2056-2180, megatron/trainers/utils.py:358-410, megatron/trainers/base.py:1136-1152.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import lcm
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collate_npu.integrations import patching
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.integrations.swift import guard
from collate_npu.integrations.swift import masks as swift_masks
from collate_npu.integrations.swift.flat import number_sequences
from collate_npu.integrations.swift.pooling import get_last_tokens, pooled
from collate_npu.integrations.swift.transformers_backend import check_batch
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.polarity import Polarity
from collate_npu.parallel import gloo_group
from collate_npu.parallel.layout import Scope
from collate_npu.segments import Segments

PACKAGE, TESTED = "ms-swift", "4.6.0"


def install(*, trainers: bool = True, mask_2d: Scope = "local", polarity: Polarity | None = None) -> None:
    """Wrap ms-swift's template, `prepare_batch` and `get_last_tokens`; call it before the trainer is built.

    `trainers=False` wraps the template alone: enough in a dataloader worker, wrong in a training process. `mask_2d` is
    what a context-parallel rank gets: Gated DeltaNet takes "local", from megatron-core 0.18 on (before, it has no context
    parallelism). `polarity` declares the 4D masks of a custom collator; undeclared, it is proved. A second call takes the
    place of the first. Undone by `uninstall`. With `COLLATE_NPU_GUARD=1` the first batch is proved (`guard.py`).

    >>> from collate_npu.integrations import swift  # doctest: +SKIP
    >>> swift.install()  # doctest: +SKIP
    """
    uninstall()
    from swift.template.base import Template

    patching.patch(PACKAGE, Template, "_data_collator", _collate)
    if trainers:
        from swift.megatron.trainers import base, utils
        from transformers.utils import is_torch_npu_available

        ours = _Trainers(mask_2d=mask_2d, polarity=polarity)
        mcore_bridge.install(holder=PACKAGE)
        patching.patch(PACKAGE, base.BaseMegatronTrainer, "get_last_tokens", get_last_tokens)
        patching.patch(PACKAGE, utils, "prepare_batch", ours.prepare_batch, everywhere="swift")
        if guard.wanted():
            patching.patch(PACKAGE, base.BaseMegatronTrainer, "_prepare_batch", partial(guard.guarded, mask_2d, polarity))
        if is_torch_npu_available():
            patching.patch(PACKAGE, torch.distributed, "all_gather_object", _by_gloo, everywhere="swift")


def uninstall() -> None:
    """Give back what `install` took, and leave every other patch in place: your own `mcore_bridge.install()` too."""
    patching.release(PACKAGE)


def _by_gloo(original: Callable[..., Any], values: Any, value: Any, group: Any = None) -> Any:
    """Python objects never meet HCCL: ms-swift gathers the names of its metrics at every step (trainers/trainer.py:108)."""
    ranks = torch.distributed.group.WORLD if group is None else group
    here = torch.distributed.get_rank(ranks) >= 0
    return original(values, value, group=gloo_group(ranks) if here else ranks)


class _OnMeta(TorchFunctionMode):
    """The template's `[B, S, S]` of ones takes no memory, nor does what is made of it (base.py:2152-2157)."""

    def __init__(self, builder: CodeType) -> None:
        super().__init__()
        self._builder = builder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ones and _is_square(args, kwargs) and sys._getframe(1).f_code is self._builder:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _is_square(args: Any, kwargs: Any) -> bool:
    """Is it `ones((B, S, S), dtype=bool)`? Images of a multimodal template have no such dtype."""
    shape = args[0] if args and isinstance(args[0], tuple) else ()
    return len(shape) == 3 and shape[1] == shape[2] and kwargs.get("dtype") is torch.bool


def _collate(original: Callable[..., Any], self: Any, batch: Any, *, padding_to: int | None = None) -> Any:
    if not self.use_megatron or self.padding_free:
        out = original(self, batch, padding_to=padding_to)
        if not self.use_megatron:
            check_batch(self, out)
        return out
    if padding_to is not None and self.sequence_parallel_size > 1:  # get_padding_to leaves out zigzag's two chunks
        padding_to = lcm(padding_to, 2 * self.sequence_parallel_size)
    with _OnMeta(inspect.unwrap(original).__code__):
        out = original(self, batch, padding_to=padding_to)
    out.pop("attention_mask", None)
    # Its own 2D mask counts the alignment padding of context parallelism as real; seq_lens do not.
    out[KEEP_KEY] = Segments.from_lengths(out["seq_lens"], out[KEEP_KEY].shape[1]).keep
    return out


@dataclass(frozen=True, kw_only=True)
class _Trainers:
    """What one `install` puts into the trainers."""

    mask_2d: Scope
    polarity: Polarity | None

    def prepare_batch(self, original: Callable[..., Any], args: Any, data: Any, vp_stage: int | None = None) -> Any:
        """ms-swift's batch for the model, its masks replaced by ours. A flat row keeps ms-swift's own offsets."""
        if args.padding_free:
            swift_masks.refuse_layout(args)
            out = original(args, data, vp_stage)
            number_sequences(out.get("packed_seq_params"))
            return out
        segments = swift_masks.segments_from_swift(args, data, self.polarity)
        bare = {key: value for key, value in data.items() if key not in ("attention_mask", KEEP_KEY)}
        return pooled(args, swift_masks.add_masks(args, original(args, bare, vp_stage), segments, self.mask_2d), segments)
