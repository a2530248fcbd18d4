"""`collate-npu env`: what is found, whatever of it fails, becomes one report with nothing private in it; and hazards of what
is installed and set, most of which is not installed here, are told where they are, and nowhere else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house import ROOT
from typed import typed

import collate_npu
from collate_npu import releases
from collate_npu.integrations import trainers
from collate_npu.tools import env

# --- what is found: stand-ins for torch and torch_npu are run for real, from a folder before the installed packages

HOME, CLI = str(Path.home()), [sys.executable, "-m", "collate_npu", "env"]
NO_CARD = "cuda = __import__('types').SimpleNamespace(is_available=lambda: False)"
LOADS_NPU = f"import os\nif os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0': import torch_npu\n{NO_CARD}"
CARDS = """
cuda, npu = (__import__('types').SimpleNamespace() for _ in range(2))
cuda.is_available, cuda.device_count = lambda: True, lambda: 1
npu.is_available, npu.device_count, npu.get_device_name = lambda: {}, lambda: 2, lambda index: 'Ascend910B1'
"""
UNASKED = "exec('raise RuntimeError(507008)')"
GONE = "raise RuntimeError('Failed to load torch_npu.') from ImportError('libhccl.so: gone')"
CANN_8, CANN_RC = "Version=8.5.0\nversion_dir=8.5.0\n", "# version: 1.0\nruntime_running_version=[7.7.0.1.238:8.2.RC1]\n"
INSTALL_INFO = ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n")
NPU, META, VERSION = "torch_npu/__init__.py", "torch_npu-2.13.0.dist-info/METADATA", "Version: 2.13.0\n"
HOMES, AUTOLOAD = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"), "TORCH_DEVICE_BACKEND_AUTOLOAD"
MACHINES = [
    # files that are there, variables, what is asked of the report, and the answer
    *(({"torch/__init__.py": code}, {}, "devices", said) for code, said in (
        (GONE, "not known: torch: RuntimeError: Failed to load torch_npu. (ImportError: libhccl.so: gone)"),
        ("import os; print('{}', flush=True); os.abort()", "not known: torch: ended by SIGABRT"),
        ("import sys; print('no driver', file=sys.stderr); sys.exit(3)", "torch: ended with exit code 3 (no driver)"),
        ("import os, sys; print('no card', file=sys.stderr, flush=True); os._exit(7)", "exit code 7 (no card)"),
        ("print('{\"a\": \"lie\"}', flush=True); raise OSError('lib.so: gone')", "not known: torch: OSError: lib.so: gone"),
        (NO_CARD, "cpu only"), (CARDS.format(True), "cuda x 1, npu x 2 (Ascend910B1)"),
        (CARDS.format(UNASKED), "not known: torch: RuntimeError: 507008"))),
    ({NPU: "raise ImportError('x')", META: VERSION}, {}, "npu", "torch_npu does not load: ImportError: x"),
    ({NPU: "", META: VERSION}, {}, "npu", "torch_npu loads"),
    *(({NPU: "import os; os.abort()", META: VERSION, "torch/__init__.py": LOADS_NPU}, {AUTOLOAD: auto}, asked, said)
        for auto, asked, said in (
        ("1", "devices", "ended by SIGABRT"), ("1", "npu", "torch_npu does not load: ended by SIGABRT"),
        ("0", "devices", "cpu only"), ("0", "npu", "torch_npu does not load: ended by SIGABRT"),
        ("0", "hazards", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU"))),
    *(({NPU: "", META: broken}, {}, "packages", f"'torch_npu': '{releases.UNKNOWN}'") for broken in (
        "\n", "Name: torch_npu\n", "\xff\xfe\x00")),
    *(({file: text}, {home: "{}"}, "cann", f"{cann} in {{}}") for home in HOMES for file, text, cann in (
        ("version.info", CANN_8, "8.5.0"), ("version.cfg", CANN_RC, "8.2.RC1"), (*INSTALL_INFO, "8.3.RC1"),
        ("empty", "", "version not known"))),
    ({}, {}, "cann", "none: ASCEND_HOME_PATH is not set"),
    ({}, {"ASCEND_HOME_PATH": "{}/absent"}, "cann", "none: ASCEND_HOME_PATH is {}/absent, which is no folder"),
    *(({}, {"LD_LIBRARY_PATH": text}, "settings", f"'LD_LIBRARY_PATH': '{left}'") for text, left in (
        (f"{HOME}/x:/opt", "~/x:/opt"), (f"a: {HOME}", "a: ~"), ("/home/somebody/venv/lib.so: gone", "~/venv/lib.so: gone"),
        ("/Users/somebody/x", "~/x"), ("https://user:secret@host/x", "https://***@host/x"), ("hf_abcdefghijklmnop", "***"),
        ("HF_TOKEN=abc, x", "HF_TOKEN=***, x"), ("2.13.0+cpu", "2.13.0+cpu"), ("a\x1b[2J\u202e", r"a\\x1b[2J\\u202e"))),
]  # fmt: skip
UNSET = dict.fromkeys((*HOMES, "LD_LIBRARY_PATH", AUTOLOAD))


@pytest.mark.parametrize(("there", "variables", "asked", "said"), MACHINES)
def test_what_is_found_is_told_and_what_fails_is_an_answer(there, variables, asked, said, tmp_path, monkeypatch):
    """The text holds what the JSON does."""
    monkeypatch.setattr(releases, "_FOUND", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {"torch/__init__.py": NO_CARD, **there}.items():  # the real one takes seconds
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    told = {**UNSET, **{name: value.replace("{}", str(tmp_path)) for name, value in variables.items()}}
    told["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    answers = [typed("env", *how, **told) for how in (["--json"], [])]
    assert [answer.exit_code for answer in answers] == [0, 0]
    found, lines = json.loads(answers[0].stdout), answers[1].stdout.splitlines()
    said, answer = said.replace("{}", env.masked(str(tmp_path))), str(found[asked])
    assert said in answer if asked in ("hazards", "packages", "settings") else answer.endswith(said)
    assert found["packages"]["collate_npu"] == collate_npu.__version__
    facts = {**found.pop("packages"), **found.pop("settings")}
    hazards = [f"- hazard: {hazard}" for hazard in found.pop("hazards")]
    assert {*lines} == {*hazards, *(f"- {name}: {value}" for name, value in {**facts, **found}.items())}


def test_a_home_at_the_root_masks_no_path(monkeypatch):
    for home, left in (("/", "/o/lib / x"), ("/o", "~/lib / x")):
        monkeypatch.setattr(Path, "home", lambda home=home: Path(home))
        assert env.masked("/o/lib / x") == left


def test_a_library_that_hangs_is_given_up():
    assert env.ask("torch", seconds=0.01) == ("", "no answer within 0 s")


@pytest.mark.slow
def test_env_runs_where_neither_torch_nor_rich_loads(tmp_path):
    for name in ("torch", "rich"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('gone')", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(CLI, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert "- devices: not known: torch: ImportError: gone" in done.stdout


def test_every_trainer_is_installed_in_the_version_it_names():
    """What a file of integrations declares is listed, and a session of its own runs that release."""
    sessions = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert [name for name, tested in trainers().items() if f'"{name}=={tested}"' not in sessions] == []


# --- hazards

TORCH = {"torch": "2.13.0+cpu"}
PAIR = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}
LIBHCCL = "torch_npu does not load: libhccl.so: gone"
FLA_ALONE = {**TORCH, "flash-linear-attention": "0.6.0", "transformers": "5.23.0"}
ASKED = {"devices": "cpu only", "npu": "torch_npu loads", "cann": "", "settings": {}}


def told(packages, **found):
    return " ".join(env.hazards({"packages": packages, **ASKED, **found}))


def pair(torch_npu, **more):
    """torch_npu and the torch it is for."""
    return {"torch": re.match(r"\d+\.\d+\.\d+", torch_npu)[0], "torch_npu": torch_npu, **more}


def mode(number):
    return {"settings": {"NPU_FA2_SPARSE_MODE": number}}


CUDA = {"devices": "cuda x 1"}
TRITON, FLA = {**TORCH, "triton": "3.7.0", "fla-core": "0.6.0"}, {"flash-linear-attention-npu": "26.9.1"}
STREAMS = "streams out of step"
ROWS = [
    ("torch 2.13.0+cpu and torch_npu 2.7.1 are not a pair", ({**TORCH, "torch_npu": "2.7.1"}, {}), (PAIR, {})),
    ("are not a pair", ({"torch": "2.7.1", "torch_npu": "2.8.0"}, {}), (pair("2.7.1.post2"), {})),
    ("2.7.0 and torch_npu 2.7.1 are not a pair", ({"torch": "2.7.0", "torch_npu": "2.7.1"}, {}),
     ({"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post4"}, {})),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU", (PAIR, {"npu": LIBHCCL}), (PAIR, {})),
    ("the causal triangle to the top left", (PAIR, mode("2")), (PAIR, mode("3"))),
    ("which fail on a CPU. Uninstall them", (TRITON, {}), (TRITON, CUDA)),
    ("before 5.20 without an error", (FLA_ALONE, {}), ({**FLA_ALONE, "causal-conv1d": "1.6.1"}, {})),
    *(("CANN 8.5.0, and here is 9.1.0 in /opt", (PAIR, {"npu": "torch_npu loads, CANN 8.5.0", "cann": "9.1.0 in /opt"}),
       (PAIR, {"npu": npu, "cann": "9.1.0 in /opt"})) for npu in ("torch_npu loads", "torch_npu loads, CANN 9.1.RC1")),
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
