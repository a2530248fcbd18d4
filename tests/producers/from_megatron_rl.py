"""slime, miles, vime, Relax, ROLL and MindSpeed-MM: no package holds them, so their batches are rebuilt (rl_batches.py).

Legend: B rows, S width, T tokens of a flat row.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from drawing import SIDED, Draw
from from_collators import FLAT, RIGHT
from producing import emitted, joined, placed, producer, side_of
from verdicts import Case

sys.path.append(str(Path(__file__).parents[1] / "peers"))
import rl_batches as made


def _told(batch: dict[str, Any]) -> dict[str, Any]:
    """Without what is not said."""
    return {key: value for key, value in batch.items() if value is not None or key == "attention_mask"}


def flat(draw: Draw, make: str, multiple: int, *, apart: bool) -> Case:
    """Padding is one more sequence behind the others, or a part of the sequence before it: no word tells it apart. Nobody
    wraps a collator of theirs, so the samples are those of the offsets."""
    rows = draw.sequences()
    batch = getattr(made, make)(rows, multiple=multiple)
    held = batch["packed_seq_params"].cu_seqlens_q.diff().tolist()
    ids = np.array([[n for n, width in enumerate(held, start=1) for _ in range(width)]])
    assert len(held) == len(rows) + (apart and sum(map(len, rows)) % multiple > 0)
    features = [{"input_ids": row.tolist()} for row in batch["input_ids"][0].split(held)]
    return emitted(draw, _told(batch), ids=ids, features=features, flat=True)


def rows_of(draw: Draw, make: str, **settings: Any) -> Case:
    """One sample a row, padded on one side."""
    rows = draw.rows()
    batch = getattr(made, make)(rows, **settings)
    ids = placed(draw.lengths, batch["input_ids"].shape[1], settings.get("side", "right"))
    features = [{"input_ids": row} for row in rows]
    return emitted(draw, _told(batch), ids=ids, features=features, silent=batch["attention_mask"] is None)


def sided(draw: Draw) -> Case:
    return rows_of(draw, "mindspeed_mm", side=side_of(draw))


def mm_packed(draw: Draw) -> Case:
    """Offsets `[1, N + 1]`, a mask that knows the padding behind, and positions that are 0 there."""
    rows = draw.sequences()
    batch = made.mindspeed_mm_packed(rows, multiple=4)
    features = [{"input_ids": row} for row in rows]
    return emitted(draw, batch, ids=joined(features, batch["input_ids"].shape[1]), features=features, flat=True)


PRODUCERS = [
    producer("slime flat row", (), flat, FLAT, make="slime", multiple=1, apart=False),
    producer("slime flat row, to 8", (), flat, FLAT, make="slime", multiple=8, apart=True),
    producer("slime (ROLL's) flat row, each to 4", (), flat, FLAT, make="roll_packed", multiple=4, apart=False),
    producer("slime bshd", (), rows_of, RIGHT, make="bshd", multiple=4),
    producer("slime (ROLL's) padded rows", (), rows_of, RIGHT, make="roll_padded", width=64),
    producer("slime (MindSpeed-MM's) padded rows", (), sided, SIDED),
    producer("slime (MindSpeed-MM's) flat row", (), mm_packed, FLAT),
]
