"""mcore-bridge 1.6.5: real `GPTModel`s of Qwen3-Next and Qwen3.5.

`mcore_bridge_work` builds and runs them in a process and says what every layer received.
"""

from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from cells import Stack, verdict
from mcore_bridge.model.modules import GatedDeltaNet
from megatron.core import mpu
from processes import found_by
from swift_world import arguments, prepare

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.megatron import mcore_bridge

NEEDS = ("swift", "mcore_bridge", "megatron")

EXACT = 1e-4
PADDED = [3, 1, 8, 8]
"""The dense mask of the three rows of `mcore_bridge_work`; a "template" case is what ms-swift's own template collates."""


@pytest.fixture(scope="module")
def bridges(tmp_path_factory):
    """What the models did in a process, with Megatron's layer."""
    return found_by("mcore_bridge_work", tmp_path_factory.mktemp("bridge"))[0]


@pytest.fixture
def found(bridges):
    return bridges["padded"]


def runs(found, who):
    kept = {name: case for name, case in found.items() if isinstance(case, dict) and name.endswith(who)}
    assert len(kept) > 10
    return kept.items()


# --- with install(): every batch, every stage


def test_every_batch_is_as_alone_and_each_layer_gets_what_it_reads(found):
    """Recurrent layers nothing at padding, attention the mask of its kernel, routers the padding.

    A second pipeline stage that recomputes is handed the same, and every layer runs again in the backward pass."""
    for name, case in runs(found, "ours"):
        assert max(case["logits"], case["gradients"]) <= EXACT, name
        assert case["gdn"] == {"1": True, "3": True}, name
        reads = "local" in name or "left" in name or "gpt_batch" in name
        assert case["attention"] == {"2": PADDED if reads else None, "4": PADDED if reads else None}, name
        assert case["router"] == (dict.fromkeys("1234", True) if "moe" in name else {}), name
        stages = 2 if "2 stages" in name else 1
        assert case["runs"] == dict.fromkeys("1234", stages), name
        if stages == 2:
            assert case["handed"] == found[name.replace("2 stages, recomputed", "1 stage")]["handed"], name
            assert "attention_mask_2d" in case["handed"]["3"], name


def test_routers_losses_do_not_count_padding_where_layers_are_recomputed(found):
    """Aux loss and z-loss, gradients included, at twice the padding."""
    assert found["router losses, ours"] <= EXACT
    assert found["router losses, upstream"] > 100 * EXACT


def test_check_delivery_asks_these_models_too(found):
    assert found["delivered"] == ""
    assert "decoder.layers.0.self_attention" in found["not delivered"]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_its_cells(found, family):
    """ms-swift's `prepare_batch` for an NPU; left padding on Megatron's own attention, which reads a dense mask."""
    stack = Stack("ms-swift, Megatron", ("ms-swift", "mcore-bridge", "megatron-core"), "peers_swift")
    line = '--external_plugins "$PLUGIN"'
    for layout, name in (("padded right", "1 stage, template, right"), ("padded left", "1 stage, local, left")):
        cases = [found[f"{family}, {name}, {who}"] for who in ("upstream", "ours")]
        alone, ours = (verdict(max(case["logits"], case["gradients"]), gradient=case["gradient"]) for case in cases)
        stack.tell(family, layout, alone=alone, ours=ours, line=line)


# --- what cannot be run, and who says so


def test_layers_of_transformers_are_refused_when_they_are_built(tmp_path):
    """Of Qwen3-Next mcore-bridge itself cannot build them."""
    said = found_by("mcore_bridge_work", tmp_path, variants=({"USE_MCORE_GDN": "0"},))[0]
    assert "USE_MCORE_GDN: got 0." in said["qwen3_next"]
    assert "USE_MCORE_GDN: got 0." in said["qwen3_5"]


def test_mlp_padding_free_is_refused_where_mcore_bridge_would_cut_its_mask_otherwise_than_the_tokens(world, installed):
    truth = Segments.from_lengths((7, 3), 8)
    world.npu(False)
    world.rank(0, 2)
    data = {"input_ids": truth.ids.long(), "position_ids": truth.position_ids}
    data |= {"attention_mask": truth.keep, "labels": truth.ids.long().masked_fill(~truth.keep, -100)}
    settings = {"cp": 2, "mlp_padding_free": True}
    with pytest.raises(UnsupportedFormError, match="cp_partition_mode: got contiguous"):
        prepare(arguments("qwen3", cp_partition_mode="contiguous", **settings), dict(data))
    assert prepare(arguments("qwen3", cp_partition_mode="zigzag", **settings), dict(data))["attention_mask"] is not None


@pytest.mark.parametrize("ignored", [1, 2])
def test_multi_token_prediction_over_left_padding_is_refused_unless_its_labels_are_ignored(world, installed, ignored):
    """Measured: the gradient of the prediction layers is off by its own size, and exact with the remedy."""
    truth = Segments.from_lengths((7, 3), 8, "left")
    data = {"input_ids": truth.ids.long(), "position_ids": truth.position_ids, "attention_mask": truth.keep}
    data["labels"] = truth.ids.long().masked_fill(~truth.keep | (truth.position_ids < ignored), -100)
    args = arguments("qwen3", attention_backend="local", masked_softmax_fusion=False, mtp_num_layers=1)
    world.npu(False)
    text = r"labels: got learned ones there in rows \[0, 1\]. With mtp_num_lay"
    with nullcontext() if ignored == 2 else pytest.raises(UnsupportedFormError, match=text):
        prepare(args, data)


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel_ranks_zero_their_own_tokens(monkeypatch, rank):
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: rank)
    config = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2)
    keep = Segments.from_lengths((3, 1), 4, "left").keep
    whole = torch.arange(1.0, 9.0).view(4, 2, 1)  # [S, B, H]
    (mine,) = mcore_bridge._zero_padding(keep, config, None, (whole[2 * rank : 2 * rank + 2],))
    assert torch.equal(mine, (whole * keep.T[..., None])[2 * rank : 2 * rank + 2])


