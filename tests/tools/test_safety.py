"""Nothing runs, fills the memory or moves the cursor because of a file that merely lies there, is read or is named."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")
from typed import typed

import collate_npu
from collate_npu import describe
from collate_npu.errors import explain
from collate_npu.tools.env import masked
from collate_npu.tools.show import picture

ROOT = Path(collate_npu.__file__).parents[1]
NAMES = ("platform", "signal", "torch", "numpy", "datasets", "tokenizers", "collate_npu", "kernels", "wandb", "helper", "re")
MARK = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
MINE = """
import datasets, helper, tokenizers, collate_npu
from collate_npu import PaddingCollator
assert "lies" not in datasets.__file__ + tokenizers.__file__ + collate_npu.__file__
def collate(tokenizer, model):
    import later_helper
    return PaddingCollator(tokenizer, model=model)
"""


ENTRY = "import sys; from collate_npu.__main__ import main; sys.exit(main())"
"""As pip writes it into its bin folder."""


def command(*args, cwd, entry):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *entry, *args], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ran(folder):
    return sorted(path.stem for path in folder.rglob("*.ran"))


@pytest.fixture
def lies(tmp_path, monkeypatch):
    """A folder in which files lie that are named like packages."""
    folder = tmp_path / "lies"
    (folder / "beside").mkdir(parents=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(MARK)
        (folder / "beside" / f"{name}.py").write_text(MARK)
    (folder / "beside" / "later_helper.py").write_text(MARK)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "collate-npu").write_text(ENTRY)
    (folder / "beside" / "json.py").write_text(MINE)
    (folder / "a.json").write_text(json.dumps([{"text": "word " * n} for n in range(3, 12)]))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("entry", [["../bin/collate-npu"], ["-m", "collate_npu"]])
def test_no_command_runs_a_file_of_the_working_directory(lies, entry):
    if "-m" in entry:
        (lies / "collate_npu.py").unlink()  # that one was named
    found = json.loads(command("env", "--json", cwd=lies, entry=entry))
    assert "torch does not load" not in found["devices"]
    command("show", "--lengths", "3,5", cwd=lies, entry=entry)
    assert ran(lies) == []


@pytest.mark.slow
@pytest.mark.models
def test_a_collator_that_was_named_finds_its_neighbours_behind_what_is_installed(lies):
    """It is called json.py, and hides no json."""
    pytest.importorskip("datasets")
    quick = ["--model", "llama", "--attn", "sdpa", "--batches", "1", "--batch-size", "3", "--no-gradients", "--json"]
    mine = ["--collator", "beside/json.py:collate", "--data", "a.json"]
    out = command("audit", *quick, *mine, cwd=lies, entry=["../bin/collate-npu"])
    assert {f["right"] for f in json.loads(out)["findings"] if f["by"] == "collate"} == {True}
    assert ran(lies) == ["helper", "later_helper"]


@pytest.mark.slow
def test_looking_through_the_package_changes_nothing():
    """Every module is imported but verl's plugin, whose own import arms it: at once where verl's engine is loaded."""
    code = """if True:
        import pkgutil, signal, sys, types, warnings
        import collate_npu, torch, transformers
        if loaded := len(sys.argv) > 1:
            for name in ("verl", "verl.models", "verl.models.mcore"):
                sys.modules[name] = types.ModuleType(name)
        from collate_npu.integrations import patching
        from collate_npu.integrations import verl as engine
        engine.install = lambda: patching._TABLE.append("verl")
        before = list(sys.meta_path), list(sys.path), signal.getsignal(signal.SIGTERM)
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(collate_npu.__path__, "collate_npu."):
            try:
                module.name.endswith("verl.plugin") or __import__(module.name)
            except ImportError:
                pass  # of a trainer that is not installed
        assert (list(sys.meta_path), list(sys.path), signal.getsignal(signal.SIGTERM)) == before
        assert patching._TABLE == []
        import collate_npu.integrations.verl.plugin
        assert (patching._TABLE == ["verl"]) == loaded
    """
    for more in ([], ["loaded"]):
        done = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


# --- text from files and names

EVIL = "a\x1b[2J\x9b31mb\u202ec"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def evil(tmp_path):
    ids = torch.tensor([[1, 2, 3]])
    torch.save({"input_ids": ids, EVIL: ids, "attention_mask": {EVIL: torch.ones(1, 1, 3, 3)}}, tmp_path / f"{EVIL}.pt")
    (tmp_path / f"{EVIL}.jsonl").write_text(json.dumps({EVIL: 1}))
    (tmp_path / f"{EVIL}.py").write_text(f"raise ValueError({EVIL!r})")
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        ["show", "--batch", f"{{}}/{EVIL}.pt"],
        ["show", "--batch", f"{{}}/{EVIL}.pt", "--out", f"{{}}/{EVIL}.html"],
        ["show", "--lengths", EVIL],
        ["audit", "--model", "llama", "--batch", f"{{}}/{EVIL}.pt"],
        ["audit", "--model", EVIL],
        ["audit", "--model", "llama", "--collator", f"{{}}/{EVIL}.py:{EVIL}"],
        ["guide", EVIL],
    ],
)
def test_no_escape_sequence_reaches_the_screen(evil, args):
    result = typed(*(arg.replace("{}", str(evil)) for arg in args))
    assert result.output
    assert not RAW.search(result.output), repr(result.output)
    assert not (evil / f"{EVIL}.html").exists() or not RAW.search((evil / f"{EVIL}.html").read_text())


def test_nor_what_python_hands_out():
    batch = {"input_ids": torch.ones(1, 3), EVIL: EVIL, "attention_mask": {EVIL: torch.ones(1, 1, 3, 3)}}
    for text in (describe(batch), picture(batch), masked(EVIL), explain(EVIL, EVIL, "", "")):
        assert not RAW.search(text), repr(text)
