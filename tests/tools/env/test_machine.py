"""System, settings and CANN, without importing anything of theirs."""

from __future__ import annotations

import os

import pytest

from collate_npu.tools.env import machine


def test_the_system_in_one_line():
    found = machine.system()
    assert found.split()[0] in ("Linux", "Darwin", "Windows")
    assert "Python 3." in found
    assert f"{os.cpu_count()}" in found


def test_of_a_library_path_what_leads_to_a_card_is_told(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/a:/usr/local/Ascend/driver/lib64::/opt/b:/usr/local/cuda/lib64")
    assert machine.settings()["LD_LIBRARY_PATH"] == "/usr/local/Ascend/driver/lib64:/usr/local/cuda/lib64:(2 more)"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert "LD_LIBRARY_PATH" not in machine.settings()


FILES = {
    "version.info": "Version=8.5.0\nversion_dir=8.5.0\n",
    "version.cfg": "# version: 1.0\nruntime_running_version=[7.7.0.1.238:8.2.RC1]\n",
    "aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100\n",
}


@pytest.mark.parametrize(("file", "text"), FILES.items(), ids=FILES)
def test_the_version_of_cann_is_read_from_its_folder(tmp_path, monkeypatch, file, text):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    expected = {"version.info": "8.5.0", "version.cfg": "8.2.RC1"}.get(file, "8.3.RC1")
    assert machine.cann() == f"{expected} in {tmp_path}"


def test_a_cann_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert machine.cann() == "none: ASCEND_HOME_PATH is not set"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "absent"))
    assert machine.cann().endswith("which is no folder")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert machine.cann() == f"version not told in {tmp_path}"
