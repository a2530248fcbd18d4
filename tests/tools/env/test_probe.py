"""Broken setups, run for real: a folder before the installed packages shadows them, and the command says what it finds."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import collate_npu
from collate_npu.tools import env
from collate_npu.tools.env import ANSWERS

ROOT = Path(collate_npu.__file__).parents[1]

TORCHES = {
    "raise RuntimeError('Failed to load torch_npu.') from ImportError('libhccl.so: gone')": (
        "RuntimeError: Failed to load torch_npu. (ImportError: libhccl.so: gone)"
    ),
    "import os; os.abort()": "ended by SIGABRT",
    "import sys; print('driver not found', file=sys.stderr); sys.exit(3)": "SystemExit: 3",
    "import os, sys; print('no card', file=sys.stderr, flush=True); os._exit(7)": "ended with exit code 7 (no card)",
    "print('{\"a\": \"lie\"}', flush=True); raise OSError('lib.so: gone')": "OSError: lib.so: gone",
}
RAISES = next(iter(TORCHES))


class Site:
    """A folder of packages that stand before the installed ones."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, code, metadata=True):
        (self.folder / name).mkdir()
        (self.folder / name / "__init__.py").write_text(code, encoding="utf-8")
        if metadata:
            info = self.folder / f"{name}-2.13.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n", "utf-8")

    def run(self, *args, **env):
        command = [sys.executable, "-m", "collate_npu", *args]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=240)
        assert "Traceback" not in done.stderr
        return done

    def env(self, **env):
        done = self.run("env", "--json", **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return Site(tmp_path)


@pytest.mark.parametrize(("code", "said"), TORCHES.items())
def test_a_torch_that_does_not_load_is_an_answer(site, code, said):
    site.add("torch", code)
    assert env.ask("torch")["fails"].startswith(said)


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
    assert found["runs"] == {}


def test_torch_npu_that_crashes_torch_is_told_apart(site):
    site.add("torch_npu", "import os; os.abort()")
    no_card = "cuda = __import__('types').SimpleNamespace(is_available=lambda: False)"
    site.add("torch", "import os\nif os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0': import torch_npu\n" + no_card)
    found = site.env(TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert "ended by SIGABRT" in found["devices"]
    assert "torch_npu does not load: ended by SIGABRT" in found["npu"]
    found = site.env(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["devices"] == "cpu only"
    assert "torch_npu does not load: ended by SIGABRT" in found["npu"]
    assert "not known" in str(found["runs"])  # this torch has nothing but `cuda`
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU" in hazard for hazard in found["hazards"])


def test_a_library_that_hangs_is_given_up():
    assert env.ask("torch", seconds=0.01) == {"fails": "no answer within 0 s"}


@pytest.mark.slow
def test_env_runs_where_neither_torch_nor_rich_loads(site):
    site.add("torch", "raise ImportError('gone')")  # quick
    site.add("rich", "raise RuntimeError(1)", metadata=False)
    assert "- devices: not known: torch does not load" in site.run("env").stdout


@pytest.mark.slow
@pytest.mark.parametrize("args", [["audit"], ["show", "--lengths", "3,5"]])
def test_other_commands_end_with_one_line(site, args):
    site.add("torch", RAISES)
    done = site.run(*args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "torch does not load: RuntimeError" in done.stderr
    assert "collate-npu env" in done.stderr


def test_cards_are_told_and_one_that_cannot_be_asked_is_a_finding(monkeypatch):
    def raises():
        raise RuntimeError("aclInit, error code 507008")

    npu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: "Ascend910B1")
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    for here, said in ((True, "cuda x 1, npu x 2 (Ascend910B1)"), (False, "npu x 2 (Ascend910B1)")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert ANSWERS["torch"]() == {"devices": said}
    npu.is_available = raises
    assert ANSWERS["torch"]() == {"devices": "not known: RuntimeError: aclInit, error code 507008"}
    npu.is_available = lambda: False
    assert ANSWERS["torch"]() == {"devices": "cpu only"}
