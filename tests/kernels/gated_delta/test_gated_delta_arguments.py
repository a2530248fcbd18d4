"""Arguments of each kernel: its own spelling of the same sequences, from which the reference computes each as alone; the
offsets of a flat row, chunk tables, and padded rows whose padding is zeroed."""

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from rule_inputs import BORDERS, D, Layer, alone, apart

from collate_npu import CollateError, Segments, unpad
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.gated_delta import (
    Kernel,
    chunk_indices,
    chunk_offsets,
    flat_offsets,
    gated_delta_kwargs,
    zero_padding,
)

ROW = Segments.from_lengths([[3, 70]], width=80)
SHORT = Segments.from_lengths([[3, 4]], width=8)


def plain(kwargs):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


TAILED = {"cu_seqlens": [0, 3, 73, 80], "cu_seqlens_cpu": [0, 3, 73, 80]}
NUMBERS = [[0] * 3 + [1] * 70 + [2] * 7]


@pytest.mark.parametrize(
    ("kernel", "segments", "expected"),
    [
        ("transformers", ROW, {"cu_seq_lens_q": [0, 3, 73, 80], "seq_idx": NUMBERS}),
        ("fla", ROW, TAILED),
        ("fla_conv", ROW, TAILED),
        ("fla_cp", ROW, {"cu_seqlens": [0, 3, 73, 80]}),
        ("causal_conv1d", ROW, {"seq_idx": NUMBERS}),
        ("fla_npu", ROW, {"cu_seqlens": (0, 3, 73, 80), "chunk_indices": (0, 0, 1, 0, 1, 1, 2, 0)}),
        ("fla_npu_cumsum", ROW, {"cu_seqlens": (0, 3, 73, 80), "chunk_indices_out": (0, 0, 1, 0, 2, 0)}),
        ("fla_npu_flash", ROW, {"cu_seqlens": [0, 3, 73, 80], "cu_seqlens_list": [0, 3, 73, 80]}),
        ("fla_npu_conv", ROW, {"query_start_loc": (0, 3, 73, 80)}),
        ("fla_npu_recurrent", Segments.from_lengths([[3, 8]], width=12), {"actual_seq_lengths": [0, 3, 8, 1]}),
        ("torch_npu", ROW, {"actual_seq_lengths": [3, 70, 7]}),
    ],
)
def test_each_kernels_own_spelling(kernel, segments, expected):
    assert plain(gated_delta_kwargs(segments, kernel=kernel)) == expected


def test_tables_are_built_on_request_and_the_convolutions_is_always_in_64():
    for chunk, block in ((64, 2048), (128, 1024), (1, 2**17)):
        for length, table in ((block, (0, 0)), (block + 1, (0, 0, 0, 1))):
            one = gated_delta_kwargs(Segments.from_lengths([[length]]), kernel="fla_npu_cumsum", chunk_size=chunk)
            assert one["chunk_indices_out"] == table
    for kernel, chunk in (("fla", 32), ("fla_conv", 64)):
        table = gated_delta_kwargs(ROW, kernel=kernel, chunk_size=32, tables=True)["chunk_indices"]
        assert np.array_equal(table, chunk_indices([0, 3, 73, 80], chunk))


DTYPES = dict.fromkeys(("fla", "fla_conv", "fla_cp", "fla_npu_flash"), torch.int64)


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_containers_dtypes_and_that_nothing_is_shared(kernel):
    first, second = (gated_delta_kwargs(SHORT, kernel=kernel) for _ in range(2))
    for value in first.values():
        if isinstance(value, torch.Tensor):
            assert value.dtype == DTYPES.get(kernel, torch.int32)
            assert value.is_contiguous()
            value.fill_(99)  # law 12: refilled, it changes no other
    assert plain(gated_delta_kwargs(SHORT, kernel=kernel)) == plain(second)
    assert isinstance(first.get("cu_seqlens_list", []), list)
    copies = gated_delta_kwargs(SHORT, kernel=kernel, device="meta").items()
    assert all(x.is_meta != name.endswith("_cpu") for name, x in copies if isinstance(x, torch.Tensor))
    tensors = [value for value in second.values() if isinstance(value, torch.Tensor)]
    assert len({value.untyped_storage().data_ptr() for value in tensors}) == len(tensors)


