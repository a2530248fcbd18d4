"""Kernel hazards: each known fault is told for the releases that have it, and for no others."""

from __future__ import annotations

import pytest

from collate_npu.tools.kernel_hazards import PACKAGES, recurrent_hazards

NPU = "flash-linear-attention-npu"


def told(**packages):
    return " ".join(recurrent_hazards({name.replace("__", "-"): version for name, version in packages.items()}))


def test_nothing_installed_is_no_hazard():
    assert told() == told(torch="2.13.0", transformers="5.23.0", triton="3.7.1") == ""


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.4.2", {"#909", "#871", "#955", "#1138", "#1140"}),
        ("0.5.0", {"#909", "#871", "#955", "#1138", "#1140"}),
        ("0.5.1", {"#955", "#1138", "#1140"}),
        ("0.5.2", {"#955", "#1138", "#1140"}),
        ("0.5.2+cu128", {"#955", "#1138", "#1140"}),
        ("0.6.0", set()),
    ],
)
def test_fla_by_release(version, numbers):
    said = told(**{"flash-linear-attention": version})
    assert {number for number in ("#909", "#871", "#955", "#1138", "#1140") if number in said} == numbers
    assert (version in said) == bool(numbers)


def test_the_kernels_of_fla_are_those_of_fla_core():
    assert "#909" not in told(**{"flash-linear-attention": "0.5.0", "fla-core": "0.5.1"})


@pytest.mark.parametrize("name", [name for name in PACKAGES if name.startswith(NPU)])
@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("26.1.0", {"#232", "#242", "#312", "#508", "#641"}),
        ("26.6.0", {"#232", "#242", "#312", "#508", "#641"}),
        ("26.7.0.dev0+main.ded3545", {"#367", "#440", "#544", "#733", "#508", "#641"}),
        ("26.9.1", {"#508", "#641"}),
    ],
)
def test_fla_npu_by_release(name, version, numbers):
    said = told(**{name: version})
    known = ("#232", "#242", "#312", "#367", "#440", "#544", "#733", "#508", "#641")
    assert {number for number in known if number in said} == numbers
    assert f"{name} {version}" in said


@pytest.mark.parametrize(
    ("torch_npu", "first"),
    [
        ("2.7.1", "2.7.1.post5"),
        ("2.7.1.post2", "2.7.1.post5"),
        ("2.9.0.post1", "2.9.0.post3"),
        ("2.9.0.post3", ""),
        ("2.10.0.post5", ""),
        ("2.13.0", ""),
    ],
)
def test_torch_npu_beside_fla_npu(torch_npu, first):
    said = told(**{NPU: "26.9.1", "torch_npu": torch_npu})
    assert ("streams out of step" in said) == bool(first)
    assert first in said
    assert "streams" not in told(torch_npu=torch_npu)


def test_triton_on_an_npu():
    assert "3.2.1 is needed" in told(**{"triton-ascend": "3.2.0"})
    assert told(**{"triton-ascend": "3.2.1"}) == ""
    assert "an NPU needs the latter" in told(triton="3.2.0", torch_npu="2.7.1")
    assert told(**{"triton": "3.2.0", "triton-ascend": "3.2.1", "torch_npu": "2.7.1"}) == ""


def test_fla_without_causal_conv1d():
    fla = {"flash-linear-attention": "0.6.0"}
    assert "with cu_seq_lens_q alone transformers raises nothing" in told(**fla, transformers="5.23.0")
    assert "transformers 5.19.0 with flash-linear-attention and without causal-conv1d drops seq_idx" in told(
        **fla, transformers="5.19.0"
    )
    both = {**fla, "causal-conv1d": "1.6.1"}
    assert told(**both, transformers="5.23.0") == told(**both, transformers="5.19.0") == ""


def test_on_an_npu_nothing_sends_people_for_a_package_that_is_not_there():
    said = told(transformers="5.23.0", torch_npu="2.13.0")
    assert "has no build for an NPU" in said
    assert "with its 2D mask, or pack on a Megatron-style stack" in said
    assert "nstall" not in said
    assert "has no build" not in told(transformers="5.23.0")
