"""Hazards of what is installed and set, most of which is not installed here: told where they are, and nowhere else."""

import re

import pytest

from collate_npu.integrations import trainers
from collate_npu.tools.env import hazards

TORCH = {"torch": "2.13.0+cpu"}
NPU = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}
LIBHCCL = "torch_npu does not load: libhccl.so: gone"
FLA_ALONE = {**TORCH, "flash-linear-attention": "0.6.0", "transformers": "5.23.0"}
ASKED = {"devices": "cpu only", "npu": "torch_npu loads", "cann": "", "settings": {}}


def told(packages, **found):
    return " ".join(hazards({"packages": packages, **ASKED, **found}))


def pair(torch_npu, **more):
    """torch_npu and the torch it is for."""
    return {"torch": re.match(r"\d+\.\d+\.\d+", torch_npu)[0], "torch_npu": torch_npu, **more}


def mode(number):
    return {"settings": {"NPU_FA2_SPARSE_MODE": number}}


CUDA = {"devices": "cuda x 1"}
TRITON, FLA = {**TORCH, "triton": "3.7.0", "fla-core": "0.6.0"}, {"flash-linear-attention-npu": "26.9.1"}
STREAMS = "streams out of step"
ROWS = [
    ("torch 2.13.0+cpu and torch_npu 2.7.1 are not a pair", ({**TORCH, "torch_npu": "2.7.1"}, {}), (NPU, {})),
    ("are not a pair", ({"torch": "2.7.1", "torch_npu": "2.8.0"}, {}), (pair("2.7.1.post2"), {})),
    ("2.7.0 and torch_npu 2.7.1 are not a pair", ({"torch": "2.7.0", "torch_npu": "2.7.1"}, {}),
     ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post4"}, {})),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU", (NPU, {"npu": LIBHCCL}), (NPU, {})),
    ("the causal triangle to the top left", (NPU, mode("2")), (NPU, mode("3"))),
    ("which fail on a CPU. Uninstall them", (TRITON, {}), (TRITON, CUDA)),
    ("before 5.20 without an error", (FLA_ALONE, {}), ({**FLA_ALONE, "causal-conv1d": "1.6.1"}, {})),
    *(("CANN 8.5.0, and here is 9.1.0 in /opt", (NPU, {"npu": "torch_npu loads, CANN 8.5.0", "cann": "9.1.0 in /opt"}),
       (NPU, {"npu": npu, "cann": "9.1.0 in /opt"})) for npu in ("torch_npu loads", "torch_npu loads, CANN 9.1.RC1")),
    *((STREAMS, (pair(old, **FLA), {}), case) for old, case in (
        ("2.7.1", (pair("2.9.0.post3", **FLA), {})), ("2.7.1.post2", (pair("2.13.0", **FLA), {})),
        ("2.6.0", (pair("2.6.0"), {})), ("2.9.0.post1", (pair("2.9.0.post1"), {})))),
    ("#909", ({"flash-linear-attention": "0.4.2"}, {}),
     ({"flash-linear-attention": "0.5.0", "fla-core": "0.5.1"}, {})),  # the kernels are those of fla-core
    ("transformers 5.14.1: drops the mask of a single left-padded row", ({"transformers": "5.14.1"}, {}), (FLA_ALONE, {})),
    ("mended by 5.15", ({"transformers": "5.14.1"}, {}), (FLA_ALONE, {})),
    ("fla-core 0.6.0: ", ({"fla-core": "0.6.0"}, {}), (TORCH, {})), ("; open).", ({"fla-core": "0.6.0"}, {}), (TORCH, {})),
    ("may crash on Ascend 950 (fla_npu's setup.py:182; mended by 3.2.1)", ({"triton-ascend": "3.2.0"}, {}), (TORCH, {})),
    *((f"{package} {version} is not among the releases that were run", ({**TORCH, package: version}, {}),
       ({**TORCH, package: trainers()[package]}, {})) for package, version in (
        ("ms-swift", "4.7.0"), ("transformers", "5.25.0"), ("torchtitan", "1"))),
    *((f"`collate-npu guide {page}` says what was checked.", ({name: "99"}, {}), ({name: ""}, {})) for name, page in (
        ("ms-swift", "ms-swift"), ("transformers", "transformers"), ("torchtitan", "torchtitan"))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "here", "elsewhere"), ROWS)
def test_a_hazard_is_told_where_it_is_and_nowhere_else(text, here, elsewhere):
    assert text in told(here[0], **here[1])
    assert text not in told(elsewhere[0], **elsewhere[1])
