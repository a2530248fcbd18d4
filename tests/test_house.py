"""Laws of the house: what keeps it small enough to hold in one head. Each lists all its faults at once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from house import FILES, PACKAGE, ROOT, before, module_of, ours, purpose_of, room_of, tree_of
from mutants.faults import FAULTS

TESTS = ROOT / "tests"

LINES = {
    "ground": (1611, 1600),
    "masks": (2467, 2200),
    "parallel": (1357, 1200),
    "kernels": (505, 450),
    "consumers": (3693, 2800),
    "collate": (1903, 1800),
    "proof": (3605, 3000),
    "integrations": (2769, 2500),
    "testing": (95, 200),
    "tools": (2316, 1500),
    "tests": (31635, 25000),
}
"""A room, the lines it may have, and the goal. The first number only falls: what adds to a room takes as much from it."""
WORDS, PAGES = 14848, 35
"""Of the guide that ships, in English, without tables that the code writes; a notebook is a page."""
STAY = ("contributing", "extending")
"""Pages for who has the repository: no wheel holds them."""


def lines_of(files) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_each_room_keeps_its_budget():
    files = defaultdict(list)
    for path in FILES:
        files[room_of(path) if room_of(path) in LINES else "ground"].append(path)
    files["tests"] = sorted(TESTS.rglob("*.py"))
    over = {room: (lines_of(files[room]), most) for room, (most, _) in LINES.items() if lines_of(files[room]) > most}
    assert over == {}


def test_budgets_only_fall():
    """Beside the commit before; lines that move to another room leave the sum as it is."""
    body = ast.parse(before("tests/test_house.py")).body
    rooms = next(node for node in body if isinstance(node, ast.Assign) and node.targets[0].id == "LINES")
    had = {room: most for room, (most, _) in ast.literal_eval(rooms.value).items()}
    assert sum(most for most, _ in LINES.values()) <= sum(had.values())
    assert LINES["tests"][0] <= had["tests"]


def test_the_guide_keeps_its_budget():
    pages = [page for page in (PACKAGE / "guide").glob("*.md") if page.stem not in STAY]
    assert len([*pages, *(PACKAGE / "guide").glob("*.ipynb")]) <= PAGES
    written = [re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", page.read_text("utf-8"), flags=re.S) for page in pages]
    assert sum(len(text.split()) for text in written) <= WORDS


PATHS = ("", "__main__", "collate", "consumers", "kernels", "proof", "integrations", "testing", "tools")
"""Where a user enters: the names of the package, the command line, and the faces of rooms that are imported by name."""


def test_every_module_is_reached_from_a_main_path():
    modules = {module_of(path).removeprefix("__init__"): path for path in FILES}
    faces = {name for name, path in modules.items() if path.name == "__init__.py" and name.split(".")[0] in PATHS}
    faces |= {name for name in modules if name.startswith(("integrations.", "consumers."))}  # each is named by a user
    reached, todo = set(), [*faces, "__main__", "tools.inherited.sitecustomize"]  # the last Python itself runs
    while todo:
        name = todo.pop()
        if name in modules and name not in reached:
            reached.add(name)
            todo += [*ours(modules[name]), name.rpartition(".")[0], *lazily(modules[name])]
    assert sorted(set(modules) - reached) == []


def lazily(path: Path) -> list[str]:
    """Modules that a file names in a string: what a face loads on first use, and what runs in a process of its own."""
    texts = [
        node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    found = [name for text in texts for name in re.findall(r"[a-z_][\w.]*", text)]
    room = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    return [variant for name in found for variant in (name.removeprefix("collate_npu."), f"{room}.{name}".strip("."))]


SHORT = 80
"""Lines a file has at least, a trainer's, a consumer's and a face aside; those with fewer may only get fewer."""
SHORTER = {"tools.inherited.sitecustomize"}


def test_the_text_of_each_planted_fault_stands_once():
    held = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert {fault.name: held.count(fault.was) for fault in FAULTS if held.count(fault.was) != 1} == {}


def test_a_file_holds_a_whole_concept():
    short = {
        module_of(path) for path in FILES if lines_of([path]) < SHORT and path.name not in ("__init__.py", "__main__.py")
    }
    assert {name for name in short if name.split(".")[0] not in ("integrations", "consumers") or name in SHORTER} == SHORTER


def test_a_module_is_what_its_name_says():
    """The words of a name begin its docstring, which is its row of the glossary (guide: contributing)."""
    faults = []
    for path in FILES:
        name, purpose = module_of(path).rpartition(".")[2], purpose_of(path).lower()
        words = [word[:5].rstrip("s") for word in name.split("_") if word not in ("and", "")]
        told = name[:2] == "__" or name == "sitecustomize"
        if not told and not all(word in purpose for word in words):
            faults.append((module_of(path), purpose))
    assert faults == []


SHARED = {"arm", "install", "main", "uninstall", "PACKAGE", "TESTED"}
"""Names that each trainer's file gives to the same thing."""


def test_a_public_name_stands_in_one_module():
    places = defaultdict(set)
    for path in FILES:
        for node in tree_of(path).body:
            targets = getattr(node, "targets", None) or [getattr(node, "target", ast.Pass())]  # = and :
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            for name in (getattr(node, "name", "_"), *names):
                places[name].add(module_of(path))
    assert {name for name, found in places.items() if len(found) > 1 and name[0] != "_"} - SHARED == set()


STACKS = ("mindspeed", "swift", "verl", "twinkle", "torchtitan", "llamafactory", "deepspeed", "areal")
"""Not megatron, trl and accelerate: what they read is a form that others read too."""
ELSEWHERE = {
    "mindspeed": """
        consumers.mask_choice consumers.megatron consumers.verl
        integrations.megatron integrations.swift integrations.twinkle
        integrations.verl
        parallel.layout releases tools.env""",
    "swift": "consumers.megatron parallel.layout",
    "verl": "consumers.mask_choice",
    "torchtitan": "consumers.adapter consumers.mask_choice consumers.model_traits",
    "llamafactory": "tools.env",
}
"""Modules whose code names a stack that is not theirs: the list may only shrink. A docstring may cite anybody."""
TABLE = "masks.dialects"
"""It says what each stack writes, and names them all."""


@cache
def code_names(path: Path) -> set[str]:
    """Words of the code: imports, names and texts, without docstrings and notes under a field."""
    tree = tree_of(path)
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            words |= set(re.findall(r"[a-z]+", node.value.lower()))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            words |= set(re.findall(r"[a-z]+", ast.unparse(node).lower()))
        elif isinstance(node, (ast.Name, ast.FunctionDef, ast.ClassDef)):
            words |= set(re.findall(r"[a-z]+", (node.id if isinstance(node, ast.Name) else node.name).lower()))
    return words


def test_a_stack_is_named_in_its_own_files_alone():
    faults = {}
    for stack in STACKS:
        named = {module_of(path) for path in FILES if stack in code_names(path) and stack not in module_of(path)} - {TABLE}
        if changed := named ^ set(ELSEWHERE.get(stack, "").split()):
            faults[stack] = sorted(changed)
    assert faults == {}
