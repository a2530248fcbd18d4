"""Reading masks against the oracle: what a mask of any form says, and what an adapter makes of a batch.

Legend: B rows, S width.
"""

import numpy as np
import oracle
import strategies as make
import torch
from laws.compared import adapter_of, apart, is_mask, lists, rank_of, refused, taken
from strategies import Drawn, law

from collate_npu import derive_segments


def plain(rows) -> bool:
    """Rows of which a square mask leaves no doubt: one sequence a row, padded on one side, none of a single token."""
    return max(map(max, rows)) == 1 and oracle.side(rows) != "mixed" and min(oracle.lengths(rows)) > 1 and len(rows[0]) > 2


@law
def test_a_mask_is_read_as_what_it_was_written_of(drawn):
    rows = make.rows_of(drawn, width=8)
    (name, size, pattern), polarity = make.pattern_of(drawn), drawn.pick(("keep", "masked", "bias"))
    keep_B1SS = oracle.dense(rows, name, size)
    for b, row in enumerate(rows if drawn.chance() else ()):  # some block the queries of padding too
        keep_B1SS[b][0] = [keys if n else [False] * len(row) for n, keys in zip(row, keep_B1SS[b][0])]
    given = make.four_dims(drawn, keep_B1SS, polarity)
    declared, known, said = drawn.chance(), drawn.chance(), name != "causal" or drawn.chance()
    truth = torch.tensor(rows)
    settings = {"polarity": polarity} if declared else {}
    settings |= ({"pattern": pattern} if said else {}) | ({"keep": truth != 0} if known else {})
    found = refused(lambda: derive_segments(given, **settings), False, "", [given, truth])
    if found is None:
        assert not (plain(rows) and name == "causal" and (declared or known)), "a plain causal mask is refused"
    else:
        cut = name == "chunked" and max(map(max, rows)) > 1  # rows are not packed, says the pattern
        assert cut or lists(found.ids) == rows


@law
def test_a_mask_of_one_value_a_key(drawn):
    """`[B, S]`, packing ids, or `[B, 1, 1, S]`."""
    rows = make.rows_of(drawn, width=8)
    B, S = len(rows), len(rows[0])
    packed = max(map(max, rows)) > 1
    dtype, polarity = drawn.pick((*make.WHOLE, torch.bool, *make.FLOATS)), drawn.pick((None, "keep", "masked"))
    if packed:
        given, polarity = make.held(drawn, rows), None
    else:
        kept = torch.tensor(oracle.keep(rows))
        given = (~kept if polarity == "masked" else kept).to(dtype)
    deep = not packed and polarity is not None and S > 1 and drawn.chance()
    given = given[:, None, None] if deep else given
    found = refused(lambda: derive_segments(given, polarity=polarity), False, "", given)
    square = B == S and not deep  # is it [B, S] or [S, S]?
    assert (square and not packed) if found is None else lists(found.ids) == rows


def batch_of(drawn: Drawn, rows):
    """A batch some loader hands over, whether its padding is told beyond doubt, and the polarity to declare."""
    ids = make.tokens_of(drawn, rows)
    labels = [[x if n and drawn.below(4) else oracle.IGNORED for x, n in zip(*pair)] for pair in zip(ids, rows)]
    for b, row in enumerate(rows):  # so that labels do not look turned around
        end = max(s for s, n in enumerate(row) if n)
        labels[b][end] = ids[b][end]
    batch = {"input_ids": drawn.pick((torch.tensor, np.array, torch.tensor))(ids), "labels": torch.tensor(labels)}
    packed, kept = max(map(max, rows)) > 1, oracle.keep(rows)
    how = drawn.pick(("ours", "2d", "4d", "both"))
    if how == "2d":
        return batch | {"attention_mask": torch.tensor(rows) if packed else make.two_dims(drawn, kept)}, True, None
    told = {"attention_mask_2d": torch.tensor(kept)} | ({"segment_ids": torch.tensor(rows)} if packed else {})
    if how == "ours":
        beside = drawn.pick(({}, {"attention_mask": None}, {"attention_mask": told["attention_mask_2d"]}))
        return batch | told | beside, True, None
    polarity = drawn.pick(("keep", "masked", "bias"))
    batch["attention_mask"] = make.four_dims(drawn, oracle.dense(rows), polarity)
    if how == "both":
        return batch | told, True, polarity
    return batch, plain(rows) and not all(map(all, kept)), polarity if drawn.chance() else None


def begins_twice(batch, rows) -> bool:
    """A sequence begins with one token again that is not learned, as padding in a data set would."""
    ids, labels = lists(batch["input_ids"]), lists(batch["labels"])
    starts = ((b, *places[:2]) for b, places in oracle.sequences(rows) if len(places) > 1)
    return any(ids[b][one] == ids[b][two] and labels[b][two] < 0 for b, one, two in starts)


