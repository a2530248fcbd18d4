"""verl 0.9.1: round trips beside verl's own functions, install and uninstall, and what verl gets wrong.

Tests named `test_upstream_*` pin a failure of verl itself beside our answer: one that goes red says that verl changed.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from megatron.core import parallel_state as mpu
from verl.models.mcore import model_forward, util

from collate_npu import CollateError, ContextParallel
from collate_npu.integrations import verl
from collate_npu.masks import dense

NEEDS = ("verl", "megatron")
pytestmark = pytest.mark.usefixtures("one_rank")

ONE = ContextParallel(1, 0)
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def jagged(lengths, *trailing, dtype=torch.int64):
    """Rows whose values are all different and none of them the padding."""
    rows, at = [], 1
    for length in lengths:
        size = length * torch.Size(trailing).numel()
        rows.append(torch.arange(at, at + size, dtype=dtype).view(length, *trailing))
        at += size
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def same(one, other):
    return len(one.unbind()) == len(other.unbind()) and all(map(torch.equal, one.unbind(), other.unbind()))


def grid(patch, tp, cp, rank):
    """verl's preprocess asks Megatron for sizes alone, so any grid can be played in one process."""
    patch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: tp)
    patch.setattr(mpu, "get_context_parallel_world_size", lambda: cp)
    patch.setattr(mpu, "get_context_parallel_rank", lambda: rank)


# --- the same as verl, where verl is right


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    LENGTHS, st.sampled_from([(), (3,)]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.booleans(),
    st.booleans(), st.integers(0, 5),
)  # fmt: skip
def test_padding_and_split_are_verls(lengths, trailing, cp, tp, fp8, roll, extra):
    values = jagged(lengths, *trailing)
    width = max(lengths) + extra if extra else None
    for rank in range(cp):
        with pytest.MonkeyPatch.context() as patch:
            grid(patch, tp, cp, rank)
            theirs = util.preprocess_bshd_engine(values, True, roll, fp8, width)
        place = ContextParallel(cp, rank, tensor_parallel=tp)
        ours = verl.pad_jagged(values, place, npu=False, width=width, fp8=fp8, roll=roll)
        mine = (ours.values, ours.attention_mask_2d, ours.position_ids)
        assert all(map(torch.equal, mine, theirs))
        assert ours.attention_mask is ours.attention_mask_2d


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.sampled_from([(), (3,)]), st.sampled_from([1, 2, 4]), st.booleans())
def test_the_way_back_is_the_inverse(lengths, trailing, tp, fp8):
    values = jagged(lengths, *trailing)
    padded = verl.pad_jagged(values, ContextParallel(1, 0, tensor_parallel=tp), npu=True, fp8=fp8)
    assert same(verl.to_jagged(padded.values, padded.segments, ONE), values)
    assert padded.attention_mask is None


@pytest.mark.parametrize("device", ["npu", "other"])
def test_the_way_back_takes_the_2d_mask_on_any_device_and_no_other(device, monkeypatch):
    monkeypatch.setattr(util, "is_npu_available", device == "npu")
    values = jagged([4, 1, 3], 2, dtype=torch.float32)
    padded = verl.pad_jagged(values)
    assert same(verl.postprocess_bshd_engine(padded.values, padded.attention_mask_2d), values)
    for other in (None, dense(padded.segments, polarity="masked")):
        with pytest.raises(CollateError, match="Pass Padded"):
            verl.postprocess_bshd_engine(padded.values, other)


def test_rows_of_no_tokens_stay_rows():
    values = torch.nested.nested_tensor_from_jagged(torch.arange(1, 5), torch.tensor([0, 3, 3, 4]))
    padded = verl.pad_jagged(values, npu=True)
    assert same(verl.to_jagged(padded.values, padded.segments), values)


# --- the mask of the model


def test_padded_ids_are_refused_with_the_remedy():
    with pytest.raises(CollateError, match=r"jagged nested tensor .* layout=torch\.jagged"):
        verl.pad_jagged(torch.ones(2, 3, dtype=torch.int64), ONE)


