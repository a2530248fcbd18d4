"""Releases: versions are read one way, and a release number stands in the table alone."""

import ast
import importlib.metadata
import re

import house
import pytest

from collate_npu import releases
from collate_npu.releases import DISTRIBUTIONS, NEWEST, UNKNOWN, Since, installed, outside, page_of

FILES = [path for path in house.FILES if house.module_of(path) != "releases"]
VERSION = re.compile(r"v?\d+(\.\d+)+([.-]?(dev|rc|post|a|b)\d*)*(\+\w+)?")
FACTS = {name: fact for name, fact in vars(releases).items() if isinstance(fact, Since)}


@pytest.mark.parametrize("fact", [Since("mine", "5.0", "here"), Since("mine", "0.5.1", "here")], ids=str)
def test_a_fact_holds_from_its_release_on(fact, monkeypatch):
    """Suffixes are no part of a release, and what has no number is newer than any."""
    older = {"5.0": "4.57.1", "0.5.1": "0.5.0"}[str(fact)]
    for form in ("{}", "{}.0", "{}.post1", "{}rc1", "{}.post2+cu12.1", "{}.dev0+main.ded3545", "core_r{}", "v{}"):
        assert fact.holds(form.format(fact)), form
        assert not fact.holds(form.format(older)), form
    assert [fact.holds(text) for text in ("6", "0", "", "main", "d98e8a6", UNKNOWN)] == [True, False, True, True, True, True]
    for version, holds in ((str(fact), True), (older, False), ("", True)):
        monkeypatch.setitem(releases._FOUND, "mine", version)
        assert fact.holds() == holds


def test_what_is_wrong_before_a_release_hurts_there_alone():
    def hurting(release, after=""):
        fact = Since("mine", release, "here", "is wrong", after)
        return [version for version in ("26.6.0", "26.7.0.dev0", "26.8.0", "main") if fact.hurts(version)]

    assert hurting("26.8") == ["26.6.0", "26.7.0.dev0"]
    assert hurting("26.8", after="26.7") == hurting("26.8", after="26.7.0") == ["26.7.0.dev0"]
    assert hurting("") == ["26.6.0", "26.7.0.dev0", "26.8.0"]
    assert not Since("mine", "26.8", "here").hurts("26.6.0")


def test_outside_are_releases_before_the_oldest_and_after_the_newest_that_ran(monkeypatch):
    oldest, newest = releases.RUN_RELEASES["trl"]
    for version, told in ((oldest, ""), (newest, ""), ("", ""), ("0.23.9", f"{oldest} to {newest}"), ("99.0", newest)):
        monkeypatch.setitem(releases._FOUND, "trl", version)
        assert outside("trl") == outside("trl", here=version)
        assert bool(outside("trl")) == bool(told)
        assert told in outside("trl")
    assert "(1.0)" in outside("mine", "1.0", "0.9")
    assert [page_of(name) for name in ("LLaMA-Factory", "mine")] == ["llamafactory-axolotl", "index"]
    assert [page_of(name) for name in ("transformers", "trl", "verl")] == ["transformers", "trl", "verl"]


OF_TESTS = {"KERNELS_TOLD"}
"""What tests alone ask: where they can run."""


def test_every_fact_is_asked_by_somebody():
    """Or tells `collate-npu env` what is wrong in earlier releases."""
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    asked = {name for name, fact in FACTS.items() if fact.before or re.search(rf"\b{name}\b", text)}
    assert {*FACTS} - asked == OF_TESTS
    assert all(VERSION.fullmatch(str(fact)) or fact.before for fact in FACTS.values())


def test_versions_are_read_once_by_the_names_a_package_ships_under(monkeypatch):
    asked = []

    def version(name):
        asked.append(name)
        if name == "fla-core":
            raise importlib.metadata.PackageNotFoundError(name)
        if name == "trl":
            raise OSError("no METADATA")
        return {"flash-linear-attention": "0.5.0"}.get(name)

    monkeypatch.setattr(releases, "version", version)
    monkeypatch.setattr(releases, "_FOUND", {})
    assert [installed("fla"), installed("fla"), installed("trl"), installed("torch")] == ["0.5.0", "0.5.0", UNKNOWN, UNKNOWN]
    assert asked == ["fla-core", "flash-linear-attention", "trl", "torch"]
    monkeypatch.undo()
    assert (installed("torch"), installed("no-such-package")) == (importlib.metadata.version("torch"), "")
    assert set(DISTRIBUTIONS) <= set(NEWEST)


def docstrings(tree):
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def declared(tree):
    """`PACKAGE, TESTED = "trl", "1.16.0"` of a trainer's one file, and the editions of the package itself."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("(PACKAGE, TESTED)", "__version__"):
            yield from ast.walk(node.value)


def is_version(node):
    """A string that is a version, or an order between anything and a tuple of whole numbers: `... < (5, 15)`."""
    if isinstance(node, ast.Compare):
        order = any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops)
        tuples = (side.elts for side in (node.left, *node.comparators) if isinstance(side, ast.Tuple))
        return order and any(all(isinstance(part, ast.Constant) for part in parts) for parts in tuples)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(VERSION.fullmatch(node.value))


def test_a_release_number_stands_in_the_table_alone():
    """Prose (docstrings, sources, messages) may name releases; what is compared may not."""
    found = []
    for path in FILES:
        tree = house.tree_of(path)
        allowed = {*docstrings(tree), *declared(tree)}
        numbered = (node for node in ast.walk(tree) if node not in allowed and is_version(node))
        found += [f"{house.module_of(path)}:{node.lineno}: {ast.unparse(node)}" for node in numbered]
    assert found == []


def test_versions_have_one_reader():
    assert [path.name for path in FILES if "importlib.metadata" in path.read_text(encoding="utf-8")] == []
