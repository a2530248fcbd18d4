"""Broken setups, run for real: a folder before the installed packages shadows them, and the command says what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import collate_npu
from collate_npu.consumers.models import transformers_version
from collate_npu.tools.env import probe

ROOT = Path(collate_npu.__file__).parents[1]

TORCHES = {
    "raises": "raise RuntimeError('Failed to load the backend extension: torch_npu.') from ImportError('libhccl.so: gone')",
    "aborts": "import os; os.abort()",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "ends": "import sys; print('driver not found', file=sys.stderr); sys.exit(3)",
    "ends at once": "import os, sys; print('no card', file=sys.stderr, flush=True); os._exit(7)",
    "talks": 'print(\'["torch", {"devices": "a lie"}]\'); raise OSError(\'libtorch_cpu.so: cannot open\')',
}
SAID = {
    "raises": "RuntimeError: Failed to load the backend extension: torch_npu. (ImportError: libhccl.so: gone)",
    "aborts": "ended by SIGABRT",
    "crashes": "ended by SIGSEGV",
    "ends": "SystemExit: 3",
    "ends at once": "ended with exit code 7 (no card)",
    "talks": "OSError: libtorch_cpu.so: cannot open",
}


class Site:
    """A folder of packages that stand before the installed ones."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, code, metadata=""):
        (self.folder / name).mkdir()
        (self.folder / name / "__init__.py").write_text(code, encoding="utf-8")
        if metadata is not None:
            info = self.folder / f"{name}-2.13.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n", "utf-8")

    def run(self, *args, **env):
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        command = [sys.executable, "-m", "collate_npu", *args]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **env}, timeout=240
        )
        assert "Traceback" not in done.stderr
        return done

    def env(self, **env):
        done = self.run("env", "--json", **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.mark.parametrize("how", TORCHES)
def test_a_torch_that_does_not_load_is_a_finding(site, how):
    site.add("torch", TORCHES[how])
    found = site.env()
    assert found["devices"].startswith(f"not known: torch does not load: {SAID[how]}")
    named = "torch_npu is installed without" if "torch_npu" in found["packages"] else "torch is installed and does not load"
    assert any(hazard.startswith(named) for hazard in found["hazards"])


def test_a_torch_whose_library_is_gone_is_a_finding(site):
    """The installed torch itself, but for its largest library."""
    real = Path(find_spec("torch").origin).parent
    (site.folder / "torch" / "lib").mkdir(parents=True)
    for path in [*real.iterdir(), *(real / "lib").iterdir()]:
        link = site.folder / "torch" / path.relative_to(real)
        if link.name != "lib" and not link.name.startswith("libtorch_cpu"):
            link.symlink_to(path)
    found = site.env()
    assert "torch does not load: ImportError: libtorch_cpu" in found["devices"]
    assert found["packages"]["torch"]


def test_torch_npu_that_crashes_torch_is_told_apart(site):
    site.add("torch_npu", "import os; os.abort()")
    site.add("torch", "import os\nif os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0': import torch_npu\n"
             "cuda = __import__('types').SimpleNamespace(is_available=lambda: False)")  # fmt: skip
    found = site.env(TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert "ended by SIGABRT" in found["devices"]
    assert found["devices"].endswith("; torch alone, without torch_npu, does")
    assert "torch_npu does not load: ended by SIGABRT" in found["npu"]
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU" in hazard for hazard in found["hazards"])


def test_a_library_that_hangs_is_given_up():
    found = probe.ask(["torch"], seconds=0.01)
    assert found == {"torch": {"fails": "no answer within 0 s"}}


def test_a_question_that_kills_its_process_leaves_the_others_their_answers(site, monkeypatch):
    site.add("torch_npu", "import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = probe.ask(["torch", "torch_npu", "mindspeed"])
    assert "devices" in found["torch"]
    assert found["torch_npu"]["fails"].startswith("ended by SIGABRT")
    assert "start" in found["mindspeed"]


@pytest.mark.parametrize(
    "metadata", ["\n", "Name: torch_npu\n", "\xff\xfe\x00", None], ids=["empty", "no version", "no text", "absent"]
)
def test_metadata_that_is_broken_is_a_finding(site, metadata):
    site.add("torch_npu", "", metadata=metadata or "")
    if metadata is None:
        (site.folder / "torch_npu-2.13.0.dist-info" / "METADATA").unlink()
    found = site.env()
    assert found["packages"]["torch_npu"] == "installed, version not known"
    assert any(hazard.startswith("The metadata of torch_npu is broken") for hazard in found["hazards"])


@pytest.mark.parametrize("name", ["typer", "rich"])
@pytest.mark.parametrize("code", ["raise ModuleNotFoundError('No module', name='{}')", "raise RuntimeError('broken')"])
def test_env_runs_where_the_command_line_does_not(site, name, code):
    site.add("torch", "raise ImportError('gone')")  # quick
    site.add(name, code.format(name), metadata=None)
    assert "- devices: not known: torch does not load" in site.run("env").stdout
    assert site.env()["packages"]["collate_npu"]
    for args in (["audit"], ["env", "--nonsense"], []):
        done = site.run(*args)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "pip install 'collate-npu[audit]'" in done.stderr


BESIDE = {
    "transformers": ("raise ValueError('broken here')", "ValueError: broken here"),
    "numpy": ("raise ModuleNotFoundError('no numpy', name='numpy')", "ModuleNotFoundError: no numpy"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_package_beside_torch_that_does_not_load_is_a_finding(site, name):
    pytest.importorskip("transformers")
    if name == "transformers" and transformers_version() < (5, 19):
        pytest.skip("nobody asks an older release which kernels it found")
    code, told = BESIDE[name]
    site.add(name, code, metadata=None)
    found = site.env()
    assert found["packages"][name]
    assert not found["devices"].startswith("not known")
    assert all(told in what for what in found["runs"].values())


@pytest.mark.parametrize("args", [["audit"], ["show", "--lengths", "3,5"]])
def test_other_commands_end_with_one_line(site, args):
    pytest.importorskip("typer")
    site.add("torch", TORCHES["raises"])
    done = site.run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "torch does not load: RuntimeError" in done.stderr
    assert "collate-npu env" in done.stderr
