"""mcore-bridge 1.6.5 on flat rows: real models of both Gated DeltaNets, each sequence against itself alone.

`bridge_packed_work` runs them, in a process for each value of `USE_MCORE_GDN`; fla's kernels are the references.
"""

import pytest
import torch
from mcore_bridge.model.modules import GatedDeltaNet
from mcore_bridge.model.modules.gated_delta_net import _unpack_sequence

from collate_npu import CollateError, releases
from collate_npu.integrations.megatron import mcore_bridge

NEEDS = ("swift", "mcore_bridge", "megatron")

EXACT, WRONG = 1e-4, 1.0
LAYERS = ["native", "transformers"]


@pytest.fixture
def found(bridges):
    return {layer: told["flat"] for layer, told in bridges.items()}


def rows(found, layer):
    kept = {name: case for name, case in found[layer].items() if isinstance(case, dict) and "padded" in case}
    assert len(kept) == (15 if layer == "native" else 5)
    return kept.items()


@pytest.mark.parametrize("layer", LAYERS)
def test_every_sequence_of_a_flat_row_equals_itself_alone_in_logits_and_gradients(found, layer):
    """With experts rounding grows: all weights moved by 1e-7 of themselves move gradients by 8e-4, logits by 1e-4."""
    for name, case in rows(found, layer):
        moe = 20 if " moe" in name else 1
        assert case["logits"] <= EXACT * moe, name
        assert case["gradients"] <= EXACT * moe, name


@pytest.mark.parametrize("layer", LAYERS)
def test_both_offsets_are_where_the_sequences_stand(found, layer):
    """Something of mcore-bridge reads either, and takes it for places."""
    for name, case in rows(found, layer):
        assert case["offsets"] == case["padded"], name
        ends = {"each padded, and a tail": 24, "each padded": 20, "a tail": 16, "side by side": 15}
        assert case["padded"][-1] == next((end for row, end in ends.items() if name.endswith(row)), 10), name


@pytest.mark.parametrize("layer", LAYERS)
def test_ms_swifts_own_flat_rows_are_right_with_padding_in_sequences_of_a_token(found, layer):
    case = found[layer]["swift, aligned"]
    assert case["offsets"] == [0, 7, 10, 15, 16]
    assert case["samples"] == 3
    assert max(case["logits"], case["gradients"]) <= EXACT


# --- offsets of others


def upstream(found, layer, name):
    return found[layer]["traps"][name]["upstream"]


def refused(found, layer, name):
    return found[layer]["traps"][name]["ours"].get("raised", "")


@pytest.mark.parametrize(
    "name", ["real offsets alone, each padded", "real offsets alone, a tail", "padded offsets that end early"]
)
def test_offsets_that_do_not_fit_are_taken_in_silence_and_refused_with_install(found, name):
    """Nothing is written behind the last one: NaN where the kernel leaves its memory as it was."""
    assert upstream(found, "native", name)["logits"] > WRONG
    assert upstream(found, "native", name)["gradients"] > WRONG
    assert "Gated DeltaNet takes offsets that rise from 0 to the" in refused(found, "native", name)


@pytest.mark.parametrize("name", ["real offsets alone, each padded", "padded offsets that end early", "real beside padded"])
def test_transformers_layer_takes_real_offsets_for_places_in_silence_and_they_are_refused_with_install(found, name):
    assert upstream(found, "transformers", name)["logits"] > WRONG
    assert upstream(found, "transformers", name)["gradients"] > WRONG
    assert "takes cu_seqlens_q for places in the row, and the row has 20 tokens" in refused(found, "transformers", name)


def test_lengths_for_offsets_are_refused(found):
    assert "Gated DeltaNet takes offsets that rise" in refused(found, "native", "lengths")
    assert "takes cu_seqlens_q for places" in refused(found, "transformers", "lengths")


