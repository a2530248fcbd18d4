"""Refusals: what is theirs stands first, a file that is not there has a neighbour, and an advice can be followed here."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
from house import PACKAGE, tree_of

from collate_npu import CollateError
from collate_npu.tools.cli import parsers
from collate_npu.tools.user_code import check_file, did_you_mean, first_line, line_in, refused

TOOLS = sorted((PACKAGE / "tools").rglob("*.py"))


def said(call, *args):
    with pytest.raises(CollateError) as error:
        call(*args)
    return str(error.value)


def test_file_and_line_of_theirs_come_first_and_ours_after(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text("def deep(): return {}['key']\ndef run(): return deep()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CollateError) as error, refused("run", "theirs.py:run", "It is run.", "Mend it.", folders=["."]):
        __import__("theirs").run()
    del sys.modules["theirs"]
    assert str(error.value) == "theirs.py, line 1: KeyError: 'key'. run: got theirs.py:run. It is run. Mend it."
    with (
        pytest.raises(CollateError, match=r"^run: got it \(KeyError: 3\)\. "),
        refused("run", "it", "A.", "B.", folders=["."]),
    ):
        raise KeyError(3)


def test_what_is_no_file_of_that_kind_has_one_that_is_near(tmp_path):
    for name in ("rows.jsonl", "rowse.jsonl", "rowsy.jsonl", "rows.py"):
        (tmp_path / name).write_text("", encoding="utf-8")
    for name, words in {
        "": f"got a folder. Such files end with .jsonl. Name one file in it: {tmp_path / 'rows.jsonl'}.",
        "row.jsonl": "got no such file. Such files end with .jsonl. Did you mean rows.jsonl or rowse.jsonl?",
        "there/rows.jsonl": f"got no such folder as {tmp_path / 'there'}. Such files end with .jsonl. Name one.",
        "rows.py": "got a file that ends with '.py'. Such files end with .jsonl. Name one.",
    }.items():
        assert said(check_file, tmp_path / name, [".jsonl"], "Name one.").endswith(words)
    check_file(tmp_path / "rows.jsonl", [".jsonl"], "")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "got a pipe. It may never end." in said(check_file, tmp_path / "pipe.jsonl", [".jsonl"], "Name one.")


def test_the_line_of_an_installed_package_and_of_this_one_is_nobodys(tmp_path):
    path = tmp_path / "site-packages" / "theirs.py"
    for place, line in {path: "", tmp_path / "theirs.py": f"{tmp_path / 'theirs.py'}, line 2: "}.items():
        with pytest.raises(ZeroDivisionError) as error:
            exec(compile("\n1 / 0", str(place), "exec"))
        assert line_in(error.value, [str(tmp_path)]) == line
    with pytest.raises(CollateError) as error:
        check_file(tmp_path, [""], "")
    assert line_in(error.value, [str(PACKAGE)]) == ""


def test_what_is_said_is_short():
    assert first_line(ValueError("x" * 500)) == "x" * 400
    assert did_you_mean(["row"], ["rowa", "rowb", "rowc"], "Look.") == "Did you mean rowb or rowc?"
    assert did_you_mean(["row"], ["else"], "Look.") == "Look."


def texts(path):
    docs = {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant) and id(node) not in docs)
    return [node.value for node in nodes if isinstance(node.value, str)]


NOT_OURS = {"--", "--local-dir", "--config", "--nproc-per-node"}
"""Of hf, of a training script, of torchrun."""


def test_every_option_that_a_text_names_is_one():
    known = {option for each in parsers()[1].values() for action in each._actions for option in action.option_strings}
    named = {option for path in TOOLS for text in texts(path) for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert named - known - NOT_OURS - {"--version"} == set()
    assert {"--verbose", "--batches"} <= named


BEHIND_A_CHECK = {"torch_npu": "check_device"}
"""Who refuses in words where it is not installed."""
BROUGHT = {"pyarrow": "datasets", "safetensors": "transformers"}
"""By which package of the extra."""


def test_what_an_advice_needs_the_extra_installs():
    """What an advice names runs: the command line imports nothing that its extra does not bring."""
    found = set()
    for path in TOOLS:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
                found |= {arg.value.partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|audit) = \[(.*?)\]", project, flags=re.M | re.S)
    extra = {name for text in lists for name in re.findall(r'"([\w-]+)', text)}
    assert len(lists) == 2
    foreign = found - {*sys.stdlib_module_names, "collate_npu"}
    assert foreign - extra - {*BEHIND_A_CHECK} - {name for name, by in BROUGHT.items() if by in extra} == set()
    source = "".join(path.read_text(encoding="utf-8") for path in TOOLS)
    assert all(f"{name}(" in source for name in BEHIND_A_CHECK.values())


def test_a_device_that_is_advised_is_here():
    torch = pytest.importorskip("torch")
    from collate_npu.tools.kernels import check_device

    words = said(check_device, "nonsense", torch.float32)
    advised = re.search(r"Name a device of this machine: ([\w, ]+)\.", words)[1].split(", ")
    assert advised[0] == "cpu"
    for device in advised:
        check_device(device, torch.float32)
