"""`collate-npu env`: what is found, whatever of it fails, becomes one report with nothing in it that is nobody else's
business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typed import typed

import collate_npu
from collate_npu import releases
from collate_npu.integrations import trainers
from collate_npu.tools import env

ROOT = Path(collate_npu.__file__).parents[1]
NPU = {"torch": "2.13.0", "torch_npu": "2.13.0"}


@pytest.fixture
def look(monkeypatch):
    """What the command prints as JSON, where the processes answer so."""

    def look(packages=None, **answers):
        answers = {"torch": ("cpu only", ""), "torch_npu": ("", "no CANN"), **answers}
        if packages is not None:
            monkeypatch.setattr(env, "installed", lambda name: packages.get(name, ""))
        monkeypatch.setattr(env, "ask", answers.__getitem__)
        found = json.loads(typed("env", "--json").stdout)
        lines = typed("env").stdout.splitlines()
        assert lines[0] == f"- system: {found['system']}"
        assert {f"- {name}: {found[name]}" for name in ("devices", "npu", "cann")} <= {*lines}
        assert {f"- {name}: {value}" for name, value in {**found["packages"], **found["settings"]}.items()} <= {*lines}
        assert [line[10:] for line in lines if line.startswith("- hazard: ")] == found["hazards"]
        return found

    return look


@pytest.mark.parametrize(
    ("packages", "answers", "npu"),
    [
        ({}, {}, "torch_npu is not installed"),
        (NPU, {"torch_npu": ("torch_npu loads", "")}, "torch_npu loads"),
        (NPU, {"torch": ("", "x")}, "torch_npu does not load: no CANN"),
    ],
)
def test_what_cannot_be_asked_is_not_known(look, packages, answers, npu):
    found = look(packages, **answers)
    assert found["npu"] == npu
    assert found["devices"] == ("not known: torch: x" if "torch" in answers else "cpu only")
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
    assert [name for name, tested in trainers().items() if f'"{name}=={tested}"' not in sessions] == []


@pytest.mark.parametrize(
    "metadata", ["\n", "Name: torch_npu\n", "\xff\xfe\x00", None], ids=["empty", "no version", "no text", "absent"]
)
def test_a_package_whose_metadata_is_broken_is_installed(look, tmp_path, monkeypatch, metadata):
    (tmp_path / "torch_npu-2.13.0.dist-info").mkdir()
    if metadata is not None:
        (tmp_path / "torch_npu-2.13.0.dist-info" / "METADATA").write_text(metadata, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(releases, "_FOUND", {"verl": "0.9.1", "trl": ""})
    found = look(torch_npu=("x", ""))["packages"]
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


# --- broken setups, run for real: a folder before the installed packages shadows them

TORCHES = {
    "raise RuntimeError('Failed to load torch_npu.') from ImportError('libhccl.so: gone')": (
        "RuntimeError: Failed to load torch_npu. (ImportError: libhccl.so: gone)"
    ),
    "import os; print('{}', flush=True); os.abort()": "ended by SIGABRT",
    "import sys; print('no driver', file=sys.stderr); sys.exit(3)": "ended with exit code 3 (no driver)",
    "import os, sys; print('no card', file=sys.stderr, flush=True); os._exit(7)": "ended with exit code 7 (no card)",
    "print('{\"a\": \"lie\"}', flush=True); raise OSError('lib.so: gone')": "OSError: lib.so: gone",
}


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
    assert env.ask("torch")[1].startswith(said)


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
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU" in hazard for hazard in found["hazards"])


def test_a_library_that_hangs_is_given_up():
    assert env.ask("torch", seconds=0.01) == ("", "no answer within 0 s")


@pytest.mark.slow
def test_env_runs_where_neither_torch_nor_rich_loads(site):
    site.add("torch", "raise ImportError('gone')")  # quick
    site.add("rich", "raise RuntimeError(1)", metadata=False)
    assert "- devices: not known: torch: ImportError: gone" in site.run("env").stdout


@pytest.mark.parametrize(
    ("cuda", "npu", "said"),
    [
        ("True", "True", ("cuda x 1, npu x 2 (Ascend910B1)", "")),
        ("False", "False", ("cpu only", "")),
        ("True", "exec('raise RuntimeError(507008)')", ("", "RuntimeError: 507008")),
    ],
)
def test_cards_are_told_and_one_that_cannot_be_asked_is_a_finding(site, cuda, npu, said):
    code = "cuda, npu = (__import__('types').SimpleNamespace() for _ in range(2))\n"
    code += f"cuda.is_available, cuda.device_count = lambda: {cuda}, lambda: 1\n"
    code += (
        f"npu.is_available, npu.device_count, npu.get_device_name = lambda: {npu}, lambda: 2, lambda index: 'Ascend910B1'"
    )
    site.add("torch", code)
    assert env.ask("torch") == said
