"""Rows of KEYS that replayed routers and losses of reinforcement learning read: right on every way, or refused."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, strategies as st
from strategies import CONTAINERS, flat_collator, sides

from collate_npu import CollateError, ContextParallel, PaddingCollator, split_batch, wrap_collator
from collate_npu.keys import KEYS
from collate_npu.parallel import pad_documents

LAYERS, TOP, EXPERTS = 3, 2, 8
BY_TOKEN = [name for name, key in KEYS.items() if key.kind == "tokens" and key.role is None and key.fill in (0, "pad")]
OR_SAMPLE = [name for name in BY_TOKEN if KEYS[name].or_sample]
PADDED = {"pad_token_id": 0, "padding_side": "left", "pad_to_multiple_of": 4, "attention_mask": "2d"}


@st.composite
def replayed(draw, rows=4, longest=7):
    """Samples whose tokens go to experts that differ, as every router chooses them."""
    drawn = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=rows))
    held = draw(st.sampled_from(CONTAINERS))
    experts = [drawn.permuted(np.tile(np.arange(EXPERTS), (n, LAYERS, 1)), axis=-1)[..., :TOP] for n in lengths]
    return [{"input_ids": [5] * n, "routed_experts": held(each.tolist())} for n, each in zip(lengths, experts)]


def check_routes(batch, samples, keep):
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


@given(replayed(), sides(), st.sampled_from([1, 4]))
def test_each_token_is_routed_as_it_was_padded_flat_and_wrapped(samples, side, multiple):
    collator = PaddingCollator(**PADDED | {"padding_side": side})
    batch = collator(samples)
    check_routes(batch, samples, batch["attention_mask"].bool())
    check_shared_out(batch, "routed_experts")
    flat = flat_collator(0, padding="max_length", max_length=64, multiple=multiple, max_sequences=6)(samples)
    real = torch.zeros(1, 64, dtype=torch.bool)
    for start, length in zip(flat["cu_seqlens_padded"].tolist(), flat["cu_seqlens"].diff().tolist()):
        real[0, start : start + length] = True
    check_routes(flat, samples, real)
    whole = wrap_collator(collator, padding_free=True)(samples)
    check_routes(whole, samples, torch.ones_like(whole["input_ids"], dtype=torch.bool))


def test_a_rollout_that_leaves_out_its_last_token_is_told_what_to_do():
    """slime and verl get one less (slime fill_routing_replay @2bebc09; verl 0.9.1 router_replay_utils.py:409-432)."""
    routes = [np.arange((n - 1) * 6).reshape(-1, 3, 2) for n in (3, 5)]
    samples = [{"input_ids": [5] * n, "routed_experts": each} for n, each in zip((3, 5), routes)]
    with pytest.raises(CollateError, match=r"(?s)row 0: got 2 values beside 3.*repeat the last value once"):
        PaddingCollator(pad_token_id=0)(samples)
    mended = [{**s, "routed_experts": np.append(each, each[-1:], 0)} for s, each in zip(samples, routes)]
    assert PaddingCollator(pad_token_id=0)(mended)["routed_experts"].shape == (2, 5, 3, 2)


@pytest.mark.parametrize("lengths", [(3, 5), (4, 4)], ids=["ragged", "equal"])
def test_what_a_loss_reads_is_padded_split_and_flattened_and_never_a_response_alone(lengths):
    samples = [{"input_ids": [5] * n, **{name: list(range(1, n + 1)) for name in BY_TOKEN}} for n in lengths]
    batch, flat = PaddingCollator(**PADDED)(samples), PaddingCollator(padding_free=True)(samples)
    documents, segments = pad_documents(flat, multiple=4)
    for name in BY_TOKEN:
        assert batch[name].tolist()[0] == [0] * (batch[name].shape[1] - lengths[0]) + samples[0][name]
        check_shared_out(batch, name)
        assert flat[name].tolist() == [[*samples[0][name], *samples[1][name]]]
        assert documents[name][segments.keep].tolist() == flat[name][0].tolist()
        with pytest.raises(CollateError, match=rf"{name}.*Dimension 1 is tokens"):  # verl's and TRL's [B, R]
            split_batch({"input_ids": torch.ones(2, 8), name: torch.ones(2, 4)}, ContextParallel(2, 0))


def test_an_advantage_of_a_sample_stays_one():
    samples = [{"input_ids": [5] * n, **dict.fromkeys(OR_SAMPLE, n / 2)} for n in (3, 5, 8)]
    batch = PaddingCollator(**PADDED)(samples)
    flat, _ = pad_documents(PaddingCollator(padding_free=True)(samples), multiple=4)
    for name in OR_SAMPLE:
        for made in (batch, split_batch(batch, ContextParallel(2, 1)), flat):
            assert made[name].tolist() == [1.5, 2.5, 4.0]
