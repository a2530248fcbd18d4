"""Trainers: megatron-core's datasets, ms-swift's templates, verl 0.9, twinkle 0.5, torchtitan 0.3 and NeMo Automodel 0.7.

Legend: B rows, S width, T tokens of a flat row.
"""

import sys
from contextlib import ExitStack
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import batches
import numpy as np
import torch
from batches import PAD, SIDED, Case, Draw, case, emitted, joined, keep_2d, placed, producer, said, side_of
from from_transformers import EOS, FLAT, RIGHT, features_of
from torch.nn.attention.flex_attention import and_masks, create_mask

sys.path.append(str(Path(__file__).parents[1] / "peers"))
if batches.there("swift"):
    import te_stub  # noqa: F401  (its stand-ins come before megatron.core is imported)
if batches.there("megatron"):
    import megatron_world  # noqa: F401  (so does triton, from 0.18 on)

CORE = ("megatron.core",)
SWIFT = ("swift", "mcore_bridge", "megatron")


def dataset(draw: Draw, *, positions: bool, attention: bool, loss: bool = False) -> Case:
    """`_get_ltor_masks_and_position_ids` of each row, stacked: bool `[B, 1, S, S]`, True = blocked. It has no word of
    padding: its loss_mask alone leaves it out. Without `attention` the mask is a triangle, although positions restart."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as build

    tokens, ids = draw.tokens.copy(), draw.ids
    tokens[:, :-1][(ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] > 0) & (ids[:, :-1] > 0)] = EOS  # another sequence follows
    with patch.object(torch.cuda, "is_available", lambda: False):
        rows = [build(row, EOS, positions, attention, loss, True) for row in torch.from_numpy(tokens)]
    mask, loss_mask, place = (torch.stack(column) for column in zip(*rows))
    batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(np.roll(tokens, -1, 1))}
    batch |= {"attention_mask": mask, "loss_mask": loss_mask, "position_ids": place}
    told = {"features": [{"text": row.tolist()} for row in tokens], "polarity": "masked", "silent": not draw.keep.all()}
    return emitted(draw, batch, ids=ids if attention else draw.keep.astype(np.int64), **told)


def t5(draw: Draw, *, history: bool) -> Case:
    """megatron-core's T5 masks for local kernels: rows and columns, True = blocked."""
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    tokens = torch.from_numpy(draw.tokens)
    mask = T5MaskedWordPieceDataset._build_b1ss_attention_mask(tokens, tokens, make_history_mask=history)
    return case(draw, mask, told={**({} if history else said(draw, "bidirectional")), "polarity": "masked"})


@cache
def template(padding_free: bool) -> Any:
    """ms-swift's real template, as tests/peers builds it."""
    import swift_world

    return swift_world.template(padding_free=padding_free)


def swift(draw: Draw, *, megatron: bool, flat: bool = False) -> Case:
    """`Template.data_collator`: for Megatron 4D (True = blocked) beside a 2D, for transformers a 2D."""
    made = template(flat)
    made.use_megatron, made.padding_side = megatron, side_of(draw)
    rows = draw.sequences()
    features = [{"input_ids": row, "labels": [-100, *row[1:]], "length": len(row)} for row in rows]
    batch = made.data_collator([dict(feature) for feature in features], padding_to=None)
    batch = {key: value for key, value in batch.items() if value is not None}
    width = batch["input_ids"].shape[1]
    ids = joined(features, width) if flat else placed(list(map(len, rows)), width, made.padding_side)
    return emitted(draw, batch, ids=ids, features=features, flat=flat, polarity="masked" if megatron else None)


