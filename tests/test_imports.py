"""Imports: the library alone loads no framework, and modules know only those before them."""

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter

from house import FILES, KNOWN, PACKAGE, module_of, names_of, ours, room_of, tree_of

import collate_npu

FIRST = ["errors", "validation", "releases", "arrays", "keys", "segments", "masks"]
ORDER = [*FIRST, "outputs parallel kernels", "consumers", "collate", "proof", "integrations", "testing", "tools", "__main__"]
"""The rooms of the house: each imports from those before it, and from itself."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names.split()}
CORE = [name for name, rank in RANK.items() if rank <= RANK["collate"]]
FOREIGN = ["transformers", "accelerate", "torch_npu", "rich", "trl", "datasets", "megatron", "triton", "fla", "flash_attn"]


def loaded_by(code):
    code = f"import sys, json, collate_npu\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_collate_npu_loads_nothing():
    """`collate-npu env` explains why `import torch` fails, so the package must import without it."""
    loaded = loaded_by("dir(collate_npu), collate_npu.__version__")
    assert loaded.isdisjoint([*FOREIGN, "torch", "numpy"])
    assert {name for name in loaded if name.startswith("collate_npu")} == {"collate_npu"}


def test_import_collate_npu_does_not_wait_for_typing():
    """It takes four fifths of the time of the whole import."""
    code = "import sys; before = 'typing' in sys.modules; import collate_npu; print(before, 'typing' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == ["False", "False"]


ROUTES = """
import types
[getattr(collate_npu, name) for name in collate_npu.__all__]
from collate_npu.consumers.mask_choice import consumers
model = types.SimpleNamespace(layer_types=["full_attention"])
lone = ("torchtitan", "mindspeed", "mindspeed_llm", "verl_npu", "transformer_engine",
        "transformer_engine_npu")  # right alone
for consumer in [None, *(name for name in consumers() if name not in lone)]:
    collator = collate_npu.PaddingCollator(pad_token_id=0, consumer=consumer, model=consumer and model, padding_side="left")
    collator([{"input_ids": [1]}, {"input_ids": [1, 2]}])
"""


def test_all_public_names_and_the_routes_of_all_consumers_load_no_framework():
    """A worker process pays for numpy and torch alone: from features to masks."""
    loaded = loaded_by(ROUTES)
    assert "collate_npu.collate.wrapping" in loaded
    assert loaded.isdisjoint(FOREIGN)


def test_the_command_line_env_and_the_guide_load_no_torch():
    run = "from collate_npu.tools import cli, env; cli.run_command_line(['guide', 'trl'])"
    loaded = loaded_by(f"import collate_npu.__main__, collate_npu.releases; {run}")
    assert (loaded - {"rich"}).isdisjoint([*FOREIGN, "torch", "numpy"])


def test_contributing_lists_the_rooms_in_their_order():
    text = (PACKAGE / "guide" / "contributing.md").read_text(encoding="utf-8")
    rows = text.partition("| room |")[2].partition("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(named) == RANK.keys() - {"__main__"}
    assert named == sorted(named, key=RANK.__getitem__)


def above(path):
    """What a file imports that does not stand before it. Above the core, public names come from the package itself."""
    if room_of(path) == "__init__":
        return [name for name in ours(path) if name.split(".")[0] not in {*CORE, "proof", "integrations", "tools"}]
    ranks = {name: RANK[name.split(".")[0]] if name else RANK["collate"] + 1 for name in ours(path)}
    return [name or "collate_npu" for name, rank in ranks.items() if rank > RANK[room_of(path)]]


def test_modules_import_only_those_before_them():
    assert {module_of(path): names for path in FILES if (names := above(path))} == {}


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


def test_the_core_imports_torch_and_numpy_alone():
    allowed = {"torch", "numpy", "collate_npu", "__future__", *sys.stdlib_module_names}
    foreign = {
        module_of(path): roots
        for path in FILES
        if room_of(path) in {*CORE, "__init__"}
        if (roots := {name.split(".")[0] for node in top_level(tree_of(path)) for name in names_of(node)} - allowed)
    }
    assert foreign == {}


def test_public_names_are_what_the_package_says():
    """Three lists agree: what type checkers import, where names live, and what `import *` brings."""
    body = tree_of(PACKAGE / "__init__.py").body
    checked = next(node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    homes = {
        alias.name: node.module.removeprefix("collate_npu.")
        for node in checked.body
        for alias in node.names
        if alias.asname == alias.name  # else it is not exported
    }
    assert homes == collate_npu._HOME
    assert collate_npu.__all__ == sorted(homes)
    assert {*homes} <= {*dir(collate_npu)}
