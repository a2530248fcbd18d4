"""`collate-npu env`: what is found, whatever of it fails, becomes one report with nothing in it that is nobody else's
business."""

import json
import os
from pathlib import Path

import pytest
from typed import typed

import collate_npu
from collate_npu import releases
from collate_npu.integrations import trainers
from collate_npu.releases import KERNELS_TOLD
from collate_npu.tools import env

ROOT = Path(collate_npu.__file__).parents[1]
NPU = {"torch": "2.13.0", "torch_npu": "2.13.0"}


@pytest.fixture
def look(monkeypatch):
    """What the command prints as JSON, where the processes answer so."""

    def look(packages=None, **answers):
        answers = {"torch": {"devices": "cpu only"}, "stacks": {"transformers, attention": "sdpa"}, **answers}
        if packages is not None:
            monkeypatch.setattr(env, "installed", lambda name: packages.get(name, ""))
        monkeypatch.setattr(env, "ask", answers.__getitem__)
        found = json.loads(typed("env", "--json").stdout)
        lines = typed("env").stdout.splitlines()
        assert lines[0] == f"- system: {found['system']}"
        assert {f"- {name}: {found[name]}" for name in ("devices", "npu", "cann")} <= {*lines}
        assert {f"- {name}: {value}" for name, value in {**found["packages"], **found["settings"]}.items()} <= {*lines}
        assert [line[10:] for line in lines if line.startswith("- hazard: ")] == found["hazards"]
        assert [line[8:] for line in lines if line.startswith("- runs: ")] == [": ".join(x) for x in found["runs"].items()]
        return found

    return look


@pytest.mark.parametrize(
    ("packages", "answers", "npu", "runs"),
    [
        ({}, {}, "torch_npu is not installed", {"transformers, attention": "sdpa"}),
        ({}, {"stacks": {"fails": "gone"}}, "torch_npu is not installed", {"not known": "gone"}),
        (NPU, {"torch_npu": {"npu": "torch_npu loads"}}, "torch_npu loads", {"transformers, attention": "sdpa"}),
        (NPU, {"torch_npu": {"fails": "no CANN"}}, "torch_npu does not load: no CANN", {"transformers, attention": "sdpa"}),
        (NPU, {"torch": {"fails": "x"}}, "torch_npu does not load: x", {}),
    ],
)
def test_what_cannot_be_asked_is_not_known(look, packages, answers, npu, runs):
    found = look(packages, **answers)
    assert (found["npu"], found["runs"]) == (npu, runs)
    assert found["devices"] == ("not known: torch does not load: x" if not runs else "cpu only")
    assert found["packages"] == {"collate_npu": collate_npu.__version__, **packages}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{Path.home()}/x:/opt", "~/x:/opt"),
        (f"a: {Path.home()}", "a: ~"),
        ("/home/somebody/venv/lib.so: gone", "~/venv/lib.so: gone"),
        ("/Users/somebody/x", "~/x"),
        ("https://user:secret@host/x", "https://***@host/x"),
        ("hf_abcdefghijklmnop", "***"),
        ("HF_TOKEN=abc, x", "HF_TOKEN=***, x"),
        ("2.13.0+cpu", "2.13.0+cpu"),
    ],
)
def test_what_is_nobodys_business_is_left_out(look, monkeypatch, text, left):
    monkeypatch.setenv("LD_LIBRARY_PATH", text)
    assert look()["settings"]["LD_LIBRARY_PATH"] == left


def test_a_home_at_the_root_masks_no_path(monkeypatch):
    for home, left in (("/", "/o/lib / x"), ("/o", "~/lib / x")):
        monkeypatch.setattr(Path, "home", lambda home=home: Path(home))
        assert env.masked("/o/lib / x") == left


def test_every_trainer_is_installed_in_the_version_it_names():
    """What a file of integrations declares is listed, and a session of its own runs that release."""
    sessions = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert [name for name, tested in trainers().values() if f'"{name}=={tested}"' not in sessions] == []


@pytest.mark.parametrize(
    "metadata", ["\n", "Name: torch_npu\n", "\xff\xfe\x00", None], ids=["empty", "no version", "no text", "absent"]
)
def test_a_package_whose_metadata_is_broken_is_installed(look, tmp_path, monkeypatch, metadata):
    (tmp_path / "torch_npu-2.13.0.dist-info").mkdir()
    if metadata is not None:
        (tmp_path / "torch_npu-2.13.0.dist-info" / "METADATA").write_text(metadata, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(releases, "_FOUND", {"verl": "0.9.1", "trl": ""})
    found = look(torch_npu={"npu": ""})["packages"]
    assert (found["torch_npu"], found["verl"], "trl" in found) == (releases.UNKNOWN, "0.9.1", False)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version.info", "Version=8.5.0\nversion_dir=8.5.0\n", "8.5.0"),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.7.0.1.238:8.2.RC1]\n", "8.2.RC1"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n", "8.3.RC1"),
        ("empty", "", "version not known"),
    ],
)
def test_the_version_of_cann_is_read_from_its_folder(look, tmp_path, monkeypatch, file, text, version):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    for home, cann in ((None, "none: ASCEND_HOME_PATH is not set"), ("", f"{version} in {tmp_path}")):
        if home is not None:
            monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
        assert look()["cann"] == cann
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "absent"))
    assert look()["cann"].endswith("which is no folder")


def test_processors_are_those_of_this_process(look, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5} if pid == 0 else {0}, raising=False)
    assert look()["system"].endswith(" 2 of 8 CPUs")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert look()["system"].endswith(" 8 of 8 CPUs")


# --- what transformers would run here


@pytest.fixture
def stacks(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(releases._FOUND, "transformers", "5.23.0")
    return env.ANSWERS["stacks"]


@pytest.mark.models
def test_transformers_says_what_it_resolved(stacks, monkeypatch):
    found = stacks()
    assert found["transformers, attention"].startswith("sdpa, eager")
    monkeypatch.delitem(releases._FOUND, "transformers")
    if KERNELS_TOLD.holds():
        assert "chunk_gated_delta_rule: plain torch" in found["transformers, Gated DeltaNet"]


@pytest.mark.models
def test_each_flash_attention_is_named_and_a_stack_that_raises_leaves_the_others(stacks, monkeypatch):
    def raises(*_, **__):
        raise OSError("half there")

    for n in (2, 3, 4):
        monkeypatch.setattr(f"transformers.utils.is_flash_attn_{n}_available", lambda: True, raising=False)
    monkeypatch.setattr("collate_npu.testing.tiny_model", raises)
    found = stacks()
    flash = [name for name in found["transformers, attention"].split(", ") if name.startswith("flash_attention_")]
    assert flash[:3] == ["flash_attention_2", "flash_attention_3", "flash_attention_4"]
    assert found["transformers, Gated DeltaNet"] == "not known: OSError: half there"
