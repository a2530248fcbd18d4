"""`collate-npu kernels` beside fla: on a CPU its kernels run in Triton's interpreter, in a process of their own."""

import json
import os
import subprocess
import sys

import pytest

from collate_npu.releases import installed

pytest.importorskip("fla_interpreted", reason="fla and triton are what is tested")
pytest.importorskip("rich")


def kernels(*args):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "collate_npu", "kernels", "--json", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, json.loads(done.stdout)["runs"], done.stderr


def test_flas_own_kernels_are_right_on_our_arguments():
    code, runs, said = kernels("--operator", "fla.chunk_gated_delta_rule", "--operator", "fla.causal_conv1d")
    assert code == 0, said
    assert {(run["operator"], run["state"]) for run in runs} == {
        ("fla.chunk_gated_delta_rule", "right"),
        ("fla.causal_conv1d", "right"),
    }
    assert {run["version"] for run in runs} == {f"{installed('fla')}, interpreted"}
    assert all(run["forward"] is not None and run["backward"] is not None for run in runs)


def test_the_interpreters_bfloat16_is_not_taken_for_the_kernels():
    code, runs, said = kernels("--dtype", "bfloat16", "--operator", "fla.chunk_gated_delta_rule")
    assert (code, [run["state"] for run in runs]) == (2, ["not here"]), said
    assert "takes float32" in runs[0]["note"]
