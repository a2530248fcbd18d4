"""The whole way in any order: features, batch, model inputs, shards, the row again, real tokens; at each stage the oracle.

Between the calls inputs are written to, objects are pickled, and batches leave as a worker's do. Legend: B rows, S width.
"""

import copy
import pickle
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler

import oracle
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import PAD, sides

from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, last_token, split_batch, unpad, wrap_collator
from collate_npu.collate.transport import Shipment
from collate_npu.parallel import cu_seqlens_of, join_shards


def at(*stages):
    return precondition(lambda self: self.stage in stages)


def written_over(held, handed_on):
    """A trainer writes to its own tensors; what was handed on as it is stays."""
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and value is not handed_on.get(key):
            value.copy_(~value if value.dtype == torch.bool else -value)


def lists(value):
    return value.tolist()


class Way(RuleBasedStateMachine):
    stage, given, size = "features", (), 1

    @initialize(
        lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        tokens=st.lists(st.just(PAD) | st.integers(0, 1 << 18), min_size=18, max_size=18),
        flat=st.booleans(),
        side=sides(),
        mode=st.sampled_from(["auto", "2d", "4d"]),
        consumer=st.sampled_from(["megatron", "transformers"]),
        size=st.integers(1, 3),
    )
    def begins(self, lengths, tokens, flat, side, mode, consumer, size):
        self.flat, self.megatron, self.size = flat, consumer == "megatron", size if consumer == "megatron" else 1
        unit = 2 * self.size if self.size > 1 else 1
        samples = [tokens[start:stop] for start, stop in pairwise(oracle.offsets(lengths))]
        if flat:  # each sample is a document that ranks share out
            samples = [oracle.padded(ids, len(ids) + -len(ids) % unit, PAD, "right") for ids in samples]
            self.rows, self.ids = (
                [[n + 1 for n, ids in enumerate(samples) for _ in ids]],
                [[token for ids in samples for token in ids]],
            )
        else:
            width = max(lengths) + -max(lengths) % unit
            self.rows = [oracle.padded([1] * n, width, 0, side) for n in lengths]
            self.ids = [oracle.padded(ids, width, PAD, side) for ids in samples]
        self.labels = [oracle.labels(*pair) for pair in zip(self.ids, self.rows)]
        self.labels[0][0] = oracle.IGNORED if flat else self.labels[0][0]
        bounds = oracle.offsets(oracle.lengths(self.rows)) if flat else [0, width]
        self.places = [oracle.share_of_documents(bounds, self.size, rank, "zigzag") for rank in range(self.size)]
        self.features = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in samples]
        kind = {"padding_free": True} if flat else {"attention_mask": mode, "pad_to_multiple_of": unit}
        self.collator = PaddingCollator(pad_token_id=PAD, padding_side=side, **kind)
        reads = {"consumer": consumer, "needs_mask_2d": self.megatron, "padding_free": flat}
        self.adapter = BatchAdapter(labels_shifted=False, **reads)
        layout = "document_zigzag" if flat else "zigzag"
        self.ranks = [ContextParallel(self.size, rank, layout=layout) for rank in range(self.size)]

    @at("features", "shards")
    @rule()
    def collates(self):
        self.batch, self.given, self.stage = self.collator(self.features), self.features, "batch"

    @precondition(lambda self: self.stage == "features" and not self.flat)
    @rule()
    def collates_as_a_stranger(self):
        """Another's collator, and ours around it."""
        kept = torch.tensor(oracle.keep(self.rows))
        theirs = {"input_ids": torch.tensor(self.ids), "attention_mask": kept.long(), "labels": torch.tensor(self.ids)}
        self.batch, self.given, self.stage = wrap_collator(lambda features: theirs)(self.features), self.features, "batch"

    @precondition(lambda self: self.given)
    @rule()
    def writes_to_the_features(self):
        """What was made of them does not change; the dataset makes its samples again."""
        self.features = copy.deepcopy(self.given)
        for feature in self.given:
            written_over(feature, {})
        self.given = ()

    @rule()
    def pickles(self):
        self.collator, self.adapter, self.ranks = pickle.loads(pickle.dumps((self.collator, self.adapter, self.ranks)))

    @at("batch")
    @rule(in_worker=st.booleans())
    def travels(self, in_worker):
        self.batch = pickle.loads(bytes(ForkingPickler.dumps(Shipment(self.batch) if in_worker else self.batch)))
        assert type(self.batch) is dict

    @at("batch")
    @rule()
    def adapts(self):
        before = copy.deepcopy(self.batch)
        self.out, self.segments = self.adapter.with_segments(self.batch)
        assert str(before) == str(self.batch)
        assert lists(self.segments.ids) == self.rows
        written_over(self.batch, self.out)
        self.stage = "inputs"

    @at("inputs")
    @rule()
    def splits(self):
        self.shards = [split_batch(self.out, cp, segments=self.segments) for cp in self.ranks]
        written_over(self.out, self.shards[0])
        self.stage = "shards"

    @at("shards")
    @rule()
    def gathers(self):
        """A model that answers each token with itself and its opposite, and the way back of its answers."""
        offsets = cu_seqlens_of(self.shards[0], self.segments) if self.flat else None
        answers = [shard["input_ids"][..., None] * torch.tensor([1, -1]) for shard in self.shards]
        whole = join_shards(answers, self.ranks[-1], cu_seqlens=offsets)
        parts = oracle.per_sequence(self.ids, self.rows)
        assert lists(whole[..., 0]) == self.ids
        assert lists(unpad(whole, self.segments)[:, 1]) == [-token for part in parts for token in part]
        assert lists(last_token(whole, self.segments)[:, 0]) == [part[-1] for part in parts]

    @at("batch")
    @invariant()
    def batch_is_right(self):
        assert lists(self.batch["input_ids"]) == self.ids
        assert lists(self.batch["labels"]) == self.labels
        assert self.flat or lists(self.batch["attention_mask_2d"]) == oracle.keep(self.rows)

    @at("inputs")
    @invariant()
    def inputs_are_right(self):
        given, packed = self.out["attention_mask"], max(map(max, self.rows)) > 1
        assert lists(self.out["input_ids"]) == self.ids
        assert lists(self.out["labels"]) == self.labels
        assert ("attention_mask_2d" in self.out) == (self.megatron and not self.flat)
        if self.megatron:
            assert lists(self.out["position_ids"]) == list(map(oracle.positions, self.rows))
            assert (
                given is None if self.flat or oracle.none_is_exact(self.rows) else lists(~given) == oracle.dense(self.rows)
            )
        elif packed or not self.flat:
            assert lists(given) == (oracle.dense(self.rows) if packed else oracle.keep(self.rows))

    @at("shards")
    @invariant()
    def shards_are_right(self):
        right = {"input_ids": self.ids, "labels": self.labels, "attention_mask_2d": oracle.keep(self.rows)}
        for shard, held in zip(self.shards, self.places):
            for key in right.keys() & shard.keys():
                assert lists(shard[key]) == [[row[s] for s in held] for row in right[key]], key


TestWay = Way.TestCase
TestWay.settings = settings(stateful_step_count=12)
TestWay.pytestmark = [pytest.mark.filterwarnings("ignore:collate_npu"), pytest.mark.usefixtures("newest_transformers")]
