"""The batch reader: whatever a batch carries is read, compared, and believed only where nothing contradicts it."""

from types import SimpleNamespace

import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, Pattern, Segments
from collate_npu.errors import AmbiguousMaskError
from collate_npu.masks import block_mask, dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.tools.describe import describe

LEFT = Segments.from_lengths([3, 5], side="left")


# --- the truth is found in whatever the batch carries


@given(strategies.packed(extra=2).filter(lambda s: all(len(row) < 2 or max(row) > 1 for row in s.lengths)))
def test_positions_that_fall_back_split_the_rows_of_a_2d_mask(segments):
    batch = {"input_ids": torch.ones(segments.shape), "attention_mask_2d": segments.keep}
    assert segments_from_batch(batch | {"position_ids": segments.position_ids}) == segments


def ones(B, S):
    return torch.ones(B, S, dtype=torch.int64)


def restarting(*rows):
    return {"position_ids": torch.tensor(rows)}


TAIL = Segments.from_lengths([[3, 2]], 8)
WHOLE, ROW = Segments.from_lengths([5, 5]), Segments.from_lengths([8])
KEEP = {"attention_mask_2d": LEFT.keep}
LEFT_BIAS = torch.where(LEFT.keep, 0.0, torch.finfo(torch.float32).min)
LEFT_ROWS, ODD = LEFT.keep[:, None, None], Segments.from_lengths([1, 2, 3])
HEADS = torch.cat([dense(LEFT), dense(LEFT, pattern=Pattern.sliding(2))], 1)
ALIBI = dense(LEFT, polarity="bias") + -0.5 * (torch.arange(5)[:, None] - torch.arange(5)).abs()
ALL_TRUE = {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}
ZEROS = {"attention_mask": torch.zeros(2, 5)}
MASKED = {"attention_mask": dense(LEFT, polarity="masked")}
MAPPING = {"full_attention": dense(LEFT), "linear_attention": LEFT.keep, "other": None}
EQUAL = Segments([[1, 1, 2, 2], [1, 1, 2, 2]])
ONE = Segments([[1, 1, 2, 2]])
LONG = Segments.from_lengths([100, 128], side="left")
AXES = torch.stack([torch.tensor([[0, 1, 2, 0, 1]]), *[torch.full((1, 5), 7)] * 3])
PARTED, TWO = Segments([[1, 1, 1, 2, 2]]), {"segment_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 2]])}
SEVEN = {"attention_mask_2d": ones(1, 7)}
SHIFTED = {
    "input_ids": torch.zeros(2, 5, dtype=torch.long),
    "labels": torch.tensor([[-100] * 3 + [0, -100], [0] * 5]),
}  # the first 0 predicts the token of a row of one
AGAIN, FIVE = torch.tensor([[5, 6, 7, 8, 9, 3, 3, 3, 3]]), Segments.from_lengths([5], 9)
STILL, IN_TWO = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 0, 0]]), {"input_ids": AGAIN, "cu_seqlens": torch.tensor([0, 5, 9])}
ALONE = Segments.from_lengths([1, 5], side="left")
NUMBERED = torch.tensor([0, 3, 5, 8])  # padding too
ELSEWHERE = restarting([0, 1, 0, 1, 2, 0, 1])
EARLY, SIX_OF_8 = {"input_ids": torch.arange(1, 9)[None], "cu_seqlens": torch.tensor([0, 6])}, torch.arange(8)[None] < 6
TOLD_TAILS = (
    {"labels": EARLY["input_ids"].where(SIX_OF_8, -100)},
    {"input_ids": EARLY["input_ids"].clamp(max=7)},  # one token again and again
    {"position_ids": torch.arange(8)[None] * SIX_OF_8},
    {"attention_mask_2d": SIX_OF_8},
)
COUNTED = {"position_ids": torch.arange(8)[None]}  # padding of a mask that was lost counts on too


