"""The built wheel, as a user gets it: the nox session `package` installs it and runs this; elsewhere it is skipped.

Runs in a folder of its own, so that the source tree cannot stand in for what the wheel forgot.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = os.environ.get("WHEELS")
pytestmark = pytest.mark.skipif(WHEELS is None, reason="nothing is built: nox -s package")
BIN = Path(sys.executable).parent

USER = """
import torch
from collate_npu import BatchAdapter, PaddingCollator, wrap_collator
from collate_npu.consumers.consumer import Consumer, Form

mine = Consumer(name="mine", forms=(Form(form="none", reads="nothing"),), source="here")
PaddingCollator(pad_token_id=0, consumer={consumer})
BatchAdapter(needs_mask_2d=True, consumer={consumer})
wrap_collator(PaddingCollator(pad_token_id=0), consumer={consumer})
masks: torch.Tensor = PaddingCollator(pad_token_id=0)([])["attention_mask_2d"]
"""


def run(*command, cwd, **env):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env={**os.environ, **env}, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def archive(kind):
    (found,) = Path(WHEELS).glob(f"collate_npu-*{kind}")
    return found


def test_the_wheel_holds_the_package_and_nothing_else():
    names = set(zipfile.ZipFile(archive(".whl")).namelist())
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "collate_npu").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    assert {"collate_npu/py.typed", "collate_npu/tools/data/text.txt", "collate_npu/guide/trl.md"} <= source
    assert {name for name in names if ".dist-info/" not in name} == source
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_archive_can_be_tested():
    with tarfile.open(archive(".tar.gz")) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "noxfile.py", "tests/test_laws.py", "collate_npu/py.typed"} <= names
    assert not [name for name in names if name.startswith((".nox", ".venv", ".git/"))]


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--version"], "collate-npu "), (["env"], "- torch: "), (["show", "--lengths", "3,5"], "■"), (["--help"], "audit")],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_installed_command_runs(tmp_path, args, said):
    code, out, err = run(BIN / "collate-npu", *args, cwd=tmp_path)
    assert code == 0, err
    assert said in out


def test_the_installed_package_is_the_wheels(tmp_path):
    code, out, err = run(sys.executable, "-c", "import collate_npu; print(collate_npu.__file__)", cwd=tmp_path)
    assert code == 0, err
    assert str(ROOT / "collate_npu") not in out


@pytest.mark.parametrize(
    ("consumer", "right"), [('"megatron"', True), ("mine", True), ("None", True), ('"megatorn"', False)]
)
def test_a_type_checker_knows_the_names_of_consumers(tmp_path, consumer, right):
    (tmp_path / "user.py").write_text(USER.format(consumer=consumer), encoding="utf-8")
    code, out, _ = run(sys.executable, "-m", "mypy", "--strict", "user.py", cwd=tmp_path)
    assert code == (0 if right else 1), out
    if not right:
        assert out.count('incompatible type "Literal[') == 0 or "megatorn" in out
        assert out.count("error: ") == 3, out
