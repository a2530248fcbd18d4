"""Packages, system, settings and CANN, without importing anything of theirs."""

import os
from pathlib import Path

import pytest

import collate_npu
from collate_npu import releases
from collate_npu.integrations import trainers
from collate_npu.tools import env as machine

ROOT = Path(collate_npu.__file__).parents[1]


def test_every_trainer_is_installed_in_the_version_it_names():
    """What a file of integrations declares is listed, and a session of its own runs that release."""
    sessions = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert [name for name, tested in trainers().values() if f'"{name}=={tested}"' not in sessions] == []


@pytest.mark.parametrize(
    "metadata", ["\n", "Name: torch_npu\n", "\xff\xfe\x00", None], ids=["empty", "no version", "no text", "absent"]
)
def test_packages_are_those_that_are_here_and_one_whose_metadata_is_broken(tmp_path, monkeypatch, metadata):
    monkeypatch.setattr(releases, "_FOUND", {"verl": "0.9.1", "trl": ""})
    assert next(iter(machine.packages())) == "torch"
    assert (machine.packages()["verl"], "trl" in machine.packages()) == ("0.9.1", False)
    (tmp_path / "torch_npu-2.13.0.dist-info").mkdir()
    if metadata is not None:
        (tmp_path / "torch_npu-2.13.0.dist-info" / "METADATA").write_text(metadata, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(releases, "_FOUND", {})
    assert machine.packages()["torch_npu"] == releases.UNKNOWN


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version.info", "Version=8.5.0\nversion_dir=8.5.0\n", "8.5.0"),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.7.0.1.238:8.2.RC1]\n", "8.2.RC1"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n", "8.3.RC1"),
        ("empty", "", "version not told"),
    ],
)
def test_the_version_of_cann_is_read_from_its_folder(tmp_path, monkeypatch, file, text, version):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert machine.cann() == "none: ASCEND_HOME_PATH is not set"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert machine.cann() == f"{version} in {tmp_path}"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "absent"))
    assert machine.cann().endswith("which is no folder")


def test_processors_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5} if pid == 0 else {0}, raising=False)
    assert machine.system().endswith(" 2 of 8 CPUs")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.system().endswith(" 8 of 8 CPUs")