def test_a_whole_rows_mask_is_refused_beside_a_ranks_tokens_and_what_is_not_finite_at_padding_is_zero_too():
    config = SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1)
    with pytest.raises(CollateError, match=r"attention_mask_2d: got bool \[2, 8\]. This rank holds 4 tokens of 2 rows"):
        mcore_bridge._zero_padding(torch.ones(2, 8, dtype=torch.bool), config, None, (torch.ones(4, 2, 1),))
    hidden = torch.tensor([float("nan"), 1.0]).view(2, 1, 1)
    (out,) = mcore_bridge._zero_padding(torch.tensor([[0, 1]]), config, None, (hidden,))
    assert out.flatten().tolist() == [0.0, 1.0]


def test_layers_nobody_measured_are_not_said_to_leave_padding_out():
    assert not mcore_bridge.masks_padding("qwen3_next")
    mcore_bridge.install()
    try:
        found = [name for name in ("qwen3_next", "qwen3_5", "nemotron_h", "glm5_next", "qwen4_exp", None)
                 if mcore_bridge.masks_padding(name)]  # fmt: skip
    finally:
        mcore_bridge.uninstall()
    assert found == ["qwen3_next", "qwen3_5"]


# --- flat rows: each sequence against itself alone


@pytest.fixture
def flat(bridges):
    return bridges["flat"]


def test_every_sequence_of_a_flat_row_equals_itself_alone_by_offsets_of_where_it_stands(flat):
    """With experts rounding grows: all weights moved by 1e-7 of themselves move gradients by 8e-4, logits by 1e-4.

    Something of mcore-bridge reads either of the offsets, and takes it for places."""
    kept = {name: case for name, case in flat.items() if isinstance(case, dict) and "padded" in case}
    assert len(kept) == 15
    for name, case in kept.items():
        assert max(case["logits"], case["gradients"]) <= EXACT * (20 if " moe" in name else 1), name
        assert case["offsets"] == case["padded"], name
        ends = {"each padded, and a tail": 24, "each padded": 20, "a tail": 16, "side by side": 15}
        assert case["padded"][-1] == next((end for row, end in ends.items() if name.endswith(row)), 10), name


TRAPS = ("real offsets alone, each padded", "real offsets alone, a tail", "padded offsets that end early", "lengths")


@pytest.mark.parametrize("name", [*TRAPS, "real beside padded"])
def test_offsets_of_others_are_taken_in_silence_and_refused_with_install(flat, name):
    """Upstream nothing is written behind the last one. Those that fit and are of another row, `0 7 10 15 20` for sequences
    at 0, 8 and 12, no layer can see."""
    raised = flat["traps"][name]
    assert "Gated DeltaNet takes offsets that rise from 0 to the" in raised if name in TRAPS else raised == ""


# --- the resolver, under context parallelism


@pytest.fixture
def guarded():
    mcore_bridge.install()
    yield
    mcore_bridge.uninstall()


def resolve(padded, actual, total, ranks=1):
    offsets = [None if each is None else torch.tensor(each, dtype=torch.int32) for each in (padded, actual)]
    return GatedDeltaNet._resolve_cu_seqlens(*offsets, total, cp_size=ranks)


@pytest.mark.parametrize(
    ("padded", "total", "ranks"),
    [([0, 3, 76], 76, 2), ([0, 6, 12], 12, 2), ([0, 4, 76], 80, 1), ([3, 70], 80, 1), ([0, 8, 4, 12], 12, 1)],
)
def test_offsets_the_ranks_cannot_share_out_are_refused(guarded, padded, total, ranks):
    with pytest.raises(CollateError, match=rf"packed_seq_params: got .*rise from 0 to the {total} tokens of the row.*Build"):
        resolve(padded, [0, 3, 73], total, ranks)


def test_offsets_that_fit_pass_and_so_does_an_object_without_any(guarded):
    assert resolve([0, 4, 12], None, 12, ranks=2).tolist() == [0, 4, 12]
    assert resolve(None, [0, 5, 5, 12], 12).tolist() == [0, 5, 5, 12]
    assert resolve([5, 12], None, 12).tolist() == [0, 5, 12]  # ends, which upstream mends
    assert resolve(None, None, 12) is None


# --- ms-swift's batches, a row on one rank and shared by two
#
# megatron-core 0.16.1 has no Gated DeltaNet for two ranks; 0.19.2 does, in an environment of its own.

NEWEST = int(version("megatron-core").split(".")[1]) >= 18
PLACE = ("ms-swift, newest Megatron", "peers_newest") if NEWEST else ("ms-swift, Megatron", "peers_swift")


def test_its_cells_on_one_rank_and_on_two(tmp_path):
    stack = Stack(PLACE[0], ("ms-swift", "mcore-bridge", "megatron-core"), PLACE[1])
    found = found_by("mcore_bridge_work", tmp_path, "qwen3", "qwen3_next", "qwen3_5", ranks=2)[0]
    stack.tell_jobs(found, line='--external_plugins "$PLUGIN"')
