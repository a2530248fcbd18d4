"""Split: each key by its rule, the whole back from the shards, and nothing guessed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layout import LAYOUTS, places

from collate_npu import AmbiguousMaskError, CollateError, Segments, UnsupportedFormError, dense
from collate_npu.keys import KEYS, SAMPLE, Key
from collate_npu.outputs import shift_labels
from collate_npu.parallel import (
    ContextParallel,
    cu_seqlens_of,
    join_shards,
    query_rows,
    split_batch,
    split_tensor,
    token_rows,
)


def full_batch(B: int, S: int, offsets: list[int]) -> dict:
    """Every kind of key there is, per-token values all different."""
    tokens = torch.arange(B * S).view(B, S)
    return {
        "input_ids": tokens,
        "labels": tokens + 1000,
        "shift_labels": tokens + 2000,
        "loss_scale": tokens.float() / 7,
        "position_ids": torch.arange(S).expand(B, S),
        "attention_mask_2d": tokens % 3 > 0,
        "attention_mask": None,
        "inputs_embeds": torch.stack([tokens, -tokens], -1).bfloat16(),
        "routed_experts": tokens[..., None, None].expand(B, S, 2, 3).to(torch.uint8),
        "my_reward_per_token": tokens.double(),
        "pixel_values": torch.rand(S, 6),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32),
        "max_length_q": 5,
        "texts": ["a"] * B,
        "temperature": torch.tensor(0.7),
        "sample_weight": torch.rand(B) if B != S else None,
    }


PER_TOKEN = (
    "input_ids",
    "labels",
    "shift_labels",
    "loss_scale",
    "position_ids",
    "attention_mask_2d",
    "inputs_embeds",
    "routed_experts",
    "my_reward_per_token",
)


@given(places(), st.integers(1, 3))
def test_split_then_join_is_the_identity_for_every_key(case, B):
    cp, S, offsets = case
    batch = full_batch(1 if cp.documents else B, S, offsets if cp.documents else [0, S])
    shards = [split_batch(batch, cp.with_rank(rank)) for rank in range(cp.size)]
    for key, whole in batch.items():
        parts = [shard[key] for shard in shards]
        if key in PER_TOKEN:
            assert torch.equal(join_shards(parts, cp, cu_seqlens=offsets), whole), key
        else:
            assert all(part is whole for part in parts), key
    assert all(list(shard) == list(batch) for shard in shards)


@given(places(), st.integers(1, 2))
def test_each_rank_gets_its_own_tokens(case, B):
    cp, S, offsets = case
    batch = full_batch(1 if cp.documents else B, S, offsets if cp.documents else [0, S])
    rows = token_rows(S, cp, offsets)
    shard = split_batch(batch, cp)
    for key in PER_TOKEN:
        assert torch.equal(shard[key], batch[key].index_select(1, rows)), key


@given(places(), st.integers(2, 4))
def test_mrope_positions_are_cut_along_their_last_dimension(case, axes):
    cp, S, offsets = case
    positions = torch.arange(axes * S).view(axes, 1, S)
    shard = split_batch(
        {"input_ids": torch.zeros(1, S), "position_ids": positions}, cp, cu_seqlens=offsets if cp.documents else None
    )
    assert torch.equal(shard["position_ids"], positions[..., token_rows(S, cp, offsets)])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_shard_shares_no_memory_with_the_batch(layout):
    """Also where one run is cut, or the batch's positions are expanded: writing to the shard changes nothing else."""
    batch = {"input_ids": torch.zeros(4, 8), "position_ids": torch.arange(8).expand(4, 8)}
    shard = split_batch(batch, ContextParallel(2, 0, layout=layout))
    for key, value in shard.items():
        value[0] = 99
        assert (batch[key] < 99).all()
        assert (value[1:] < 99).all()


def test_a_split_batch_shares_no_dict_with_the_batch():
    batch = {"input_ids": torch.zeros(1, 4)}
    split_batch(batch, ContextParallel(1, 0))["new"] = 1
    assert list(batch) == ["input_ids"]


# --- the 2D mask and its scope --------------------------------------------------------------------------------------------


def test_the_2d_mask_is_local_or_global_and_nothing_else_changes():
    segments = Segments.from_lengths([3, 8], side="left")
    batch = {"input_ids": torch.arange(16).view(2, 8), "attention_mask_2d": segments.keep, "seq_idx": segments.ids - 1}
    local, whole = (split_batch(batch, ContextParallel(2, 1, mask_2d=scope)) for scope in ("local", "global"))
    assert torch.equal(local["attention_mask_2d"], segments.keep[:, 2:6])
    assert torch.equal(whole["attention_mask_2d"], segments.keep)
    assert local["seq_idx"].shape == (2, 4)
    assert whole["seq_idx"].shape == (2, 8)
    assert torch.equal(local["input_ids"], whole["input_ids"])


