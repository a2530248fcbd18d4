"""ms-swift 4.6.0: one `install()`, or `--external_plugins` with the path of `plugin.py` beside this file.

Its transformers backend is right or refused; a trainer that packs has its recurrent models adapted. On Megatron the template
sends lengths as one 2D mask (no `[B, 1, S, S]` in a worker), and `prepare_batch` makes of it, or of whatever mask a custom
collator sent, what this model and this kernel read.
Sources: swift/template/base.py:2056-2180, megatron/trainers/utils.py:358-410, megatron/trainers/base.py:1136-1152.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import lcm
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collate_npu import errors
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.model_traits import is_transformers, needs_mask_2d, text_config, unwrap
from collate_npu.consumers.recurrent import variables_of
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.integrations import patching
from collate_npu.integrations.adapt import adapt
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.integrations.patching import once_imported
from collate_npu.integrations.swift.masks import (
    TrainerMasks,
    get_last_tokens,
    guarded,
    pooled,
    refuse_layout,
    segments_from_swift,
)
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.dense_mask import Polarity
from collate_npu.parallel import gloo_group
from collate_npu.segments import Segments

PACKAGE, TESTED = "ms-swift", "4.6.0"


def install(*, trainers: bool = True, polarity: Polarity | None = None) -> None:
    """Wrap ms-swift's template, `prepare_batch` and `get_last_tokens`; call it before the trainer is built.

    `trainers=False` wraps the template alone: enough in a dataloader worker, wrong in a training process. `polarity` is that
    of a custom collator's 4D masks; undeclared, it is proved. A second call takes the place of the first. Undone by
    `uninstall`. With `COLLATE_NPU_GUARD=1` the first batch is proved (`masks.guarded`).

    >>> from collate_npu.integrations import swift  # doctest: +SKIP
    >>> swift.install()  # doctest: +SKIP
    """
    uninstall()
    from swift.template.base import Template

    patching.patch(PACKAGE, Template, "_data_collator", _collate)
    patching.patch(PACKAGE, Template, "pre_forward_hook", _with_sequences)
    once_imported("swift.trainers.mixin", _watch_trainers)
    if trainers:
        from swift.megatron.trainers import base, utils
        from transformers.utils import is_torch_npu_available

        ours = _Trainers(polarity)
        mcore_bridge.install(holder=PACKAGE)
        patching.patch(PACKAGE, base.BaseMegatronTrainer, "get_last_tokens", get_last_tokens)
        patching.patch(PACKAGE, utils, "prepare_batch", ours.prepare_batch, everywhere="swift")
        if errors.is_set("COLLATE_NPU_GUARD"):
            patching.patch(PACKAGE, base.BaseMegatronTrainer, "_prepare_batch", partial(guarded, ours.masks_of))
        if is_torch_npu_available():
            patching.patch(PACKAGE, torch.distributed, "all_gather_object", _by_gloo, everywhere="swift")


def uninstall() -> None:
    """Give back what `install` took, and leave every other patch in place: your own `mcore_bridge.install()` too."""
    patching.release(PACKAGE)


def _by_gloo(original: Callable[..., Any], values: Any, value: Any, group: Any = None) -> Any:
    """No object meets HCCL: ms-swift gathers the names of its metrics at every step (trainers/trainer.py:108)."""
    ranks = torch.distributed.group.WORLD if group is None else group
    here = torch.distributed.get_rank(ranks) >= 0
    return original(values, value, group=gloo_group(ranks) if here else ranks)


class _OnMeta(TorchFunctionMode):
    """The template's `ones((B, S, S), dtype=bool)` takes no memory, nor does what is made of it (base.py:2152-2157)."""

    def __init__(self, builder: CodeType) -> None:
        super().__init__()
        self._builder = builder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shape = args[0] if func is torch.ones and args and isinstance(args[0], tuple) else ()
        square = len(shape) == 3 and shape[1] == shape[2] and kwargs.get("dtype") is torch.bool  # no dtype of an image
        if square and sys._getframe(1).f_code is self._builder:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _watch_trainers() -> None:
    from swift.trainers.mixin import SwiftMixin

    if patching.in_place(_collate):
        patching.patch(PACKAGE, SwiftMixin, "train", _train)


