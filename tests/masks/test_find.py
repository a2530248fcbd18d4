"""Find: the one door. Whatever a batch carries is read, compared, and believed only where nothing contradicts it."""

from __future__ import annotations

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import peak_bytes

from collate_npu import AmbiguousMaskError, CollateError, Pattern, PolarityError, Segments, block_mask, dense
from collate_npu.masks.find import segments_from_batch

RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
FLAT = Segments.from_lengths([[3, 5]])


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


# --- the truth is found in whatever the batch carries


SOURCES = {
    "2d": lambda s: {"attention_mask_2d": s.keep},
    "2d ints": lambda s: {"attention_mask_2d": s.keep.long()},
    "2d where transformers puts it": lambda s: {"attention_mask": s.keep.long()},
    "2d and None": lambda s: {"attention_mask_2d": s.keep, "attention_mask": None},
    "2d and a mapping": lambda s: {"attention_mask_2d": s.keep, "attention_mask": {"full_attention": None}},
    "2d twice": lambda s: {"attention_mask_2d": s.keep, "attention_mask": s.keep.long()},
    "4d masked": lambda s: {"attention_mask": dense(s, polarity="masked")},
    "4d keep": lambda s: {"attention_mask": dense(s)},
    "4d additive": lambda s: {"attention_mask": dense(s, polarity="bias")},
    "2d and 4d": lambda s: {"attention_mask_2d": s.keep, "attention_mask": dense(s, polarity="masked")},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("segments", [RIGHT, LEFT], ids=["right", "left"])
def test_sources_of_the_truth(source, segments):
    assert segments_from_batch(batch_of(segments, **SOURCES[source](segments))) == segments


@given(strategies.packed(extra=2).filter(lambda s: all(len(row) < 2 or max(row) > 1 for row in s.lengths)))
def test_positions_that_fall_back_split_the_rows_of_a_2d_mask(segments):
    found = segments_from_batch(batch_of(segments, attention_mask_2d=segments.keep, position_ids=segments.position_ids))
    assert found == segments


def test_positions_beside_a_2d_mask():
    keys = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])}
    arange = torch.arange(5).expand(2, 5)
    assert not segments_from_batch(batch_of(RIGHT, **keys, position_ids=arange)).packed
    assert not segments_from_batch(batch_of(RIGHT, **keys, position_ids=torch.zeros(3, 2, 5))).packed
    packed = torch.tensor([[9, 0, 1, 0, 1], [0, 1, 2, 3, 4]])
    assert segments_from_batch(batch_of(RIGHT, **keys, position_ids=packed)).lengths == ((2, 2), (5,))


def test_inputs_may_be_embeddings_or_megatron_tokens():
    for key, shape in (("inputs_embeds", (2, 5, 3)), ("tokens", (2, 5))):
        assert segments_from_batch({key: torch.zeros(shape), "attention_mask_2d": LEFT.keep}) == LEFT
    with pytest.raises(CollateError, match="keys labels"):
        segments_from_batch({"labels": torch.zeros(2, 5)})


FLAT_SOURCES = {
    "cu_seq_lens_q": {"cu_seq_lens_q": FLAT.cu_seqlens},
    "cu_seqlens": {"cu_seqlens": FLAT.cu_seqlens},
    "cu_seqlens_q": {"cu_seqlens_q": FLAT.cu_seqlens},
    "position_ids": {"position_ids": FLAT.position_ids},
    "ones and positions": {"attention_mask": torch.ones(1, 8), "position_ids": FLAT.position_ids},
}


@pytest.mark.parametrize("source", FLAT_SOURCES)
@pytest.mark.parametrize("padding_free", [False, True])
def test_sources_of_a_flat_row(source, padding_free):
    assert segments_from_batch(batch_of(FLAT, **FLAT_SOURCES[source]), padding_free=padding_free) == FLAT