def test_what_stands_beside_right_padded_offsets_is_not_read_by_megatrons_layer(found):
    case = found["native"]["traps"]["real beside padded"]
    assert max(case["upstream"]["logits"], case["ours"]["logits"]) <= EXACT


@pytest.mark.parametrize("layer", LAYERS)
def test_offsets_that_fit_and_are_of_another_row_cannot_be_seen_by_a_layer(found, layer):
    """`0 7 10 15 20` for sequences that stand at 0, 8 and 12: only who knows the truth can tell."""
    name = "real offsets, and a tail of their own"
    assert upstream(found, layer, name)["logits"] > WRONG
    assert refused(found, layer, name) == ""


# --- Qwen3.5 with transformers' layer


def test_a_convolution_that_runs_across_sequences_is_refused(found):
    case = found["transformers"]
    assert case["qwen3_5, upstream"]["logits"] > WRONG
    assert case["qwen3_5, upstream"]["gradients"] > WRONG
    for said in (case["qwen3_5, gpt_batch"], case["qwen3_5, install"]["raised"]):
        assert "USE_MCORE_GDN: got 0 and a flat row. With transformers 5.19.0 the convolution" in said
        assert "Unset it: Megatron's own layer takes flat rows." in said
    assert case["qwen3_5, one sequence"] == ""
    for row in ("side by side", "each padded"):  # the remedy
        assert found["native"][f"qwen3_5, {row}"]["logits"] <= EXACT


def test_older_transformers_takes_mcore_bridges_convolution(monkeypatch):
    layer = type("Qwen3_5MoeGatedDeltaNet", (), {"__module__": "mcore_bridge.model.mm_gpts.qwen3_5"})()
    monkeypatch.setitem(releases._FOUND, "transformers", "5.14.1")
    mcore_bridge.refuse_unseparated([layer])
    monkeypatch.setitem(releases._FOUND, "transformers", "5.15.0")
    with pytest.raises(CollateError, match="USE_MCORE_GDN"):
        mcore_bridge.refuse_unseparated([layer])


# --- the resolver, under context parallelism


@pytest.fixture
def installed():
    mcore_bridge.install()
    yield
    mcore_bridge.uninstall()


def resolve(padded, actual, total, ranks=1):
    offsets = [None if each is None else torch.tensor(each, dtype=torch.int32) for each in (padded, actual)]
    return GatedDeltaNet._resolve_cu_seqlens(*offsets, total, cp_size=ranks)


def test_upstream_ranks_floor_odd_sequences():
    """Raw offsets over two ranks: 3 and 73 tokens become 1 and 37 of a rank's 38, and the boundary moves."""
    assert resolve([0, 3, 76], None, 76, ranks=2) is None
    parts = _unpack_sequence(torch.arange(38), torch.tensor([0, 3, 76]) // 2, dim=0)
    assert [len(part) for part in parts] == [1, 37]
    assert resolve([0, 6, 12], None, 12, ranks=2).tolist() == [0, 6, 12]  # and is cut into four parts


@pytest.mark.parametrize(
    ("padded", "total", "ranks"),
    [([0, 3, 76], 76, 2), ([0, 6, 12], 12, 2), ([0, 4, 76], 80, 1), ([3, 70], 80, 1), ([0, 8, 4, 12], 12, 1)],
)
def test_offsets_the_ranks_cannot_share_out_are_refused(installed, padded, total, ranks):
    with pytest.raises(CollateError, match=rf"packed_seq_params: got .*rise from 0 to the {total} tokens of the row.*Build"):
        resolve(padded, [0, 3, 73], total, ranks)


def test_offsets_that_fit_pass_and_so_does_an_object_without_any(installed):
    assert resolve([0, 4, 12], None, 12, ranks=2).tolist() == [0, 4, 12]
    assert resolve(None, [0, 5, 5, 12], 12).tolist() == [0, 5, 5, 12]
    assert resolve([5, 12], None, 12).tolist() == [0, 5, 12]  # ends, which upstream mends
    assert resolve(None, None, 12) is None
