"""Hazards of what is installed and set, most of which is not installed here: told where they are, and nowhere else."""

import re

import pytest

from collate_npu.integrations import trainers
from collate_npu.releases import DISTRIBUTIONS, TORCH_NPU_STREAMS
from collate_npu.tools.env.hazards import hazards
from collate_npu.tools.env.machine import Environment

FLA_FAULTS, OPEN = {"#909", "#871", "#1138", "#1140"}, {"#955"}
NPU_FAULTS, NPU_OPEN, MAIN = {"#232", "#242", "#312"}, {"#508", "#641"}, {"#367", "#440", "#544", "#733"}
TORCH = {"torch": "2.13.0+cpu"}
NPU = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}
BRIDGE = {"mcore-bridge": "1.6.5", "megatron-core": "0.16.1", "fla-core": "0.6.0"}
LIBHCCL = "torch_npu does not load: libhccl.so: gone"
FLA_ALONE = {**TORCH, "flash-linear-attention": "0.6.0", "transformers": "5.23.0"}


def told(packages, settings=(), devices="cpu only", npu="torch_npu loads", cann=""):
    found = Environment(
        system="", packages=packages, settings=dict(settings), cann=cann, devices=devices, npu=npu, runs={}, refused={}
    )
    return " ".join(hazards(found))


ROWS = [
    ("torch 2.13.0+cpu and torch_npu 2.7.1 are not a pair", ({**TORCH, "torch_npu": "2.7.1"},), (NPU,)),
    ("are not a pair", ({"torch": "2.7.1", "torch_npu": "2.8.0"},), ({"torch": "2.7.1", "torch_npu": "2.7.1.post2"},)),
    ("2.7.0 and torch_npu 2.7.1 are not a pair", ({"torch": "2.7.0", "torch_npu": "2.7.1"},),
     ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post4"},)),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU", (NPU, {}, "", LIBHCCL), (NPU,)),
    ("the causal triangle to the top left", (NPU, {"NPU_FA2_SPARSE_MODE": "2"}), (NPU, {"NPU_FA2_SPARSE_MODE": "3"})),
    ("drops sliding windows", ({**NPU, "transformers": "5.23.0"},), ({**TORCH, "transformers": "5.23.0"},)),
    ("an NPU needs the latter", ({**NPU, "triton": "3.2.0"},), ({**NPU, "triton": "3.2.0", "triton-ascend": "3.2.1"},)),
    ("which fail on a CPU. Uninstall them", ({**TORCH, "triton": "3.7.0", "fla-core": "0.6.0"},),
     ({**TORCH, "triton": "3.7.0", "fla-core": "0.6.0"}, {}, "cuda x 1")),
    ("before 5.20 drops seq_idx in silence, later", (FLA_ALONE,), ({**FLA_ALONE, "causal-conv1d": "1.6.1"},)),
    ("has no build for an NPU", ({**NPU, "transformers": "5.23.0"},), (FLA_ALONE,)),
    ("of mcore-bridge 1.6.5 reads attention_mask_2d: call integrations.swift.install()", (BRIDGE,), (TORCH,)),
    ("and from transformers 5.13 on no Qwen3-Next", (BRIDGE, {"USE_MCORE_GDN": "false"}), (BRIDGE, {"USE_MCORE_GDN": "1"})),
    ("megatron-core 0.16.1 has no context parallelism", (BRIDGE,), (BRIDGE, {"USE_MCORE_GDN": "0"})),
    ("has no context parallelism: 0.18 is the first", (BRIDGE,), ({**BRIDGE, "megatron-core": "0.18.0"},)),
    ("`import mindspeed.megatron_adaptor` first", ({"mindspeed": "0.16.0"},), (TORCH,)),
    ("`import megatron_adaptor` first", ({"megatron_adaptor": "0.1.0"},), ({"mindspeed": "0.16.0"},)),
    ("MindSpeed is installed beside", ({"megatron_adaptor": "0.1.0", "mindspeed": "1"},), ({"megatron_adaptor": "0.1.0"},)),
    ("until torch.npu.conv.allow_hf32 or", (NPU, {}, "npu x 2 (Ascend910B1)"), (NPU,)),
    ("torch.backends.cudnn.allow_tf32 is set", (TORCH, {}, "cuda x 1"), (TORCH,)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "here", "elsewhere"), ROWS, ids=[text for text, *_ in ROWS])
def test_a_hazard_is_told_where_it_is_and_nowhere_else(text, here, elsewhere):
    assert text in told(*here)
    assert text not in told(*elsewhere)