@pytest.mark.parametrize(
    ("shape", "keys", "settings", "told"),
    [
        # keys of another width, offsets of several rows
        ((2, 4), {"inputs_embeds": torch.ones(2, 5, 3)}, {}, "input_ids [2, 4], inputs_embeds [2, 5]"),
        ((2, 4), {"cu_seqlens": torch.tensor([[0, 2, 4], [0, 3, 4]])}, {}, "pass segment_ids"),
        # positions beside a 2D mask, and of several axes
        ((2, 5), {**KEEP, "position_ids": torch.arange(5).expand(2, 5)}, {}, LEFT),
        ((2, 5), {"attention_mask_2d": ones(2, 5), "position_ids": torch.zeros(3, 2, 5)}, {}, WHOLE),
        (
            (2, 5),
            {"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5]), **restarting([9, 0, 1, 0, 1], [0, 1, 2, 3, 4])},
            {},
            Segments([[0, 1, 1, 2, 2], [1] * 5]),
        ),
        ((1, 5), {"attention_mask_2d": ones(1, 5), "position_ids": AXES}, {}, PARTED),
        ((1, 5), {"attention_mask_2d": ones(1, 5), "position_ids": AXES[1:]}, {}, Segments.from_lengths([5])),
        ((1, 5), {"attention_mask_2d": ones(1, 5), "position_ids": AXES[1:], "text_position_ids": AXES[0]}, {}, PARTED),
        ((1, 7), {**ELSEWHERE, **TWO}, {}, "restart at other tokens"),
        ((1, 7), {**ELSEWHERE, "attention_mask": dense(Segments.from_lengths([7])), **SEVEN}, {}, ""),
        # flat rows
        ((1, 8), {"cu_seq_lens_q": torch.tensor([0, 3, 5, 8]), "seq_lens": torch.tensor([3, 2])}, {}, TAIL),
        ((1, 8), {"cu_seq_lens_q": torch.tensor([0, 3, 5])}, {}, TAIL),
        ((1, 8), {"cu_seq_lens_q": NUMBERED, "attention_mask_2d": TAIL.keep}, {}, TAIL),
        ((1, 8), {"cu_seq_lens_q": NUMBERED, "attention_mask_2d": TAIL.keep, "labels": ones(1, 8)}, {}, "8 real"),
        ((2, 5), restarting([0, 1, 2, 0, 1], [0, 1, 2, 3, 4]), {}, Segments.from_lengths([[3, 2], [5]])),
        ((2, 5), restarting([0, 1, 2, 0, 1], [1, 1, 0, 1, 2]), {}, "a mask that was lost"),
        ((1, 8), restarting([0] * 8), {"padding_free": True}, "Nothing says where one sequence"),
        ((1, 8), restarting([3, 4, 5, 3, 4, 5, 6, 7]), {"padding_free": True}, "Nothing says where one sequence"),
        ((1, 8), restarting([*range(1, 9)]), {"padding_free": True}, "Nothing says where one sequence"),
        ((1, 8), COUNTED, {}, "a mask that was lost"),
        ((1, 8), COUNTED, {"padding_free": True}, ROW),
        ((1, 5), {"segment_ids": PARTED.ids, "cu_seqlens": torch.tensor([0, 3, 5])}, {}, PARTED),
        ((1, 5), {"segment_ids": PARTED.ids, "cu_seqlens": torch.tensor([0, 2, 5])}, {}, "disagrees with segment_ids"),
        ((2, 5), KEEP, {"padding_free": True}, "2 rows"),
        # offsets that end early take no token
        *(((1, 8), {**EARLY, **tail}, {}, Segments.from_lengths([6], 8)) for tail in TOLD_TAILS),
        *(((1, 8), {**EARLY, "cu_seqlens": torch.tensor([0, n])}, {}, "no other key says that the tokens") for n in (6, 7)),
        # polarity, declared or not
        ((2, 5), MASKED, {"polarity": "masked"}, LEFT),
        ((2, 5), ALL_TRUE, {"polarity": "keep", "pattern": "bidirectional"}, WHOLE),
        ((2, 5), ZEROS, {"polarity": "bias"}, WHOLE),
        ((2, 5), ZEROS, {"polarity": "masked"}, WHOLE),
        ((2, 5), {"attention_mask": ~LEFT.keep}, {"polarity": "masked"}, LEFT),
        ((2, 5), {"attention_mask": LEFT.keep, **KEEP}, {"polarity": "masked"}, "disagrees with the other mask"),
        ((2, 5), {"attention_mask": LEFT_BIAS}, {"polarity": "bias"}, LEFT),
        ((2, 5), {"attention_mask": LEFT_BIAS}, {}, LEFT),
        ((2, 5), {"attention_mask": LEFT_BIAS, **KEEP}, {}, LEFT),
        (
            (2, 5),
            {"attention_mask": LEFT_BIAS, **restarting([0, 0, 0, 1, 2], [0, 1, 0, 1, 2])},
            {},
            Segments([[0, 0, 1, 1, 1], [1, 1, 2, 2, 2]]),
        ),
        ((2, 5), {**ZEROS, "segment_ids": ones(2, 5) - 1}, {}, Segments(ones(2, 5) - 1)),
        # as many rows as tokens, and one mask for all rows
        ((3, 3), {"attention_mask": ODD.keep.float()}, {}, ODD),
        ((3, 3), {"attention_mask": dense(ODD, polarity="bias")[2, 0]}, {}, "or one square mask"),
        ((2, 5), {"attention_mask": dense(WHOLE)[0, 0]}, {}, WHOLE),
        ((1, 5), {"attention_mask": dense(WHOLE)[:1]}, {}, Segments.from_lengths([5])),
        ((2, 1), {"attention_mask": torch.ones(2, 1, 1, 1).bool()}, {"polarity": "keep"}, Segments(ones(2, 1))),
        ((2, 5), {"attention_mask_2d": LEFT_BIAS}, {}, "It is additive"),
        ((2, 5), {"attention_mask_2d": LEFT.keep[:, None]}, {}, "attention_mask_2d: got bool [2, 1, 5]"),
        # masks by head, with values, by kind of layer, by a predicate
        ((2, 5), {"attention_mask": HEADS, **KEEP}, {}, "different from head to head"),
        ((2, 5), {"attention_mask": ALIBI, **KEEP}, {}, "adds values to scores"),
        ((2, 5), {"attention_mask": dense(LEFT).expand(2, 3, 5, 5)}, {}, LEFT),
        ((2, 5), {"attention_mask": dense(LEFT)[:, 0]}, {}, LEFT),
        ((2, 5), {"attention_mask": LEFT_ROWS.expand(2, 3, 1, 5)}, {"polarity": "keep", "pattern": "causal"}, LEFT),
        ((2, 5), {"attention_mask": MAPPING}, {}, LEFT),
        ((2, 5), {"attention_mask": {**MAPPING, "linear_attention": LEFT.keep.flip(1)}}, {}, "row 0: "),
        ((2, 128), {"attention_mask": block_mask(LONG)}, {}, LONG),
        (
            (2, 128),
            {"attention_mask": block_mask(LONG, pattern=Pattern.sliding(9)), "attention_mask_2d": LONG.keep},
            {},
            "sliding(9)",
        ),
        # what a mask leaves open is decided by what stands beside it
        ((2, 4), {"attention_mask": dense(EQUAL)}, {}, "attends itself"),
        ((2, 4), {"attention_mask": dense(EQUAL), "position_ids": EQUAL.position_ids}, {}, EQUAL),
        ((1, 4), {"attention_mask": dense(ONE), "cu_seqlens": torch.tensor([0, 2, 4])}, {}, ONE),
        ((2, 5), {**ALL_TRUE, "position_ids": torch.arange(5)[None]}, {"pattern": "bidirectional"}, "Both readings"),
        (
            (1, 5),
            {"attention_mask": torch.tensor([[[[1, 1, 1, 1, 0]]]]), "segment_ids": torch.tensor([[1, 1, 2, 2, 0]])},
            {"polarity": "keep", "pattern": "causal"},
            Segments([[1, 1, 2, 2, 0]]),
        ),
        (
            (1, 4),
            {"attention_mask": dense(Segments([[1, 0, 1, 1]]), pattern="bidirectional")},
            {"polarity": "keep"},
            "mask of bidirectional",
        ),
        # a tail of one token again that nobody learns, or that a key counts
        ((1, 9), {**IN_TWO, "labels": AGAIN.masked_fill(AGAIN == 3, -100)}, {"padding_free": True}, FIVE),
        ((1, 9), {"input_ids": AGAIN, "num_padding": 4, "position_ids": STILL}, {"padding_free": True}, FIVE),
        ((1, 9), IN_TWO, {"padding_free": True}, Segments([[1] * 5 + [2] * 4])),
        # a moved label of the first token stands at the padding before it
        ((2, 5), {"attention_mask_2d": ALONE.keep, **SHIFTED}, {}, ALONE),
        ((2, 5), {"attention_mask_2d": ALONE.keep, "segment_ids": ALONE.ids, **SHIFTED}, {}, ALONE),
    ],
)
def test_what_a_batch_tells(shape, keys, settings, told):
    batch = {"input_ids": ones(*shape), **keys}
    if isinstance(told, Segments):
        assert segments_from_batch(batch, **settings) == told
        return
    with pytest.raises(CollateError) as raised:
        segments_from_batch(batch, **settings)
    assert told in str(raised.value)


def test_tokens_may_be_embeddings_or_megatrons():
    for key, shape in (("inputs_embeds", (2, 5, 3)), ("tokens", (2, 5))):
        assert segments_from_batch({key: torch.zeros(shape), "attention_mask_2d": LEFT.keep}) == LEFT
        assert segments_from_batch({key: torch.zeros(shape), "attention_mask": dense(WHOLE)}) == WHOLE
    with pytest.raises(CollateError, match="keys labels"):
        segments_from_batch({"labels": torch.zeros(2, 5)})


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


# --- 2D masks: additive, declared, turned around (seams A4, A5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_turned_around_is_seen_by_its_tokens_where_there_are_no_labels(side):
    real = Segments.from_lengths([2, 3, 5], width=5, side=side)
    batch = {"input_ids": torch.arange(15).view(3, 5).masked_fill(~real.keep, 77)}
    assert segments_from_batch({**batch, "attention_mask": real.keep}) == real
    turned = {"input_ids": batch["input_ids"][:2], "attention_mask": ~real.keep[:2]}
    with pytest.raises(CollateError, match="row 0: got 3 real tokens, all of them 77"):
        segments_from_batch(turned)
    assert segments_from_batch(turned, polarity="masked").keep.equal(real.keep[:2])  # the remedy


def test_one_row_turned_around_is_found_among_rows_that_are_right():
    labels = torch.tensor([[1, 2, 3, -100], [-100, -100, 5, 6]])
    keep = torch.tensor([[True, True, True, False], [True, True, False, False]])
    for key, told in (("attention_mask", labels), ("attention_mask_2d", labels.numpy())):
        with pytest.raises(
            CollateError, match=r"1 bad row\.\s+row 1: got 2 learned at padding.*\s.*\s.*If the mask is inverted"
        ):
            segments_from_batch({"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": told, key: keep})
    keep[1] = False
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": labels.where(keep, -100), "attention_mask_2d": keep}
    with pytest.raises(CollateError, match="row 1: got no real token"):
        segments_from_batch(batch)
    twice = batch | {"attention_mask": dense(Segments.from_keep(keep), polarity="masked")}
    assert segments_from_batch(twice).empty_rows == (1,)  # two masks say so
    with pytest.raises(CollateError, match="row 1: got 2 learned at padding, the first at place 2"):
        segments_from_batch(twice | {"labels": labels})


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


# --- what a dense mask or positions alone leave open


TRIANGLE = dense(Segments.from_lengths([6, 6]))
LOOKS_PADDED = torch.tensor([[0, 0, 9, 1, 2, 3], [4, 5, 6, 7, 8, 1]])


@pytest.mark.parametrize("turn", [False, True], ids=["begins", "ends"])
@pytest.mark.parametrize("labels", [None, "ids", "ignored", "classes"])
def test_a_triangle_over_rows_that_look_padded_is_refused_unless_they_are_learned(turn, labels):
    """By tokens that repeat at an end without a label; the id of padding is asked nowhere."""
    ids = LOOKS_PADDED.flip(1) if turn else LOOKS_PADDED
    batch = {"input_ids": ids, "attention_mask": TRIANGLE}
    told = {"ids": ids.clone(), "ignored": ids.masked_fill(ids == 0, -100), "classes": torch.tensor([1, 0])}
    batch |= {} if labels is None else {"labels": told[labels]}
    if labels == "ids":
        assert segments_from_batch(batch) == Segments.from_lengths([6, 6])
    else:
        with pytest.raises(AmbiguousMaskError, match=r"row 0: got 2 times the token 0 where it (begin|end)s"):
            segments_from_batch(batch)
    real = Segments.from_lengths([6, 6])
    assert segments_from_batch({**batch, "attention_mask_2d": real.keep}) == real
    batch |= {"labels": told["ignored"]} if labels == "ids" else {}
    told = Segments.from_lengths([4, 6], side="right" if turn else "left")
    assert segments_from_batch({**batch, "attention_mask": None, "attention_mask_2d": told.keep}) == told


def test_lengths_of_other_stacks_are_read():
    """NeMo Automodel fills seq_lens with -1000; NeMo RL puts input_lengths beside a mask of ones, and pads right."""
    ids = torch.arange(10).view(2, 5)
    lengths = torch.tensor([[3, 2, -1000], [5, -1000, -1000]])
    assert segments_from_batch({"input_ids": ids, "seq_lens": lengths}) == Segments.from_lengths([[3, 2], [5]])
    ones = {"input_ids": ids, "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    for told in ([3, 5], [5, 5], [1, 2]):
        for batch in (ones, {"input_ids": ids}):
            assert segments_from_batch(batch | {"input_lengths": torch.tensor(told)}) == Segments.from_lengths(told, 5)
    left = Segments.from_lengths([3, 5], side="left")  # a mask that says more is believed
    assert segments_from_batch({**ones, "attention_mask": left.keep, "input_lengths": torch.tensor([3, 5])}) == left
    with pytest.raises(CollateError, match="input_lengths: 1 bad row"):
        segments_from_batch({**ones, "attention_mask": left.keep, "input_lengths": torch.tensor([4, 5])})


def test_lengths_with_their_places_say_where_padding_stands():
    """NeMo Automodel 0.7.0 datasets/utils.py: padding behind each sequence of a row, counted beside the lengths."""
    ids = torch.arange(12).view(2, 6)
    lengths, places = torch.tensor([[[3, 2], [4, -1000]], [[4, 2], [6, -1000]]])
    batch = {"input_ids": ids, "seq_lens": lengths, "seq_lens_padded": places}
    expected = Segments([[1, 1, 1, 0, 2, 2], [1, 1, 1, 1, 0, 0]])
    assert segments_from_batch(batch | {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1], [*range(6)]])}) == expected
    for wrong in (places - 2, places + 1, places[:, :1], places[:1]):
        with pytest.raises(CollateError, match="seq_lens_padded"):
            segments_from_batch(batch | {"seq_lens_padded": wrong})
    given = {"input_ids": ids, "seq_lens": lengths, "segment_ids": expected.ids}  # the remedy
    assert segments_from_batch(given) == expected


