"""Refusals of the tools: an advice can be followed here."""

import ast
import re
import sys

from house import PACKAGE, tree_of

from collate_npu.tools.cli import parsers

TOOLS = sorted((PACKAGE / "tools").rglob("*.py"))


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
    assert {"--packed", "--batch-size"} <= named


BEHIND_A_CHECK = {"torch_npu": "check_device", "trl": "installed"}
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
