"""Flat rows with a tail, as the stacks that pack write them, and batches that say little of their padding.

VeOmni is real where it is installed. The rest, and VeOmni elsewhere, is written after its source, named with each row:
no package holds it. How each is read: `test_batch_reader`'s table of tails. Rows of Megatron's indexed datasets stand under
torch's own collation, megatron-energon pads by its own.
Legend: B rows, S width, T tokens of the row, N sequences.
"""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import batches
import numpy as np
import torch
from batches import PAD, Case, Draw, Producer, emitted, joined, keep_2d, placed, producer, restarting
from from_transformers import FLAT, RIGHT, TRL, features_of, sft
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

IGNORED = -100
TRL_FLAT = {"flat": True, "return_position_ids": True, "pad_to_multiple_of": 8}


def tailed(draw: Draw) -> tuple[list[list[int]], int, int]:
    """The sequences, the tail behind them (none, one place, or some), and a pad id, which is text as well."""
    rows = draw.sequences()
    tail, last = (0, 1, draw.number(2, 9))[draw.number(0, 2)], rows[-1]
    return rows, tail, last[-1] if len(last) > 1 else last[0] + 1  # a token alone and its like behind it: nobody can tell


def row(rows: list[list[int]], tail: int, fill: int, *, moved: bool = False) -> dict[str, Tensor]:
    """`[1, T]`: the tokens and their labels, -100 at the first of each sequence, or moved to the token before."""
    labels = [[*ids[1:], IGNORED] if moved else [IGNORED, *ids[1:]] for ids in rows]
    named = "shift_labels" if moved else "labels"
    ids_T = torch.tensor([n for ids in rows for n in ids] + [fill] * tail)
    return {"input_ids": ids_T[None], named: torch.tensor([n for part in labels for n in part] + [IGNORED] * tail)[None]}


def positions(lengths: list[int], tail: list[int]) -> Tensor:
    return torch.tensor([n for length in lengths for n in range(length)] + tail)[None]


def offsets(lengths: list[int]) -> dict[str, Any]:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def told(draw: Draw, batch: dict[str, Any], rows: list[list[int]], **more: Any) -> Case:
    features = features_of(rows)
    return emitted(draw, batch, ids=joined(features, batch["input_ids"].shape[1]), features=features, flat=True, **more)


def veomni(draw: Draw, *, real: bool = False, each: bool = False) -> Case:
    """`MainCollator` with `pad_to_length` (0.1.12 veomni/data/data_collator.py:50-113, 204-312): the mask 1 and positions 0
    in the tail, which is one sequence of the offsets, and its length beside; 0 pads. Before those lines `each` place of the
    tail was one, and nothing told how many (prepare_fa_kwargs_from_position_ids)."""
    rows, tail, _ = tailed(draw)
    lengths = list(map(len, rows))
    batch = row(rows, tail, 0)
    batch["labels"][:, 0] = batch["input_ids"][:, 0]  # of the first sequence it is left
    batch |= {"attention_mask": torch.ones_like(batch["input_ids"]), "position_ids": positions(lengths, [0] * tail)}
    ends = offsets([*lengths, *([1] * tail if each else [tail] * bool(tail))])
    if not each:
        ends |= {"tail_padding_length": torch.tensor(tail, dtype=torch.int32)} if tail else {}
        ends |= {"linear_attn_cu_seq_lens_q": ends["cu_seq_lens_q"]}
    batch |= ends
    if real:
        from veomni.data.data_collator import MainCollator

        features = [{key: torch.tensor(ids) for key in ("input_ids", "labels")} for ids in rows]
        features = [feature | {"attention_mask": torch.ones_like(feature["input_ids"])} for feature in features]
        made = dict(MainCollator(pad_to_length=sum(lengths) + tail)(features))
        assert made.keys() == batch.keys()
        assert all(torch.equal(torch.as_tensor(made[key]), torch.as_tensor(batch[key])) for key in made)
        batch = made
    # nothing says that places with offsets of their own are padding: sequences of a token, which nobody learns
    rows = [*rows, *[[0]] * tail] if each else rows
    return told(draw, batch, rows)


def xtuner(draw: Draw, *, split: int = 0) -> Case | None:
    """The attributes of a SequenceContext, and the labels beside (xtuner b934f46 v1/datasets/collator.py:36-111): the tail
    cut into chunks, each a sequence that counts from 0. `split` over so many ranks it grows, and one rank has its part
    (v1/data_proto/sequence_context.py:226-306)."""
    rows, tail, fill = tailed(draw)
    lengths, chunk = list(map(len, rows)), draw.number(1, 5)
    chunks = [min(chunk, tail - at) for at in range(0, tail, chunk)]
    if split:
        grown = -(sum(lengths) + tail) % split
        chunks = [*chunks[:-1], chunks[-1] + grown] if chunks else [grown] * bool(grown)
        tail += grown
    batch = row(rows, tail, fill, moved=True)
    batch["shifted_labels"] = batch.pop("shift_labels")
    counted = [n for length in chunks for n in range(length)]
    none = dict.fromkeys(("block_table", "pixel_values", "inputs_embeds", "image_grid_thw", "seq_idx", "_raw_input_ids"))
    batch |= {"position_ids": positions(lengths, counted), "num_padding": tail, "device": "cpu", "_sp_rank": 0, **none}
    return told(draw, batch | offsets([*lengths, *chunks]), rows)


