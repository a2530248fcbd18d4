"""verl 0.9.1: round trips beside verl's own functions, install and uninstall, and what verl gets wrong.

Tests named `test_upstream_*` pin a failure of verl itself beside our answer: one that goes red says that verl changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

why = "verl 0.9.1 and megatron-core 0.16.1 are not installed (nox -s peers_misc)"
util = pytest.importorskip("verl.models.mcore.util", reason=why, exc_type=ImportError)
model_forward = pytest.importorskip("verl.models.mcore.model_forward", reason=why, exc_type=ImportError)
mpu = pytest.importorskip("megatron.core.parallel_state", reason=why, exc_type=ImportError)

from collate_npu import CollateError, ContextParallel, Pattern, UnsupportedFormError, dense  # noqa: E402
from collate_npu.integrations import verl  # noqa: E402
from collate_npu.integrations.verl import engine as verl_engine  # noqa: E402
from collate_npu.parallel import join_shards  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

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


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """One process with Megatron's groups, as verl needs them to do anything."""
    if not torch.distributed.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            mpu.initialize_model_parallel()
            yield
            mpu.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    else:
        yield


@pytest.fixture
def npu(monkeypatch):
    """What verl decides once, at import, by looking for torch_npu."""
    monkeypatch.setattr(util, "is_npu_available", True)


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


@given(LENGTHS, st.sampled_from([2, 3]))
def test_shards_make_up_the_whole(lengths, cp):
    values = jagged(lengths)
    shards = [verl.pad_jagged(values, ContextParallel(cp, rank), npu=True) for rank in range(cp)]
    whole = join_shards([shard.values for shard in shards], ContextParallel(cp, 0))
    assert same(verl.to_jagged(whole, shards[0].segments, ONE), values)
    keep = join_shards([shard.attention_mask_2d for shard in shards], ContextParallel(cp, 0))
    assert torch.equal(keep, shards[0].segments.keep)


@pytest.mark.parametrize("given_mask", ["2d", "4d", "ids"])
@pytest.mark.parametrize("device", ["npu", "other"])
def test_the_way_back_takes_any_mask_on_any_device(given_mask, device, monkeypatch):
    monkeypatch.setattr(util, "is_npu_available", device == "npu")
    values = jagged([4, 1, 3], 2, dtype=torch.float32)
    padded = verl.pad_jagged(values)
    masked = dense(padded.segments, polarity="masked")
    given = {"2d": padded.attention_mask_2d, "4d": masked, "ids": None}[given_mask]
    ids = values if given_mask == "ids" else None
    assert same(verl_engine.postprocess_bshd_engine(padded.values, given, input_ids=ids), values)


def test_gradients_come_back_as_verls_do():
    values = jagged([4, 1, 3])
    padded = verl.pad_jagged(values)
    outputs = [padded.values.float().requires_grad_() for _ in range(2)]
    theirs = util.postprocess_bshd_engine(outputs[0], padded.attention_mask_2d)
    ours = verl.to_jagged(outputs[1], padded.segments)
    for result in (theirs, ours):
        (result.values() * torch.arange(8.0)).sum().backward()
    assert torch.equal(outputs[0].grad, outputs[1].grad)
    assert outputs[1].grad.sum() == 28


def test_rows_of_no_tokens_stay_rows():
    values = torch.nested.nested_tensor_from_jagged(torch.arange(1, 5), torch.tensor([0, 3, 3, 4]))
    padded = verl.pad_jagged(values, npu=True)
    assert same(verl.to_jagged(padded.values, padded.segments), values)


# --- the mask of the model


@pytest.mark.parametrize("device", ["npu", "other"])
def test_a_window_is_refused(device):
    """MindSpeed's causal attention takes no dense mask (consumers/mindspeed.py)."""
    with pytest.raises(UnsupportedFormError, match="compressed causal triangle" if device == "npu" else "thd"):
        verl.pad_jagged(jagged([7, 3]), npu=device == "npu", pattern=Pattern.sliding(3))


def test_padded_ids_are_refused_with_the_remedy():
    with pytest.raises(CollateError, match=r"jagged nested tensor .* layout=torch\.jagged"):
        verl.pad_jagged(torch.ones(2, 3, dtype=torch.int64), ONE)


