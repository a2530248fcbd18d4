"""NeMo RL (rebuilt after its source, 7ea279a), NeMo Automodel 0.7 and Megatron-Bridge 0.3.

Legend: B rows, S width.
"""

from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import torch
from drawing import PAD, Draw
from from_collators import FLAT, RIGHT, features_of
from producing import emitted, joined, placed, producer
from verdicts import Case

AUTOMODEL = ("nemo_automodel",)


def rl_packed(draw: Draw, *, tail: bool) -> Case:
    """nemo_rl/models/huggingface/common.py:142, :290: one row, its offsets nested, positions 0 in its tail."""
    rows = draw.sequences()
    behind = draw.number(2, 5) if tail else 0
    ends = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)
    longest = max(map(len, rows))
    told = {"cu_seqlens_q": ends, "cu_seqlens_k": ends.clone(), "max_seqlen_q": longest, "max_seqlen_k": longest}
    batch = {
        "input_ids": torch.tensor([[token for row in rows for token in row] + [PAD] * behind]),
        "position_ids": torch.tensor([[n for row in rows for n in range(len(row))] + [0] * behind]),
        "flash_attn_kwargs": SimpleNamespace(**told),
    }
    features = features_of(rows)
    return emitted(draw, batch, ids=joined(features, batch["input_ids"].shape[1]), features=features, flat=True)


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


def padded(draw: Draw) -> Case:
    """`default_collater` with the samples' own masks: a 2D mask, and a padding mask beside it."""
    from nemo_automodel.components.datasets.utils import default_collater

    rows = draw.rows()
    samples = [{**each, "attention_mask": [1] * len(each["input_ids"])} for each in _moved(rows)]
    batch = default_collater([{**samples[0], "___PAD_TOKEN_IDS___": {"input_ids": PAD}}, *samples[1:]])
    ids = placed(list(map(len, rows)), batch["input_ids"].shape[1], "right")
    del batch["labels"]
    return emitted(draw, batch, ids=ids, features=features_of(rows))


PRODUCERS = [
    producer("NeMo RL packed", (), rl_packed, FLAT, tail=False),
    producer("NeMo RL packed, a tail", (), rl_packed, FLAT, tail=True),
    producer("NeMo RL padded", (), rl_padded, RIGHT),
    producer("NeMo Automodel, thd", AUTOMODEL, thd, FLAT, multiple=1),
    producer("NeMo Automodel, thd aligned", AUTOMODEL, thd, FLAT, multiple=4),
    producer("NeMo Automodel, neat", AUTOMODEL, neat, FLAT, kind="block_causal"),
    producer("NeMo Automodel, neat ids", AUTOMODEL, neat, FLAT, kind="document_ids"),
    producer("NeMo Automodel, neat flash", AUTOMODEL, neat, FLAT, "positions against mask", kind="flash_varlen"),
    producer("NeMo Automodel, padded", AUTOMODEL, padded, RIGHT),
]
