"""ms-swift 4.6.0 on Megatron: one `install()`, or `--external_plugins` with the path of `plugin.py` beside this file.

The template then sends lengths as one 2D mask (no `[B, 1, S, S]` in a worker), and `prepare_batch` makes of it, or of
whatever mask a custom collator sent, what this model and this kernel read (`swift_masks`); what has no right form raises.
Sources: swift/template/base.py:2056-2180, megatron/trainers/utils.py:358-410, megatron/trainers/base.py:1136-1152.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.integrations.swift import masks as swift_masks
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.polarity import Polarity
from collate_npu.parallel.layout import Scope
from collate_npu.segments import Segments

_undo: mcore_bridge.Undo = []
_options: dict[str, Any] = {}
# Segments of the last prepared batch, by id(args). `get_last_tokens` runs right after that batch's forward and receives no
# whole mask, so it looks here.
_segments_of_last_batch: dict[int, Segments] = {}


def install(*, trainers: bool = True, mask_2d: Scope = "local", polarity: Polarity | None = None) -> None:
    """Wrap ms-swift's template, `prepare_batch` and `get_last_tokens`; call it before the trainer is built.

    `trainers=False` wraps the template alone: enough in a dataloader worker, wrong in a training process. `mask_2d` is
    what a context-parallel rank gets (nothing in mcore-bridge 1.6.5 reads it there). `polarity` declares the 4D masks of
    a custom collator; undeclared, it is proved. Undone by `uninstall`.
    """
    uninstall()
    from swift.template.base import Template

    _options.update(mask_2d=mask_2d, polarity=polarity)
    mcore_bridge.patch(Template, "_data_collator", _collate, _undo)
    if trainers:
        from swift.megatron.trainers import base, utils

        mcore_bridge.install()
        mcore_bridge.patch(base.BaseMegatronTrainer, "get_last_tokens", _last_tokens, _undo)
        mcore_bridge.patch(utils, "prepare_batch", _prepare, _undo)
        _rename(_undo[-1][2], utils.prepare_batch)


def uninstall() -> None:
    """Put everything back as ms-swift and mcore-bridge have it. Undoes `install`."""
    names = [(getattr(owner, name), original) for owner, name, original in _undo if name == "prepare_batch"]
    mcore_bridge.restore(_undo)
    for ours, original in names:
        _rename(ours, original)
        mcore_bridge.uninstall()
    _segments_of_last_batch.clear()


def _rename(old: Any, new: Any) -> None:
    """Modules that imported the function by name hold it too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("swift.") and vars(module).get("prepare_batch") is old:
            vars(module)["prepare_batch"] = new


class _OnMeta(TorchFunctionMode):
    """The template's `[B, S, S]` of ones takes no memory, nor does what is made of it (base.py:2152-2157)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        square = func is torch.ones and isinstance(args[0], tuple) and len(args[0]) == 3
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if square else {})})


def _collate(original: Callable[..., Any], self: Any, batch: Any, *, padding_to: int | None = None) -> Any:
    if not self.use_megatron or self.padding_free:
        return original(self, batch, padding_to=padding_to)
    if padding_to is not None and self.sequence_parallel_size > 1:  # get_padding_to leaves out zigzag's two chunks
        padding_to = lcm(padding_to, 2 * self.sequence_parallel_size)
    with _OnMeta():
        out = original(self, batch, padding_to=padding_to)
    out.pop("attention_mask", None)
    # Its own 2D mask counts the alignment padding of context parallelism as real; seq_lens do not.
    out[KEEP_KEY] = Segments.from_lengths(out["seq_lens"], out[KEEP_KEY].shape[1]).keep
    return out


def _prepare(original: Callable[..., Any], args: Any, data: Any, vp_stage: int | None = None) -> Any:
    if args.padding_free:
        return original(args, data, vp_stage)
    segments = _segments_of_last_batch[id(args)] = swift_masks.segments_from_swift(args, data, _options["polarity"])
    bare = {key: value for key, value in data.items() if key not in ("attention_mask", KEEP_KEY)}
    return swift_masks.add_masks(args, original(args, bare, vp_stage), segments, _options["mask_2d"])


def _last_tokens(
    original: Callable[..., Any], self: Any, output_tensor: Tensor, packed_seq_params: Any = None, attention_mask: Any = None
) -> Any:
    """The whole mask of the batch, whatever the model was given: None, or one rank's rows."""
    segments = _segments_of_last_batch.get(id(self.args))
    if packed_seq_params is None and segments is not None:
        attention_mask = segments.keep.to(output_tensor.device)
    return original(self, output_tensor, packed_seq_params, attention_mask)