@pytest.mark.parametrize("kernel", ["fla", "transformers"])
@given(data=st.data())
@settings(max_examples=15)
def test_the_reference_computes_each_sequence_as_alone(kernel, data):
    """Laws 1 and 14: any packing, tails, single tokens, lengths around chunk borders; outputs and every gradient."""
    lengths = data.draw(st.lists(st.sampled_from(BORDERS), min_size=1, max_size=3))
    tail = data.draw(st.sampled_from((0, 1, 7)))
    segments = Segments.from_lengths([lengths], width=sum(lengths) + tail)
    layer, hidden = Layer(), torch.randn(*segments.shape, D, generator=torch.Generator().manual_seed(3)).requires_grad_()
    kwargs = gated_delta_kwargs(segments, kernel=kernel, keep_padding=None if len(lengths) > 1 or not tail else False)
    boundary = {"cu_seqlens": kwargs["cu_seqlens" if kernel == "fla" else "cu_seq_lens_q"]}
    kept = hidden if int(boundary["cu_seqlens"][-1]) == segments.shape[1] else unpad(hidden, segments)[None]
    out = layer(kept, **boundary)
    real = unpad(out, segments) if kept is hidden else out[0]
    expected = alone(layer, hidden, segments)
    assert apart(real, expected, layer, hidden) < 1e-5
    if len(lengths) > 1:
        assert (unpad(layer(hidden), segments) - expected).abs().max() > 1e-2  # the control: without boundaries


def test_transformers_takes_padded_rows_with_a_mask():
    segments = Segments.from_lengths([3, 5], side="left")
    assert plain(gated_delta_kwargs(segments, kernel="transformers")) == {"attention_mask": segments.keep.long().tolist()}
    flat = gated_delta_kwargs(segments, kernel="transformers", keep_padding=False)
    assert plain(flat)["cu_seq_lens_q"] == [0, 3, 8]
    for bad in (Segments.from_lengths([[3, 2], [5]]), Segments.from_keep([[1, 0, 1]])):
        with pytest.raises(UnsupportedFormError, match="keep_padding=False"):
            gated_delta_kwargs(bad, kernel="transformers")
        gated_delta_kwargs(bad, kernel="transformers", keep_padding=False)


HOLE, LEFT = Segments.from_keep([[1, 0, 1]]), Segments.from_lengths([2], width=4, side="left")
REFUSED = [
    ({"padding": "front"}, "'own', 'behind'"),
    ({"segments": [[1, 1]]}, "Pass a Segments"),
    ({"device": "nowhere"}, "device of this machine"),
    ({"chunk_size": 0}, "chunk_size"),
    ({"kernel": "flash"}, "It is one of transformers, fla"),
    ({"chunk_size": 128}, "chunks of 16, 32, 64"),
    ({"kernel": "fla_npu", "chunk_size": 32}, "chunks of 64, 128"),
    ({"kernel": "fla_npu_recurrent"}, "a sequence of 70 tokens"),
    ({"segments": HOLE}, r"row 0: got padding inside a sequence[\s\S]*keep_padding=False"),
    ({"segments": LEFT, "padding": "behind"}, r"before the first[\s\S]*padding='own'"),
    ({"segments": Segments.from_lengths([0], width=4)}, "at least one token"),
    ({"segments": Segments.from_lengths([3, 5]), "padding": [0, 3, 8]}, "one flat row"),
    *(({"padding": bad}, "cu_seqlens_padded of this very batch") for bad in ([0, 3, 73], [0, 2, 73, 80], [0, 3, 3, 80])),
    *(({"padding": padding, "max_sequences": n}, "max_sequences") for padding, n in
      (("own", 0), ("own", 1), ("own", 11), ("behind", 3), ([0, 3, 73, 80], 4))),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_has_no_right_arguments_is_refused_with_the_way_out(wrong, message):
    with pytest.raises(CollateError, match=message):
        gated_delta_kwargs(**{"segments": ROW, "kernel": "fla", **wrong})


# --- offsets of a flat row: every token covered once, no real token in the sequence of another

FLAT = Segments.from_ids([[1, 1, 1, 0, 2, 2, 0, 0]])


@pytest.mark.parametrize(
    ("segments", "kept", "own", "behind"),
    [(FLAT, (0, 3, 5), (0, 3, 4, 6, 8), (0, 4, 8)), (Segments.from_lengths([3, 5]), (0, 3, 8), (0, 3, 5, 10), (0, 5, 10))],
)
def test_the_pictures(segments, kept, own, behind):
    """Of several rows the padding is taken out unless it is kept."""
    assert flat_offsets(segments, keep_padding=False) == kept
    assert flat_offsets(segments) == (own if len(segments.array) == 1 else kept)
    assert flat_offsets(segments, keep_padding=True) == own
    assert flat_offsets(segments, keep_padding=True, padding="behind") == behind


def test_a_batchs_own_offsets_are_taken_as_they_are():
    assert flat_offsets(FLAT, padding=[0, 4, 6, 8]) == (0, 4, 6, 8)
    assert flat_offsets(FLAT, padding=torch.tensor([0, 4, 6, 8, 8])) == (0, 4, 6, 8)  # an empty one is left out
    assert flat_offsets(FLAT, max_sequences=5) == (0, 3, 4, 6, 7, 8)
    assert flat_offsets(FLAT, padding="behind", max_sequences=2) == (0, 4, 8)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 8), st.integers(1, 9))
