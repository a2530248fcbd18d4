"""The whole way in any order: features, batch, model inputs, shards, the row again, real tokens; at each stage the oracle.

Between the calls inputs are written to, objects are pickled, and batches leave as a worker's do. Legend: B rows, S width.
"""

import copy
import itertools
import pickle
from multiprocessing.reduction import ForkingPickler

import oracle
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from strategies import PAD

from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, last_token, split_batch, unpad, wrap_collator
from collate_npu.collate.transport import Shipment
from collate_npu.consumers.consumer import consumers
from collate_npu.masks import dense
from collate_npu.parallel import cu_seqlens_of, join_shards

pytestmark = [pytest.mark.filterwarnings("ignore:collate_npu"), pytest.mark.usefixtures("newest_transformers")]


def at(stage):
    return precondition(lambda self: self.stage == stage)


def scribbled(value):
    """Written over, as a trainer may do with its own tensors."""
    for each in value.values():
        if isinstance(each, torch.Tensor):
            each.copy_(~each if each.dtype == torch.bool else -each)


def lists(value):
    return value.tolist()


class Way(RuleBasedStateMachine):
    stage = "features"

    @initialize(
        lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        side=st.sampled_from(["left", "right"]),
        mode=st.sampled_from(["auto", "2d", "4d"]),
        size=st.integers(1, 3),
        flat=st.booleans(),
        tokens=st.lists(st.integers(0, 9), min_size=18, max_size=18),
        consumer=st.sampled_from(["megatron", "transformers"]),
    )
    def begins(self, lengths, side, mode, size, flat, tokens, consumer):
        ends = oracle.offsets(lengths)
        samples = [tokens[start:stop] for start, stop in itertools.pairwise(ends)]
        self.features = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in samples]
        self.flat, self.size = flat, size if consumer == "megatron" else 1
        unit = 2 * self.size if self.size > 1 else 1
        if flat:  # each sample is a document of its own that ranks share out
            samples = [oracle.padded(ids, len(ids) + -len(ids) % unit, PAD, "right") for ids in samples]
            self.features = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in samples]
            self.rows = [[n + 1 for n, ids in enumerate(samples) for _ in ids]]
            self.ids = [[token for ids in samples for token in ids]]
        else:
            width = max(lengths) + -max(lengths) % unit
            self.rows = [oracle.padded([1] * n, width, 0, side) for n in lengths]
            self.ids = [oracle.padded(ids, width, PAD, side) for ids in samples]
        kind = {"padding_free": True} if flat else {"attention_mask": mode, "pad_to_multiple_of": unit}
        self.collator = PaddingCollator(pad_token_id=PAD, padding_side=side, **kind)
        self.adapter = BatchAdapter(
            consumer=consumer, needs_mask_2d=consumer == "megatron", padding_free=flat, labels_shifted=False
        )
        layout = "document_zigzag" if flat else "zigzag"
        self.ranks = [ContextParallel(self.size, rank, layout=layout) for rank in range(self.size)]
        self.given, self.stage = None, "features"

    def labelled(self):
        moved = [oracle.labels(*pair) for pair in zip(self.ids, self.rows)]
        return [[oracle.IGNORED, *row[1:]] for row in moved] if self.flat else moved

    @precondition(lambda self: self.stage in ("features", "shards"))
    @rule()
    def collates(self):
        self.batch = self.collator(self.features)
        self.given, self.stage = [feature.copy() for feature in self.features], "batch"
        self.told()

    @precondition(lambda self: self.stage == "features" and not self.flat)
    @rule()
    def collates_through_a_strangers(self):
        """Who pads by its own: ours around it says the same."""
        plain = {"input_ids": torch.tensor(self.ids), "attention_mask": torch.tensor(oracle.keep(self.rows)).long()}
        own = {"labels": torch.tensor(self.ids)}
        self.batch = wrap_collator(lambda features: {**plain, **own})(self.features)
        self.given, self.stage = [], "batch"
        assert "position_ids" not in self.batch
        self.told()

    @at("batch")
    @rule()
    def told(self):
        assert lists(self.batch["input_ids"]) == self.ids
        assert lists(self.batch["labels"]) == self.labelled()
        assert lists(self.batch.get("attention_mask_2d", torch.tensor(self.rows) != 0)) == oracle.keep(self.rows)

    @precondition(lambda self: self.given)
    @rule()
    def writes_to_the_features(self):
        """What was collated does not change, and the dataset makes its samples again."""
        kept = copy.deepcopy(self.given)
        for feature in self.given:
            scribbled(feature)
        self.features, self.given = kept, None
        if self.stage == "batch":
            self.told()

    @rule()
    def pickles(self):
        self.collator, self.adapter, self.ranks = pickle.loads(pickle.dumps((self.collator, self.adapter, self.ranks)))

    @at("batch")
    @rule(in_worker=st.booleans())
    def travels(self, in_worker):
        sent = Shipment(self.batch) if in_worker else self.batch
        self.batch = pickle.loads(bytes(ForkingPickler.dumps(sent)))
        assert type(self.batch) is dict
        self.told()

    @at("batch")
    @rule()
    def adapts(self):
        before = copy.deepcopy(self.batch)
        self.out, self.segments = self.adapter.with_segments(self.batch)
        for key, value in before.items():
            assert torch.equal(self.batch[key], value) if isinstance(value, torch.Tensor) else self.batch[key] == value
        assert lists(self.segments.ids) == self.rows
        self.out = copy.deepcopy(self.out)
        scribbled(self.batch)
        self.stage = "inputs"
        self.adapted()

    @at("inputs")
    @rule()
    def adapted(self):
        assert lists(self.out["input_ids"]) == self.ids
        assert lists(self.out["labels"]) == self.labelled()
        if self.adapter.consumer is consumers()["megatron"]:
            masked = self.out["attention_mask"]
            exact = self.flat or oracle.none_is_exact(self.rows)
            assert masked is None if exact else lists(~masked) == oracle.dense(self.rows)
            assert ("attention_mask_2d" in self.out) != self.flat
            assert lists(self.out["position_ids"]) == list(map(oracle.positions, self.rows))
        elif self.flat and max(self.rows[0]) > 1:
            assert lists(self.out["attention_mask"]) == oracle.dense(self.rows)
        elif not self.flat:
            assert lists(self.out["attention_mask"]) == oracle.keep(self.rows)

    @at("inputs")
    @rule()
    def splits(self):
        self.shards = [split_batch(self.out, cp, segments=self.segments) for cp in self.ranks]
        scribbled({key: value for key, value in self.out.items() if self.size > 1 and value is not self.shards[0][key]})
        self.stage = "shards"
        bounds = oracle.offsets(oracle.lengths(self.rows)) if self.flat else [0, len(self.rows[0])]
        self.places = [oracle.share_of_documents(bounds, self.size, rank, "zigzag") for rank in range(self.size)]
        self.shared()

    @at("shards")
    @rule()
    def shared(self):
        for shard, held in zip(self.shards, self.places):
            assert lists(shard["input_ids"]) == [[row[s] for s in held] for row in self.ids]
            assert lists(shard["labels"]) == [[row[s] for s in held] for row in self.labelled()]
            if "attention_mask_2d" in shard:
                assert lists(shard["attention_mask_2d"]) == [[row[s] for s in held] for row in oracle.keep(self.rows)]

    @at("shards")
    @rule()
    def gathers(self):
        """A model that answers each token with itself, and the way back of its answers."""
        offsets = cu_seqlens_of(self.shards[0], self.segments) if self.flat else None
        logits = [shard["input_ids"][..., None] * torch.tensor([1, -1]) for shard in self.shards]
        whole = join_shards(logits, self.ranks[-1], cu_seqlens=offsets)
        assert lists(whole[..., 0]) == self.ids
        parts = oracle.per_sequence(self.ids, self.rows)
        assert lists(unpad(whole, self.segments)[:, 1]) == [-token for part in parts for token in part]
        assert lists(last_token(whole, self.segments)[:, 0]) == [part[-1] for part in parts]

    @at("inputs")
    @rule()
    def builds_the_mask(self):
        assert lists(dense(self.segments)) == oracle.dense(self.rows)


TestWay = Way.TestCase
TestWay.settings = settings(stateful_step_count=12)
TestWay.pytestmark = pytestmark