def test_none_alone_is_refused_with_the_remedy():
    with pytest.raises(CollateError, match="Pass input_ids="):
        verl_engine.postprocess_bshd_engine(torch.zeros(2, 3), None)


def test_vision_rows_are_verls(monkeypatch):
    values = jagged([5, 2, 7])
    for tp, width in ((1, None), (4, None), (2, 9)):
        monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda tp=tp: tp)
        ours = verl_engine.build_vlm_attn_mask_bshd(values, 3, 99, width)
        assert all(map(torch.equal, ours, util.build_vlm_attn_mask_bshd(values, 3, 99, width)))
        ours = verl_engine.build_vlm_attn_mask_thd(values, 99)
        assert all(map(torch.equal, ours, util.build_vlm_attn_mask_thd(values, 99)))


# --- rows padded on the left


@settings(deadline=None)
@given(st.data(), st.booleans())
def test_rows_padded_anywhere_are_verls_for_bool_masks(data, sequence_parallel):
    keep = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3)))
    keep[:, 3] = True
    ids = torch.arange(1, keep.numel() + 1).view(keep.shape)
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    with pytest.MonkeyPatch.context() as patch:
        grid(patch, 4, 1, 0)
        theirs = util.preprocess_bshd(ids, keep, positions, sequence_parallel)
    cp = ContextParallel(1, 0, tensor_parallel=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextParallel, "from_megatron", classmethod(lambda *_, **__: cp))
        ours = verl_engine.preprocess_bshd(ids, keep.long(), positions, sequence_parallel)
    assert all(map(torch.equal, ours, theirs))
    hidden = torch.stack([ours[0], -ours[0]], -1).float()
    back = verl_engine.postprocess_bshd(hidden, ours[1], keep.long(), 6)
    assert torch.equal(back, util.postprocess_bshd(hidden, theirs[1], keep, 6))
    assert torch.equal(back[..., 0].long(), ids * keep)


# --- what verl gets wrong


def test_upstream_none_has_no_way_back(monkeypatch):
    for device in (True, False):
        monkeypatch.setattr(util, "is_npu_available", device)
        with pytest.raises(AttributeError, match="diagonal" if device else "shape"):
            util.postprocess_bshd_engine(torch.zeros(2, 3), None)


def test_upstream_2d_has_no_way_back_on_npu(npu):
    with pytest.raises(IndexError):
        util.postprocess_bshd_engine(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


def test_upstream_4d_has_no_way_back_elsewhere():
    with pytest.raises(AssertionError, match=r"attention_mask\.shape"):
        util.postprocess_bshd_engine(torch.zeros(2, 3), torch.ones(2, 1, 3, 3, dtype=torch.bool))


def test_upstream_builds_a_square_mask_on_npu_where_none_is_exact(npu):
    values = jagged([7, 3])
    mask = util.preprocess_bshd_engine(values)[1]
    assert mask.shape == (2, 1, 7, 7)
    assert mask[1, 0, 3:].all(), "queries at padding see nothing: a kernel needs inner_precise=2 for such rows"
    assert verl.pad_jagged(values).attention_mask is None


def test_upstream_square_mask_has_no_remote_keys_under_cp(npu, monkeypatch):
    grid(monkeypatch, 1, 2, 0)
    mask = util.preprocess_bshd_engine(jagged([8]))[1]
    assert mask.shape == (1, 1, 4, 4), "the last query of rank 0 attends 4 keys, not 8"


def test_upstream_vision_rows_ignore_fp8(monkeypatch):
    values = jagged([5, 2, 7])
    ids = util.preprocess_bshd_engine(values, use_fp8_padding=True)[0]
    rows = util.build_vlm_attn_mask_bshd(values, 3, 0)[0]
    assert rows.shape[1] != ids.shape[1], "labels and logits of a vision model have two widths under fp8"
    assert verl_engine.build_vlm_attn_mask_bshd(values, 3, 0, use_fp8_padding=True)[0].shape == ids.shape


def test_upstream_int_masks_pick_other_tokens():
    ids, keep = torch.tensor([[11, 12, 13, 14]]), torch.tensor([[0, 0, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1]])
    with pytest.raises(RuntimeError):
        util.preprocess_bshd(ids, keep, positions)
    assert torch.equal(verl_engine.preprocess_bshd(ids, keep, positions)[0], torch.tensor([[13, 14]]))


def test_upstream_vision_packing_keeps_its_2d_mask_on_npu(npu):
    """Not None: the model packs the rows by this mask, and its Gated DeltaNet reads it (verl#7250, verl#7372)."""
    values = jagged([5, 2, 7])
    assert util.build_vlm_attn_mask_bshd(values, 3, 0)[1] is None
    assert util.build_vlm_attn_mask_thd(values, 0)[1].shape == (3, 7)
    assert verl_engine.build_vlm_attn_mask_bshd(values, 3, 0)[1] is None
    assert verl_engine.build_vlm_attn_mask_thd(values, 0)[1].shape == (3, 7)


# --- install, and back


def test_uninstall_puts_verls_own_back(npu):
    before = {ours.__name__: getattr(util, ours.__name__) for ours in verl_engine._REPLACEMENTS}
    verl_engine.install()
    verl_engine.install()
    assert all(getattr(util, name) is getattr(model_forward, name) is not original for name, original in before.items())
    assert util.postprocess_bshd_engine(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)).is_nested, "ours, on an NPU"
    verl_engine.uninstall()
    assert all(getattr(util, name) is original for name, original in before.items())


