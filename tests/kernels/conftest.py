"""Rules of a contract as its code names them."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import collate_npu.kernels as room

CALLS = {"breach": 0, "_breach": 0, "Breach": 0}
"""Functions that make a breach, and which argument is the rule."""


def _rules(folder: str) -> Iterator[str]:
    for path in (Path(room.__file__).parent / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                made = getattr(node.func, "attr", getattr(node.func, "id", ""))
                at = CALLS.get(made, len(node.args))
                named = [word.value for word in node.keywords if word.arg == "rule"] if made == "Breach" else []
                yield from (each.value for each in (*node.args[at : at + 1], *named) if isinstance(each, ast.Constant))


@pytest.fixture
def rules_of() -> Callable[[str], set[str]]:
    """`rules_of("gated_delta")`: every rule that stands in the code of this folder."""
    return lambda folder: set(_rules(folder))
