"""The files of the package, their rooms and what they import: read, not run."""

import ast
import subprocess
from functools import cache
from pathlib import Path

import pytest

import collate_npu

PACKAGE = Path(collate_npu.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted({*PACKAGE.rglob("*.py")} - {*PACKAGE.glob("guide/**/*.py")})  # examples are pages, no modules


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    return module_of(path).split(".")[0]


KNOWN = {module_of(path) for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_of(node: ast.AST) -> list[str]:
    """What an import names, as modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        # `from collate_npu import padding` names a module, `from collate_npu.collate.padding import x` lives in one
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name.removeprefix("collate_npu.") in KNOWN else str(node.module) for name in whole]
    return []


def ours(path: Path) -> list[str]:
    """The modules of the package that a file imports, at its top or in any function."""
    names = [name for node in ast.walk(tree_of(path)) for name in names_of(node) if name.split(".")[0] == "collate_npu"]
    return sorted({name.removeprefix("collate_npu").removeprefix(".") for name in names})


def before(path: str) -> str:
    """A file as the commit before this one has it; skips a test where none is here."""
    asked = ["git", "-C", str(ROOT), "show", f"HEAD^:{path}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("no commit before this one is here, or it has no such file")
    return found.stdout


def purpose_of(path: Path) -> str:
    """The first sentence of a module's docstring, on one line: what the file is for."""
    paragraph = (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0].replace("\n", " ")
    return paragraph.partition(". ")[0].removesuffix(".")