def test_scope_changes_what_a_sequence_gathering_layer_receives():
    """A layer that gathers the row (Megatron's GatedDeltaNet) multiplies all S tokens; the local mask tells it of S / cp."""
    segments = Segments.from_lengths([5], width=8, side="left")
    hidden = torch.arange(1.0, 9.0).view(1, 8, 1)
    cps = {scope: [ContextParallel(2, r, mask_2d=scope) for r in (0, 1)] for scope in ("local", "global")}
    gathered = join_shards([split_tensor(hidden, cp) for cp in cps["global"]], cps["global"][0])
    for cp in cps["global"]:
        mask_2d = split_batch({"input_ids": hidden[..., 0], "attention_mask_2d": segments.keep}, cp)["attention_mask_2d"]
        assert (gathered * mask_2d[..., None])[0, :, 0].tolist() == [0, 0, 0, 4, 5, 6, 7, 8]
    for cp in cps["local"]:
        mask_2d = split_batch({"input_ids": hidden[..., 0], "attention_mask_2d": segments.keep}, cp)["attention_mask_2d"]
        assert mask_2d.shape == (1, 4)  # where shapes happen to broadcast, the row would be masked by another rank's tokens
        assert not torch.equal(mask_2d, segments.keep[:, :4])


# --- dense masks ----------------------------------------------------------------------------------------------------------


@st.composite
def ragged(draw, cp, S):
    side = draw(st.sampled_from(["left", "right"]))
    B = 1 if cp.documents else draw(st.integers(1, 3))
    return Segments.from_lengths([draw(st.integers(0, S)) for _ in range(B)], width=S, side=side)


@given(places(), st.data())
def test_rows_of_a_dense_mask_are_the_rows_built_alone(case, data):
    cp, S, offsets = case
    if S < 2:
        return
    segments = data.draw(ragged(cp, S))
    whole = dense(segments, polarity="masked")
    shard = split_batch(
        {"input_ids": torch.zeros(segments.shape), "attention_mask": whole}, cp, cu_seqlens=offsets if cp.documents else None
    )
    assert torch.equal(shard["attention_mask"], dense(segments, polarity="masked", rows=query_rows(S, cp, offsets)))
    assert shard["attention_mask"].shape[-1] == S


def test_deriving_the_2d_mask_after_the_split_is_wrong_and_before_it_is_right():
    """ms-swift derives `(masked == 0).sum(dim=(1, 2)) > 0`; on a shard's rows that is wrong in width, order and value."""
    segments = Segments.from_lengths([8, 3], width=8, side="left")
    masked = dense(segments, polarity="masked")
    derive = lambda m: (m == 0).sum(dim=(1, 2)) > 0  # noqa: E731
    assert torch.equal(derive(masked), segments.keep)
    for rank in (0, 1):
        cp = ContextParallel(2, rank)
        batch = {"input_ids": torch.zeros(2, 8), "attention_mask": masked, "attention_mask_2d": derive(masked)}
        shard = split_batch(batch, cp)
        assert torch.equal(shard["attention_mask_2d"], segments.keep[:, token_rows(8, cp)])
        late = derive(shard["attention_mask"])
        assert late.shape == (2, 8)
        if rank == 1:  # keys 6 and 7 stand after its last row, so it takes two real tokens for padding
            assert late[0].tolist() == [True] * 6 + [False] * 2
            assert not torch.equal(late, segments.keep)


def test_masks_of_other_shapes():
    S = 8
    cp = ContextParallel(2, 0)
    square = torch.ones(S, S, dtype=torch.bool).tril()
    rows = token_rows(S, cp)
    for whole in (square, square.expand(3, S, S), square.expand(3, 2, S, S), square[None, None]):
        shard = split_batch({"input_ids": torch.zeros(3, S), "attention_mask": whole}, cp)["attention_mask"]
        assert torch.equal(shard, whole[..., rows, :])
    keys = torch.ones(3, 1, 1, S)
    assert split_batch({"input_ids": torch.zeros(3, S), "attention_mask": keys}, cp)["attention_mask"] is keys


