"""verl 0.9, twinkle 0.5 and torchtitan 0.3.

Legend: B rows, S width, T tokens of a flat row.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from drawing import ONE_SEQUENCE, PAD, SIDED, Draw, chunked, sliding
from from_collators import joined, placed
from producing import Producer, case, emitted, keep_2d, restarting
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask
from verdicts import Case

from collate_npu import Pattern

VERL = ("verl", "megatron.core")
TWINKLE = ("twinkle.processor",)
TITAN = ("torchtitan",)


class _Alone(ExitStack):
    """verl asks Megatron for group sizes: one rank, on a GPU or on an NPU."""

    def __init__(self, npu: bool) -> None:
        super().__init__()
        from megatron.core import parallel_state as mpu
        from verl.models.mcore import util

        for name in ("tensor_model_parallel_world_size", "context_parallel_world_size"):
            self.enter_context(patch.object(mpu, f"get_{name}", lambda: 1))
        self.enter_context(patch.object(mpu, "get_context_parallel_rank", lambda: 0))
        self.enter_context(patch.object(util, "is_npu_available", npu))
        self.util = util


def _jagged(draw: Draw) -> tuple[Any, list[dict[str, Any]]]:
    rows = [torch.tensor(row) for row in draw.rows()]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged), [{"input_ids": row.tolist()} for row in rows]


def verl_padded(draw: Draw, *, npu: bool) -> Case:
    """`preprocess_bshd_engine`: 2D True = real on a GPU, 4D True = blocked (rows and columns) on an NPU."""
    nested, features = _jagged(draw)
    with _Alone(npu) as alone:
        tokens, mask, positions = alone.util.preprocess_bshd_engine(nested)
    batch = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    ids = placed(draw.lengths, tokens.shape[1], "right")
    return emitted(draw, batch, ids=ids, features=features, polarity="masked" if npu else None)


def verl_vision(draw: Draw, form: str) -> Case:
    """`build_vlm_attn_mask_bshd` and `_thd`: padded tokens and a 2D mask."""
    nested, features = _jagged(draw)
    with _Alone(False) as alone:
        if form == "thd":
            tokens, mask = alone.util.build_vlm_attn_mask_thd(nested, PAD)
        else:
            tokens, mask = alone.util.build_vlm_attn_mask_bshd(nested, len(features), PAD)
    ids = placed(draw.lengths, tokens.shape[1], "right")
    return emitted(draw, {"input_ids": tokens, "attention_mask": mask}, ids=ids, features=features)


def verl_legacy(draw: Draw) -> Case:
    """`preprocess_bshd`: left padding moved to the right."""
    keep = keep_2d(draw, torch.bool)
    with _Alone(False) as alone:
        given = (torch.from_numpy(draw.tokens), keep, restarting(draw))
        tokens, mask, _ = alone.util.preprocess_bshd(*given)
    batch = {"input_ids": tokens, "attention_mask": mask}
    ids = placed(draw.lengths, tokens.shape[1], "right")
    features = [{"input_ids": row} for row in draw.rows()]
    return emitted(draw, batch, ids=ids, features=features)


def verl_packed(draw: Draw) -> Case:
    """`preprocess_packed_seqs`: one flat row and PackedSeqParams."""
    keep = keep_2d(draw, torch.bool)
    with _Alone(False) as alone:
        flat, params = alone.util.preprocess_packed_seqs(torch.from_numpy(draw.tokens), keep)
    features = [{"input_ids": row} for row in draw.rows()]
    batch = {"input_ids": flat, "packed_seq_params": params}
    return emitted(draw, batch, ids=joined(features), features=features, flat=True)


def verl_rollout(draw: Draw, *, left: bool) -> Case:
    """`postprocess_data`: rows of one length padded to another, as prompts are."""
    from verl.utils.torch_functional import postprocess_data

    rows, S = draw.rows(), draw.shape[1]
    parts = [
        postprocess_data(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64), S, PAD, left_pad=left)
        for row in rows
    ]
    tokens, mask = (torch.cat(column) for column in zip(*parts))
    ids = placed(draw.lengths, S, "left" if left else "right")
    features = [{"input_ids": row} for row in rows]
    return emitted(draw, {"input_ids": tokens, "attention_mask": mask}, ids=ids, features=features)


def verl_decoder(draw: Draw) -> Case:
    """`prepare_decoder_attention_mask`: two fills added, so that some places hold -inf."""
    from verl.utils.torch_functional import prepare_decoder_attention_mask

    mask = prepare_decoder_attention_mask(keep_2d(draw), draw.shape, torch.zeros(*draw.shape, 1))
    return case(draw, mask, polarity="bias")


def twinkle(draw: Draw, *, framework: str, npu: bool = False, flat: bool = False) -> Case | None:
    """`InputProcessor`: 4D True = blocked for Megatron (None on an NPU), 2D for transformers."""
    if min(len(sequence) for row in draw.sequences() for sequence in row) == 1:
        return None  # twinkle 0.5.1 makes a scalar of a sample of one token, and fails
    from twinkle import Platform
    from twinkle.processor import base

    side = "left" if draw.style == "left" else "right"
    rows = [sequence for row in draw.sequences() for sequence in row]
    features = [
        {
            "input_ids": row,
            "labels": [*row[1:], -100],
            "attention_mask": [1] * len(row),
            "position_ids": list(range(len(row))),
        }
        for row in rows
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Platform, "get_local_device", staticmethod(lambda *_, **__: "cpu")))
        stack.enter_context(patch.object(Platform, "device_prefix", staticmethod(lambda *_, **__: "npu" if npu else "cuda")))
        processor = base.InputProcessor(framework=framework, padding_side=side, padding_free=flat)
        processor.device_mesh = None
        made = processor([dict(feature) for feature in features], **({"attention_mask_type": "causal"} if npu else {}))
    batch = made[0] if isinstance(made, list) else made
    batch = {key: value for key, value in dict(batch).items() if value is not None}
    width = batch["input_ids"].shape[1]
    side = side if framework == "transformers" else "right"
    ids = joined(features, width) if flat else placed(list(map(len, rows)), width, side)
    return emitted(
        draw, batch, ids=ids, features=features, flat=flat, polarity="masked" if framework == "megatron" else None
    )


def titan(draw: Draw, *, mods: str, block: bool = False) -> Case:
    """torchtitan's mask predicates of packed documents, which know no padding."""
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    from torchtitan.models.common import attention

    positions, (B, S) = restarting(draw), draw.shape
    size = int(draw.rng.integers(1, S + 1))
    parts = [attention.get_causal_mask_mod()]
    if mods in ("document", "window"):
        parts.append(attention.get_document_mask_mod(positions))
    if mods == "fast document":
        parts.append(attention.get_efficient_causal_mask_mod_for_packed_document(positions))
    if mods == "window":
        parts.append(attention.get_sliding_window_mask_mod(size))
    if mods == "blocks":
        parts.append(attention.get_fixed_block_mask_mod(size))
    mask = (create_block_mask if block else create_mask)(and_masks(*parts), B, 1, S, S, device="cpu")
    more: dict[str, Any] = {}
    if mods == "window":
        more = {"attends": sliding(draw.ids, size), "pattern": Pattern.sliding(size)}
    if mods == "blocks":
        more = {"attends": chunked(draw.ids, size), "pattern": Pattern.chunked(size)}
    return case(draw, mask, polarity=None if block else "keep", position_ids=positions, **more)