@pytest.mark.parametrize(
    ("torch_npu", "cann", "wanted"),
    [
        ("2.7.1", "8.3.RC1 in /usr/local/Ascend", ""),
        ("2.7.1", "8.3.T12 in /usr/local/Ascend", ""),
        ("2.7.1", "8.5.0 in /usr/local/Ascend", "8.3.RC1"),
        ("2.7.1.post4", "9.0.0 in /opt", ""),
        ("2.7.1.post4", "9.1.0 in /opt", "9.0.0"),
        ("2.7.1.post3", "9.1.0 in /opt", ""),
        ("2.7.1.post5", "9.0.0 in /opt", "9.1.0"),
        ("2.7.1.post7+cpu", "9.0.0 in /opt", "9.1.0"),
        ("2.7.1.post9", "9.0.0 in /opt", ""),
        ("2.12.0rc1", "9.0.0 in /opt", ""),
        ("2.7.1.post5", "9.1.0 in /opt", ""),
        ("2.12.0", "none: ASCEND_HOME_PATH is not set", ""),
        ("2.12.0", "version not told in /opt", ""),
    ],
)
def test_cann_is_compared_with_the_table_of_torch_npu(torch_npu, cann, wanted):
    said = told({"torch": torch_npu[:6].rstrip(".r"), "torch_npu": torch_npu}, cann=cann)
    assert (f"is made for CANN {wanted}, and here is {cann}" in said) == bool(wanted)
    assert ("COMPATIBILITY.md" in said) == bool(wanted)


def test_the_torch_npu_that_is_made_for_the_toolkit_is_named():
    here = {"torch": "2.7.1", "torch_npu": "2.7.1"}
    said = told(here, cann="8.5.0 in /opt")
    assert "and here is 8.5.0 in /opt: install torch_npu 2.6.0.post5 or 2.7.1.post2 or 2.8.0.post2 or 2.9.0, or " in said
    assert "install the one made for this CANN, or CANN 8.3.RC1" in told(here, cann="7.0.0 in /opt")


@pytest.mark.parametrize(
    ("torch_npu", "older"),
    [("2.6.0.post5", 1), ("2.7.1", 1), ("2.7.1.post2", 1), ("2.9.0", 1), ("2.7.1.post4", 0), ("2.10.0", 0), ("2.13.0", 0)],
)
def test_the_newer_operator_of_attention(torch_npu, older):
    said = told({"torch": torch_npu[:6].rstrip("."), "torch_npu": torch_npu})
    assert ("has no npu_fusion_attention_v3, which begins with 2.7.1.post4" in said) == bool(older)
    assert ("(CANN 9.0.0): call npu_fusion_attention." in said) == bool(older)


@pytest.mark.parametrize(
    ("package", "version", "numbers"),
    [
        ("flash-linear-attention", "0.4.2", FLA_FAULTS | OPEN),
        ("fla-core", "0.5.0", FLA_FAULTS | OPEN),
        ("fla-core", "0.5.1", {"#1138", "#1140"} | OPEN),
        ("fla-core", "0.5.2+cu128", {"#1138", "#1140"} | OPEN),
        ("fla-core", "0.6.0", OPEN),
        *((name, "26.1.0", NPU_FAULTS | NPU_OPEN) for name in DISTRIBUTIONS["fla_npu"]),
        (DISTRIBUTIONS["fla_npu"][1], "26.7.0.dev0+main.ded3545", MAIN | NPU_OPEN),
        (DISTRIBUTIONS["fla_npu"][2], "26.9.1", NPU_OPEN),
    ],
)
def test_faults_of_kernels_by_release(package, version, numbers):
    said = told({**TORCH, package: version})
    assert set(re.findall(r"#\d+", said)) == numbers
    assert f"{package} {version}: " in said


def test_faults_of_releases_name_the_one_that_mends_them():
    assert "#909" not in told({"flash-linear-attention": "0.5.0", "fla-core": "0.5.1"})  # the kernels are those of fla-core
    old = told({"transformers": "5.14.1"})
    assert "transformers 5.14.1: drops the mask of a single left-padded row" in old
    assert "mended by 5.15" in old
    assert "may crash on Ascend 950 (fla_npu's setup.py:182; mended by 3.2.1)" in told({"triton-ascend": "3.2.0"})


@pytest.mark.parametrize(
    ("torch_npu", "wrong"),
    [("2.7.1", 1), ("2.7.1.post2", 1), ("2.6.0", 1), ("2.9.0.post1", 1), ("2.9.0.post3", 0), ("2.13.0", 0)],
)
def test_torch_npu_beside_fla_npu(torch_npu, wrong):
    said = told({"torch": torch_npu[:6], "flash-linear-attention-npu": "26.9.1", "torch_npu": torch_npu})
    assert ("streams out of step" in said) == (f"{TORCH_NPU_STREAMS[0]} is made for CANN 9.1.0" in said) == bool(wrong)
    assert "streams" not in told({"torch_npu": torch_npu})


@pytest.mark.parametrize(
    ("package", "version", "page"),
    [
        ("ms-swift", "4.7.0", "ms-swift"),
        ("transformers", "5.24.0", "transformers"),
        ("axolotl", "1", "llamafactory-axolotl"),
    ],
)
def test_a_release_that_was_not_run_is_told_with_its_page(package, version, page):
    assert f"{package} {version} is not among the releases that were run" in told({**TORCH, package: version})
    assert f"`collate-npu guide {page}` says what was checked." in told({**TORCH, package: version})
    for ran in dict(trainers().values())[package], "":
        assert "is not among" not in told({**TORCH, package: ran})
