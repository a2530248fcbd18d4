"""The built wheel, as a user gets it: the nox session `package` installs it, and what it asks for, into an environment with
nothing else, and runs this from another; elsewhere it is skipped.

What runs there runs in a folder of its own, so that the source tree cannot stand in for what the wheel forgot.
"""

import json
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from blocks import assert_shown, shown_in

ROOT = Path(__file__).parents[2]
WHEELS = os.environ.get("WHEELS")
pytestmark = pytest.mark.skipif(WHEELS is None, reason="nothing is built: nox -s package")
BIN = Path(os.environ.get("AS_USER", "."))
"""The commands of that environment."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOR_DEVELOPERS = ("guide/contributing.md", "guide/extending.md")
"""Pages that the wheel leaves out."""
TERMINAL = {"COLUMNS": "100", "TERM": "dumb", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true"}

USER = """
import torch
from collate_npu import BatchAdapter, PaddingCollator, wrap_collator
from collate_npu.consumers.mask_choice import Consumer, Form
mine = Consumer(name="mine", forms=(Form(form="none", reads="nothing"),), source="here")
PaddingCollator(pad_token_id=0, consumer={consumer})
BatchAdapter(needs_mask_2d=True, consumer={consumer})
wrap_collator(PaddingCollator(pad_token_id=0), consumer={consumer})
masks: torch.Tensor = PaddingCollator(pad_token_id=0)([])["attention_mask_2d"]
"""


def run(*command, cwd, **env):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    return done.returncode, done.stdout, done.stderr


def archive(kind):
    (found,) = Path(WHEELS).glob(f"collate_npu-*{kind}")
    return found


def test_the_wheel_holds_the_package_and_nothing_else():
    names = set(zipfile.ZipFile(archive(".whl")).namelist())
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "collate_npu").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name and not name.endswith(FOR_DEVELOPERS)}
    assert {"collate_npu/py.typed", "collate_npu/tools/data/text.txt", "collate_npu/guide/trl.md"} <= source
    assert {name for name in names if ".dist-info/" not in name} == source
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_two_builds_of_a_commit_are_one_wheel_and_the_list_of_what_a_user_has_is_whole():
    (again,) = Path(WHEELS, "again").glob("collate_npu-*.whl")
    assert again.read_bytes() == archive(".whl").read_bytes()
    held = json.loads(Path(WHEELS, "sbom.json").read_text(encoding="utf-8"))
    versions = {each["name"]: each["version"] for each in held["components"]}
    assert {"collate-npu", "torch", "numpy", "transformers", "accelerate", "rich", "wrapt"} <= versions.keys()
    assert all(versions.values())


def test_the_source_archive_can_be_tested():
    with tarfile.open(archive(".tar.gz")) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "noxfile.py", "tests/conftest.py", "collate_npu/py.typed"} <= names
    assert not [name for name in names if name.startswith((".nox", ".venv", ".git/"))]


def as_user(command, folder, *words, **env):
    """What a command of that environment prints."""
    code, out, err = run(BIN / command, *words, cwd=folder, **env)
    assert code == 0, err[-2000:]
    return out


def test_the_installed_command_runs_the_wheel(tmp_path):
    said = {"--version": "collate-npu ", "env": "- torch: ", "show --lengths 3,5": "■", "--help": "audit"}
    for line, words in {**said, "guide": "[Errors](errors.md)", "guide errors#polarity": "PolarityError"}.items():
        assert words in as_user("collate-npu", tmp_path, *line.split())
    place = as_user("python", tmp_path, "-c", "import collate_npu; print(collate_npu.__file__)")
    assert str(ROOT / "collate_npu") not in place


CLOSURE = """
import json, re, sys
from importlib.metadata import distributions, requires
def named(text): return re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", text)[0]).lower()
there, todo, asked = {named(each.name) for each in distributions()}, ["collate-npu"], set()
while todo:
    name = todo.pop()
    if name in there and name not in asked:
        asked.add(name)
        todo += [named(need) for need in requires(name) or () if "extra ==" not in need]
print(json.dumps(sorted(there - asked)))
"""


def test_the_environment_is_what_the_install_line_of_the_readme_makes(tmp_path):
    """No extra is asked for, and nothing is there that nobody asked for."""
    lines = [line for code, *_ in shown_in(README, "console") for line in code.splitlines()]
    assert "pip install ." in lines
    assert set(json.loads(as_user("python", tmp_path, "-c", CLOSURE))) <= {"pip", "setuptools"}


@pytest.mark.parametrize(("block", "output"), [(code, output) for code, output, _ in shown_in(README, "python")])
def test_the_blocks_of_the_readme_run_there(tmp_path, block, output):
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    out = as_user("python", tmp_path, "block.py", **TERMINAL)
    assert not output or assert_shown(output, out) is None


@pytest.mark.parametrize(("line", "output"), [(code, output) for code, output, _ in shown_in(README, "console") if output])
def test_the_commands_of_the_readme_print_there_what_is_shown(tmp_path, line, output):
    assert_shown(output, as_user(*shlex.split(line)[:1], tmp_path, *shlex.split(line)[1:], **TERMINAL))


def test_a_type_checker_knows_the_names_of_consumers(tmp_path):
    right = {"name": '"megatron"', "own": "mine", "none": "None"}
    for name, consumer in {**right, "wrong": '"megatorn"'}.items():
        (tmp_path / f"{name}.py").write_text(USER.format(consumer=consumer), encoding="utf-8")
    there = ("--python-executable", BIN / "python")
    code, out, _ = run(sys.executable, "-m", "mypy", "--strict", *there, *tmp_path.glob("*.py"), cwd=tmp_path)
    assert code == 1, out
    assert [line.partition(":")[0] for line in out.splitlines() if ": error: " in line] == ["wrong.py"] * 3, out