def a_tail(draw: Draw, *, counts: str, keys: str, pad: int | None = None) -> Case:
    """Positions of the tail that are 0, count anew, or stand still; beside them what else counts the tail, if anything. With
    a pad id of its own the labels stand with the token before."""
    rows, tail, fill = tailed(draw)
    lengths = list(map(len, rows))
    counted = {"zeros": [0] * tail, "anew": list(range(tail)), "still": [lengths[-1] - 1] * tail}
    own, whole = [*lengths, tail] if tail else lengths, [*lengths[:-1], lengths[-1] + tail]
    batch = row(rows, tail, fill if pad is None else pad, moved=pad is not None)
    batch["position_ids"] = positions(lengths, counted[counts])
    if keys == "lengths and a loss mask":
        batch |= {"loss_mask": batch.pop("shift_labels") != IGNORED, "seq_lens": torch.tensor(whole)}
    packed = {"packed_seq_lengths": torch.tensor(lengths, dtype=torch.int32)}
    ends = {"a sequence of its own": offsets(own), "the last's": offsets(whole), "lengths without it": packed}
    return told(draw, batch | ends.get(keys, {}), rows)


def mindspeed_mm_packed(draw: Draw) -> Case:
    """MindSpeed-MM 57069cd mindspeed_mm/fsdp/data/data_utils/func_utils/{convert.py:955-990, collator.py:60-240}: offsets
    `[1, N + 1]`, positions that begin again, a mask of ones, and zeros of padding behind in all of them."""
    rows = draw.sequences()
    lengths = list(map(len, rows))
    tail = -sum(lengths) % 4
    ids = torch.tensor([token for ids in rows for token in ids])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch = {key: pad(value, (0, tail), value=IGNORED if key == "labels" else 0)[None] for key, value in batch.items()}
    batch |= {"position_ids": positions(lengths, [0] * tail), "cu_seqlens": torch.tensor([[0, *accumulate(lengths)]])}
    return told(draw, batch, rows)


# --- trainers of reinforcement learning, written after their source


def rl_packed(draw: Draw, *, tail: bool) -> Case:
    """nemo_rl/models/huggingface/common.py:142, :290: one row, its offsets nested, positions 0 in its tail."""
    rows, behind = draw.sequences(), draw.number(2, 5) if tail else 0
    lengths = list(map(len, rows))
    ends = {key.replace("seq_lens", "seqlens").replace("length", "seqlen"): x for key, x in offsets(lengths).items()}
    batch = row(rows, behind, PAD) | {"position_ids": positions(lengths, [0] * behind)}
    del batch["labels"]
    return told(draw, batch | {"flash_attn_kwargs": SimpleNamespace(**ends)}, rows)


def rl_padded(draw: Draw) -> Case:
    """nemo_rl/models/automodel/data.py:275: padded rows and the lengths they were made of; its mask of ones says nothing
    (tests/integration/test_nemo_rl.py)."""
    rows = draw.rows()
    lengths = list(map(len, rows))
    width = max(lengths)
    batch = {
        "input_ids": torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        "position_ids": torch.arange(width).repeat(len(rows), 1),
        "input_lengths": torch.tensor(lengths),
    }
    return emitted(draw, batch, ids=placed(lengths, width, "right"), features=features_of(rows))


def skyrl_rows(draw: Draw) -> Case:
    """Prompts padded left, responses right; positions counted by the mask, 1 at padding (model_wrapper.py:264-265)."""
    mask = keep_2d(draw)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    batch = {"input_ids": torch.from_numpy(draw.tokens.copy()), "attention_mask": mask, "position_ids": positions}
    return emitted(draw, batch)


def one_row(rows: list[list[int]], width: int) -> dict[str, Any]:
    """`TensorDataCollatorWithFlattening(max_seq_length=width)`: the tail has id 0, label -100, position 0, `seq_idx` -1."""
    lengths = list(map(len, rows))
    tail = width - sum(lengths)
    index = torch.tensor([[n for n, ids in enumerate(rows) for _ in ids] + [-1] * tail], dtype=torch.int32)
    counted = {"position_ids": positions(lengths, [0] * tail), "seq_idx": index}
    return row(rows, tail, 0) | counted | offsets(lengths)


