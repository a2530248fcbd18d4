"""Arguments of each kernel: from them it computes each sequence as alone, or they are refused where no argument says it; the
offsets of a flat row, and padded rows whose padding is zeroed."""

from itertools import pairwise
from typing import get_args

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import HealthCheck, assume, given, reject, settings, strategies as st
from kernel_readings import RANKS, computed, sequences_alone, values
from rule_inputs import D, Layer, alone, apart

from collate_npu import CollateError, Segments, unpad
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.gated_delta import MOST_DECODED, Kernel, flat_offsets, gated_delta_kwargs, zero_padding

ROW = Segments.from_lengths([[3, 70]], width=80)
SHORT = Segments.from_lengths([[3, 4]], width=8)


def plain(kwargs):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


def has_no_form(kernel, batch, keep, padding):
    """Why no argument says it: padding in a sequence, or before the first; packed rows under a mask; too long a sequence."""
    rows, sides = batch.array.tolist(), batch.padding_side != "none"
    if kernel == "transformers" and keep is not False and (len(rows) > 1 or (sides and not batch.packed)):
        return batch.packed or bool(batch.hole_rows)
    kept = sides and (len(rows) == 1 if keep is None else keep)
    behind = padding == "behind" or kernel == "megatron"
    if not batch.num_tokens or (kept and (batch.hole_rows or (behind and any(not row[0] for row in rows)))):
        return True
    begins = [[s for s, n in enumerate(row) if (s == 0 or row[s - 1] != n) and (n or not behind)] for row in rows]
    runs = [stop - start for row, at in zip(rows, begins) for start, stop in pairwise([*at, len(row)])]
    return kernel == "fla_npu_recurrent" and max(runs if kept else oracle.lengths(rows)) > MOST_DECODED


@pytest.mark.parametrize("kernel", get_args(Kernel))
@settings(suppress_health_check=[HealthCheck.filter_too_much])  # `fla_cp` takes rows of a multiple of its ranks alone
@given(strategies.segments(), st.sampled_from([None, False, True]), st.sampled_from(["own", "behind"]))
def test_what_the_kernel_computes_from_them_is_each_sequence_alone(kernel, batch, keep, padding):
    """As that kernel reads them, by its own source; where it has no form for a batch, that is refused, and nothing else."""
    try:
        kwargs = gated_delta_kwargs(batch, kernel=kernel, keep_padding=keep, padding=padding)
    except UnsupportedFormError:
        assert has_no_form(kernel, batch, keep, padding)
        reject()
    assert not has_no_form(kernel, batch, keep, padding)
    rows, (B, S) = "attention_mask" in kwargs, batch.shape
    whole = rows or keep or (keep is None and B == 1)
    places = np.arange(B * S) if whole else np.flatnonzero(batch.array)
    assume(kernel != "fla_cp" or (len(places) % RANKS == 0 and len(places) >= 3 * RANKS))
    x, decay = (each[places] for each in values(B * S))
    conv = kernel.endswith(("conv", "conv1d"))
    right = sequences_alone(batch, places, rule=not conv, conv=conv or kernel == "transformers")
    shape = {"B": B, "T": S} if rows else {"B": 1, "T": len(places)}
    out = computed(kernel, kwargs | ({"scale": 1.0} if "actual_seq_lengths" in kwargs else {}), x, decay, **shape)
    assert not np.isnan(out).any()
    np.testing.assert_allclose(out[~np.isnan(right)], right[~np.isnan(right)], atol=1e-9, rtol=0)


def test_chunks_begin_again_at_each_sequence():
    assert gated_delta_kwargs(ROW, kernel="fla_npu")["chunk_indices"] == (0, 0, 1, 0, 1, 1, 2, 0)
    for length, table in ((2048, (0, 0)), (2049, (0, 0, 0, 1))):
        one = gated_delta_kwargs(Segments.from_lengths([[length]]), kernel="fla_npu_cumsum")
        assert one["chunk_indices_out"] == table


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
    ({"kernel": "flash"}, "It is one of transformers, fla"),
    ({"kernel": "fla_npu_recurrent"}, "a sequence of 70 tokens"),
    ({"segments": HOLE}, r"row 0: got padding inside a sequence[\s\S]*keep_padding=False"),
    ({"segments": LEFT, "padding": "behind"}, r"before the first[\s\S]*padding='own'"),
    ({"segments": Segments.from_lengths([0], width=4)}, "at least one token"),
    ({"segments": Segments.from_lengths([3, 5]), "padding": [0, 3, 8]}, "one flat row"),
    *(({"padding": bad}, "cu_seqlens_padded of this very batch") for bad in ([0, 3, 73], [0, 2, 73, 80], [0, 3, 3, 80])),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_has_no_right_arguments_is_refused_with_the_way_out(wrong, message):
    with pytest.raises(CollateError, match=message):
        gated_delta_kwargs(**{"segments": ROW, "kernel": "fla", **wrong})


# --- offsets of a flat row: every token covered once, no real token in the sequence of another

FLAT = Segments.from_ids([[1, 1, 1, 0, 2, 2, 0, 0]])


def test_padding_is_a_sequence_of_its_own_or_lies_behind_the_one_before():
    assert flat_offsets(FLAT) == (0, 3, 4, 6, 8)
    assert flat_offsets(FLAT, padding="behind") == flat_offsets(FLAT, padding=torch.tensor([0, 4, 8])) == (0, 4, 8)
    assert flat_offsets(FLAT, keep_padding=False) == (0, 3, 5)


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
