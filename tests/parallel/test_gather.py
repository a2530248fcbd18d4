"""Gather without other ranks; with them: tests/distributed. That joining undoes splitting is a target of `fuzz`."""

import pytest
import torch

from collate_npu import CollateError, Segments
from collate_npu.parallel import ContextParallel, gather_sequence


def test_a_jagged_output_comes_back_jagged_without_padding():
    cp, values = ContextParallel(1, 0, layout="document_zigzag"), torch.arange(12.0).view(6, 2)
    output = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6]))
    assert torch.equal(gather_sequence(output, cp).values(), values)
    real = gather_sequence(output, cp, Segments.from_ids([[1, 1, 1, 0, 2, 0]]))
    assert torch.equal(real.values(), values[[0, 1, 2, 4]])
    assert real.offsets().tolist() == [0, 3, 4]
    with pytest.raises(CollateError, match="one flat row of 6"):
        gather_sequence(output, cp, Segments.from_lengths([3, 3]))


@pytest.mark.parametrize(
    ("shape", "segments", "loss", "words"),
    [
        ((2, 4), None, "same", "Gathering needs the process group"),
        ((2, 8), Segments.from_lengths([8, 8]), "same", "one of 2 shards has 4 tokens"),
        ((3, 4), Segments.from_lengths([8, 8]), "same", "one of 2 shards has 4 tokens"),
        ((2, 4), None, "mean", "'same'"),
        ((2, 3), None, "same", "multiple of 4"),
    ],
)
def test_what_is_wrong_is_said_before_anyone_waits(shape, segments, loss, words):
    with pytest.raises(CollateError, match=words):
        gather_sequence(torch.zeros(shape), ContextParallel(2, 0), segments, loss=loss)
