"""ms-swift 4.6.0: one `install()`, or `--external_plugins` with the path of `plugin.py` beside this file.

Its transformers backend goes through `collate-npu run`. On Megatron the template sends lengths as one 2D mask (no
`[B, 1, S, S]` in a worker). From this, or from the mask of a custom collator, `prepare_batch` makes the masks that this
model and this kernel read.
Sources: swift/template/base.py:2056-2180, megatron/trainers/utils.py:358-410, megatron/trainers/base.py:1136-1152.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import host_tensor
from collate_npu.consumers.megatron import kernel_of_args
from collate_npu.consumers.model_traits import needs_mask_2d, recurrent_heads
from collate_npu.errors import CollateError, UnsupportedFormError, explain, refuse_rows, shape_of
from collate_npu.integrations import patching
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.mask_values import Polarity
from collate_npu.parallel import ContextParallel, check_recurrent_split, split_tensor
from collate_npu.segments import Segments

PACKAGE, TESTED = "ms-swift", "4.6.0"


def install(*, trainers: bool = True, polarity: Polarity | None = None) -> None:
    """Wrap ms-swift's template, `prepare_batch` and `get_last_tokens`; call it before the trainer is built.

    `trainers=False` wraps the template alone: enough in a dataloader worker, wrong in a training process. `polarity` is that
    of a custom collator's 4D masks; without it, the polarity is proved. A second call replaces the first. `uninstall` undoes
    it.

    >>> from collate_npu.integrations import swift  # doctest: +SKIP
    >>> swift.install()  # doctest: +SKIP
    """
    uninstall()
    from swift.template.base import Template

    patching.patch(PACKAGE, Template, "_data_collator", _collate)
    if trainers:
        from swift.megatron.trainers import base, utils
        from transformers.utils import is_torch_npu_available

        mcore_bridge.install(holder=PACKAGE)
        patching.patch(PACKAGE, base.BaseMegatronTrainer, "get_last_tokens", get_last_tokens)
        patching.patch(PACKAGE, utils, "prepare_batch", partial(prepare_batch, polarity), everywhere="swift")
        if is_torch_npu_available():
            patching.patch(PACKAGE, torch.distributed, "all_gather_object", patching.gather_by_gloo, everywhere="swift")


def uninstall() -> None:
    """Undo `install`, and leave every other patch in place, also your own `mcore_bridge.install()`."""
    patching.release(PACKAGE)


class _SquareOnMeta:
    """torch, but that `ones((B, S, S))` takes no memory, and so nothing that is made of it (base.py:2152-2157)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def ones(self, *shape: Any, **kwargs: Any) -> Any:
        """torch's, on the meta device if it has three dimensions."""
        return torch.ones(*shape, **({**kwargs, "device": "meta"} if np.size(shape) == 3 else kwargs))


def _collate(original: Callable[..., Any], self: Any, batch: Any, *, padding_to: int | None = None) -> Any:
    if not self.use_megatron and self.is_training and "COLLATE_NPU_RUN" not in os.environ:
        rule = "The plugin serves ms-swift's Megatron backend, and this is the transformers one."
        remedy = "Leave it out, and put `collate-npu run --` before the command."
        raise UnsupportedFormError(explain("external_plugins", "swift sft", rule, remedy))
    if not self.use_megatron or self.padding_free:
        return original(self, batch, padding_to=padding_to)
    if padding_to is not None and self.sequence_parallel_size > 1:  # get_padding_to leaves out zigzag's two chunks
        padding_to = lcm(padding_to, 2 * self.sequence_parallel_size)
    out = patching.with_globals(original, torch=_SquareOnMeta())(self, batch, padding_to=padding_to)
    out.pop("attention_mask", None)
    # Its own 2D mask counts the alignment padding of context parallelism as real; seq_lens do not.
    out[KEEP_KEY] = Segments.from_lengths(out["seq_lens"], out[KEEP_KEY].shape[1]).keep
    return out


def prepare_batch(
    polarity: Polarity | None, original: Callable[..., Any], args: Any, data: Any, vp_stage: int | None = None
) -> Any:
    """Return ms-swift's batch for the model with our masks in place of its own. A flat row keeps ms-swift's offsets."""
    if args.padding_free:
        check_layout(args, ranks_of(args), Segments.from_lengths([[2 * args.context_parallel_size] * 2]))
        out = original(args, data, vp_stage)
        number_sequences(out.get("packed_seq_params"))
        return out
    segments = segments_from_swift(args, data, polarity)
    bare = {key: value for key, value in data.items() if key not in ("attention_mask", KEEP_KEY)}
    out = with_masks(args, original(args, bare, vp_stage), segments)
    return out if args.task_type == "causal_lm" else PooledBatch(out, segments.keep)


