"""Collating against the oracle: samples that tell of themselves what producers tell, padded on a side or flat.

Legend: L tokens of one sample.
"""

from functools import cache

import oracle
import pytest
import strategies as make
import torch
from laws.compared import adapter_of, apart, is_mask, lists, taken
from strategies import PAD, Drawn, law

from collate_npu import PaddingCollator

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")

collator_of = cache(PaddingCollator)


KINDS = ("nothing", "nothing", "ones", "holes", "packed", "seq_lengths")


def told_of(drawn: Drawn, L: int, kind: str):
    """What a sample tells of itself: key, value, and its segment ids; None where it contradicts itself."""
    if kind in ("holes", "packed"):
        values = drawn.many(L, 2 if kind == "holes" else 4)
        return "attention_mask", values, oracle.numbered(values)
    if kind == "seq_lengths":
        cut = drawn.below(L + 1)
        wrong = drawn.below(8) == 7
        row = [1 + (cut <= place) for place in range(L)]
        return "seq_lengths", [cut, L - cut + wrong], None if wrong else oracle.numbered(row)
    return ("attention_mask" if kind == "ones" else ""), [1] * L, [1] * L


def samples_of(drawn: Drawn, most: int = 3):
    """Features, their tokens, and their segment ids."""
    features, tokens, own, kind = [], [], [], drawn.pick(KINDS)
    for _ in range(1 + drawn.below(most)):
        L = 1 + drawn.below(6)
        key, value, row = told_of(drawn, L, drawn.pick(KINDS) if drawn.below(8) == 7 else kind)
        tokens.append(drawn.many(L, 10))
        own.append(row)
        labels = oracle.alone([x + 20 for x in tokens[-1]], row or [1] * L)
        held = make.held(drawn, labels) if min(labels) >= 0 else labels  # no -100 in a uint16
        feature = {"input_ids": make.held(drawn, tokens[-1]), "labels": held}
        feature |= {"loss_scale": [x / 2 for x in tokens[-1]]}
        features.append(feature | ({key: make.held(drawn, value)} if key else {}))
    return features, tokens, own


def contradict(features, own) -> bool:
    """A sample contradicts itself, has no token, or has other keys than the rest."""
    return len({frozenset(each) for each in features}) > 1 or any(row is None or not any(row) for row in own)


@law
def test_a_batch_tells_the_truth_of_its_samples(drawn):
    features, tokens, own = samples_of(drawn)
    side, multiple, flat = drawn.pick(make.SIDES), drawn.pick((None, 4)), drawn.below(3) == 2
    settings = {"padding_free": True} if flat else {"attention_mask": drawn.pick(("auto", "2d", "4d")), "padding_side": side}
    bad = contradict(features, own)
    collator = collator_of(pad_token_id=PAD, pad_to_multiple_of=multiple, **settings)
    batch = taken(lambda: collator(features), bad, "a sample contradicts itself or has no token", features)
    if batch is None:
        return
    assert apart(features, batch)
    if flat:
        is_flat(batch, tokens, own, multiple or 1)
        return
    width = max(map(len, tokens)) + -max(map(len, tokens)) % (multiple or 1)
    is_padded(batch, tokens, [oracle.padded(row, width, 0, side) for row in own], side, settings["attention_mask"])
    if drawn.chance():
        found = adapter_of(needs_mask_2d=False, consumer="megatron").with_segments(batch)[1]
        assert lists(found.ids) == [oracle.padded(row, width, 0, side) for row in own]


def is_padded(batch, tokens, rows, side, mode) -> None:
    width = len(rows[0])
    wide = [oracle.padded(row, width, PAD, side) for row in tokens]
    moved = [[x + 20 for x in row] for row in wide]
    assert lists(batch["input_ids"]) == wide
    assert lists(batch["labels"]) == [oracle.labels(*pair) for pair in zip(moved, rows)]
    assert lists(batch["loss_scale"]) == [oracle.padded([x / 2 for x in row], width, 0, side) for row in tokens]
    assert lists(batch["position_ids"]) == list(map(oracle.positions, rows))
    assert lists(batch["attention_mask_2d"]) == oracle.keep(rows)
    assert (max(map(max, rows)) > 1) == ("segment_ids" in batch)
    assert lists(batch.get("segment_ids", torch.tensor(rows))) == rows
    is_mask(batch["attention_mask"], rows, must_be_dense=mode == "4d") if mode != "2d" else None
    assert mode != "2d" or lists(batch["attention_mask"]) == oracle.keep(rows)


def is_flat(batch, tokens, own, multiple) -> None:
    counts = oracle.lengths(own)
    tail = -sum(counts) % multiple
    places = counts + [tail] * (tail > 0)
    row = [n + 1 for n, count in enumerate(places) for _ in range(count)]
    ids = oracle.flat(own, tokens, len(row), PAD)
    follows = [s > 0 and row[s] == row[s - 1] and s < sum(counts) for s in range(len(row))]
    assert batch["attention_mask"] is None
    assert lists(batch["input_ids"]) == [ids]
    learned = oracle.flat(own, [oracle.alone([x + 20 for x in xs], n) for xs, n in zip(tokens, own)], len(row), 0)
    assert lists(batch["labels"]) == [[x if ok else oracle.IGNORED for x, ok in zip(learned, follows)]]
    assert lists(batch["loss_scale"]) == [oracle.flat(own, [[x / 2 for x in xs] for xs in tokens], len(row), 0)]
    assert lists(batch["position_ids"]) == [oracle.positions(row)]
    assert lists(batch["cu_seq_lens_q"]) == lists(batch["cu_seq_lens_k"]) == oracle.offsets(places)
    assert batch["max_length_q"] == batch["max_length_k"] == max(places)
    assert lists(batch["seq_idx"]) == [[n - 1 for n in row]]
    assert lists(batch["seq_lens"]) == counts