def test_a_2d_attention_mask_follows_the_scope_and_stays_whole_under_ulysses():
    keep = torch.ones(2, 8, dtype=torch.int64)
    batch = {"input_ids": torch.zeros(2, 8), "attention_mask": keep}
    widths = {
        (layout, scope): split_batch(batch, ContextParallel(4, 1, layout=layout, mask_2d=scope))["attention_mask"].shape[1]
        for layout in ("zigzag", "contiguous", "ulysses")
        for scope in ("local", "global")
    }
    assert widths == {
        ("zigzag", "local"): 2,
        ("zigzag", "global"): 8,
        ("contiguous", "local"): 2,
        ("contiguous", "global"): 8,
        ("ulysses", "local"): 8,
        ("ulysses", "global"): 8,
    }


def test_a_mapping_of_masks_is_split_entry_by_entry():
    segments = Segments.from_lengths([5, 8], width=8)
    masks = {"full_attention": dense(segments), "linear_attention": segments.keep, "sliding_attention": None}
    shard = split_batch({"input_ids": torch.zeros(2, 8), "attention_mask": masks}, ContextParallel(2, 1))["attention_mask"]
    assert shard["full_attention"].shape == (2, 1, 4, 8)
    assert torch.equal(shard["linear_attention"], segments.keep[:, 2:6])
    assert shard["sliding_attention"] is None


def test_masks_that_are_refused():
    ids = torch.zeros(2, 8)
    cp = ContextParallel(2, 0)
    with pytest.raises(CollateError, match="8 query rows and 8 keys"):
        split_batch({"input_ids": ids, "attention_mask": torch.ones(2, 1, 4, 8)}, cp)  # already another's rows
    with pytest.raises(UnsupportedFormError, match="create_cp_block_mask"):
        split_batch({"input_ids": ids, "attention_mask": object()}, cp)
    with pytest.raises(AmbiguousMaskError, match="as many rows as tokens"):
        split_batch({"input_ids": torch.zeros(8, 8), "attention_mask": torch.zeros(8, 8)}, cp)
    keep = torch.ones(8, 8, dtype=torch.int64)
    assert split_batch({"input_ids": torch.zeros(8, 8), "attention_mask": keep}, cp)["attention_mask"].shape == (8, 4)


# --- the table ------------------------------------------------------------------------------------------------------------


def test_every_rule_says_why():
    assert all(rule.why for rule in KEYS.values())


def test_the_table_is_extended_by_another():
    cp = ContextParallel(2, 1)
    batch = {"input_ids": torch.zeros(3, 8), "labels": torch.zeros(3, 5), "rope": torch.arange(8.0)[:, None]}
    with pytest.raises(CollateError, match=r"labels.*float32 \[3, 5\]") as error:
        split_batch(batch, cp)
    assert "rope: got" in str(error.value)  # every bad key at once
    table = {**KEYS, "labels": SAMPLE, "rope": Key(kind="tokens", dim=0)}
    shard = split_batch(batch, cp, keys=table)
    assert shard["labels"] is batch["labels"]
    assert shard["rope"][:, 0].tolist() == [2, 3, 4, 5]


def test_keys_that_the_table_does_not_know():
    cp = ContextParallel(2, 0)
    ids = torch.zeros(2, 8)
    assert split_batch({"input_ids": ids, "x": torch.zeros(2, 8, 3)}, cp)["x"].shape == (2, 4, 3)
    assert split_batch({"input_ids": ids, "x": torch.zeros(2, 5)}, cp)["x"].shape == (2, 5)
    for shape in ((8, 2), (3, 2, 8), (8,)):
        with pytest.raises(CollateError, match="the width stands elsewhere"):
            split_batch({"input_ids": ids, "x": torch.zeros(shape)}, cp)


def test_per_row_labels_are_left_whole_and_others_must_fit():
    cp = ContextParallel(2, 0)
    batch = {"input_ids": torch.zeros(3, 8), "labels": torch.tensor([0, 1, 2])}
    assert split_batch(batch, cp)["labels"] is batch["labels"]
    with pytest.raises(CollateError, match="labels"):
        split_batch({"input_ids": torch.zeros(3, 8), "labels": torch.zeros(4)}, cp)
    with pytest.raises(CollateError, match="position_ids"):
        split_batch({"input_ids": torch.zeros(3, 8), "position_ids": torch.arange(7)}, cp)


