"""verl 0.9, twinkle 0.5 and torchtitan 0.3.

Legend: B rows, S width, T tokens of a flat row.
"""

import importlib.util
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from drawing import ONE_SEQUENCE, PAD, SIDED, Draw
from from_collators import FLAT, RIGHT, features_of
from producing import case, emitted, joined, keep_2d, placed, producer, restarting, said, side_of
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask
from verdicts import Case

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


def _rows(draw: Draw, batch: dict[str, Any], side: str = "right", **told: Any) -> Case:
    ids = placed(draw.lengths, batch["input_ids"].shape[1], side)
    return emitted(draw, batch, ids=ids, features=features_of(draw.rows()), **told)


def verl_nested(draw: Draw, form: str, npu: bool = False) -> Case:
    """Padded tokens of a nested tensor: `preprocess_bshd_engine` (2D True = real on a GPU, 4D True = blocked, rows and
    columns, on an NPU), and `build_vlm_attn_mask_bshd` and `_thd` with a 2D mask."""
    nested = torch.nested.as_nested_tensor([torch.tensor(row) for row in draw.rows()], layout=torch.jagged)
    with _Alone(npu) as alone:
        if form == "engine":
            tokens, mask, positions = alone.util.preprocess_bshd_engine(nested)
            batch = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
            return _rows(draw, batch, polarity="masked" if npu else None)
        build, rows = getattr(alone.util, f"build_vlm_attn_mask_{form}"), [len(draw.ids)] * (form == "bshd")
        tokens, mask = build(nested, *rows, PAD)
    return _rows(draw, {"input_ids": tokens, "attention_mask": mask})


def verl_legacy(draw: Draw) -> Case:
    """`preprocess_bshd`: left padding moved to the right."""
    with _Alone(False) as alone:
        given = (torch.from_numpy(draw.tokens), keep_2d(draw, torch.bool), restarting(draw))
        tokens, mask, _ = alone.util.preprocess_bshd(*given)
    return _rows(draw, {"input_ids": tokens, "attention_mask": mask})


def verl_packed(draw: Draw) -> Case:
    """`preprocess_packed_seqs`: one flat row and PackedSeqParams."""
    with _Alone(False) as alone:
        flat, params = alone.util.preprocess_packed_seqs(torch.from_numpy(draw.tokens), keep_2d(draw, torch.bool))
    features = features_of(draw.rows())
    batch = {"input_ids": flat, "packed_seq_params": params}
    return emitted(draw, batch, ids=joined(features), features=features, flat=True)


def verl_rollout(draw: Draw, *, side: str) -> Case:
    """`postprocess_data`: rows of one length padded to another, as prompts are."""
    from verl.utils.torch_functional import postprocess_data

    S, left = draw.shape[1], side == "left"
    rows = [(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64)) for row in draw.rows()]
    parts = [postprocess_data(*row, S, PAD, left_pad=left) for row in rows]
    tokens, mask = (torch.cat(column) for column in zip(*parts))
    return _rows(draw, {"input_ids": tokens, "attention_mask": mask}, side)


def verl_decoder(draw: Draw) -> Case:
    """`prepare_decoder_attention_mask`: two fills added, so that some places hold -inf."""
    from verl.utils.torch_functional import prepare_decoder_attention_mask

    mask = prepare_decoder_attention_mask(keep_2d(draw), draw.shape, torch.zeros(*draw.shape, 1))
    return case(draw, mask, told={"polarity": "bias"})


