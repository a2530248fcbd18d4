"""Hazards of combinations, most of which are not installed here."""

from __future__ import annotations

import pytest

from collate_npu.tools.env.combinations import hazards
from collate_npu.tools.env.installed import UNKNOWN


def told(packages, settings=(), *, devices="cpu only", npu="torch_npu loads", rounding=(), start=""):
    found = hazards({"torch": "2.13.0+cpu", **packages}, dict(settings), devices=devices, npu=npu, rounding=dict(rounding),
                    start=start)  # fmt: skip
    return " ".join(found)


def test_nothing_special_is_no_hazard():
    assert told({"transformers": "5.23.0"}) == ""


def test_torch_npu_without_cann_is_explained():
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in told(
        {"torch_npu": "2.13.0"}, npu="torch_npu does not load: libhccl.so: gone"
    )
    assert told({"torch_npu": "2.13.0"}) == ""


def test_a_broken_pair_is_named():
    assert "torch 2.13.0+cpu and torch_npu 2.7.1 are not a pair" in told({"torch_npu": "2.7.1"})


@pytest.mark.parametrize(
    "pair", [("2.7.1", "2.7.1.post2"), ("2.6.0+cpu", "2.6.0"), ("2.13.0", "2.13.0"), ("2.9.1", "2.9.0")]
)
def test_pairs_of_one_minor_release(pair):
    assert told({"torch": pair[0], "torch_npu": pair[1]}) == ""


def test_a_missing_torch_is_a_hazard():
    assert "torch is not installed" in " ".join(hazards({}, {}, devices="not known", npu="", rounding={}))


def test_a_torch_that_does_not_load_is_a_hazard():
    assert "installed and does not load" in told({}, devices="not known: torch does not load: OSError")


def test_broken_metadata_is_a_hazard():
    assert "The metadata of trl is broken: install anew" in told({"trl": UNKNOWN})


def test_mindspeeds_start_is_handed_on():
    assert told({"mindspeed": "0.16.0"}, start="MindSpeed is late.") == "MindSpeed is late."


@pytest.mark.parametrize("name", ["flash-linear-attention", "fla-core"])
def test_kernels_without_a_card_are_a_hazard(name):
    packages = {"triton": "3.7.0", name: "0.6.0"}
    assert "which fail on a CPU. Uninstall them here." in told(packages)
    assert "fail on a CPU" not in told(packages, devices="cuda x 1")


def test_old_transformers_are_named():
    assert "mended in 5.15" in told({"transformers": "5.14.1"})


def test_what_each_gated_delta_net_of_mcore_bridge_cannot_do():
    packages = {"transformers": "5.19.0", "mcore-bridge": "1.6.5", "megatron-core": "0.16.1"}
    said = told(packages)
    assert "No Gated DeltaNet of mcore-bridge 1.6.5 reads attention_mask_2d: call integrations.swift.install()" in said
    assert "megatron-core 0.16.1 has no context parallelism" in said
    assert "USE_MCORE_GDN" not in said
    packages["megatron-core"] = "0.18.0"
    assert "context parallelism" not in told(packages)
    for off in ("0", "false"):
        said = told(packages, {"USE_MCORE_GDN": off})
        assert "no context parallelism, and with transformers 5.13 or newer (here 5.19.0) no Qwen3-Next without that" in said
        assert "Unset it." in said


def test_sparse_mode_two_is_named():
    assert "top left" in told({"torch_npu": "2.13.0"}, {"NPU_FA2_SPARSE_MODE": "2"})
    assert told({"torch_npu": "2.13.0"}, {"NPU_FA2_SPARSE_MODE": "3"}) == ""


@pytest.mark.parametrize(
    ("kind", "name"), [("HF32", "torch.npu.conv.allow_hf32"), ("TF32", "torch.backends.cuda.matmul.allow_tf32")]
)
def test_rounding_is_told_as_it_is_set(kind, name):
    assert told({}, rounding={name: False}) == ""
    assert f"{kind} rounds float32 products to ten bits ({name})" in told({}, rounding={name: True})


def test_known_faults_of_recurrent_kernels_are_hazards():
    said = told({"flash-linear-attention": "0.5.0", "fla-core": "0.5.0"})
    assert "flash-linear-attention 0.5.0: chunk tables go wrong after an empty sequence (#909)" in said
