"""Offsets: real and physical ones kept apart, and every number of a flat row held against the others."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, ContextParallel, PaddingCollator, Segments, last_token
from collate_npu.collate import Layout
from collate_npu.errors import AmbiguousMaskError
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.parallel import pad_documents, split_batch

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
        {"cu_seqlens": [3, 5]},
        {"cu_seqlens": [0, 5, 3]},
        {"cu_seqlens": [0, 3, 8], "seq_idx": [[0, 0, 1, 1, 1, 1, 1, 1]]},
        {"cu_seqlens": [0, 3, 8], "seq_idx": [[0, 0, 0, 1]]},
        {"cu_seqlens": [0, 3, 8], "attention_mask_2d": [[1, 1, 0, 1, 1, 1, 1, 1]]},
        {"cu_seqlens": [0, 3, 8], "segment_ids": [[1, 1, 1, 1, 2, 2, 2, 2]]},
        {"cu_seq_lens_q": [0, 3, 6], "attention_mask": [[1] * 8]},
        {"attention_mask_2d": [[1, 1, 1, 1, 1, 1, 0, 0]], "seq_lens": [5]},
        {"attention_mask_2d": [[1, 1, 1, 1, 1, 1, 0, 0]], "seq_lens": [[5]]},
    ],
    ids=str,
)
def test_numbers_that_differ_raise(keys):
    with pytest.raises(CollateError):
        find(**keys)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["zigzag", "contiguous"]),
)
def test_padded_documents_come_back_through_the_door(lengths, size, layout):
    cp = ContextParallel(size, 0, layout=layout).for_documents()
    batch = PaddingCollator(pad_token_id=0, padding_free=True)([{"input_ids": list(range(1, n + 1))} for n in lengths])
    padded, segments = pad_documents(batch, cp)
    assert segments_from_batch(padded) == segments
    assert last_token(padded["input_ids"], segments).tolist() == lengths
    assert split_batch(padded, cp)["input_ids"].shape[1] * size == segments.shape[1]


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


TAILS = {
    "VeOmni": {"cu_seq_lens_q": [0, 3, 5, 8], "position_ids": [0, 1, 2, 0, 1, 0, 0, 0], "tail_padding_length": 3},
    "VeOmni, counted by its linear attention": {"linear_attn_cu_seq_lens_q": [0, 3, 5, 8], "tail_padding_length": 3},
    "xtuner, in chunks": {"cu_seq_lens_q": [0, 3, 5, 7, 8], "position_ids": [0, 1, 2, 0, 1, 0, 1, 0], "num_padding": 3},
    "prime-rl": {"seq_lens": [3, 5], "position_ids": [0, 1, 2, 0, 1, 0, 1, 2]},
    "the last's, still": {"cu_seq_lens_q": [0, 3, 8], "position_ids": [0, 1, 2, 0, 1, 1, 1, 1]},
    "the last's, zeros": {"cu_seq_lens_q": [0, 3, 8], "position_ids": [0, 1, 2, 0, 1, 0, 0, 0]},
    "unsloth": {"packed_seq_lengths": [3, 2], "position_ids": [0, 1, 2, 0, 1, 0, 0, 0]},
    "torchtitan": {"position_ids": [0, 1, 2, 0, 1, 0, 1, 2]},
    "NeMo Automodel": {"cu_seqlens": [0, 3, 5, 8], "_packed_seq_ids": [[1, 1, 1, 2, 2, 0, 0, 0]]},
}


@pytest.mark.parametrize("ones", [False, True], ids=["no mask", "a mask of ones"])
@pytest.mark.parametrize("who", TAILS)
def test_a_tail_that_numbers_count_is_no_sequence(who, ones):
    """Who writes each: tests/producers/from_packers.py."""
    told = Segments.from_lengths([[3, 2]], width=8)
    batch = {key: [value] if key == "position_ids" else value for key, value in TAILS[who].items()}
    batch |= {"labels": [[-100, 1, 2, -100, 4, -100, -100, -100]], "input_ids": [[10, 11, 12, 13, 14, 12, 12, 12]]}
    batch |= {"attention_mask": [[1] * 8]} if ones else {}
    batch = {key: torch.tensor(value) for key, value in batch.items()}
    if ones and not {"cu_seq_lens_q", "linear_attn_cu_seq_lens_q"} & batch.keys():  # of such rows the mask is the truth
        return
    assert segments_from_batch(batch, padding_free=not ones) == told
    learned = batch | {"labels": batch["input_ids"]}
    if who in ("the last's, zeros", "prime-rl"):
        with pytest.raises(CollateError, match="position_ids"):  # then it is text, and two sources differ
            segments_from_batch(learned, padding_free=not ones)


@pytest.mark.parametrize(
    ("ids", "positions", "last", "lengths"),
    [
        ([9, 12, 12], [0, 0, 0], 5, [3, 2, 1]),  # one is real, and the tail is its
        ([12, 12, 12], [0, 0, 0], 5, [3, 2]),
        (None, [0, 0, 0], 5, [3, 2]),
        ([9, 9, 9], [2, 3, 0], 7, [3, 4, 1]),  # once is no repetition
    ],
)
def test_a_tail_without_a_number_is_what_repeats(ids, positions, last, lengths):
    batch = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, *positions]])}
    batch |= {"cu_seq_lens_q": torch.tensor([0, 3, last, 8])}
    batch |= {"labels": torch.tensor([[-100, 1, 2, -100, 4, -100, -100, -100]])}
    tokens = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, *ids]])} if ids else {"inputs_embeds": torch.zeros(1, 8, 2)}
    assert segments_from_batch(batch | tokens) == Segments.from_lengths([lengths], width=8)


UNREAD = [[-100, 1, 2, -100, 4, -100, -100, -100]]


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
        ([0] * 8, {"cu_seqlens": [0, 8]}, [8]),
        ([0, 1, 2, 3, 4, 5, 0, 0], {"cu_seqlens": [0, 6, 8], "input_ids": [[1, 2, 3, 4, 5, 6, 7, 7]]}, [6]),
        ([0], {"cu_seqlens": [0, 1], "input_ids": [[7]]}, [1]),
        ([0, 0, 0, 1], {"input_ids": [[7, 2, 7, 2]], "loss_mask": [[1, 0, 0, 0]]}, [1, 1, 2]),
        ([0, 1, 0, 0], {"input_ids": [[2, 7, 7, 7]], "labels": [[3, 0, -100, -100]]}, [2, 1, 1]),  # pads, or samples
        ([0, 0, 0], {"input_ids": [[7] * 3], "labels": [[-100] * 3], "seq_lens": [1, 1, 1, 0]}, [1, 1, 1]),
        ([*range(8)], {"segment_ids": [[1] * 3 + [2] * 5]}, [3, 5]),  # positions that tell nothing
    ],
)
def test_where_a_row_ends_by_its_positions_and_what_nobody_learns(positions, keys, lengths):
    assert find(position_ids=[positions], **keys) == Segments.from_lengths([lengths], len(positions))


def test_a_dense_mask_of_ones_says_that_all_is_real():
    batch = {"input_ids": IDS, "labels": IDS.where(IDS < 5, -100), "attention_mask": torch.ones(1, 8, 8, dtype=torch.bool)}
    batch |= {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 4, 4, 4]]), "cu_seqlens": torch.tensor([0, 8])}
    assert segments_from_batch(batch, polarity="keep", pattern="bidirectional") == Segments.from_lengths([8])


def test_two_tokens_at_position_0_tell_nothing():
    with pytest.raises(AmbiguousMaskError):
        find(padding_free=True, input_ids=[[1, 2]], position_ids=[[0, 0]])


@pytest.mark.parametrize(
    ("ids", "positions"),
    [
        ([[1, 1, 2, 2, 2]] * 2, [[0, 1, 0, 1, 2], [5, 6, 7, 8, 9]]),  # the mask alone parts the second row
        ([[0, 0, 1, 1, 2, 2, 2]], [[1, 1, 0, 1, 2, 3, 4]]),
        ([[1, 1, 0, 2, 2]], [[0, 1, 9, 0, 1]]),  # the mask leaves it open
    ],
)
def test_a_dense_mask_and_positions_part_rows_together(ids, positions):
    told = Segments(ids)
    batch = {"input_ids": told.ids, "attention_mask_2d": told.keep, "attention_mask": dense(told)}
    assert segments_from_batch({**batch, "position_ids": torch.tensor(positions)}) == told


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


@pytest.mark.parametrize("key", ["num_padding", "tail_padding_length"])
def test_a_tail_begins_where_a_sequence_ends(key):
    """xtuner's SequenceContext.cat adds up the tails of contexts, which then stand inside the row."""
    with pytest.raises(CollateError, match=f"{key}: got 2. The tail begins where a sequence ends"):
        find(cu_seq_lens_q=[0, 3, 5, 8], **{key: 2})


def test_unsloths_lengths_are_of_the_row_from_its_start():
    assert find(packed_seq_lengths=[3, 2]) == Segments.from_lengths([[3, 2]], width=8)
    with pytest.raises(CollateError):
        find(seq_lens=[3, 2])  # who says so with this name may have padding anywhere


def test_lengths_beside_places_may_fill_some_of_them():
    assert find(cu_seqlens=[0, 4, 8], seq_lens=[4, 2]) == Segments([[1, 1, 1, 1, 2, 2, 0, 0]])


@pytest.mark.parametrize("count", [None, 16])
@pytest.mark.parametrize("tokens", [[1, 7, 7], [7, 7], [5, 6, 7, 7, 7]])
def test_sequences_of_one_token_that_lengths_count_are_no_tail(tokens, count):
    collator = PaddingCollator(pad_token_id=7, padding_free=True, consumer="megatron", layout=Layout(max_sequences=count))
    batch = collator([{"input_ids": [t], "labels": [t]} for t in tokens])
    assert segments_from_batch(batch).lengths == ((1,) * len(tokens),)
