"""Packing against the oracle: several samples in a padded row, or in one flat row of constant shapes.

Legend: B rows, S width, N sequences, L tokens of one sample.
"""

from itertools import pairwise
from math import lcm

import oracle
import pytest
import strategies as make
from laws.compared import adapter_of, apart, lists, rank_of, taken
from laws.test_collating import collator_of, contradict, is_padded, samples_of
from strategies import PAD, flat_collator, law

from collate_npu.parallel import cu_seqlens_of

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")


def width_of(least, multiple, widths) -> int | None:
    """The narrowest of these widths, each a multiple, that holds so many tokens; None if none does."""
    return next((w for w in sorted(-(-n // multiple) * multiple for n in widths or [least]) if w >= least), None)


@law
def test_several_samples_in_a_row(drawn):
    features, tokens, own = samples_of(drawn, 6)
    features = [feature | {"number": n} for n, feature in enumerate(features)]
    side, multiple, counts = drawn.pick(make.SIDES), drawn.pick((None, 4)), list(map(len, tokens))
    most, widths = drawn.pick((None, 4 + drawn.below(9))), drawn.pick((None, None, (6, 10)))
    width = width_of(max(counts) if widths else most or max(counts), multiple or 1, widths)
    bad = contradict(features, own) or width is None or max(counts) > (most or width)
    settings = {"attention_mask": drawn.pick(("auto", "2d", "4d")), "padding_side": side, "padding": widths or True}
    collator = collator_of(pad_token_id=PAD, packing=True, max_length=most, pad_to_multiple_of=multiple, **settings)
    batch = taken(lambda: collator(features), bad, "a sample is longer than its row, or contradicts itself", features)
    if batch is None:
        return
    assert apart(features, batch)
    rows = oracle.best_fit(counts, min(width, most or width))
    assert lists(batch.pop("number")) == [n for row in rows for n in row]
    ids = [oracle.numbered([x and 9 * n + x for n in row for x in own[n]]) for row in rows]
    ids = [oracle.padded(row, width, 0, side) for row in ids]
    is_padded(batch, [[x for n in row for x in tokens[n]] for row in rows], ids, side, settings["attention_mask"])
    assert lists(adapter_of(needs_mask_2d=False, consumer="megatron").with_segments(batch)[1].ids) == ids


@law
def test_one_flat_row_of_constant_shapes(drawn):
    """Each sequence stands at a multiple, its own and the ranks'; the rest of the row is cut into the sequences that are
    missing, or is behind the last."""
    features, tokens, own = samples_of(drawn)
    each, most, multiple = drawn.pick((None, 2, 4)), drawn.pick((None, 2 + drawn.below(5))), drawn.pick((None, 6))
    cp = drawn.pick((None, rank_of(1 + drawn.below(3), 0, layout="document_zigzag", tensor_parallel=1 + drawn.below(3))))
    widths, bad = drawn.pick((None, (8, 16, 40))), contradict(features, own)
    counts = [1] if bad else oracle.lengths(own)
    width = width_of(sum(counts), multiple or 1, widths)
    bad = bad or width is None or (most is not None and len(counts) > most)
    padding = {"multiple": each, "max_sequences": most, "cp": cp}
    collator = flat_collator(PAD, pad_to_multiple_of=multiple, padding=widths or True, **padding)
    batch = taken(lambda: collator(features), bad, "the row is too narrow, or has too many sequences")
    if batch is None:
        return
    padded = any(padding.values())
    each = lcm(each or 1, cp.document_multiple if cp else 1)
    held, missing = [-(-n // each) * each for n in counts], max(0, (most or 0) - len(counts))
    if padded:  # it grows where its sequences do not fit; without a number of sequences it keeps no tail
        width = max(sum(held) + missing * each, width * (most is not None))
        width += -width % lcm(each, cp.multiple if cp else 1)
    is_laid_out(batch, tokens, own, held, width, each, most, padded)


def is_laid_out(batch, tokens, own, held, width, each, most, padded) -> None:
    counts, tail = oracle.lengths(own), width - sum(held)
    ends = lists(batch["cu_seq_lens_q"])
    places = [stop - start for start, stop in pairwise(ends)]
    if padded:
        assert lists(batch["cu_seqlens_padded"]) == lists(cu_seqlens_of(batch)) == ends
        assert lists(batch["cu_seqlens"]) == oracle.offsets(counts + [0] * (len(places) - len(counts)))
    assert ends[0] == 0
    assert ends[-1] == width
    if padded and (most or len(counts)) == len(counts):  # none is missing: the rest stands behind the last
        assert places == [*held[:-1], held[-1] + tail]
    else:
        rest = places[len(counts) :]
        assert places[: len(counts)] == held
        assert len(rest) == (most - len(counts) if most else tail > 0)
        assert all(n >= each and n % each == 0 for n in rest)
    assert batch["max_length_q"] == batch["max_length_k"] == (width if most else max(places))
    moved = [oracle.alone([x + 20 for x in xs], n) for xs, n in zip(tokens, own)]
    wide = ([oracle.padded(xs, 9, 0, "right") for xs in each] for each in (tokens, moved))
    parts, learned = (oracle.per_sequence(each, own) for each in wide)
    parts += [[]] * (len(places) - len(parts))
    laid = lambda rows, fill: [[x for row, n in zip(rows, places) for x in oracle.padded(row, n, fill, "right")]]  # noqa: E731
    assert lists(batch["input_ids"]) == laid(parts, PAD)
    assert lists(batch["labels"]) == laid([[oracle.IGNORED, *xs[1:]] for xs in learned] + [[]] * len(places), -100)
    assert lists(batch["loss_scale"]) == laid([[x / 2 for x in xs] for xs in parts], 0)
    assert lists(batch["position_ids"]) == [[s for n in places for s in range(n)]]
    assert lists(batch["seq_idx"]) == [[n for n, place in enumerate(places) for _ in range(place)]]
    assert batch["attention_mask"] is None