def test_a_flat_row_with_an_alignment_tail():
    segments = Segments.from_lengths([[3, 2]], 8)
    keys = {"cu_seq_lens_q": torch.tensor([0, 3, 5, 8]), "seq_lens": torch.tensor([3, 2])}
    assert segments_from_batch(batch_of(segments, **keys)) == segments
    assert segments_from_batch(batch_of(segments, cu_seq_lens_q=torch.tensor([0, 3, 5]))) == segments


def test_a_flat_row_without_boundaries_is_refused():
    with pytest.raises(AmbiguousMaskError, match="Nothing says where one sequence"):
        segments_from_batch(batch_of(FLAT), padding_free=True)
    with pytest.raises(AmbiguousMaskError):
        segments_from_batch(batch_of(FLAT))
    for custom in (torch.zeros(1, 8), torch.tensor([[3, 4, 5, 3, 4, 5, 6, 7]]), torch.arange(1, 9)[None]):
        with pytest.raises(AmbiguousMaskError):
            segments_from_batch(batch_of(FLAT, position_ids=custom.long()), padding_free=True)


def test_offsets_beside_a_2d_mask_split_a_flat_row():
    keys = {"attention_mask": torch.ones(1, 8), "cu_seq_lens_q": FLAT.cu_seqlens}
    assert segments_from_batch(batch_of(FLAT, **keys)) == FLAT


# --- sources that contradict each other


def test_positions_that_count_up_once_say_nothing_of_padding():
    """One row whose mask was lost: its padding counts on, as ours does, or as a model makes it up."""
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.int64), "position_ids": torch.arange(8)[None]}
    with pytest.raises(AmbiguousMaskError, match="a mask that was lost"):
        segments_from_batch(batch)
    assert segments_from_batch(batch, padding_free=True) == Segments.from_lengths([8])


def test_offsets_that_end_before_a_mask_of_ones_disagree():
    keys = {"attention_mask": torch.ones(1, 8), "cu_seq_lens_q": torch.tensor([0, 3, 6])}
    with pytest.raises(CollateError, match="1 bad row"):
        segments_from_batch({"input_ids": torch.ones(1, 8, dtype=torch.int64), **keys})


def test_no_source_is_an_error_that_names_the_keys():
    with pytest.raises(AmbiguousMaskError, match=r"batch: got keys input_ids, labels\. No key says.*attention_mask_2d"):
        segments_from_batch(batch_of(RIGHT, labels=None))


@pytest.mark.parametrize(
    ("polarity", "build"),
    [
        (None, lambda s: s.keep.long()),
        ("keep", lambda s: dense(s)),
        ("masked", lambda s: dense(s, polarity="masked")),
        (None, lambda s: dense(s, polarity="bias")),
    ],
)
def test_disagreement_of_2d_and_4d_names_the_rows(polarity, build):
    segments = Segments.from_lengths([3, 5, 4, 2])
    other = Segments.from_lengths([3, 4, 4, 1], 5)
    with pytest.raises(CollateError) as raised:
        segments_from_batch(
            batch_of(segments, attention_mask_2d=segments.keep, attention_mask=build(other)), polarity=polarity
        )
    text = str(raised.value)
    assert all(f"row {b}" in text for b in (1, 3))
    assert not any(f"row {b}" in text for b in (0, 2))


def test_the_truth_of_alignment_padding_must_be_one():
    """ms-swift 4.6.0 marks alignment padding as real in its 2D mask, and as padding in its 4D one."""
    with pytest.raises(CollateError, match="row 0"):
        segments_from_batch(
            batch_of(RIGHT, attention_mask_2d=torch.ones(2, 5), attention_mask=dense(RIGHT, polarity="masked"))
        )