def test_mindspeeds_adaptor_runs_before_our_plugin_brings_megatron_in(tmp_path):
    """verl itself imports it where its workers begin (workers/engine/__init__.py:54-65), which may be later."""
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("")
    seen = "import sys\nprint('adaptor', 'megatron.core' in sys.modules)\n"
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text(seen)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "collate_npu.integrations.verl.plugin"}
    held = "'megatron.core' in sys.modules"
    code = f"import verl, sys\nprint('before', {held})\nimport verl.models.mcore\nprint('after', {held})"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if line.startswith(("adaptor", "before", "after"))] == [
        "before False",
        "adaptor False",
        "after True",
    ], done.stderr[-2000:]


def test_a_later_patch_of_another_library_stays(npu):
    original, theirs = util.preprocess_bshd_engine, model_forward.preprocess_bshd_engine
    verl_engine.install()
    ours = model_forward.preprocess_bshd_engine
    model_forward.preprocess_bshd_engine = stranger = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        verl_engine.uninstall()
        assert model_forward.preprocess_bshd_engine is stranger
        assert util.preprocess_bshd_engine is original
        assert stranger(jagged([7, 3]))[1].shape == (2, 1, 7, 7), "verl's own mask again"
    finally:
        model_forward.preprocess_bshd_engine = theirs


def test_an_inverted_or_misshapen_mask_of_padded_rows_is_refused():
    ids, keep = torch.tensor([[11, 12, 13, 14]] * 2), torch.tensor([[0, 0, 1, 1]] * 2)
    with pytest.raises(CollateError, match="tokens of the batch are"):
        verl_engine.preprocess_bshd(ids, keep[:, 1:], keep)
    with pytest.raises(CollateError, match="no real token"):
        verl_engine.preprocess_bshd(ids, keep * torch.tensor([[1], [0]]), keep)


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
        verl_engine.postprocess_bshd_engine(outputs[2], padded.attention_mask_2d),
    ]
    for result in back:
        assert same(result, values)
        (result.values() * torch.arange(46.0).view(23, 2)).sum().backward()
    assert torch.equal(outputs[0].grad, outputs[1].grad)
    assert torch.equal(outputs[0].grad, outputs[2].grad)
    assert same(verl_engine.postprocess_bshd_engine(padded.values, None, input_ids=values), values)

    rows = jagged(lengths)
    assert verl_engine.build_vlm_attn_mask_bshd(rows, 3, 0)[0].shape == (3, 16)
    keep = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(AssertionError, match="not supported"):
        util.preprocess_bshd(keep.long(), keep, keep.long())
    with pytest.raises(UnsupportedFormError, match="jagged"):
        verl_engine.preprocess_bshd(keep.long(), keep, keep.long())
    with pytest.raises(UnsupportedFormError, match="Pass the 2D mask"):
        verl_engine.postprocess_bshd_engine(padded.values, torch.zeros(3, 1, 8, 16, dtype=torch.bool))
    return padded.values.shape


def test_two_ranks_agree_with_verl_forward_and_backward():
    from gloo_pool import Pool

    pool = Pool(2)
    try:
        assert pool("test_verl.on_two_ranks", seconds=300) == [(3, 8, 2)] * 2
    finally:
        pool.close()