def number_sequences(params: Any) -> None:
    """Number the sequences for Mamba's layers. From 0.17 on megatron-core numbers them in the constructor if it gets the
    width, which ms-swift sets afterwards (megatron/utils/utils.py:272). Without numbers they run into each other
    (core/ssm/mamba_mixer.py:744-750 of 0.19.2)."""
    if getattr(params, "total_tokens", None) is not None and params.seq_idx is None:
        params.__post_init__()


# --- the masks of one micro-batch


def segments_from_swift(args: Any, data: Mapping[str, Any], polarity: Polarity | None = None) -> Segments:
    """Return the Segments of the real lengths, if the template sent them, else of the masks. All must agree. ms-swift's own
    2D mask counts alignment padding as real (template/base.py:2073, 2133)."""
    lengths, keep = data.get("seq_lens"), data.get(KEEP_KEY)
    if lengths is None or keep is None:
        return segments_from_batch(data, polarity=polarity)
    keep, real_B = host_tensor(KEEP_KEY, keep) != 0, torch.as_tensor(lengths)
    parts = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    real, aligned = (torch.arange(keep.shape[1]) < each[:, None] for each in (real_B, -(-real_B // parts) * parts))
    right_B = keep.eq(real).all(dim=1) | keep.eq(aligned).all(dim=1)
    wrong = (~right_B).nonzero().flatten().tolist()
    bad = [(b, f"seq_lens {int(real_B[b])} beside {int(keep[b].sum())} real tokens") for b in wrong]
    rule = "seq_lens of a padded batch count its real tokens, with the padding on their right."
    refuse_rows(KEEP_KEY, bad, rule, "Remove seq_lens where a collator pads differently.")
    return segments_from_batch({**data, KEEP_KEY: real}, polarity=polarity)


def with_masks(args: Any, batch: Mapping[str, Any], segments: Segments) -> dict[str, Any]:
    """Return the prepared batch with its masks. Raises `UnsupportedFormError` if its padding has no right form here. Labels
    of padding become -100: ms-swift rolls labels one place to the left, so that the padding before a row's tokens would
    predict the first of them (megatron/trainers/utils.py, `get_batch_on_this_pp_rank`)."""
    cp, labels = ranks_of(args), batch.get("labels")
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    config = getattr(args.model_info, "config", None)
    recurrent = needs_mask_2d(args.model_type if config is None else config)
    kernel = _kernel_of(args, segments, recurrent=recurrent)
    check_layout(args, cp, segments)
    _refuse_lookahead(args, labels, segments)
    keep = segments.keep.to(device) if cp is None else split_tensor(segments.keep.to(device), cp)
    blocked = mcore_bridge.attention_mask(segments, kernel, cp, device=device)
    extras = {KEEP_KEY: keep} if recurrent else {}
    if blocked is None and args.model_info.is_moe_model:
        shared = args.sequence_parallel and args.tensor_model_parallel_size > 1
        extras["padding_mask"] = mcore_bridge.router_padding(~keep, shared=shared)
    out = {**batch, "attention_mask": blocked}
    if isinstance(labels, Tensor) and labels.shape == keep.shape:  # else a classifier's, or another pipeline stage's
        out["labels"] = labels.masked_fill(~keep, -100)
    from mcore_bridge.model import GPTModel, MultimodalGPTModel

    loader = getattr(getattr(args, "megatron_model_meta", None), "loader", None)
    model_class = getattr(loader, "model_cls", None) or (MultimodalGPTModel if args.is_multimodal else GPTModel)
    return mcore_bridge.pass_through_forward(model_class, out, extras)


def _kernel_of(args: Any, segments: Segments, *, recurrent: bool) -> str:
    """Return the consumer of the mask that the attention and `mlp_padding_free` read. Transformer Engine, which all backends
    but "local" run, computes causal attention with every mask (core/models/gpt/gpt_layer_specs.py:251)."""
    from transformers.utils import is_torch_npu_available

    kernel = kernel_of_args(args)
    backend = getattr(args.attention_backend, "name", args.attention_backend)  # an enum, in real arguments
    mlp = bool(getattr(args, "mlp_padding_free", False))
    kind = getattr(getattr(args, "megatron_model_meta", None), "model_type", None)
    mcore_bridge.check_padding(segments, kernel, recurrent=recurrent, model_type=kind)
    if mlp and is_torch_npu_available() and backend != "local":
        rule = "mlp_padding_free needs a dense mask, which an NPU's flash kernel cannot be given."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Set mlp_padding_free=False."))
    if mlp and args.context_parallel_size > 1 and args.cp_partition_mode != "zigzag":
        rule = "mcore-bridge cuts the mask of mlp_padding_free zigzag, always (transformer_layer.py:375-377)."
        raise UnsupportedFormError(explain("cp_partition_mode", args.cp_partition_mode, rule, "Set mlp_padding_free=False."))
    reads_dense = mlp or (backend == "local" and kernel != "mindspeed")
    return "megatron" if reads_dense and kernel != "mindspeed_dense" else kernel


def _refuse_lookahead(args: Any, labels: Any, segments: Segments) -> None:
    """Raise if multi-token prediction learns to predict a token from padding. `labels` are shifted once already;
    mcore-bridge shifts them again for each depth, and reads no other mask (model/gpt_model.py:514-529)."""
    depth = getattr(args, "mtp_num_layers", None) or 0
    if not depth or not isinstance(labels, Tensor) or segments.padding_side in ("none", "right"):
        return
    learned, padding = host_tensor("labels", labels) != -100, ~segments.keep
    from_padding = [(padding[:, :-k] & learned[:, k:]).any(dim=1) for k in range(1, depth + 1)]
    if rows := torch.stack(from_padding).any(dim=0).nonzero().flatten().tolist():
        rule = f"With mtp_num_layers={depth} the padding before a row's tokens predicts the first {depth + 1} of them."
        remedy = f"Pad right, or ignore the labels of the first {depth + 1} tokens of a row (-100)."
        raise UnsupportedFormError(explain("labels", f"learned ones there in rows {rows[:8]}", rule, remedy))


def ranks_of(args: Any) -> ContextParallel | None:
    """Return this rank's place among those that share a row, as ms-swift cuts it; None if it shares none."""
    if args.context_parallel_size == 1:
        return None
    from megatron.core import mpu

    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    return ContextParallel(size, rank, layout=args.cp_partition_mode)


def check_layout(args: Any, cp: ContextParallel | None, segments: Segments) -> None:
    """Raise if recurrent layers would read a row in another order than its ranks hold. With every `cp_partition_mode`
    mcore-bridge's layers undo a zigzag, of each sequence in a flat row (modules/gated_delta_net.py:273-294)."""
    config, flat = getattr(args.model_info, "config", None), bool(args.padding_free)
    if cp is not None and config is not None and needs_mask_2d(config):
        cp, heads = cp.for_documents() if flat else cp, recurrent_heads(config)
        check_recurrent_split(cp, segments, padding_free=flat, heads=heads)


# --- pooling


class PooledBatch(dict[str, Any]):
    """A batch with two readers. `model(**batch)` and `batch[key]` give the model's mask: None, or this rank's part.
    `batch.get` of either mask gives pooling the whole rows, bool `[B, S]`, True = real: it gathers the output first."""

    def __init__(self, batch: Mapping[str, Any], keep: Tensor) -> None:
        super().__init__(batch)
        self._keep = keep.to(next(value.device for value in batch.values() if isinstance(value, Tensor)))

    def get(self, key: str, default: Any = None) -> Any:
        return self._keep if key in ("attention_mask", KEEP_KEY) else super().get(key, default)


def get_last_tokens(
    original: Any, trainer: Any, output_tensor: Tensor, packed_seq_params: Any = None, attention_mask: Any = None
) -> Any:
    """Pool by the given mask: bool or int `[B, S]` of whole rows, each with a real token."""
    if packed_seq_params is not None:
        return original(trainer, output_tensor, packed_seq_params, attention_mask)
    ranks = trainer.args.context_parallel_size
    B, S = output_tensor.shape[0], output_tensor.shape[1] * ranks
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != (B, S):
        got = "no mask" if attention_mask is None else shape_of(attention_mask)
        rule = f"A 2D mask of the whole rows names their last tokens; this output has {B} rows of {S} ({ranks} ranks)."
        remedy = "Pass the attention_mask_2d of the same batch, unsplit; data.get('attention_mask') gives it."
        raise CollateError(explain("get_last_tokens", got, rule, remedy))
    keep = attention_mask.to(output_tensor.device) != 0
    bad = [(b, "padding alone") for b in (~keep.any(dim=1)).nonzero().flatten().tolist()]
    refuse_rows("get_last_tokens", bad, "A row of padding has no last token.", "Drop those rows.")
    return original(trainer, output_tensor, None, keep)
