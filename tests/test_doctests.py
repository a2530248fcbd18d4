"""Every public name shows an example in its docstring, and every example runs and prints what is shown.

Public is what `collate_npu.__all__` lists and what README and the guide name. Examples that need a stack which is not
installed beside these tests are skipped, and each names the test that runs the same call on the released package.
"""

import ast
import doctest
import re
import warnings
from importlib import import_module
from importlib.util import find_spec

import pytest
from house import FILES, PACKAGE, ROOT, tree_of

import collate_npu
from collate_npu.releases import KERNELS_TOLD

TEXTS = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted((PACKAGE / "guide").glob("*.md")))]

INSIDE: set[str] = set()


def nodes():
    """Dotted name -> module, class, function or method of the package; not what stands inside a function."""
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from inside(module, tree_of(path))


def inside(name, node):
    yield name, node
    for child in [] if isinstance(node, ast.FunctionDef) else node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield from inside(f"{name}.{child.name}", child)
        elif isinstance(child, ast.Assign) and isinstance(child.value, ast.Name):  # another name of a class
            same = [other for other in node.body if getattr(other, "name", "") == child.value.id]
            yield from ((f"{name}.{child.targets[0].id}", other) for other in same)


NODES = dict(nodes())
DOCSTRINGS = {name: doc for name, node in NODES.items() if (doc := ast.get_docstring(node))}
EXAMPLES = {name: doc for name, doc in DOCSTRINGS.items() if ">>> " in doc}
STACK = {name for name, doc in EXAMPLES.items() if "doctest: +SKIP" in doc}
"""Examples that need the stack itself."""
NEEDS_MODELS = r"transformers import|tiny_model|tiny_config|tokenizer\(|hybrid_model_types\(|left_out\(|qwen3_next"
MODELS = {name for name, doc in EXAMPLES.items() if re.search(NEEDS_MODELS, doc[doc.index(">>> ") :])}
MODELS |= {name for name in EXAMPLES if name.startswith("integrations.transformers.")}


def module_of(name):
    """The module that holds a dotted name."""
    parts = name.split(".")
    while not ((path := PACKAGE.joinpath(*parts)).is_dir() or path.with_suffix(".py").exists()):
        parts.pop()
    return ".".join(["collate_npu", *parts])


def run_here():
    """Examples by room, those that build models apart."""
    rooms = {(name in MODELS, name.split(".")[0]): [] for name in EXAMPLES if name not in STACK}
    for name in EXAMPLES.keys() - STACK:
        rooms[name in MODELS, name.split(".")[0]].append(name)
    for (models, room), names in rooms.items():
        yield pytest.param(sorted(names), marks=[pytest.mark.models] * models, id=room + " models" * models)


@pytest.mark.parametrize("names", run_here())
def test_examples_print_what_is_shown(names, tmp_path, monkeypatch):
    if names[0] in MODELS:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert "".join(said for name in names if not needed(name) for said in faults(name)) == ""


def needed(name):
    """Is an example of something that is not here?"""
    kernels = "reference_kernels" in name and not KERNELS_TOLD.holds()  # no older release hands them boundaries
    return kernels or ("Trainer(" in EXAMPLES[name] and find_spec("accelerate") is None)


def faults(name):
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], dict(vars(import_module(module_of(name)))), name, None, None)
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the neutral form says once whom a 4D mask is for
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    return said


def test_examples_that_need_their_stack_are_run_by_a_test():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    for name in STACK:
        parsed = doctest.DocTestParser().get_examples(EXAMPLES[name])
        assert all(example.options.get(doctest.SKIP) for example in parsed), name
        face, last = module_of(name).rpartition(".")[2], name.rpartition(".")[2]
        assert any(re.search(rf"\b{face}\b", text) and re.search(rf"\b{last}\b", text) for text in texts), name


def homes(name):
    """Where a dotted name of a text is defined: the dotted names of DOCSTRINGS that end so, in this room or another."""
    last, room = name.split(".")[-1], ".".join(name.split(".")[:-1])
    anywhere = [full for full in DOCSTRINGS if full.split(".")[-1] == last and is_top(full)]
    found = [full for full in anywhere if full.startswith(room)] or anywhere
    return [full for full in found if full.count(".") == min(other.count(".") for other in found)]


def is_top(full):
    return module_of(full).removeprefix("collate_npu.") == full.rpartition(".")[0]


def named():
    """What README and the guide import from us, or name with its place, as dotted names."""
    for text in TEXTS:
        for code in re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("collate_npu."):
                    yield from (f"{node.module.partition('.')[2]}.{name.name}" for name in node.names)
        yield from re.findall(r"\b((?:integrations|kernels|consumers|masks|collate|parallel|testing)\.[\w.]+\w)", text)


PUBLIC = {home for name in collate_npu.__all__ for home in homes(f"{collate_npu._HOME[name]}.{name}")}
PUBLIC |= {home for name in named() for home in homes(name)}
PUBLIC |= {name for name in DOCSTRINGS if re.fullmatch(r"testing(\.kernels)?\.[a-z]\w+", name) and is_top(name)} - INSIDE


def test_a_public_name_has_an_example():
    assert {name.rpartition(".")[2] for name in PUBLIC} >= set(collate_npu.__all__)
    assert {"consumers.tiny_models.tiny_model", "integrations.swift.install", "consumers.mask_choice.Refusal"} <= PUBLIC
    assert sorted(PUBLIC - EXAMPLES.keys()) == []


def test_a_public_function_of_more_than_six_lines_says_what_it_does():
    functions = {name: node for name, node in NODES.items() if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    long = {name for name, node in functions.items() if (node.end_lineno or 0) - node.lineno >= 6}
    assert sorted(long - DOCSTRINGS.keys()) == []
