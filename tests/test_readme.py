"""Every code block of the README runs: Python in a process of its own, with the output shown below it; commands as far as
they can inside a test (CI runs the two of the set-up literally)."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from collate_npu.consumers.consumer import table
from collate_npu.consumers.models import transformers_version

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "collate_npu" / "guide").glob("*.md"))


def blocks_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S)


def python_of(text: str) -> list[tuple[str, str]]:
    """Each Python block with the output shown below it, if any."""
    blocks = [*blocks_of(text), ("", "")]
    return [(code, after * (kind == "text")) for (language, code), (kind, after) in pairwise(blocks) if language == "python"]


BLOCKS = blocks_of(TEXT)
PYTHON = python_of(TEXT)
SHOWN = [block for page in PAGES for block in python_of(page.read_text(encoding="utf-8")) if block[1]]
"""Of the guide those with an output: the others are fragments of a trainer's script."""
COMMANDS = [line for language, code in BLOCKS if language == "console" for line in code.splitlines()]


GLOO_ABORT = "SIGABRT"
"""torch 2.13 now and then aborts a finished process that had a DeviceMesh over gloo (its three lines alone do so too)."""


def test_every_block_is_of_a_known_kind():
    assert {language for language, _ in BLOCKS} <= {"python", "text", "console"}
    assert len(PYTHON) >= 4


@pytest.mark.parametrize(("code", "output"), [*PYTHON, *SHOWN], ids=range(1, len(PYTHON) + len(SHOWN) + 1))
def test_python_blocks_run_and_print_what_is_shown(code, output, tmp_path):
    before = TEXT[: TEXT.index(code)].splitlines()[-3] if code in TEXT else ""
    if "from datasets" in code:
        pytest.importorskip("datasets")
    if "reference_kernels" in code and transformers_version() < (5, 19):
        pytest.skip("no older release hands boundaries to kernels")
    if "transformers" in code or "testing" in code or "model_type" in code:
        pytest.importorskip("transformers")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    env["ACCELERATE_USE_CPU"] = "true"
    script = tmp_path / "shard.py"
    script.write_text(code, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if "torchrun" in before else []
    command = [sys.executable, *torchrun, str(script)]
    for _ in range(4):
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300)
        if not (torchrun and GLOO_ABORT in done.stderr):
            break
    assert done.returncode == 0, done.stderr[-2000:]
    if output:
        assert done.stdout == output


def test_the_table_of_consumers_is_what_they_say_of_themselves():
    """Where it differs, put the output of `python -c "from collate_npu.consumers.consumer import table; print(table())"`
    between the two comments."""
    shown = re.search(r"<!-- consumers -->\n(.*?)\n<!-- /consumers -->", TEXT, flags=re.S)
    assert shown is not None
    assert shown[1] == table()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_name_of_ours_in_the_text_is_real(page):
    """`integrations.swift.install()`, `keys.py` and the like: modules, their names, and files."""
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\b(?:collate_npu\.)?((?:integrations|kernels|consumers|masks|collate)\.[\w.]+\w)", text))
    assert names
    for name in names:
        assert is_ours(name.split(".")), name
    files = set(re.findall(r"`((?:collate_npu|tests|benchmarks)/[\w./-]+)`", text))
    assert all((ROOT / file).exists() for file in files)


def is_ours(parts):
    """Is it a module or package, or a name that stands at the top of one?"""
    path = ROOT / "collate_npu" / Path(*parts)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    home = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return home.exists() and re.search(rf"\b{parts[-1]}\b", home.read_text(encoding="utf-8")) is not None


def test_the_two_commands_are_what_ci_runs():
    sessions = [line.rsplit(" ", 1)[1] for line in COMMANDS if "nox -s" in line]
    assert sessions[:2] == ["audit", "tests"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for session in sessions:
        assert re.search(rf'"\$nox" -s .*\b{session}\b', script)
        assert re.search(rf"^def {session}\(", (ROOT / "noxfile.py").read_text(encoding="utf-8"), flags=re.M)


def test_the_two_commands_need_python_and_venv_alone():
    """A system's Python may refuse to install packages (externally managed), and has no nox."""
    pasted = [line for line in COMMANDS if "nox -s" in line]
    assert COMMANDS[0].startswith("git clone ")
    for line in pasted[:2]:
        assert re.fullmatch(r"python3 -m venv \.venv && \.venv/bin/pip install nox && \.venv/bin/nox -s \w+", line)
    assert ".venv/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for name, pin in re.findall(r"(COLLATE_NPU_\w+)=(\S+)", "\n".join(pasted)):
        assert f'"{name}", "{pin.removesuffix("+cpu")}"' in noxfile


def test_installs_name_real_extras():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'name = "collate-npu"' in project
    for line in COMMANDS:
        words = shlex.split(line)
        for extra in re.findall(r"(?:collate-npu|\.)\[(\w+)\]", " ".join(words)):
            assert re.search(rf"^{extra} = \[", project, flags=re.M)


def test_every_link_of_the_readme_leads_to_a_page_and_every_page_is_linked():
    linked = {ROOT / path for path in re.findall(r"\]\((collate_npu/[^)#]+)\)", TEXT)}
    assert all(path.exists() for path in linked)
    assert linked >= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_a_page_import_what_is_there(page):
    """They need the stacks themselves, whose peer tests run the same calls; here, their syntax and our names."""
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("collate_npu."):
                home = str(node.module).split(".")[1:]
                assert all(is_ours([*home, name.name]) for name in node.names), code