def swift_rswa(draw: Draw) -> Case:
    """ms-swift's mask for OCR: a causal prefix that all see, then a window over the answer, whose beginning `labels` say
    (templates/deepseek.py:486)."""
    from swift.template.templates import deepseek

    owner = next(found for found in vars(deepseek).values() if hasattr(found, "_build_rswa_attention_mask"))
    size, cut = draw.number(1, draw.shape[1]), draw.number(0, draw.shape[1] - 1)
    labels = torch.from_numpy(draw.tokens).masked_fill(torch.arange(draw.shape[1]) < cut, -100)
    mask = owner._build_rswa_attention_mask(labels, keep_2d(draw), size, torch.float32)
    attends = batches.sliding(draw.ids, size) | batches.causal(draw.ids) & (np.arange(draw.shape[1]) < cut)
    attends[:, :cut] = batches.causal(draw.ids)[:, :cut]
    return case(draw, mask, told={**batches.otherwise(draw, attends), "polarity": "bias"})


# --- verl, twinkle, torchtitan

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


def verl_engine(draw: Draw, *, npu: bool) -> Case:
    """`preprocess_bshd_engine`, tokens of a nested tensor padded: 2D True = real on a GPU, 4D True = blocked, rows and
    columns, on an NPU."""
    nested = torch.nested.as_nested_tensor([torch.tensor(row) for row in draw.rows()], layout=torch.jagged)
    with _Alone(npu) as alone:
        tokens, mask, positions = alone.util.preprocess_bshd_engine(nested)
    batch = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    told = {"ids": placed(draw.lengths, tokens.shape[1], "right"), "polarity": "masked" if npu else None}
    return emitted(draw, batch, features=features_of(draw.rows()), **told)


def verl_packed(draw: Draw) -> Case:
    """`preprocess_packed_seqs`: one flat row and PackedSeqParams."""
    with _Alone(False) as alone:
        flat, params = alone.util.preprocess_packed_seqs(torch.from_numpy(draw.tokens), keep_2d(draw, torch.bool))
    features = features_of(draw.rows())
    batch = {"input_ids": flat, "packed_seq_params": params}
    return emitted(draw, batch, ids=joined(features), features=features, flat=True)


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
    told = {"polarity": None if hf else "masked", "labels_shifted": True}
    return emitted(draw, batch, ids=ids, features=features, flat=flat, **told)


def titan(draw: Draw) -> Case:
    """torchtitan's blocks of a fixed size. Its masks of documents, and of a window in them, are place by place those that
    transformers makes of the positions."""
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    from torchtitan.models.common import attention

    B, S = draw.shape
    size = draw.number(1, S)
    mods = attention.get_causal_mask_mod(), attention.get_fixed_block_mask_mod(size)
    mask = create_mask(and_masks(*mods), B, 1, S, S, device="cpu")
    return case(draw, mask, told={"polarity": "keep", **said(draw, "chunked", size)}, position_ids=batches.restarting(draw))


# --- NeMo Automodel

AUTOMODEL = ("nemo_automodel",)


class _Table(list):
    """Without splits."""


def _moved(rows: list[list[int]]) -> _Table:
    return _Table({"input_ids": list(row), "labels": [*row[1:], -100]} for row in rows)


def _map(lengths: list[list[int]], places: list[list[int]], width: int) -> np.ndarray:
    ids = np.zeros((len(lengths), width), np.int64)
    for row, real, held in zip(ids, lengths, places):
        for n, (start, length) in enumerate(zip(accumulate([0, *held]), real), start=1):
            row[start : start + length] = n
    return ids


