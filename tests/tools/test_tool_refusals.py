"""Refusals of the tools: an advice can be followed here. Its options exist, and its extra installs what it runs."""

import ast
import re
import sys

from house import PACKAGE, names_of, tree_of

from collate_npu.tools.cli import parsers

TOOLS = sorted((PACKAGE / "tools").rglob("*.py"))
NODES = [node for path in TOOLS for node in ast.walk(tree_of(path))]
NOT_OURS = {"--", "--local-dir", "--config", "--nproc-per-node"}
"""Of hf, of a training script, of torchrun."""
BEHIND_A_CHECK = {"torch_npu": "check_device", "trl": "installed"}
"""Who refuses in words where it is not installed."""
BROUGHT = {"pyarrow": "datasets", "safetensors": "transformers"}
"""By which package of the extra."""


def test_every_option_that_a_text_names_is_one():
    known = {option for each in parsers()[1].values() for action in each._actions for option in action.option_strings}
    docs = {id(node.value) for node in NODES if isinstance(node, ast.Expr)}
    texts = [node.value for node in NODES if isinstance(node, ast.Constant) and id(node) not in docs]
    named = {option for text in texts for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", str(text))}
    assert named - known - NOT_OURS - {"--version"} == set()
    assert {"--packed", "--batch-size"} <= named


def test_what_an_advice_needs_the_extra_installs():
    called = [node for node in NODES if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module"]
    found = {name.partition(".")[0] for node in NODES for name in names_of(node)}
    found |= {arg.value.partition(".")[0] for node in called for arg in node.args if isinstance(arg, ast.Constant)}
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|audit) = \[(.*?)\]", project, flags=re.M | re.S)
    extra = {name for text in lists for name in re.findall(r'"([\w-]+)', text)}
    assert len(lists) == 2
    foreign = found - {*sys.stdlib_module_names, "collate_npu"}
    assert foreign - extra - {*BEHIND_A_CHECK} - {name for name, by in BROUGHT.items() if by in extra} == set()
    source = "".join(path.read_text(encoding="utf-8") for path in TOOLS)
    assert all(f"{name}(" in source for name in BEHIND_A_CHECK.values())