def test_offsets_of_one_length_move_no_sequence(lengths, tail, count):
    segments = Segments.from_lengths([lengths], sum(lengths) + tail)
    try:
        offsets = flat_offsets(segments, max_sequences=count)
    except CollateError:
        assert count < len(lengths) or count > len(lengths) + tail
        return
    assert len(offsets) == count + 1
    assert offsets[-1] == segments.shape[1]
    assert all(a < b for a, b in pairwise(offsets))
    assert [offsets[n] for n in range(len(lengths))] == [start for _, start, _ in segments.spans]


# --- chunk tables


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from((16, 32, 64, 128)))
def test_a_table_is_its_definition(lengths, chunk):
    """A row for each chunk that begins inside a sequence: its sequence, and how many chunks of it stand before. An empty
    sequence has no chunk and keeps its number (fla #909)."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    expected = [[n, start // chunk] for n, length in enumerate(lengths) for start in range(0, length, chunk)]
    assert chunk_indices(offsets, chunk).tolist() == expected
    firsts = [sum(row[0] < n for row in expected) for n in range(len(lengths) + 1)]
    assert chunk_offsets(offsets, chunk).tolist() == firsts


# --- padded rows without a mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_zeros_at_padding_make_a_layer_exact_where_nothing_has_a_bias(side):
    segments = Segments.from_lengths([3, 9, 1], side=side)
    hidden = torch.randn(*segments.shape, D, generator=torch.Generator().manual_seed(3)).requires_grad_()
    layer = Layer()
    out, expected = unpad(layer(zero_padding(hidden, segments)), segments), alone(layer, hidden, segments)
    assert apart(out, expected, layer, hidden) < 1e-5
    if side == "left":
        assert apart(unpad(layer(hidden), segments), expected, layer, hidden) > 0.1
        biased = Layer(bias=True)
        wrong = unpad(biased(zero_padding(hidden, segments)), segments)
        assert apart(wrong, alone(biased, hidden, segments), biased, hidden) > 0.1


def test_it_is_a_new_tensor_and_packed_rows_holes_and_other_shapes_are_refused():
    hidden = torch.ones(2, 3, 2, 2)
    assert (zero_padding(hidden, Segments.from_lengths([2, 0], width=3)).sum(), hidden.sum()) == (8, 24)
    bad = Segments.from_ids([[1, 1, 2, 2], [1, 0, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(UnsupportedFormError, match=r"2 bad rows\.\n  row 0: got 2 sequences\n  row 1: got padding inside"):
        zero_padding(torch.ones(3, 4, 1), bad)
    with pytest.raises(CollateError, match=r"\[3, 4\]"):
        zero_padding(torch.ones(4, 3, 1), bad)