def thd(draw: Draw, *, multiple: int) -> Case:
    """`pack_dataset` and `packed_sequence_thd_collater`: lengths and places, filled with -1000."""
    from nemo_automodel.components.datasets.llm.packed_sequence import pack_dataset
    from nemo_automodel.components.datasets.utils import packed_sequence_thd_collater

    rows = draw.sequences()
    size = -(-max(map(len, rows)) // multiple) * multiple + draw.number(0, 8) * multiple
    packs = list(pack_dataset(_moved(rows), None, size, padding_idx=PAD, pad_to_multiple_of=multiple))
    lengths, places = ([list(pack[key]) for pack in packs] for key in ("seq_lens", "seq_lens_padded"))
    batch = packed_sequence_thd_collater(packs)
    del batch["labels"]
    return emitted(draw, batch, ids=_map(lengths, places, size), features=features_of(rows))


def neat(draw: Draw, *, kind: str) -> Case:
    """`neat_pack_dataset` and `neat_packed_collater`: document ids, a block mask, or offsets of the whole batch."""
    from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
    from nemo_automodel.components.datasets.utils import neat_packed_collater
    from nemo_automodel.components.models.common.packing import PackingCapabilities

    rows = draw.sequences()
    size = max(map(len, rows)) + draw.number(0, 8)
    packs = list(neat_pack_dataset(_moved(rows), "train", size, padding_idx=PAD))
    batch = neat_packed_collater(packs, packing=PackingCapabilities(kind))
    del batch["labels"]
    ids = np.array([pack["attention_mask"] for pack in packs], np.int64)
    return emitted(draw, batch, ids=ids, features=features_of(rows))


def automodel_padded(draw: Draw) -> Case:
    """`default_collater` with the samples' own masks: a 2D mask, and a padding mask beside it."""
    from nemo_automodel.components.datasets.utils import default_collater

    rows = draw.rows()
    samples = [{**each, "attention_mask": [1] * len(each["input_ids"])} for each in _moved(rows)]
    batch = default_collater([{**samples[0], "___PAD_TOKEN_IDS___": {"input_ids": PAD}}, *samples[1:]])
    ids = placed(list(map(len, rows)), batch["input_ids"].shape[1], "right")
    del batch["labels"]
    return emitted(draw, batch, ids=ids, features=features_of(rows))


PRODUCERS = [
    producer("mcore GPTDataset, reset both", CORE, dataset, FLAT, positions=True, attention=True),
    producer("mcore GPTDataset, reset attention", CORE, dataset, FLAT, positions=False, attention=True, loss=True),
    producer("mcore GPTDataset, reset positions", CORE, dataset, FLAT, positions=True, attention=False),
    producer("mcore GPTDataset, plain", CORE, dataset, SIDED, positions=False, attention=False),
    producer("mcore T5 encoder", CORE, t5, batches.ONE_SEQUENCE, history=False),
    producer("mcore T5 decoder", CORE, t5, batches.ONE_SEQUENCE, history=True),
    producer("swift template, Megatron", SWIFT, swift, RIGHT, megatron=True),
    producer("swift template, transformers", SWIFT, swift, SIDED, megatron=False),
    producer("swift template, Megatron, padding free", SWIFT, swift, FLAT, megatron=True, flat=True),
    producer("swift R-SWA", SWIFT, swift_rswa, batches.ONE_SEQUENCE),
    producer("verl padded, GPU", VERL, verl_engine, RIGHT, npu=False),
    producer("verl padded, NPU", VERL, verl_engine, RIGHT, npu=True),
    producer("verl packed sequences", VERL, verl_packed, SIDED),
    producer("verl decoder mask", VERL, verl_decoder, batches.ONE_SEQUENCE),
    producer("twinkle, Megatron", TWINKLE, twinkle, RIGHT, framework="megatron"),
    producer("twinkle, Megatron on an NPU", TWINKLE, twinkle, RIGHT, framework="megatron", npu=True),
    producer("twinkle, transformers", TWINKLE, twinkle, SIDED, framework="transformers"),
    producer("twinkle, Megatron, padding free", TWINKLE, twinkle, FLAT, framework="megatron", flat=True),
    producer("twinkle, transformers, padding free", TWINKLE, twinkle, FLAT, framework="transformers", flat=True),
    producer("torchtitan fixed blocks", TITAN, titan, ("none",)),
    producer("NeMo Automodel, thd", AUTOMODEL, thd, FLAT, multiple=1),
    producer("NeMo Automodel, thd aligned", AUTOMODEL, thd, FLAT, multiple=4),
    producer("NeMo Automodel, neat", AUTOMODEL, neat, FLAT, kind="block_causal"),
    producer("NeMo Automodel, neat ids", AUTOMODEL, neat, FLAT, kind="document_ids"),
    producer("NeMo Automodel, neat flash", AUTOMODEL, neat, FLAT, kind="flash_varlen"),
    producer("NeMo Automodel, padded", AUTOMODEL, automodel_padded, RIGHT),
]