def twinkle(draw: Draw, *, framework: str, npu: bool = False, flat: bool = False) -> Case | None:
    """`InputProcessor`: 4D True = blocked for Megatron (None on an NPU), 2D for transformers."""
    rows = draw.sequences()
    if min(map(len, rows)) == 1:
        return None  # twinkle 0.5.1 makes a scalar of a sample of one token, and fails
    from twinkle import Platform
    from twinkle.processor import base

    fields = {"input_ids": list, "labels": lambda row: [*row[1:], -100], "attention_mask": lambda row: [1] * len(row)}
    fields["position_ids"] = lambda row: list(range(len(row)))
    features = [{key: make(row) for key, make in fields.items()} for row in rows]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Platform, "get_local_device", staticmethod(lambda *_, **__: "cpu")))
        stack.enter_context(patch.object(Platform, "device_prefix", staticmethod(lambda *_, **__: "npu" if npu else "cuda")))
        processor = base.InputProcessor(framework=framework, padding_side=side_of(draw), padding_free=flat)
        processor.device_mesh = None
        made = processor([dict(feature) for feature in features], **({"attention_mask_type": "causal"} if npu else {}))
    batch = made[0] if isinstance(made, list) else made
    batch = {key: value for key, value in dict(batch).items() if value is not None}
    width, hf = batch["input_ids"].shape[1], framework == "transformers"
    ids = joined(features, width) if flat else placed(list(map(len, rows)), width, side_of(draw) if hf else "right")
    return emitted(draw, batch, ids=ids, features=features, flat=flat, polarity=None if hf else "masked")


def titan(draw: Draw, *, mods: str, block: bool = False) -> Case:
    """torchtitan's mask predicates of packed documents, which know no padding."""
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    from torchtitan.models.common import attention

    positions, (B, S) = restarting(draw), draw.shape
    size = draw.number(1, S)
    parts = {
        "document": lambda: [attention.get_document_mask_mod(positions)],
        "window": lambda: [attention.get_document_mask_mod(positions), attention.get_sliding_window_mask_mod(size)],
        "blocks": lambda: [attention.get_fixed_block_mask_mod(size)],
    }[mods]()
    make = create_block_mask if block else create_mask
    mask = make(and_masks(attention.get_causal_mask_mod(), *parts), B, 1, S, S, device="cpu")
    pattern = {"window": "sliding", "blocks": "chunked"}.get(mods)
    told = {"polarity": None if block else "keep"} | (said(draw, pattern, size) if pattern else {})
    return case(draw, mask, told=told, position_ids=positions)


PRODUCERS = [
    producer("verl padded, GPU", VERL, verl_nested, RIGHT, form="engine"),
    producer("verl padded, NPU", VERL, verl_nested, RIGHT, form="engine", npu=True),
    producer("verl vision, bshd", VERL, verl_nested, RIGHT, form="bshd"),
    producer("verl vision, thd", VERL, verl_nested, RIGHT, form="thd"),
    producer("verl preprocess_bshd", VERL, verl_legacy, SIDED),
    producer("verl packed sequences", VERL, verl_packed, SIDED, "no boundaries"),
    producer("verl prompts, left", VERL, verl_rollout, ("none", "left"), side="left"),
    producer("verl prompts, right", VERL, verl_rollout, RIGHT, side="right"),
    producer("verl decoder mask", VERL, verl_decoder, ONE_SEQUENCE),
    producer("twinkle, Megatron", TWINKLE, twinkle, RIGHT, framework="megatron"),
    producer("twinkle, Megatron on an NPU", TWINKLE, twinkle, RIGHT, framework="megatron", npu=True),
    producer("twinkle, transformers", TWINKLE, twinkle, SIDED, framework="transformers"),
    producer("twinkle, Megatron, padding free", TWINKLE, twinkle, FLAT, framework="megatron", flat=True),
    producer("twinkle, transformers, padding free", TWINKLE, twinkle, FLAT, framework="transformers", flat=True),
    producer("torchtitan documents", TITAN, titan, FLAT, mods="document"),
    producer("torchtitan documents, BlockMask", TITAN, titan, FLAT, "no tensor", mods="document", block=True),
    producer("torchtitan window", TITAN, titan, FLAT, mods="window"),
    producer("torchtitan fixed blocks", TITAN, titan, ("none",), mods="blocks"),
]