# --- offsets, real and physical, lengths and tails of a flat row


IDS = torch.arange(8)[None]
APART = Segments([[1, 1, 1, 0, 2, 2, 0, 0]])


def find(padding_free=False, **keys):
    held = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in keys.items()}
    return segments_from_batch({"input_ids": IDS, **held}, padding_free=padding_free)


@pytest.mark.parametrize(
    "keys",
    [
        {"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8]},
        {"cu_seqlens_q": [0, 3, 5], "cu_seqlens_q_padded": [0, 4, 8], "cu_seqlens_kv_padded": [0, 4, 8]},
        {"cu_seq_lens_q": [0, 4, 8], "cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8], "cu_seq_lens_k": [0, 4, 8]},
        {"cu_seq_lens_q": [0, 4, 8], "seq_lens": [3, 2]},
        {
            "packed_seq_params": SimpleNamespace(
                cu_seqlens_q=torch.tensor([0, 3, 5]), cu_seqlens_q_padded=torch.tensor([0, 4, 8])
            )
        },
        {"cu_seqlens_padded": [0, 4, 4, 8], "cu_seqlens": [0, 3, 3, 5]},
        {"cu_seqlens": [0, 4, 8], "cu_seqlens_unpadded": [0, 3, 5]},
        {"flash_attn_kwargs": {"cu_seqlens_q": [0, 3, 5], "cu_seqlens_q_padded": [0, 4, 8]}},
    ],
    ids=lambda keys: "+".join(keys),
)
def test_sequences_stand_where_the_physical_offsets_say_and_are_as_long_as_the_real_ones(keys):
    assert find(**keys) == APART


@pytest.mark.parametrize(
    "keys",
    [
        {"cu_seqlens": [0, 3, 5], "cu_seq_lens_q": [0, 4, 5]},
        {"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 2, 8]},
        {"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8], "cu_seqlens_q": [0, 2, 5]},
        {"cu_seqlens": [0, 3, 5], "seq_lens": [3, 3]},
        {"cu_seqlens": [0, 3, 5], "seq_lens": [5]},
        {"cu_seqlens": [0, 3, 5], "seq_lens": [2]},
        {"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8], "seq_lens": [4, 4]},
        {"cu_seqlens": [0, 1], "_packed_seq_ids": [[0]], "input_ids": [[7]]},
        {"cu_seqlens": [0, 3, 8], "num_padding": 8},  # nothing is left
        {"cu_seqlens": [0, 3, 9]},
        {"cu_seq_lens_q": [0, 3, 5, 8], "num_padding": 2},  # a tail begins where a sequence ends
        {"cu_seq_lens_q": [0, 3, 5, 8], "num_padding": 3, "attention_mask_2d": [[1] * 8]},
        {"seq_lens": [3, 2]},  # whose padding may stand anywhere
        {"cu_seqlens": [0, 3, 8], "seq_idx": [[0, 0, 1, 1, 1, 1, 1, 1]]},
        {"cu_seqlens": [0, 3, 8], "seq_idx": [[0, 0, 0, 1]]},
        {"cu_seqlens": [0, 3, 8], "attention_mask_2d": [[1, 1, 1, 0, 1, 1, 1, 1]]},  # padding where a sequence begins
        {"cu_seqlens": [0, 3, 8], "segment_ids": [[1, 1, 1, 1, 2, 2, 2, 2]]},
        {"cu_seq_lens_q": [0, 3, 6], "attention_mask": [[1] * 8]},
    ],
    ids=str,
)
def test_numbers_that_differ_raise(keys):
    with pytest.raises(CollateError):
        find(**keys)


def test_lengths_of_padded_rows_are_held_against_their_mask():
    keep = torch.tensor([[1, 1, 1], [0, 0, 1]])
    batch = {"input_ids": torch.ones(2, 3), "attention_mask_2d": keep}
    for right in ([3, 1], torch.tensor([3, 1]), [[3], [1]]):
        assert segments_from_batch({**batch, "seq_lens": right}) == Segments.from_keep(keep)
    wrongs = (([[2, 1], [1]], "row 0"), ([3, 2], "row 1"), ([3], "1 entries"))
    for wrong, said in wrongs:  # the first part a row that the mask leaves whole
        with pytest.raises(CollateError, match=said):
            segments_from_batch({**batch, "seq_lens": wrong})
    packed = Segments([[1, 1, 2], [0, 0, 1]])  # of such a row one length may count all
    assert segments_from_batch({**batch, "segment_ids": packed.ids, "seq_lens": [3, 1]}) == packed
    assert segments_from_batch({"input_ids": torch.ones(2, 3), "seq_lens": [3, 3]}) == Segments.from_lengths([3, 3])
    with pytest.raises(CollateError):
        segments_from_batch({"input_ids": torch.ones(2, 3), "seq_lens": [3, 1]})  # on which side?


UNREAD = [[-100, 1, 2, -100, 4, -100, -100, -100]]
THREE = {"cu_seqlens": [0, 3, 5, 8], "labels": UNREAD}


@pytest.mark.parametrize(
    ("positions", "keys", "lengths"),
    [
        ([0, 1, 2, 0, 1, 1, 1, 1], {"cu_seqlens": [0, 3, 8], "labels": UNREAD}, [3, 2]),
        ([0, 1, 2, 0, 1, 0, 0, 0], {"cu_seqlens": [0, 3, 8], "labels": UNREAD}, [3, 2]),
        ([0, 1, 2, 0, 1, 0, 1, 2], {"cu_seqlens": [0, 3, 8], "labels": UNREAD}, [3, 2]),
        ([0, 1, 2, 0, 1, 9, 4, 7], {"cu_seqlens": [0, 3, 8], "labels": UNREAD}, [3, 5]),
        ([0, 1, 2, 0, 1, 1, 1, 1], {"cu_seqlens": [0, 3, 8], "labels": [[-100, 1, 2, -100, 4, 0, 0, 0]]}, [3, 5]),
        ([0, 1, 2, 0, 1, 1, 1, 1], {"cu_seqlens": [0, 3, 8], "loss_mask": [[0, 1, 1, 0, 1, 0, 0, 0]]}, [3, 2]),
        ([0, 1, 2, 0, 1, 1, 1, 1], {"cu_seqlens": [0, 3, 8], "loss_mask": [[1] * 8]}, [3, 5]),
        # a tail without a number is what repeats
        ([0, 1, 2, 0, 1, 0, 0, 0], {**THREE, "input_ids": [[*range(5), 9, 7, 7]]}, [3, 2, 1]),
        ([0, 1, 2, 0, 1, 0, 0, 0], {**THREE, "input_ids": [[*range(5), 7, 7, 7]]}, [3, 2]),
        ([0, 1, 2, 0, 1, 2, 3, 0], {**THREE, "cu_seqlens": [0, 3, 7, 8], "input_ids": [[*range(5), 7, 7, 7]]}, [3, 4, 1]),
        ([0] * 8, {"cu_seqlens": [0, 8]}, [8]),
        ([0, 1, 2, 3, 4, 5, 0, 0], {"cu_seqlens": [0, 6, 8], "input_ids": [[1, 2, 3, 4, 5, 6, 7, 7]]}, [6]),
        ([0], {"cu_seqlens": [0, 1], "input_ids": [[7]]}, [1]),
        ([0, 0, 0, 1], {"input_ids": [[7, 2, 7, 2]], "loss_mask": [[1, 0, 0, 0]]}, [1, 1, 2]),
        ([0, 1, 0, 0], {"input_ids": [[2, 7, 7, 7]], "labels": [[3, 0, -100, -100]]}, [2, 1, 1]),  # pads, or samples
        ([0, 0, 0], {"input_ids": [[7] * 3], "labels": [[-100] * 3], "seq_lens": [1, 1, 1, 0]}, [1, 1, 1]),
        ([*range(8)], {"segment_ids": [[1] * 3 + [2] * 5]}, [3, 5]),  # positions that tell nothing
        ([0, 1, 2, 3, 4, 0, 1, 2], {**THREE, "cu_seqlens": [0, 5, 8], "input_ids": [[*range(5), 7, 7, 7]]}, [5]),
        ([*range(8)], {"cu_seqlens": [0, 3, 8], "_packed_seq_ids": [[1, 1, 1, 2, 2, 0, 0, 0]]}, [3, 2]),
        ([*range(8)], {"packed_seq_lengths": [3, 2]}, [3, 2]),
    ],
)
def test_where_a_row_ends_by_its_positions_and_what_nobody_learns(positions, keys, lengths):
    assert find(position_ids=[positions], **keys) == Segments.from_lengths([lengths], len(positions))


@pytest.mark.parametrize(
    ("labels", "real"),
    [(torch.zeros(2, 4), True), (torch.full((2, 4), -100), False), (torch.zeros(2), False), (None, False)],
)
def test_a_token_alone_at_position_0_is_real_where_it_is_learned(labels, real):
    told = Segments([[1, 2, 2, 2]] * 2)
    batch = {"input_ids": torch.arange(8).view(2, 4), "attention_mask": dense(told), "position_ids": told.position_ids}
    batch |= {} if labels is None else {"labels": labels.long()}
    if real:
        assert segments_from_batch(batch) == told
        return
    with pytest.raises(AmbiguousMaskError):
        segments_from_batch(batch)


@pytest.mark.parametrize("count", [None, 16])
@pytest.mark.parametrize("tokens", [[1, 7, 7], [7, 7], [5, 6, 7, 7, 7]])
def test_sequences_of_one_token_that_lengths_count_are_no_tail(tokens, count):
    collator = strategies.flat_collator(7, consumer="megatron", max_sequences=count)
    batch = collator([{"input_ids": [t], "labels": [t]} for t in tokens])
    assert segments_from_batch(batch).lengths == ((1,) * len(tokens),)


# --- hazards: what is legal in a batch and goes wrong in silence somewhere

LEFT_23, RIGHT_23, WHOLE_33 = Segments.from_lengths([2, 3], 3, "left"), *map(Segments.from_lengths, ([2, 3], [3, 3]))
SIX, FULL, BIAS = torch.arange(1, 7).view(2, 3), dense(LEFT_23), dense(LEFT_23, polarity="bias")
KEPT, OWN = {"attention_mask_2d": LEFT_23.keep}, {"attention_mask": LEFT_23.keep}
RIGHT_KEPT = {"attention_mask_2d": RIGHT_23.keep}
INFINITE = torch.where(FULL, 0.0, -torch.inf)
ALONE_4D, NINES = "D and alone", torch.full((2, 3), 9)


@pytest.mark.parametrize(
    ("segments", "keys", "words"),
    [
        *((LEFT_23, {"attention_mask": mask}, ALONE_4D) for mask in (FULL, FULL[:, 0])),
        (LEFT_23, {"attention_mask": FULL, **KEPT}, ""),
        (WHOLE_33, {"attention_mask": dense(WHOLE_33)}, ""),
        (LEFT_23, OWN, ""),
        (LEFT_23, {"attention_mask": FULL.float(), **KEPT}, "holds 0 and 1 alone"),
        (LEFT_23, {"attention_mask": FULL.long(), **KEPT}, "int64 and 4D, 1 = attends"),
        (LEFT_23, {"attention_mask": (~FULL).long(), **KEPT}, "int64 and 4D, 1 = blocked"),
        (LEFT_23, {"attention_mask": BIAS, **KEPT}, ""),
        (LEFT_23, {"attention_mask": INFINITE, **KEPT}, "-inf throughout"),
        (RIGHT_23, {"attention_mask": torch.where(dense(RIGHT_23), 0.0, -torch.inf), **RIGHT_KEPT}, ""),
        (LEFT_23, KEPT, "there is no attention_mask"),
        (RIGHT_23, RIGHT_KEPT, ""),
        (LEFT_23, {"labels": SIX.masked_fill(~LEFT_23.keep, -100), **OWN}, ""),
        (LEFT_23, {"labels": torch.tensor([1, 0]), **OWN}, ""),  # targets of a classifier
        (LEFT_23, {"input_ids": NINES, **OWN}, "padding holds the id 9, as do 5 of 5 real tokens"),
        (LEFT_23, {"input_ids": NINES, "attention_mask": FULL.char()}, "D and alone + int8 and 4D, 1 = attends + the id 9"),
    ],
)
def test_what_goes_wrong_is_named_and_nothing_else(segments, keys, words):
    lines = describe({"input_ids": SIX.masked_fill(~segments.keep, 0), **keys}).splitlines()
    found = [line for line in lines if line.startswith("hazard: ")]
    told = words.split(" + ") if words else []
    assert [said in line for said, line in zip(told, found, strict=True)] == [True] * len(told)