def test_segments_of_another_batch_are_refused():
    with pytest.raises(CollateError, match="segments speak of"):
        split_batch({"input_ids": torch.zeros(2, 8)}, ContextParallel(2, 0), segments=Segments.from_lengths([4, 4]))
    with pytest.raises(CollateError, match="The width is read off"):
        split_batch({"x": torch.zeros(2, 8)}, ContextParallel(2, 0))
    shard = split_batch({"x": torch.zeros(2, 8)}, ContextParallel(2, 0), segments=Segments.from_lengths([4, 8]))
    assert shard["x"].shape == (2, 4)


def test_a_packed_row_is_not_cut_across_documents():
    batch = {"input_ids": torch.zeros(1, 16), "cu_seq_lens_q": torch.tensor([0, 8, 16])}
    for layout in ("zigzag", "ulysses_ring"):
        cp = ContextParallel(2, 0, layout=layout)
        with pytest.raises(UnsupportedFormError, match="for_documents"):
            split_batch(batch, cp)
        assert split_batch(batch, cp.for_documents())["input_ids"].shape == (1, 8)
    assert split_batch(batch, ContextParallel(2, 0, layout="contiguous"))["input_ids"].shape == (1, 8)


def test_a_packed_row_under_a_dense_mask_is_cut_anywhere():
    """Without offsets in the batch no kernel reads documents: the mask keeps them apart, wherever the row is cut."""
    segments = Segments.from_lengths([[1, 3]])
    batch = {"input_ids": torch.arange(4)[None], "attention_mask": dense(segments, polarity="masked")}
    shard = split_batch(batch, ContextParallel(2, 1), segments=segments)
    assert shard["input_ids"].tolist() == [[1, 2]]
    assert torch.equal(shard["attention_mask"], batch["attention_mask"][:, :, 1:3])


def test_documents_come_in_one_flat_row():
    cp = ContextParallel(2, 0, layout="document_zigzag")
    with pytest.raises(UnsupportedFormError, match="one flat row"):
        split_batch({"input_ids": torch.zeros(2, 8)}, cp)
    segments = Segments.from_lengths([[4, 4]])
    assert split_batch({"input_ids": torch.zeros(1, 8)}, cp, segments=segments)["input_ids"].shape == (1, 4)
    with pytest.raises(CollateError, match="needs their offsets"):
        split_batch({"input_ids": torch.zeros(1, 8)}, cp, segments=Segments.from_lengths([[3, 4]], width=8))


def test_offsets_are_found_in_order():
    padded, real = torch.tensor([0, 8]), torch.tensor([0, 5])
    assert cu_seqlens_of({"cu_seqlens": real, "cu_seqlens_padded": padded}) is padded
    assert cu_seqlens_of({"cu_seqlens": real, "cu_seq_lens_q": padded}) is padded
    assert cu_seqlens_of({"cu_seqlens": real}) is real
    assert cu_seqlens_of({}) is None
    assert cu_seqlens_of({}, Segments.from_lengths([[2, 3]])).tolist() == [0, 2, 5]
    assert cu_seqlens_of({}, Segments.from_lengths([[2, 3]], width=8)) is None
    assert cu_seqlens_of({}, Segments.from_lengths([2, 2])) is None


# --- labels ---------------------------------------------------------------------------------------------------------------


def test_shift_labels_ends_at_each_sequence():
    labels = torch.arange(1, 8).view(1, 7)
    segments = Segments.from_ids([[0, 1, 1, 1, 2, 2, 0]])
    assert shift_labels(labels).tolist() == [[2, 3, 4, 5, 6, 7, -100]]
    assert shift_labels(labels, segments).tolist() == [[-100, 3, 4, -100, 6, -100, -100]]
    assert shift_labels(labels, segments, ignore_index=0).tolist() == [[0, 3, 4, 0, 6, 0, 0]]


@given(places(layouts=LAYOUTS[:2]), st.data())
def test_shifting_before_the_split_keeps_every_label_and_after_it_loses_those_at_borders(case, data):
    cp, S, _ = case
    if cp.size == 1 or S == 0:
        return
    segments = data.draw(ragged(cp, S))
    labels = torch.where(segments.keep, torch.arange(S) + 1, -100)
    right = shift_labels(labels, segments)
    shards = [split_tensor(right, cp.with_rank(r)) for r in range(cp.size)]
    assert sum(int((part != -100).sum()) for part in shards) == sum(max(n - 1, 0) for n in segments.row_lengths)
    late = join_shards([shift_labels(split_tensor(labels, cp.with_rank(r))) for r in range(cp.size)], cp)
    if min(segments.row_lengths) == S:
        assert not torch.equal(late, right)