def test_a_declared_polarity_is_not_overruled():
    masked = {"attention_mask": dense(LEFT, polarity="masked")}
    assert segments_from_batch(batch_of(LEFT, **masked), polarity="masked") == LEFT
    with pytest.raises(CollateError):
        segments_from_batch(batch_of(LEFT, **masked), polarity="keep")
    all_true = {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}
    with pytest.raises(PolarityError):
        segments_from_batch(batch_of(LEFT, **all_true))
    whole = Segments.from_lengths([5, 5])
    assert segments_from_batch(batch_of(LEFT, **all_true), polarity="keep", pattern="bidirectional") == whole


def test_padding_free_takes_one_row():
    with pytest.raises(CollateError, match=r"2 rows. padding_free means one flat row"):
        segments_from_batch(batch_of(RIGHT, attention_mask_2d=RIGHT.keep), padding_free=True)


# --- a pattern is a fact too (seam A1)

PATTERNS = [Pattern.sliding(2), Pattern.prefix(2), Pattern.of("bidirectional"), Pattern.chunked(2)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("segments", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("beside", [True, False], ids=["2d beside", "alone"])
def test_a_mask_of_another_pattern_is_refused_or_declared(pattern, segments, beside):
    keys = {"attention_mask": dense(segments, pattern=pattern)} | ({"attention_mask_2d": segments.keep} if beside else {})
    with pytest.raises(CollateError):
        segments_from_batch(batch_of(segments, **keys))
    assert segments_from_batch(batch_of(segments, **keys), pattern=pattern, polarity="keep") == segments


def test_the_refusal_of_a_pattern_names_the_one_that_explains_it():
    keys = {"attention_mask_2d": LEFT.keep, "attention_mask": dense(LEFT, pattern=Pattern.sliding(2))}
    for declared in (None, "causal"):
        with pytest.raises(AmbiguousMaskError, match=r"Pass pattern=Pattern\.sliding\(2\)"):
            segments_from_batch(batch_of(LEFT, **keys), pattern=declared)


def test_masks_by_head_and_masks_that_add_values_are_refused():
    heads = torch.cat([dense(LEFT), dense(LEFT, pattern=Pattern.sliding(2))], 1)
    alibi = dense(LEFT, polarity="bias") + -0.5 * (torch.arange(5)[:, None] - torch.arange(5)).abs()
    for mask, told in ((heads, "not the same for every head"), (alibi, "adds values where it attends")):
        for beside in ({}, {"attention_mask_2d": LEFT.keep}):
            with pytest.raises(AmbiguousMaskError, match=told):
                segments_from_batch(batch_of(LEFT, attention_mask=mask, **beside))
    same = dense(LEFT).expand(2, 3, 5, 5)
    assert segments_from_batch(batch_of(LEFT, attention_mask=same)) == LEFT


# --- the shape of the tokens (seam A2)


@pytest.mark.parametrize("shape", [(2, 5), (3, 4), (1, 4), (4, 2), (2, 3), (8, 1)])
@pytest.mark.parametrize("key", ["attention_mask_2d", "attention_mask", "segment_ids", "position_ids"])
def test_a_source_of_another_shape_than_the_tokens_raises(shape, key):
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), key: torch.ones(shape, dtype=torch.int64)}
    if key == "position_ids":
        batch |= {"attention_mask_2d": torch.ones(2, 4), key: torch.arange(shape[1]).expand(shape)}
    if (key, shape) == ("position_ids", (1, 4)):  # one row of positions is for all rows, as in transformers
        assert segments_from_batch(batch) == Segments.from_lengths([4, 4])
        return
    with pytest.raises(CollateError):
        segments_from_batch(batch)


@pytest.mark.parametrize("width", [3, 5])
def test_a_dense_mask_of_another_width_raises(width):
    batch = {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64),
        "attention_mask": dense(Segments.from_lengths([2, 3], width)),
    }
    for beside in ({}, {"attention_mask_2d": torch.ones(2, 4)}):
        with pytest.raises(CollateError):
            segments_from_batch(batch | beside)


# --- positions (seam A3)


