"""The way back under torch.compile(fullgraph=True), torch.export and FakeTensorMode, Segments cold or used before."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from collate_npu import Segments, last_token, per_sequence, repad, unpad

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


@way_of
@use
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_for_batch_after_batch(name, warm, backend):
    """Other lengths are another answer: nothing of the first batch is burnt in."""
    torch._dynamo.reset()
    way = WAYS[name]
    compiled = torch.compile(way, fullgraph=True, backend=backend)
    for lengths in LENGTHS:
        assert same(compiled(X, built(lengths, warm, way)), expected(way, lengths))


class Head(torch.nn.Module):
    def __init__(self, way, segments):
        super().__init__()
        self.way, self.segments = way, segments

    def forward(self, x):
        return self.way(x, self.segments)


@way_of
@use
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_exported(name, warm, strict):
    way = WAYS[name]
    program = torch.export.export(Head(way, built((3, 5), warm, way)), (X,), strict=strict)
    assert same(program.module()(X), expected(way, (3, 5)))


@way_of
@use
def test_under_fake_tensors_and_unharmed_by_them(name, warm):
    way = WAYS[name]
    segments = built((3, 5), warm, way)
    with FakeTensorMode():
        shapes = shapes_of(way(torch.ones(2, 5, 4), segments))
    assert shapes == shapes_of(expected(way, (3, 5)))
    assert same(way(X, segments), expected(way, (3, 5)))


def shapes_of(out):
    return [x.shape for x in (out if isinstance(out, (list, tuple)) else [out])]