def _train(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a trainer of the transformers backend that packs: each recurrent model that it holds is adapted meanwhile."""
    template, held = self.template, [each for each in vars(self).values() if isinstance(each, torch.nn.Module)]
    with ExitStack() as stack:
        if template.padding_free and template.sequence_parallel_size == 1:
            for each in {id(unwrap(each)): each for each in reversed(held)}.values():
                if is_transformers(unwrap(each)) and needs_mask_2d(each):
                    _restore_layers(each, stack)
                    stack.enter_context(adapt(each))
            template.adapted = True  # what its workers know, who have no model
            stack.callback(delattr, template, "adapted")
        return original(self, *args, **kwargs)


def _restore_layers(model: torch.nn.Module, stack: ExitStack) -> None:
    """Without fla its layers of Qwen3.5 raise at a second sequence (model/models/qwen.py:1287); their own forward can be
    adapted."""
    from swift.model.models import qwen

    qwen._try_import_flash_linear_attention_kernels()
    for layer in {type(module) for module in model.modules()} if qwen.causal_conv1d is None else ():
        own = variables_of(layer.forward).get("origin_forward")
        if own is not None:
            stack.callback(setattr, layer, "forward", layer.forward)
            layer.forward = own


def _with_sequences(original: Callable[..., Any], self: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Multimodal templates hand on what they know by name (template/base.py:1731), and that is not `seq_idx`."""
    out, mended = original(self, model, args, kwargs)
    return out, {**{key: kwargs[key] for key in ("seq_idx",) if key in kwargs}, **mended}


def _collate(original: Callable[..., Any], self: Any, batch: Any, *, padding_to: int | None = None) -> Any:
    if not self.use_megatron:
        out = original(self, batch, padding_to=padding_to)
        check_batch(self, out)
        return out
    if self.padding_free:
        return original(self, batch, padding_to=padding_to)
    if padding_to is not None and self.sequence_parallel_size > 1:  # get_padding_to leaves out zigzag's two chunks
        padding_to = lcm(padding_to, 2 * self.sequence_parallel_size)
    with _OnMeta(inspect.unwrap(original).__code__):
        out = original(self, batch, padding_to=padding_to)
    out.pop("attention_mask", None)
    # Its own 2D mask counts the alignment padding of context parallelism as real; seq_lens do not.
    out[KEEP_KEY] = Segments.from_lengths(out["seq_lens"], out[KEEP_KEY].shape[1]).keep
    return out


@dataclass
class _Trainers:
    """What one `install` puts into the trainers of a process, which train one after another."""

    polarity: Polarity | None
    masks: TrainerMasks | None = None

    def masks_of(self, args: Any) -> TrainerMasks:
        """The same for every batch of a trainer."""
        if self.masks is None or self.masks.args is not args:
            self.masks = TrainerMasks(args, self.polarity)
        return self.masks

    def prepare_batch(self, original: Callable[..., Any], args: Any, data: Any, vp_stage: int | None = None) -> Any:
        """ms-swift's batch for the model, its masks replaced by ours. A flat row keeps ms-swift's own offsets."""
        if args.padding_free:
            refuse_layout(args)
            out = original(args, data, vp_stage)
            number_sequences(out.get("packed_seq_params"))
            return out
        masks = self.masks_of(args)
        segments = segments_from_swift(args, data, masks.polarity)
        bare = {key: value for key, value in data.items() if key not in ("attention_mask", KEEP_KEY)}
        return pooled(args, masks.add(original(args, bare, vp_stage), segments), segments)


def number_sequences(params: Any) -> None:
    """Let Mamba's layers know the sequences: from 0.17 on megatron-core numbers them in the constructor, where it knows the
    width, which ms-swift says afterwards (megatron/utils/utils.py:272). Unnumbered they run into each other
    (core/ssm/mamba_mixer.py:744-750 of 0.19.2)."""
    if getattr(params, "total_tokens", None) is not None and params.seq_idx is None:
        params.__post_init__()


_SPLIT_BY_SWIFT = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose recurrent layers ms-swift exchanges between the ranks of one row, padded right; of a flat row it makes
the offsets itself (model/models/qwen.py:1241-1249, 1396)."""


def check_batch(template: Any, batch: Mapping[str, Any]) -> None:
    """Of the transformers backend: raise `UnsupportedFormError` where real tokens would not be computed as alone.

    Two settings say nothing to recurrent layers and train on in silence: `padding_free` and `packing` (positions alone,
    which no such layer reads; `_train` has adapted a trainer's model) and `sequence_parallel_size` (Qwen3.5 alone has a
    forward for a split row, model/models/qwen.py:1312-1445). Costs O(B * S) a batch of a recurrent model.
    """
    if not template.is_training or "input_ids" not in batch or not needs_mask_2d(template.config):
        return
    family, ranks, flat = text_config(template.config).model_type, template.sequence_parallel_size, template.padding_free
    if ranks > 1 and family not in _SPLIT_BY_SWIFT:
        rule = f"Each rank runs the recurrent layers of {family} on its part of a row alone, from an empty state."
        remedy = "Set sequence_parallel_size=1, or train with `megatron sft`, whose Gated DeltaNet gathers the row."
        raise UnsupportedFormError(explain("sequence_parallel_size", str(ranks), rule, remedy))
    if ranks == 1 and not hasattr(template, "adapted"):
        read = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
        if flat:
            read["position_ids"] = batch.get("text_position_ids", batch["position_ids"])
        model = template.model if flat and template.model is not None else template.config
        adapter = BatchAdapter(model, consumer="transformers", padding_free=flat)
        adapter.route(segments_from_batch(read, padding_free=flat))