@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 2, 2, 2, 3, 4],
        [0] * 7,
        [0, 0, 1, 1, 2, 2, 3],
        [2, 3, 4, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0, 1],
        [0, 1, 2, 3, 1, 2, 3],
    ],
    ids=str,
)
def test_positions_that_do_not_restart_say_nothing(positions):
    batch = {"input_ids": torch.arange(7)[None], "position_ids": torch.tensor([positions])}
    assert not segments_from_batch({**batch, "attention_mask": torch.ones(1, 7, dtype=torch.int64)}).packed
    packed = torch.tensor([[1, 1, 1, 2, 2, 2, 2]])
    assert segments_from_batch({**batch, "segment_ids": packed}) == Segments(packed)


def test_positions_that_restart_elsewhere_than_the_sequences_raise():
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 1]])
    batch = {"input_ids": torch.arange(7)[None], "position_ids": positions}
    with pytest.raises(CollateError, match="restart at other places"):
        segments_from_batch({**batch, "segment_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 2]])})
    with pytest.raises(CollateError, match=r"position_ids|pattern"):
        segments_from_batch(
            {**batch, "attention_mask": dense(Segments.from_lengths([7])), "attention_mask_2d": torch.ones(1, 7)}
        )


def test_the_text_row_of_several_axes_tells_and_three_axes_do_not():
    text = torch.tensor([[0, 1, 2, 0, 1]])
    axes = torch.stack([text, *[torch.full_like(text, 7)] * 3])
    batch = {"input_ids": torch.arange(5)[None], "attention_mask_2d": torch.ones(1, 5)}
    assert segments_from_batch({**batch, "position_ids": axes}).lengths == ((3, 2),)
    assert segments_from_batch({**batch, "position_ids": axes[1:]}).lengths == ((5,),)
    both = {"position_ids": axes[1:], "text_position_ids": text}
    assert segments_from_batch({**batch, **both}).lengths == ((3, 2),)


# --- 2D masks: additive, declared, turned around (seams A4, A5)


def test_zeros_are_not_read_as_padding_throughout():
    zeros = batch_of(RIGHT, attention_mask=torch.zeros(2, 5))
    with pytest.raises(PolarityError, match="of zeros"):
        segments_from_batch(zeros)
    for polarity in ("bias", "masked"):
        assert segments_from_batch(zeros, polarity=polarity) == Segments.from_lengths([5, 5])


def test_a_declared_polarity_holds_for_2d_masks_too():
    assert segments_from_batch(batch_of(LEFT, attention_mask=~LEFT.keep), polarity="masked") == LEFT
    bias = torch.where(LEFT.keep, 0.0, torch.finfo(torch.float32).min)
    assert segments_from_batch(batch_of(LEFT, attention_mask=bias), polarity="bias") == LEFT
    assert segments_from_batch(batch_of(LEFT, attention_mask=bias)) == LEFT
    with pytest.raises(PolarityError):
        segments_from_batch(batch_of(LEFT, attention_mask_2d=bias))


@pytest.mark.parametrize("key", ["attention_mask", "attention_mask_2d"])
def test_a_2d_mask_turned_around_is_refused(key):
    """One full row among padded ones leaves a row without tokens; otherwise the labels stand on padding."""
    with pytest.raises(CollateError, match="row 1: got no real token"):
        segments_from_batch(batch_of(LEFT, **{key: (~LEFT.keep).long()}))
    segments = Segments.from_lengths([3, 4], 5, side="left")
    labels = torch.where(segments.keep, 7, -100)
    with pytest.raises(CollateError, match="row 0: got 3 labels, all on padding"):
        segments_from_batch(batch_of(segments, labels=labels, **{key: (~segments.keep).long()}))
    assert segments_from_batch(batch_of(segments, labels=labels, **{key: segments.keep.long()})) == segments


def test_one_row_turned_around_is_found_among_rows_that_are_right():
    """A label on the last token of the others says nothing of it; nor does one where another row is empty."""
    labels = torch.tensor([[1, 2, 3, -100], [-100, -100, 5, 6]])
    keep = torch.tensor([[True, True, True, False], [True, True, False, False]])
    with pytest.raises(CollateError, match="row 1: got 2 labels, all on padding"):
        segments_from_batch({"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": labels, "attention_mask_2d": keep})
    keep[1] = False
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": labels.where(keep, -100), "attention_mask_2d": keep}
    with pytest.raises(CollateError, match="row 1: got no real token"):
        segments_from_batch(batch)


def test_labels_on_padding_alone_are_right_where_segment_ids_say_so():
    segments = Segments.from_lengths([1, 5], side="left")
    labels = torch.full((2, 5), -100)
    labels[0, 3] = 9  # shifted already: it predicts the row's one token, from the padding before it
    keys = {"labels": labels, "attention_mask_2d": segments.keep}
    with pytest.raises(CollateError, match="carry segment_ids"):
        segments_from_batch(batch_of(segments, **keys))
    assert segments_from_batch(batch_of(segments, segment_ids=segments.ids, **keys)) == segments


def test_a_row_that_is_meant_to_be_empty_says_so_in_segment_ids():
    segments = Segments.from_lengths([0, 3])
    with pytest.raises(CollateError, match="segment_ids"):
        segments_from_batch(batch_of(segments, attention_mask_2d=segments.keep))
    both = batch_of(segments, attention_mask_2d=segments.keep, segment_ids=segments.ids)
    assert segments_from_batch(both) == segments


# --- masks that are no tensors (seam A11)


@pytest.mark.parametrize("as_type", [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x.to_sparse(), torch.Tensor.int])
@pytest.mark.parametrize("form", ["2d", "4d"])
def test_every_holder_of_numbers_is_read(as_type, form):
    mask = LEFT.keep if form == "2d" else dense(LEFT)
    mask = mask.to(torch.uint8) if as_type(LEFT.keep) is not None else mask
    assert segments_from_batch(batch_of(LEFT, attention_mask=as_type(mask))) == LEFT


def test_a_block_mask_is_read_by_the_predicate_it_was_made_of():
    segments = Segments.from_lengths([100, 128], side="left")
    assert segments_from_batch(batch_of(segments, attention_mask=block_mask(segments))) == segments
    sliding = block_mask(segments, pattern=Pattern.sliding(9))
    with pytest.raises(AmbiguousMaskError, match=r"sliding\(9\)"):
        segments_from_batch(batch_of(segments, attention_mask=sliding, attention_mask_2d=segments.keep))


@pytest.mark.parametrize(
    "value", [object(), "ones", torch.ones(2, 5, device="meta"), torch.ones(2, 5, dtype=torch.complex64), {1, 0}], ids=repr
)
@pytest.mark.parametrize("key", ["attention_mask", "attention_mask_2d", "segment_ids", "position_ids"])
def test_what_holds_no_numbers_is_an_error_that_names_key_and_type(value, key):
    beside = {} if key.startswith("attention_mask_2d") else {"attention_mask_2d": RIGHT.keep}
    with pytest.raises(CollateError, match=key):
        segments_from_batch(batch_of(RIGHT, **{**beside, key: value}))


def test_a_mapping_is_read_mask_by_mask():
    masks = {"full_attention": dense(LEFT), "linear_attention": LEFT.keep, "other": None}
    assert segments_from_batch(batch_of(LEFT, attention_mask=masks)) == LEFT
    wrong = {**masks, "linear_attention": Segments.from_lengths([4, 5], side="left").keep}
    with pytest.raises(CollateError):
        segments_from_batch(batch_of(LEFT, attention_mask=wrong))


# --- other sources decide what a mask leaves open (seams A13, A14)


def test_packed_sequences_of_equal_length_are_decided_by_what_stands_beside():
    segments = Segments([[1, 1, 2, 2], [1, 1, 2, 2]])
    batch = batch_of(segments, attention_mask=dense(segments))
    with pytest.raises(AmbiguousMaskError):
        segments_from_batch(batch)
    for beside in ({"position_ids": segments.position_ids}, {"segment_ids": segments.ids}):
        assert segments_from_batch({**batch, **beside}) == segments
    one = Segments([[1, 1, 2, 2]])
    flat = batch_of(one, attention_mask=dense(one), cu_seqlens=torch.tensor([0, 2, 4]))
    assert segments_from_batch(flat) == one


def test_padding_as_a_sequence_of_its_own_is_decided_by_a_2d_mask():
    segments = Segments([[1, 1, 1, 0, 0]])
    document = dense(Segments([[1, 1, 1, 2, 2]]))
    with pytest.raises(AmbiguousMaskError, match="Carry attention_mask_2d"):
        segments_from_batch(batch_of(segments, attention_mask=document))
    assert segments_from_batch(batch_of(segments, attention_mask=document, attention_mask_2d=segments.keep)) == segments


@given(strategies.segments(), st.sampled_from([None, "causal"]))
def test_segment_ids_decide_whatever_the_mask_beside_them(segments, pattern):
    """Every packing, hole and single token: with the Segments on the wire no causal mask of theirs is refused."""
    for polarity in ("keep", "masked", "bias"):
        keys = {"segment_ids": segments.ids, "attention_mask": dense(segments, polarity=polarity)}
        assert segments_from_batch(batch_of(segments, **keys), pattern=pattern) == segments


# --- any two sources that differ raise (law 11)


def full_sources(segments):
    """Sources that tell a whole truth, or all but the sequences."""
    yield "segment_ids", segments.ids
    yield "attention_mask_2d", segments.keep
    yield "attention_mask", dense(segments, polarity="masked")
    yield "attention_mask", ~segments.keep
    if segments.shape[0] == 1 and segments.padding_side in ("none", "right"):
        yield "cu_seqlens", segments.cu_seqlens


@given(st.data())
def test_two_sources_that_differ_raise_whichever_they_are(data):
    S = data.draw(st.integers(2, 6))
    rows = st.integers(1, 2**S - 1)
    drawn = [Segments([strategies.ids_of(data.draw(rows), data.draw(rows), S)]) for _ in range(2)]
    first, second = ([*full_sources(segments)] for segments in drawn)
    one, other = data.draw(st.sampled_from(first)), data.draw(st.sampled_from(second))
    if one[0] == other[0]:
        return
    batch = {"input_ids": torch.arange(S)[None], **dict([one, other])}
    try:
        found = segments_from_batch(batch, polarity="masked")
    except CollateError:
        return
    for key, value in (one, other):  # what is found is what each of them says of real tokens
        if key == "segment_ids":
            assert torch.equal(found.ids, value)
        elif value.ndim == 2:
            assert torch.equal(found.keep, value if key == "attention_mask_2d" else ~value)
        elif key == "attention_mask":
            assert torch.equal(dense(found, polarity="masked")[:, 0][found.keep], value[:, 0][found.keep])


# --- cost


@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
@pytest.mark.parametrize("beside", ["nothing", "attention_mask_2d", "segment_ids"])
def test_reading_a_dense_mask_takes_a_block_of_it_beside_the_mask_itself(polarity, beside):
    segments = Segments.from_lengths([700, 1024], side="left")
    batch = batch_of(segments, attention_mask=dense(segments, polarity=polarity))
    batch |= {"attention_mask_2d": segments.keep, "segment_ids": segments.ids} if beside != "nothing" else {}
    if beside == "attention_mask_2d":
        del batch["segment_ids"]
    assert segments_from_batch(batch) == segments
    peak_bytes(lambda: segments_from_batch(batch))  # first calls import and cache
    assert peak_bytes(lambda: segments_from_batch(batch)) <= 1.1 * batch["attention_mask"].nbytes  # itself counted once
