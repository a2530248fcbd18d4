"""Imports: the library alone loads no framework, and modules know only those before them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import collate_npu

PACKAGE = Path(collate_npu.__file__).parent

ORDER = (
    ("errors",),
    ("keys",),
    ("host",),
    ("segments",),
    ("masks",),
    ("outputs", "parallel", "kernels"),
    ("consumers",),
    ("collate",),
    ("integrations",),
    ("testing",),
    ("tools",),
    ("__main__",),
)
"""The rooms of the house: each imports from those before it, and from itself."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
CORE = [name for names in ORDER[: RANK["collate"] + 1] for name in names]
FOREIGN = [
    "transformers",
    "accelerate",
    "torch_npu",
    "rich",
    "typer",
    "trl",
    "datasets",
    "megatron",
    "triton",
    "fla",
    "flash_attn",
]

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


KNOWN = {module_of(path) for path in FILES}


def names_of(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        # `from collate_npu import padding` names a module, `from collate_npu.collate.padding import x` lives in one
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name.removeprefix("collate_npu.") in KNOWN else node.module for name in whole]
    return []


def ours(path):
    """The modules of the package that a file imports, at its top or in any function."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = [name for node in nodes for name in names_of(node) if name.split(".")[0] == "collate_npu"]
    return sorted({name.removeprefix("collate_npu").removeprefix(".") for name in names})


def test_import_collate_npu_loads_no_framework():
    code = "import sys, json, collate_npu; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "collate_npu.collate.wrapping" in loaded
    assert loaded.isdisjoint(FOREIGN)


def test_collating_and_adapting_load_no_framework():
    """A worker process pays for numpy and torch alone: the routes of all consumers, from features to masks."""
    code = """
import sys, json, types
from collate_npu import *
from collate_npu.consumers.consumer import consumers
model = types.SimpleNamespace(layer_types=["full_attention"])
for consumer in [None, *(name for name in consumers() if name not in ("torchtitan", "mindspeed", "transformer_engine"))]:
    collator = PaddingCollator(pad_token_id=0, consumer=consumer, model=model, padding_side="left")
    collator([{"input_ids": [1]}, {"input_ids": [1, 2]}])
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])).isdisjoint(FOREIGN)


def test_every_module_has_its_place_in_the_order():
    assert {module_of(path).split(".")[0] for path in FILES} <= {*RANK, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_modules_import_only_those_before_them(path):
    room = module_of(path).split(".")[0]
    if room == "__init__":
        assert {name.split(".")[0] for name in ours(path)} <= {*CORE, "tools"}
        return
    for name in ours(path):
        # what is above the core may take public names from the package itself
        if name:
            assert RANK[name.split(".")[0]] <= RANK[room], f"{room} imports {name}"
        else:
            assert RANK[room] > RANK["collate"], f"{room} imports the package: {name or 'collate_npu'}"


def test_no_two_modules_import_each_other():
    graph = {module_of(path): set(ours(path)) - {"", module_of(path)} for path in FILES if module_of(path) != "__init__"}
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == KNOWN - {"__init__"}


def top_level(tree):
    """Statements that run on import; those under TYPE_CHECKING do not."""
    for node in tree.body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from (part for part in ast.walk(node) if isinstance(part, (ast.Import, ast.ImportFrom)))
        else:
            yield node


@pytest.mark.parametrize(
    "path", [path for path in FILES if module_of(path).split(".")[0] in {*CORE, "__init__"}], ids=module_of
)
def test_the_core_imports_torch_and_numpy_alone(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = {name.split(".")[0] for node in top_level(tree) for name in names_of(node)}
    assert roots <= {"torch", "numpy", "collate_npu", "__future__", *sys.stdlib_module_names}


def test_public_names_are_what_the_package_says():
    assert len(collate_npu.__all__) == len(set(collate_npu.__all__))
    assert all(hasattr(collate_npu, name) for name in collate_npu.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imported = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(collate_npu.__all__) == imported