def test_vision_rows_are_verls(monkeypatch):
    values = jagged([5, 2, 7])
    for tp, width in ((1, None), (4, None), (2, 9)):
        monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda tp=tp: tp)
        ours = verl.build_vlm_attn_mask_bshd(values, 3, 99, width)
        assert all(map(torch.equal, ours, util.build_vlm_attn_mask_bshd(values, 3, 99, width)))


# --- what verl gets wrong


def test_upstream_builds_a_square_mask_on_npu_where_none_is_exact(verl_npu):
    values = jagged([7, 3])
    mask = util.preprocess_bshd_engine(values)[1]
    assert mask.shape == (2, 1, 7, 7)
    assert mask[1, 0, 3:].all(), "queries at padding see nothing: a kernel needs inner_precise=2 for such rows"
    assert verl.pad_jagged(values).attention_mask is None


def test_upstream_vision_rows_ignore_fp8(monkeypatch):
    values = jagged([5, 2, 7])
    ids = util.preprocess_bshd_engine(values, use_fp8_padding=True)[0]
    rows = util.build_vlm_attn_mask_bshd(values, 3, 0)[0]
    assert rows.shape[1] != ids.shape[1], "labels and logits of a vision model have two widths under fp8"
    assert verl.build_vlm_attn_mask_bshd(values, 3, 0, use_fp8_padding=True)[0].shape == ids.shape


def test_upstream_an_int_mask_of_ones_picks_the_second_token_of_each_row_in_silence():
    """So our forwards hand it over as a bool (test_verl_forward)."""
    ids, keep = torch.tensor([[11, 12, 13]]), torch.tensor([[1, 1, 1]])
    assert util.preprocess_bshd(ids, keep, keep)[0].tolist() == [[12, 12, 12]]
    assert util.preprocess_bshd(ids, keep.bool(), keep)[0].tolist() == ids.tolist()


# --- install, and back


def test_uninstall_puts_verls_own_back(verl_npu):
    names = ("preprocess_bshd_engine", "postprocess_bshd_engine", "build_vlm_attn_mask_bshd")
    before = {name: getattr(util, name) for name in names}
    verl.install()
    verl.install()
    assert all(getattr(util, name) is getattr(model_forward, name) is not original for name, original in before.items())
    assert util.postprocess_bshd_engine(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)).is_nested, "ours, on an NPU"
    verl.uninstall()
    assert all(getattr(util, name) is original for name, original in before.items())


# --- two real ranks


def on_two_ranks():
    """Runs on each of two ranks: verl beside us, forward and backward, with Megatron's own groups."""
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(context_parallel_size=2)
    lengths = [13, 2, 8]
    values = jagged(lengths, 2, dtype=torch.float32)
    padded = verl.pad_jagged(values, npu=True)
    theirs = util.preprocess_bshd_engine(values)
    assert padded.attention_mask is None
    assert all(map(torch.equal, (padded.values, padded.attention_mask_2d, padded.position_ids), theirs))

    outputs = [padded.values.clone().requires_grad_() for _ in range(3)]
    back = [
        util.postprocess_bshd_engine(outputs[0], padded.attention_mask_2d),
        verl.to_jagged(outputs[1], padded.segments),
        verl.postprocess_bshd_engine(outputs[2], padded.attention_mask_2d),
    ]
    for result in back:
        assert same(result, values)
        (result.values() * torch.arange(46.0).view(23, 2)).sum().backward()
    assert torch.equal(outputs[0].grad, outputs[1].grad)
    assert torch.equal(outputs[0].grad, outputs[2].grad)

    rows = jagged(lengths)
    assert verl.build_vlm_attn_mask_bshd(rows, 3, 0)[0].shape == (3, 16)
    return padded.values.shape


def test_two_ranks_agree_with_verl_forward_and_backward(ranks):
    assert ranks(2)("test_verl.on_two_ranks", seconds=300) == [(3, 8, 2)] * 2
