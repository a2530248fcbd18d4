"""Trainers of reinforcement learning over transformers models: verl's FSDP engine, SkyRL 0.3, cosmos-rl 0.4, open-instruct.

open-instruct has no package: its batches are made here after open_instruct/padding_free_collator.py of commit 005366f7.
Legend: B rows, S width, T tokens of a flat row.
"""

from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, PAD, Draw
from from_collators import FLAT, RIGHT, features_of
from producing import emitted, joined, keep_2d, placed, producer
from torch import Tensor
from torch.nn.functional import pad
from verdicts import Case


def flat_positions(rows: list[list[int]]) -> Tensor:
    return torch.cat([torch.arange(len(row)) for row in rows])[None]


def rmpad(draw: Draw) -> Case:
    """verl (workers/engine/fsdp/transformer_impl.py:1178-1240), SkyRL (model_wrapper.py:270-286) and cosmos-rl
    (hf_models/patch.py:488-525): one flat row with positions that begin again, and no mask."""
    rows = draw.sequences()
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[token for row in rows for token in row]]),
        "position_ids": flat_positions(rows),
    }
    features = features_of(rows)
    return emitted(draw, {**batch, "attention_mask": None}, ids=joined(features), features=features, flat=True)


def verl_rows(draw: Draw) -> Case:
    """The same engine with use_remove_padding=False: padded right, positions 0 there (transformer_impl.py:1270-1293)."""
    from verl.workers.utils.padding import build_attention_mask_from_nested

    rows = [torch.tensor(row) for row in draw.rows()]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tokens = torch.nested.to_padded_tensor(nested, padding=PAD)
    places = torch.nested.as_nested_tensor([torch.arange(len(row)) for row in rows], layout=torch.jagged)
    batch = {"input_ids": tokens, "position_ids": torch.nested.to_padded_tensor(places, padding=0)}
    batch["attention_mask"] = build_attention_mask_from_nested(nested, tokens.shape[1])
    ids = placed(draw.lengths, tokens.shape[1], "right")
    return emitted(draw, batch, ids=ids, features=features_of(draw.rows()))


def skyrl_rows(draw: Draw) -> Case:
    """Prompts padded left, responses right; positions counted by the mask, 1 at padding (model_wrapper.py:264-265)."""
    mask = keep_2d(draw)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    batch = {"input_ids": torch.from_numpy(draw.tokens.copy()), "attention_mask": mask, "position_ids": positions}
    return emitted(draw, batch)


def flattened(rows: list[list[int]], width: int) -> dict[str, Any]:
    """`TensorDataCollatorWithFlattening(max_seq_length=width)`: the tail has id 0, label -100, position 0, `seq_idx` -1."""
    T = sum(map(len, rows))
    tail = (0, width - T)
    labels = torch.tensor([[label for row in rows for label in (-100, *row[1:])]])
    index = torch.tensor([[n for n, row in enumerate(rows) for _ in row]], dtype=torch.int32)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows]).tolist()], dtype=torch.int32)
    return {
        "input_ids": pad(torch.tensor([[token for row in rows for token in row]]), tail),
        "labels": pad(labels, tail, value=-100),
        "position_ids": pad(flat_positions(rows), tail), "seq_idx": pad(index, tail, value=-1),
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
        "max_length_q": max(map(len, rows)), "max_length_k": max(map(len, rows)),
    }  # fmt: skip


def open_instruct(draw: Draw, *, tail: int = 0) -> Case:
    """Fine-tuning: every sequence of the batch in one row, `tail` places of padding behind."""
    features = features_of(draw.sequences())
    rows = [feature["input_ids"] for feature in features]
    width = sum(map(len, rows)) + tail
    return emitted(draw, flattened(rows, width), ids=joined(features, width), features=features, flat=True)


def open_instruct_dpo(draw: Draw, *, tail: int = 0) -> Case | None:
    """`concatenated_inputs`: the chosen row, then the rejected one. With `max_seq_length` both are as wide, and offsets
    count the padding between them to the first rejected sequence (open-instruct pull request 1900)."""
    rows = draw.sequences()
    if len(rows) < 2 or len(rows) % 2:
        return None
    parts = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    widths = [sum(map(len, part)) for part in parts]
    widths = [max(widths) + tail] * 2 if tail else widths
    width = widths[0]
    chosen, rejected = (flattened(part, size) for part, size in zip(parts, widths))
    rejected["seq_idx"] = rejected["seq_idx"] + len(parts[0])
    batch = {key: torch.cat([chosen[key], rejected[key]], -1) for key in ("input_ids", "labels", "position_ids", "seq_idx")}
    for name in ("q", "k"):
        ends = rejected[f"cu_seq_lens_{name}"][1:] + width
        batch[f"cu_seq_lens_{name}"] = torch.cat([chosen[f"cu_seq_lens_{name}"], ends])
        batch[f"max_length_{name}"] = max(chosen[f"max_length_{name}"], rejected[f"max_length_{name}"])
    ids = np.concatenate([joined(features_of(part), size) for part, size in zip(parts, widths)], axis=1)
    ids[:, width:][ids[:, width:] > 0] += len(parts[0])
    return emitted(draw, batch, ids=ids, features=features_of(rows), flat=True)


PRODUCERS = [
    producer("flat row of verl FSDP, SkyRL, cosmos-rl", (), rmpad, FLAT),
    producer("verl FSDP, padded", ("verl",), verl_rows, RIGHT),
    producer("SkyRL, padded", (), skyrl_rows, ONE_SEQUENCE),
    producer("open-instruct", (), open_instruct, FLAT),
    producer("open-instruct, tail", (), open_instruct, FLAT, tail=5),
    producer("open-instruct DPO", (), open_instruct_dpo, FLAT),
    producer("open-instruct DPO, tail", (), open_instruct_dpo, FLAT, "padding in offsets", tail=5),
]
