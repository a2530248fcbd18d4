"""Rows of KEYS that replayed routers and losses of reinforcement learning read: right on every way, or refused."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, strategies as st
from strategies import CONTAINERS, flat_collator, sides

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, split_batch, unpad, wrap_collator
from collate_npu.keys import KEYS, LOSS_KEYS
from collate_npu.outputs import repad
from collate_npu.parallel import ContextParallel, pad_documents

LAYERS, TOP, EXPERTS = 3, 2, 8
BY_TOKEN = (*LOSS_KEYS, "advantages", "returns", "values", "teacher_ids")


@st.composite
def replayed(draw, rows=4, longest=7):
    """Samples whose tokens go to experts that differ, as every router chooses them."""
    drawn = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=rows))
    held = draw(st.sampled_from(CONTAINERS))
    experts = [drawn.permuted(np.tile(np.arange(EXPERTS), (n, LAYERS, 1)), axis=-1)[..., :TOP] for n in lengths]
    return [{"input_ids": [5] * n, "routed_experts": held(each.tolist())} for n, each in zip(lengths, experts)]


def check(batch, samples, keep):
    """Real tokens go where they went, padding to experts that exist and differ."""
    found = batch["routed_experts"]
    expected = torch.cat([torch.as_tensor(np.asarray(sample["routed_experts"])) for sample in samples])
    assert torch.equal(found[keep].long(), expected.long())
    assert (found[..., 0] != found[..., 1]).all()
    assert ((found >= 0) & (found < EXPERTS)).all()


def check_shared_out(batch, name):
    """The tokens of two ranks are those of the batch, each once and in order."""
    shards = [split_batch(batch, ContextParallel(2, rank))[name] for rank in (0, 1)]
    held = [oracle.share(batch[name].shape[1], 2, rank, "zigzag") for rank in (0, 1)]
    whole = oracle.gathered([shard.unbind(1) for shard in shards], held)
    assert torch.equal(torch.stack(whole, 1), batch[name])


@given(replayed(), sides())
def test_padded_rows_replay_each_token(samples, side):
    batch = PaddingCollator(pad_token_id=0, padding_side=side, pad_to_multiple_of=4, attention_mask="2d")(samples)
    keep = batch["attention_mask"].bool()
    check(batch, samples, keep)
    segments = Segments.from_keep(keep)
    adapted = BatchAdapter(needs_mask_2d=True, consumer="megatron").write(batch, segments)
    assert torch.equal(adapted["routed_experts"], batch["routed_experts"])
    real = unpad(batch["routed_experts"], segments)
    assert torch.equal(unpad(repad(real, segments), segments), batch["routed_experts"][keep])
    check_shared_out(batch, "routed_experts")


@given(replayed(), st.sampled_from([1, 4]))
def test_flat_rows_replay_each_token(samples, multiple):
    batch = flat_collator(0, padding="max_length", max_length=64, multiple=multiple, max_sequences=6)(samples)
    real = torch.zeros(1, 64, dtype=torch.bool)
    starts, lengths = batch["cu_seqlens_padded"].tolist(), batch["cu_seqlens"].diff().tolist()
    for start, length in zip(starts, lengths):
        real[0, start : start + length] = True
    check(batch, samples, real)
    side_by_side = PaddingCollator(padding_free=True)(samples)
    documents, segments = pad_documents(side_by_side, ContextParallel(2, 0).for_documents())
    check(documents, samples, segments.keep)


@given(replayed())
def test_a_wrapped_collator_replays_each_token(samples):
    theirs = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
    flat = wrap_collator(theirs, padding_free=True)(samples)
    check(flat, samples, torch.ones_like(flat["input_ids"], dtype=torch.bool))


def test_a_rollout_that_leaves_out_its_last_token_is_told_what_to_do():
    """slime and verl get one less (slime fill_routing_replay @2bebc09; verl 0.9.1 router_replay_utils.py:409-432)."""
    samples = [{"input_ids": [5] * n, "routed_experts": np.arange((n - 1) * 6).reshape(-1, 3, 2)} for n in (3, 5)]
    with pytest.raises(CollateError, match=r"(?s)row 0: got 2 values beside 3.*repeat the last value once"):
        PaddingCollator(pad_token_id=0)(samples)
    mended = [{**s, "routed_experts": np.append(s["routed_experts"], s["routed_experts"][-1:], 0)} for s in samples]
    assert PaddingCollator(pad_token_id=0)(mended)["routed_experts"].shape == (2, 5, 3, 2)
    with pytest.raises(CollateError, match="routed_experts"):
        split_batch({"input_ids": torch.ones(1, 8), "routed_experts": torch.ones(1, 7, 3, 2)}, ContextParallel(2, 0))


@pytest.mark.parametrize("name", BY_TOKEN)
@pytest.mark.parametrize("lengths", [(3, 5), (4, 4)], ids=["ragged", "equal"])
def test_what_a_loss_reads_is_padded_split_and_flattened(name, lengths):
    samples = [{"input_ids": [5] * n, name: list(range(1, n + 1))} for n in lengths]
    batch = PaddingCollator(pad_token_id=0, padding_side="left", pad_to_multiple_of=4, attention_mask="2d")(samples)
    assert batch[name].tolist()[0] == [0] * (batch[name].shape[1] - lengths[0]) + samples[0][name]
    check_shared_out(batch, name)
    flat = PaddingCollator(padding_free=True)(samples)
    assert flat[name].tolist() == [[*samples[0][name], *samples[1][name]]]
    padded, segments = pad_documents(flat, multiple=4)
    assert padded[name][segments.keep].tolist() == flat[name][0].tolist()


@pytest.mark.parametrize("name", BY_TOKEN)
def test_a_loss_of_responses_alone_is_refused_where_tokens_are_shared_out(name):
    """verl's and TRL's `[B, R]`: R places of the response, which no split by the width S can cut."""
    with pytest.raises(CollateError, match=rf"{name}.*Dimension 1 is tokens"):
        split_batch({"input_ids": torch.ones(2, 8), name: torch.ones(2, 4)}, ContextParallel(2, 0))


@pytest.mark.parametrize("name", ["advantages", "returns", "values"])
def test_an_advantage_of_a_sample_stays_one(name):
    samples = [{"input_ids": [5] * n, name: n / 2} for n in (3, 5, 8)]
    batch = PaddingCollator(pad_token_id=0, pad_to_multiple_of=4, attention_mask="2d")(samples)
    assert batch[name].tolist() == [1.5, 2.5, 4.0]
    assert split_batch(batch, ContextParallel(2, 1))[name].tolist() == [1.5, 2.5, 4.0]
    flat, _ = pad_documents(PaddingCollator(padding_free=True)(samples), multiple=4)
    assert flat[name].tolist() == [1.5, 2.5, 4.0]
    assert KEYS[name].or_sample
