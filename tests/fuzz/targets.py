"""Targets: each draws an input from bytes, calls the package, and compares with the oracle, or demands a refusal.

A target raises where the package is wrong. Inputs are not written to, and what is made shares no memory with them.
Legend: B rows, S width.
"""

from math import lcm

import oracle
import torch
from fuzz import drawn as make
from fuzz.collating import collate
from fuzz.compared import apart, bits, lists, others, rank_of, refused, taken
from fuzz.doors import adapt, derive
from fuzz.drawn import Drawn
from fuzz.kernels import kernels
from fuzz.packing import pack
from fuzz.planning import plan

from collate_npu import ContextParallel, Segments, last_token, repad, split_batch, unpad
from collate_npu.outputs import ignore_first_labels, per_sequence, shift_labels, to_nested
from collate_npu.parallel import split_tensor

LAYOUTS = ("zigzag", "contiguous")


def place_of(drawn: Drawn, layouts=LAYOUTS):
    """A rank, and which tokens of a row with such bounds each rank holds."""
    size, layout = 1 + drawn.below(4), drawn.pick(layouts)
    return rank_of(size, drawn.below(size), layout=layout)


def units_of(cp: ContextParallel) -> tuple[int, int]:
    """What a document, and the whole row, is a multiple of."""
    chunks = cp.size * (2 if cp.size > 1 and cp.layout.endswith("zigzag") else 1)
    return chunks, lcm(chunks, cp.size)


def held_by(rank: int, bounds, cp: ContextParallel) -> list[int]:
    return oracle.share_of_documents(bounds, cp.size, rank, cp.layout.removeprefix("document_"))


def split(drawn: Drawn) -> None:
    rows, cp = make.rows_of(drawn, ("right", "left", "none", "mixed"), width=16), place_of(drawn)
    unit = units_of(cp)[1]
    S = len(rows[0]) + -len(rows[0]) % unit * (drawn.below(4) > 0)
    rows = [oracle.padded(row, S, 0, "right") for row in rows]
    whole = oracle.dense(rows) if drawn.chance() else None
    B, ids, kept = len(rows), make.tokens_of(drawn, rows), oracle.keep(rows)
    batch = {
        "input_ids": torch.tensor(ids),
        "labels": make.held(drawn, ids),
        "attention_mask_2d": torch.tensor(kept),
        "attention_mask": torch.tensor(whole or kept),
        "position_ids": torch.tensor([ids] * 3),
        "loss_scale": torch.tensor(ids, dtype=torch.float32),
        "advantages": torch.arange(B),
        "pixel_values": torch.ones(2, 3),
        "name": "x",
    }
    out = taken(lambda: split_batch(batch, cp), S % unit > 0, "the width does not divide", batch)
    if out is None:
        return
    held = held_by(cp.rank, [0, S], cp)
    ours = [[row[s] for s in held] for row in ids]
    flat = [[row[s] for s in held] for row in kept]
    dense = [[[keys[q] for q in held]] for (keys,) in whole] if whole else flat
    right = {"input_ids": ours, "labels": ours, "loss_scale": ours, "attention_mask_2d": flat, "attention_mask": dense}
    right |= {"position_ids": [ours] * 3, "advantages": list(range(B)), "pixel_values": [[1.0] * 3] * 2, "name": "x"}
    assert {key: lists(value) for key, value in out.items()} == right
    assert cp.size == 1 or apart(batch, {key: value for key, value in out.items() if value is not batch[key]})


def gather(drawn: Drawn) -> None:
    cp = place_of(drawn, (*LAYOUTS, "document_zigzag"))
    document, unit = units_of(cp)
    parts = [document * drawn.below(3) for _ in range(1 + drawn.below(3))]
    parts[-1] += -sum(parts) % unit
    bounds = oracle.offsets(parts) if cp.documents else [0, sum(parts)]
    given = bounds if drawn.chance() else torch.tensor(bounds, dtype=torch.int32)
    offsets = {"cu_seqlens": given} if cp.documents else {}
    dtype, B = drawn.pick((torch.int64, torch.bool, torch.bfloat16, torch.float32)), 1 + drawn.below(2)
    values = [[drawn.below(2) for _ in range(B)] for _ in range(sum(parts))]
    x, dim = torch.tensor(values).reshape(-1, B).to(dtype), drawn.below(3) - 1
    x = x if dim == 0 else x.T[:, :, None].expand(-1, -1, 2)[..., 0] if dim == 1 else x.T
    before, along = bits(x), lists(x.movedim(dim, 0))
    held = [held_by(rank, bounds, cp) for rank in range(cp.size)]
    shards = [split_tensor(x, others(cp, rank), dim=dim, **offsets) for rank in range(cp.size)]
    for shard, places in zip(shards, held):
        assert lists(shard.movedim(dim, 0)) == [along[place] for place in places]
    assert bits(x) == before
    assert along == oracle.gathered([lists(s.movedim(dim, 0)) for s in shards], held)
    assert cp.size == 1 or apart([x], shards)


def outputs(drawn: Drawn) -> None:
    rows = make.rows_of(drawn)
    if drawn.below(8) == 7:
        rows.append([0] * len(rows[0]))
    segments, values = Segments(rows), [[drawn.below(100) for _ in row] for row in rows]
    x, fill, steps = torch.tensor(values), drawn.below(5), 1 + drawn.below(3)
    if drawn.below(8) == 7:
        wrong = x[:, 1:] if drawn.chance() else torch.cat([x, x])
        for way in (unpad, last_token, per_sequence, to_nested, shift_labels, ignore_first_labels):
            refused(lambda way=way: way(wrong, segments), True, "the shape is another")
        return
    parts = oracle.per_sequence(values, rows)
    flat = [token for part in parts for token in part]
    made = [unpad(x, segments), *per_sequence(x, segments), shift_labels(x, segments, steps=steps)]
    made += [ignore_first_labels(x, segments), repad(made[0], segments, fill=fill)]
    assert lists(x) == values
    assert lists(made[0]) == flat
    assert [lists(part) for part in per_sequence(x, segments)] == parts
    assert lists(made[-3]) == [oracle.shifted(*pair, steps) for pair in zip(values, rows)]
    assert lists(made[-2]) == [oracle.labels(*pair) for pair in zip(values, rows)]
    assert lists(made[-1]) == oracle.repadded(flat, rows, fill)
    wide = torch.stack([x, -x], -1)
    assert lists(unpad(wide, segments)) == [[token, -token] for token in flat]
    if drawn.below(8) == 7:  # torch takes long
        assert [lists(part) for part in to_nested(x, segments).unbind()] == parts
    ends = refused(lambda: last_token(x, segments), not all(map(any, rows)), "a row has no token")
    assert (ends is None and not all(map(any, rows))) or lists(ends) == [part[-1] for part in parts]
    assert apart([x], [*made[:1], *made[-3:]])


def probe(drawn: Drawn) -> None:
    from fuzz.probing import probe as asked  # it imports transformers

    asked(drawn)


ALL = (collate, derive, adapt, split, gather, outputs, kernels, plan, pack, probe)
TARGETS = {each.__name__: each for each in ALL}