@law
def test_padded_rows_through_an_adapter(drawn):
    rows = make.rows_of(drawn, width=8)
    consumer, recurrent = drawn.pick(("megatron", "transformers")), drawn.chance()
    batch, certain, polarity = batch_of(drawn, rows)
    packed, mixed = max(map(max, rows)) > 1, oracle.side(rows) == "mixed"
    holes = any(places[-1] - places[0] >= len(places) for _, places in oracle.sequences(rows))
    adapter = adapter_of(consumer=consumer, needs_mask_2d=recurrent, polarity=polarity, labels_shifted=False)
    labels = lists(batch["labels"])  # one behind a hole is not predicted from padding
    must = (recurrent and (packed or holes)) or labels != [oracle.alone(*pair) for pair in zip(labels, rows)]
    made = refused(lambda: adapter.with_segments(batch), must, "recurrent layers read no holes and no packed rows", batch)
    if made is None:
        doubt = not certain or (consumer == "transformers" and mixed) or begins_twice(batch, rows)
        assert must or doubt, "refused, although nothing is in doubt"
        return
    out, found = made
    assert lists(found.ids) == rows
    assert apart(batch, {key: value for key, value in out.items() if value is not batch.get(key)})
    assert lists(out["input_ids"]) == lists(batch["input_ids"])
    assert lists(out["labels"]) == [oracle.labels(*pair) for pair in zip(lists(batch["labels"]), rows)]
    reads = is_megatrons if consumer == "megatron" else is_transformers
    reads(out, rows, recurrent)


def flat_batch(drawn: Drawn):
    """One row of sequences, told by positions that restart, by offsets, or by their ids; and whether that says anything."""
    counts = [1 + drawn.below(4) for _ in range(1 + drawn.below(4))]
    tail, told = drawn.below(3), drawn.pick(("position_ids", "cu_seq_lens_q", "segment_ids", "attention_mask"))
    places, sequences = counts + [tail] * (tail > 0), len(counts)
    if told in ("position_ids", "cu_seq_lens_q"):  # they say nothing of padding
        sequences = len(places)
    row = [(n + 1) * (n < sequences) for n, count in enumerate(places) for _ in range(count)]
    (ids,) = make.tokens_of(drawn, [row])
    says = {"position_ids": [oracle.positions(row)], "cu_seq_lens_q": oracle.offsets(places)}.get(told, [row])
    says_it = told != "position_ids" or len(row) == 1 or max(places) > 1  # zeros alone may be a key that nobody filled
    labels = [x if n else oracle.IGNORED for x, n in zip(ids, row)]
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), told: torch.tensor(says)}, row, says_it


@law
def test_flat_rows_through_an_adapter(drawn):
    batch, row, said = flat_batch(drawn)
    consumer, recurrent = drawn.pick(("megatron", "transformers")), drawn.chance()
    adapter = adapter_of(consumer=consumer, needs_mask_2d=recurrent, padding_free=True, labels_shifted=False)
    must = not said or (recurrent and consumer == "transformers" and len({*row} - {0}) > 1)
    made = taken(lambda: adapter.with_segments(batch), must, "the model is unknown, or where a sequence begins", batch)
    if made is None:
        return
    out, found = made
    assert lists(found.ids) == [row]
    assert apart(batch, {key: value for key, value in out.items() if value is not batch.get(key)})
    assert lists(out["labels"]) == [oracle.labels(lists(batch["labels"])[0], row)]
    assert lists(out["position_ids"]) == [oracle.positions(row)]
    assert "attention_mask_2d" not in out
    assert consumer == "transformers" or out["attention_mask"] is None
    assert consumer == "megatron" or is_keep(out["attention_mask"], [row])


def is_keep(kept, rows) -> bool:
    """A mask of transformers, True attends: none where a causal kernel needs none."""
    exact = oracle.none_is_exact(rows)
    return kept is None if exact else lists(kept) == oracle.dense(rows)


@law
def test_a_rank_s_part_through_an_adapter(drawn):
    """The batch is split last: a rank gets its tokens, and of a dense mask its queries against every key."""
    rows = make.rows_of(drawn, ("left", "right", "none", "mixed"), width=12)
    size, ids, S = 2 + drawn.below(2), make.tokens_of(drawn, rows), len(rows[0])
    rank, layout = drawn.below(size), drawn.pick(("zigzag", "contiguous"))
    batch = {"input_ids": torch.tensor(ids), "attention_mask_2d": torch.tensor(oracle.keep(rows))}
    adapter = adapter_of(consumer="megatron", needs_mask_2d=False, context_parallel=rank_of(size, rank, layout=layout))
    must = S % (size * (1 + (layout == "zigzag"))) > 0
    out = taken(lambda: adapter(batch), must, "the width does not divide")
    if out is None:
        return
    held = oracle.share(S, size, rank, layout)
    assert lists(out["input_ids"]) == [[row[s] for s in held] for row in ids]
    assert lists(out["position_ids"]) == [[oracle.positions(row)[s] for s in held] for row in rows]
    masked = out["attention_mask"]
    assert (masked is None) == oracle.none_is_exact(rows)
    assert masked is None or lists(~masked) == [[[oracle.sees(row, q) for q in held]] for row in rows]


def is_megatrons(out, rows, recurrent) -> None:
    is_mask(out["attention_mask"], rows)
    assert lists(out["position_ids"]) == list(map(oracle.positions, rows))
    assert ("attention_mask_2d" in out) == recurrent
    assert not recurrent or lists(out["attention_mask_2d"]) == oracle.keep(rows)


def is_transformers(out, rows, recurrent) -> None:
    """One sequence a row is told by a 2D mask, several by a dense one; positions where its own count would be wrong."""
    packed = max(map(max, rows)) > 1
    assert "attention_mask_2d" not in out
    assert lists(out["attention_mask"]) == (oracle.dense(rows) if packed else oracle.keep(rows))
    counted = [oracle.positions(row) for row in rows]
    real = [[s if n else p for s, (n, p) in enumerate(zip(row, ps))] for row, ps in zip(rows, counted)]
    assert lists(out["position_ids"]) == counted if "position_ids" in out else real == counted