FULL = ("none", "packed")
PRODUCERS = [
    Producer("verl padded, GPU", VERL, partial(verl_padded, npu=False), ("none", "right")),
    Producer("verl padded, NPU", VERL, partial(verl_padded, npu=True), ("none", "right")),
    Producer("verl vision, bshd", VERL, partial(verl_vision, form="bshd"), ("none", "right")),
    Producer("verl vision, thd", VERL, partial(verl_vision, form="thd"), ("none", "right")),
    Producer("verl preprocess_bshd", VERL, verl_legacy, SIDED),
    Producer("verl packed sequences", VERL, verl_packed, SIDED, ("no boundaries",)),
    Producer("verl prompts, left", VERL, partial(verl_rollout, left=True), ("none", "left")),
    Producer("verl prompts, right", VERL, partial(verl_rollout, left=False), ("none", "right")),
    Producer("verl decoder mask", VERL, verl_decoder, ONE_SEQUENCE),
    Producer("twinkle, Megatron", TWINKLE, partial(twinkle, framework="megatron"), ("none", "right")),
    Producer("twinkle, Megatron on an NPU", TWINKLE, partial(twinkle, framework="megatron", npu=True), ("none", "right")),
    Producer("twinkle, transformers", TWINKLE, partial(twinkle, framework="transformers"), SIDED),
    Producer("twinkle, Megatron, padding free", TWINKLE, partial(twinkle, framework="megatron", flat=True), FULL),
    Producer("twinkle, transformers, padding free", TWINKLE, partial(twinkle, framework="transformers", flat=True), FULL),
    Producer("torchtitan documents", TITAN, partial(titan, mods="document"), FULL),
    Producer("torchtitan documents, BlockMask", TITAN, partial(titan, mods="document", block=True), FULL, ("no tensor",)),
    Producer("torchtitan documents, fast", TITAN, partial(titan, mods="fast document"), FULL),
    Producer("torchtitan window", TITAN, partial(titan, mods="window"), FULL),
    Producer("torchtitan fixed blocks", TITAN, partial(titan, mods="blocks"), ("none",)),
]