def open_instruct(draw: Draw, *, tail: int = 0) -> Case:
    """Fine-tuning: every sequence of the batch in one row, `tail` places of padding behind."""
    rows = draw.sequences()
    return told(draw, one_row(rows, sum(map(len, rows)) + tail), rows)


def open_instruct_dpo(draw: Draw, *, tail: int) -> Case | None:
    """`concatenated_inputs` with `max_seq_length`: the chosen row, then the rejected one, both as wide; offsets count the
    padding between them to the first rejected sequence (open-instruct pull request 1900)."""
    rows = draw.sequences()
    if len(rows) < 2 or len(rows) % 2:
        return None
    parts = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    width = max(sum(map(len, part)) for part in parts) + tail
    chosen, rejected = (one_row(part, width) for part in parts)
    rejected["seq_idx"] = rejected["seq_idx"] + len(parts[0])
    batch = {key: torch.cat([chosen[key], rejected[key]], -1) for key in ("input_ids", "labels", "position_ids", "seq_idx")}
    for name in ("q", "k"):
        ends = rejected[f"cu_seq_lens_{name}"][1:] + width
        batch[f"cu_seq_lens_{name}"] = torch.cat([chosen[f"cu_seq_lens_{name}"], ends])
        batch[f"max_length_{name}"] = max(chosen[f"max_length_{name}"], rejected[f"max_length_{name}"])
    ids = np.concatenate([joined(features_of(part), width) for part in parts], axis=1)
    ids[:, width:][ids[:, width:] > 0] += len(parts[0])
    return emitted(draw, batch, ids=ids, features=features_of(rows), flat=True)


# --- loaders

ENERGON = ("megatron.energon",)


def energon(draw: Draw) -> Case:
    """`generic_batch`: tensors of other lengths are padded behind with 0, and no key says so."""
    from megatron.energon.task_encoder.base import generic_batch

    rows = features_of(draw.rows())
    tensors = [{key: torch.tensor(value) for key, value in row.items()} for row in rows]
    batch = {"input_ids": generic_batch([row["input_ids"] for row in tensors])}
    return emitted(draw, batch, ids=placed(draw.lengths, batch["input_ids"].shape[1], "right"), features=rows)


def indexed(draw: Draw) -> Case:
    """`GPTDataset`'s keys without a mask: whole rows of tokens, labels that stand with the token before."""
    moved = torch.from_numpy(np.roll(draw.tokens, -1, 1))
    columns = {"tokens": torch.from_numpy(draw.tokens.copy()), "labels": moved, "loss_mask": torch.ones(draw.shape)}
    columns["position_ids"] = restarting(draw)
    rows = [{key: column[b] for key, column in columns.items()} for b in range(len(draw.ids))]
    return emitted(draw, default_collate(rows), features=rows)


def known(name: str, make: Any, needs: tuple[str, ...] = (), **settings: Any) -> Producer:
    return producer(name, needs, make, FLAT, **settings)


PRODUCERS = [
    known("VeOmni MainCollator", veomni, ("veomni",), real=True),
    known("VeOmni", veomni),
    known("VeOmni, each place a sequence", veomni, each=True),
    known("xtuner SequenceContext", xtuner),
    known("xtuner SequenceContext, grown for ranks", xtuner, split=4),
    # prime-rl 559b447 src/prime_rl/trainer/batch.py:714-719, pull request 3032
    known("prime-rl", a_tail, counts="anew", keys="lengths and a loss mask", pad=1),
    # torchtitan b5bcd76 components/data/collators.py:52-88, pull request 2560
    known("torchtitan TextCollator", a_tail, counts="anew", keys="positions", pad=0),
    # unsloth 015bdef utils/packing.py:207, 405
    known("unsloth", a_tail, counts="zeros", keys="lengths without it"),
    known("TRL packed, padding free, to 8", sft, TRL, packed=True, **TRL_FLAT),
    known("a tail by positions, zeros", a_tail, counts="zeros", keys="positions"),
    *(known(f"a tail that is {keys}, positions {counts}", a_tail, counts=counts, keys=keys)
      for keys in ("a sequence of its own", "the last's") for counts in ("zeros", "anew", "still")),
    known("slime (MindSpeed-MM's) flat row", mindspeed_mm_packed),
    producer("NeMo RL packed", (), rl_packed, FLAT, tail=False),
    producer("NeMo RL packed, a tail", (), rl_packed, FLAT, tail=True),
    producer("NeMo RL padded", (), rl_padded, RIGHT),
    producer("SkyRL, padded", (), skyrl_rows, batches.ONE_SEQUENCE),
    known("open-instruct, tail", open_instruct, tail=5),
    producer("open-instruct DPO, tail", (), open_instruct_dpo, FLAT, tail=5),
    producer("loader: Energon's own batch", ENERGON, energon, RIGHT),
    producer("loader: indexed tokens", (), indexed, ("none", "packed")),
]  # fmt: skip
