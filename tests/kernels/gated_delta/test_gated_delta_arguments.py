"""Arguments of each kernel: its own spelling of the same sequences, from which the reference computes each as alone."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_inputs import BORDERS, D, Layer, alone, apart
from strategies import segment_ids

from collate_npu import CollateError, Segments, UnsupportedFormError, unpad
from collate_npu.kernels.gated_delta import Kernel, chunk_indices, flat_offsets, gated_delta_kwargs

ROW = Segments.from_lengths([[3, 70]], width=80)
SHORT = Segments.from_lengths([[3, 4]], width=8)


def plain(kwargs):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("transformers", {"cu_seq_lens_q": [0, 3, 73, 80], "seq_idx": [[0] * 3 + [1] * 70 + [2] * 7]}),
        ("fla", {"cu_seqlens": [0, 3, 73, 80], "cu_seqlens_cpu": [0, 3, 73, 80]}),
        ("fla_conv", {"cu_seqlens": [0, 3, 73, 80], "cu_seqlens_cpu": [0, 3, 73, 80]}),
        ("fla_cp", {"cu_seqlens": [0, 3, 73, 80]}),
        ("causal_conv1d", {"seq_idx": [[0] * 3 + [1] * 70 + [2] * 7]}),
        (
            "fla_npu",
            {
                "cu_seqlens": (0, 3, 73, 80),
                "chunk_indices": (0, 0, 1, 0, 1, 1, 2, 0),
                "chunk_indices_out": (0, 0, 1, 0, 2, 0),
            },
        ),
        ("fla_npu_conv", {"query_start_loc": (0, 3, 73, 80)}),
        ("torch_npu", {"actual_seq_lengths": [3, 70, 7]}),
    ],
)
def test_each_kernels_own_spelling(kernel, expected):
    assert plain(gated_delta_kwargs(ROW, kernel=kernel)) == expected


def test_the_decoding_rule_has_a_first_entry_before_the_lengths():
    assert plain(gated_delta_kwargs(SHORT, kernel="fla_npu_recurrent")) == {"actual_seq_lengths": [0, 3, 4, 1]}
    with pytest.raises(UnsupportedFormError, match="a sequence of 70 tokens"):
        gated_delta_kwargs(ROW, kernel="fla_npu_recurrent")


def test_tables_are_built_on_request_and_the_convolutions_is_always_in_64():
    rule = gated_delta_kwargs(ROW, kernel="fla", chunk_size=32, tables=True)["chunk_indices"]
    conv = gated_delta_kwargs(ROW, kernel="fla_conv", chunk_size=32, tables=True)["chunk_indices"]
    assert np.array_equal(rule, chunk_indices([0, 3, 73, 80], 32))
    assert np.array_equal(conv, chunk_indices([0, 3, 73, 80], 64))


DTYPES = {"fla": torch.int64, "fla_conv": torch.int64, "fla_cp": torch.int64}


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_containers_dtypes_and_that_nothing_is_shared(kernel):
    first, second = (gated_delta_kwargs(SHORT, kernel=kernel) for _ in range(2))
    for _name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == DTYPES.get(kernel, torch.int32)
            assert value.is_contiguous()
            value.fill_(99)  # law 12: refilled, it changes no other
    assert plain(gated_delta_kwargs(SHORT, kernel=kernel)) == plain(second)
    tensors = [value for value in second.values() if isinstance(value, torch.Tensor)]
    assert len({value.untyped_storage().data_ptr() for value in tensors}) == len(tensors)


@pytest.mark.parametrize("kernel", [kernel for kernel in get_args(Kernel) if kernel != "fla_npu_recurrent"])
@given(ids=segment_ids(width=12))
@settings(max_examples=40)
def test_every_spelling_tells_the_same_sequences(kernel, ids):
    """Law 3: offsets, lengths, numbers and tables give the same ends again."""
    segments = Segments.from_ids(ids)
    try:
        offsets = flat_offsets(segments, padding="behind" if kernel == "megatron" else "own")
    except UnsupportedFormError:
        return
    try:
        kwargs = plain(gated_delta_kwargs(segments, kernel=kernel, tables=True))
    except UnsupportedFormError:
        assert kernel == "transformers"
        assert segments.packed or segments.hole_rows
        return
    for name, value in kwargs.items():
        if name in ("qkv_format", "attention_mask", "max_seqlen_q", "max_seqlen_kv"):
            continue
        if name == "total_tokens":
            found = (*offsets[:-1], value)
        elif name == "seq_idx":
            found = (0, *(1 + np.flatnonzero(np.diff(value[0]))).tolist(), len(value[0]))
        elif name == "actual_seq_lengths":
            found = (0, *np.cumsum(value).tolist())
        elif name.startswith("chunk_indices"):
            pairs = np.reshape(value, (-1, 2)).tolist()
            assert pairs == chunk_indices(offsets, 64 if name == "chunk_indices" else 2048).tolist()
            continue
        else:
            found = tuple(value)
        assert found == offsets, name


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_go_through_unpad_and_come_back(side):
    segments = Segments.from_lengths([[3, 2], [9], [1]], side=side)
    hidden = torch.randn(*segments.shape, D).requires_grad_()
    layer = Layer()
    out = layer(unpad(hidden, segments)[None], cu_seqlens=gated_delta_kwargs(segments, kernel="fla")["cu_seqlens"])
    assert apart(out[0], alone(layer, hidden, segments), layer, hidden) < 1e-5
    whole = gated_delta_kwargs(segments, kernel="fla", keep_padding=True)["cu_seqlens"]
    kept = layer(hidden.reshape(1, -1, D), cu_seqlens=whole)[0].unflatten(0, segments.shape)
    assert apart(unpad(kept, segments), alone(layer, hidden, segments), layer, hidden) < 1e-5


def test_holes_are_closed_by_unpad():
    segments = Segments.from_keep([[1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 1, 1]])
    hidden, layer = torch.randn(2, 6, D).requires_grad_(), Layer()
    out = layer(unpad(hidden, segments)[None], cu_seqlens=gated_delta_kwargs(segments, kernel="fla")["cu_seqlens"])
    assert apart(out[0], alone(layer, hidden, segments), layer, hidden) < 1e-5


def test_perturbing_one_sequence_changes_no_other():
    """Law 11, forward and backward."""
    segments, layer = Segments.from_lengths([[5, 1, 6]], width=14), Layer()
    boundary = gated_delta_kwargs(segments, kernel="fla")["cu_seqlens"]
    hidden = torch.randn(1, 14, D).requires_grad_()
    changed = hidden.detach().clone()
    changed[:, 5:6] += 1
    out, other = layer(hidden, cu_seqlens=boundary), layer(changed, cu_seqlens=boundary)
    same = [bool((out[:, a:b] == other[:, a:b]).all()) for a, b in pairwise(boundary.tolist())]
    assert same == [True, False, True, True]
    (grad,) = torch.autograd.grad(out[:, :5].sum(), hidden)
    assert grad[:, 5:].abs().max() == 0


def test_transformers_takes_padded_rows_with_a_mask():
    segments = Segments.from_lengths([3, 5], side="left")
    assert plain(gated_delta_kwargs(segments, kernel="transformers")) == {"attention_mask": segments.keep.long().tolist()}
    flat = gated_delta_kwargs(segments, kernel="transformers", keep_padding=False)
    assert plain(flat)["cu_seq_lens_q"] == [0, 3, 8]
    for bad in (Segments.from_lengths([[3, 2], [5]]), Segments.from_keep([[1, 0, 1]])):
        with pytest.raises(UnsupportedFormError, match="keep_padding=False"):
            gated_delta_kwargs(bad, kernel="transformers")
        gated_delta_kwargs(bad, kernel="transformers", keep_padding=False)


def test_refusals():
    with pytest.raises(CollateError, match="The kernels are transformers, fla"):
        gated_delta_kwargs(ROW, kernel="flash")
    with pytest.raises(UnsupportedFormError, match="chunks of 16, 32, 64"):
        gated_delta_kwargs(ROW, kernel="fla", chunk_size=128)
    with pytest.raises(UnsupportedFormError, match="chunks of 64, 128"):
        gated_delta_kwargs(ROW, kernel="fla_npu", chunk_size=32)
    assert gated_delta_kwargs(ROW, kernel="fla_npu", chunk_size=128)["chunk_indices"] == (0, 0, 1, 0, 2, 0)
