"""The way back under torch.compile(fullgraph=True), torch.export and FakeTensorMode, Segments cold or used before; and flat
rows of one shape, for which a graph is captured once."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, strategies as st
from strategies import flat_collator
from torch._subclasses.fake_tensor import FakeTensorMode

from collate_npu import BatchAdapter, PaddingCollator, Segments, adapt, derive_segments, last_token, repad, unpad
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.outputs import per_sequence

WAYS = {
    "unpad": unpad,
    "repad": lambda x, segments: repad(unpad(x, segments), segments),
    "last_token": last_token,
    "per_sequence": per_sequence,
}
LENGTHS = ((3, 5), (2, 2), (5, 5), (3, 5))
way_of = pytest.mark.parametrize("name", WAYS)
use = pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
X = torch.arange(40.0).view(2, 5, 4)


def built(lengths, warm, way):
    segments = Segments.from_lengths(list(lengths), 5, "left")
    if warm:
        way(X, segments)
    return segments


def expected(way, lengths):
    return way(X, Segments.from_lengths(list(lengths), 5, "left"))


def same(one, other):
    pairs = zip(one, other, strict=True) if isinstance(one, (list, tuple)) else [(one, other)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.draws(3)
@way_of
@use
def test_compiled_in_one_graph_for_batch_after_batch(name, warm):
    """Other lengths are another answer: nothing of the first batch is burnt in."""
    torch._dynamo.reset()
    way = WAYS[name]
    compiled = torch.compile(way, fullgraph=True, backend="aot_eager")
    for lengths in LENGTHS:
        assert same(compiled(X, built(lengths, warm, way)), expected(way, lengths))


BUILT = {
    "ids": lambda s: Segments(s.ids),
    "from_ids": lambda s: Segments.from_ids(s.ids * 3),
    "from_keep": lambda s: Segments.from_keep(s.keep),
    "a batch": lambda s: segments_from_batch({"input_ids": s.ids, "attention_mask_2d": s.keep}),
    "a mask": lambda s: derive_segments(dense(s)),
    "a mask beside a keep mask": lambda s: derive_segments(dense(s), keep=s.keep),
    "the adapter": lambda s: BatchAdapter(needs_mask_2d=True, consumer="verl").with_segments(
        {"input_ids": s.ids, "attention_mask_2d": s.keep}
    )[1],
}


@pytest.mark.parametrize("source", BUILT)
def test_segments_of_every_public_door_are_read_by_compiled_code(source):
    """And what compiled code is given is its own: writing to it changes nothing."""
    torch._dynamo.reset()
    lengths = Segments.from_lengths([3, 5], 5, "left")
    compiled = torch.compile(lambda s: s.indices.mul_(0) + s.indices, fullgraph=True, backend="eager")
    assert torch.equal(compiled(BUILT[source](lengths)), lengths.indices)


class Head(torch.nn.Module):
    def __init__(self, way, segments):
        super().__init__()
        self.way, self.segments = way, segments

    def forward(self, x):
        return self.way(x, self.segments)


@pytest.mark.draws(3)
@way_of
@use
def test_exported_and_under_fake_tensors_and_unharmed_by_them(name, warm):
    way = WAYS[name]
    segments, wanted = built((3, 5), warm, way), expected(way, (3, 5))
    for strict in (False, True):
        assert same(torch.export.export(Head(way, segments), (X,), strict=strict).module()(X), wanted)
    with FakeTensorMode():
        assert shapes_of(way(torch.ones(2, 5, 4), segments)) == shapes_of(wanted)
    assert same(way(X, segments), wanted)


def shapes_of(out):
    return [x.shape for x in (out if isinstance(out, (list, tuple)) else [out])]


# --- flat rows of one shape

WIDTH, COUNT = 256, 8
STATIC = {"padding": (WIDTH,), "max_sequences": COUNT}
ALIGNED = {**STATIC, "multiple": 16}
FLASH = {"_attn_implementation": "flash_attention_2", "model_type": "qwen3_next"}
MODELS = {
    "attention alone": SimpleNamespace(layer_types=["full_attention"], **FLASH),
    "dense mask": SimpleNamespace(layer_types=["full_attention"], model_type="llama"),
}
READERS = {"neutral": {}} | {n: {"consumer": "transformers", "model": m, "pattern": "causal"} for n, m in MODELS.items()}
batches = st.lists(st.integers(1, 16), min_size=1, max_size=COUNT)


def collated(lengths, shape):
    features = [{"input_ids": [*range(1, n + 1)], "labels": [*range(1, n + 1)]} for n in lengths]
    return flat_collator(0, **shape)(features)


def signature(batch):
    """What a graph is captured for: keys in order, shapes, dtypes, and numbers that are burnt in."""
    return [(k, (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v) for k, v in batch.items()]


@pytest.mark.draws(3)
@pytest.mark.usefixtures("newest_transformers")
@pytest.mark.parametrize("shape", [STATIC, ALIGNED], ids=["not aligned", "aligned"])
@pytest.mark.parametrize("reader", READERS)
@given(lengths=batches, others=batches)
def test_batches_of_any_lengths_have_one_shape(reader, shape, lengths, others):
    """But for a dense mask, which a row with one sequence does without: two shapes there."""
    assume(reader != "dense mask" or min(len(lengths), len(others)) > 1)
    given_ = {**shape, **READERS[reader]}
    assert signature(collated(lengths, given_)) == signature(collated(others, given_))


@pytest.mark.parametrize("kernel", ["fla", "fla_conv", "transformers", "causal_conv1d", "fla_npu_conv", "torch_npu"])
@given(lengths=batches, others=batches)
def test_kernel_arguments_have_one_shape(kernel, lengths, others):
    """None of the sequences is empty or too many."""
    for shape in (ALIGNED, STATIC):
        told = []
        for batch in (collated(lengths, shape), collated(others, shape)):
            given_ = gated_delta_kwargs(segments_from_batch(batch), kernel=kernel, padding=batch["cu_seqlens_padded"])
            told.append([(k, len(v) if isinstance(v, tuple) else (v.shape, v.dtype)) for k, v in given_.items()])
            assert "cu_seqlens" not in given_ or (given_["cu_seqlens"].diff() > 0).all()
        assert told[0] == told[1]


# --- batches whose widths repeat


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.draws(2)
@pytest.mark.parametrize("door", ["adapter", "adapt"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.filterwarnings("ignore")  # Dynamo's, of hooks
def test_widths_that_repeat_compile_nothing_after_the_first_round(family, door):
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    torch._dynamo.reset()
    model, graphs, made = tiny_model(family, vocab_size=64), [], []
    adapter = BatchAdapter(model) if door == "adapter" else dict
    handle = adapt(model) if door == "adapt" else None
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(1) or graph.forward, dynamic=False)
    for _ in range(3):
        for width, side in ((8, "left"), (12, "right")):
            rows = [{"input_ids": list(range(1, n + 1))} for n in (width, width - len(made) - 1)]
            batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")(rows)
            with torch.no_grad():
                compiled(**adapter(batch))
        made.append(len(graphs))
    assert made[0] == made[1] == made[2] > 0
    if handle is not None:
        handle.remove()
