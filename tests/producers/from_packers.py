"""Flat rows with a tail, as the stacks that pack write them: what counts it as a sequence, and what tells that it is none.

VeOmni is real where it is installed. The rest, and VeOmni elsewhere, is written after its source, named with each row.
Legend: T tokens of the row, N sequences.
"""

from itertools import accumulate
from typing import Any

import torch
from drawing import Draw
from from_collators import FLAT, TRL, features_of, sft
from producing import Producer, emitted, joined, producer
from torch import Tensor
from verdicts import Case

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
]  # fmt: skip
