"""ms-swift's flat rows on Megatron: its real template, arguments and `prepare_batch`, and what we say of their offsets."""

from types import SimpleNamespace

import pytest
import torch
from swift_world import World, arguments, collate, prepare

from collate_npu import CollateError, Segments
from collate_npu.integrations import swift as guard
from collate_npu.integrations.swift import flat_segments

NEEDS = ("swift", "mcore_bridge", "megatron")

LENGTHS = (7, 3, 5)


@pytest.mark.parametrize(
    ("ranks", "changed", "offsets"),
    [
        (1, {}, [0, 7, 10, 15]),
        (1, {"fp8_format": "e4m3"}, [0, 7, 10, 15, 16]),
        (1, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, [0, 7, 10, 15, 16]),
        (1, {"fp8_recipe": "mxfp8"}, [0, 7, 10, *range(15, 33)]),
        (2, {}, [0, 8, 12, 20]),
        (2, {"fp8_format": "e4m3"}, [0, 8, 12, 20, 24, 28, 32]),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, [0, 8, 12, 20]),
    ],
)
def test_the_offsets_are_physical_end_with_the_row_and_can_be_shared_out(monkeypatch, installed, ranks, changed, offsets):
    world = World(monkeypatch)
    world.npu(False)
    world.rank(0, ranks)
    args = arguments("qwen3_next", cp=ranks, padding_free=True, **changed)
    data = collate(args, *LENGTHS)
    width = data["input_ids"].shape[1]
    params = prepare(args, data)["packed_seq_params"]
    assert params.cu_seqlens_q.tolist() == offsets
    assert params.cu_seqlens_q.dtype == torch.int32
    assert offsets[-1] == width
    assert isinstance(params.max_seqlen_q, int)
    truth = flat_segments(data, params, ranks)
    assert truth.shape == (1, width)
    assert truth.sequence_lengths == LENGTHS
    assert [start for _, start, _ in truth.spans] == offsets[:3]


def test_upstream_positions_are_shorter_than_the_row_where_three_ranks_share_the_tokens_of_two(monkeypatch):
    """padding_to is 6 and the row 24, of which 20 have places: the last four have no position at all."""
    world = World(monkeypatch)
    world.npu(False)
    world.rank(0, 2)
    args = arguments("qwen3_next", cp=2, padding_free=True, tensor_model_parallel_size=3, sequence_parallel=True)
    data = collate(args, *LENGTHS, 6)
    params = prepare(args, data)["packed_seq_params"]
    assert data["input_ids"].shape[1] > params.cu_seqlens_q[-1]
    with pytest.raises(
        CollateError, match=r"packed_seq_params: got .*Set padding_free=False, or a tensor_model_parallel_size"
    ):
        flat_segments(data, params, 2)


ROW = {"input_ids": torch.ones(1, 16), "seq_lens": [7, 3, 5]}


class Params:
    def __init__(self, offsets, **others):
        self.cu_seqlens_q = self.cu_seqlens_kv = torch.tensor(offsets)
        self.cu_seqlens_q_padded = self.cu_seqlens_kv_padded = None
        vars(self).update(others)


@pytest.mark.parametrize(
    ("params", "ranks"),
    [
        (Params([0, 7, 10, 15]), 1),  # ends early
        (Params([7, 10, 16]), 1),  # ends
        (Params([1, 8, 11, 16]), 1),  # begins late
        (Params([0, 6, 10, 16]), 1),  # too short for the first
        (Params([0, 7, 16]), 1),  # two sequences for three
        (Params([0, 7, 10, 15, 15, 16]), 1),  # an empty one
        (Params([0, 7, 10, 16]), 2),  # not to be shared out
        (Params([0, 7, 10, 16], cu_seqlens_kv=torch.tensor([0, 7, 11, 16])), 1),
        (Params([0, 7, 10, 16], cu_seqlens_q_padded=torch.tensor([0, 8, 11, 16])), 1),
    ],
)
def test_offsets_that_do_not_fit_the_samples_are_refused(params, ranks):
    with pytest.raises(
        CollateError, match=r"packed_seq_params: got .*rise from 0 to the 16 tokens .*Set padding_free=False"
    ):
        flat_segments(ROW, params, ranks)


def test_and_those_that_fit_are_the_truth():
    assert flat_segments(ROW, Params([0, 7, 10, 16])) == Segments.from_lengths([LENGTHS], 16)


def test_the_guard_stops_at_the_first_batch_and_looks_once(capsys):
    """Two ranks of a row: the offsets are compared, the layers are not watched."""
    model, row = torch.nn.Linear(1, 1), {**ROW, "input_ids": torch.ones(1, 20)}
    args = SimpleNamespace(padding_free=True, context_parallel_size=2, cp_partition_mode="zigzag")
    trainer = SimpleNamespace(unwrapped_models=[model], args=args)
    for offsets, said in (([0, 7, 10, 20], None), ([0, 8, 12, 20], 1), ([0, 8, 12, 20], 0)):
        prepare_batch = lambda *_, offsets=offsets: {"packed_seq_params": Params(offsets)}  # noqa: E731
        if said is None:
            with pytest.raises(CollateError, match="packed_seq_params"):
                guard.guarded(None, prepare_batch, trainer, row)
            guard._GUARDED.clear()
        else:
            guard.guarded(None, prepare_batch, trainer, row)
            assert capsys.readouterr().out.count("the flat row are those of its 3 samples") == said
