"""Every public name shows an example in its docstring, and every example runs and prints what is shown.

Public is what `collate_npu.__all__` lists and what README and the guide name. Examples that need a stack which is not
installed beside these tests are skipped, and each names the test that runs the same call on the released package.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import collate_npu
from collate_npu.consumers.models import transformers_version
from collate_npu.kernels import fusion_attention, gated_delta

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "collate_npu"
TEXTS = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted((PACKAGE / "guide").glob("*.md")))]

STACK = {
    "parallel.layout.ContextParallel.from_mesh": "tests/test_readme.py::test_python_blocks_run_and_print_what_is_shown",
    "parallel.layout.ContextParallel.from_megatron": "tests/peers/test_megatron.py::test_parallel_state_tells_the_rank",
    "integrations.swift.install": "tests/peers/test_swift_install.py::"
    "test_install_reaches_functions_that_were_imported_by_name_and_uninstall_gives_them_back",
    "integrations.twinkle.install": "tests/peers/test_twinkle.py::test_install_twice_and_uninstall",
    "integrations.megatron.install": "tests/peers/test_megatron_experts.py::test_the_bias_of_experts_counts_real_tokens",
    "integrations.megatron.gpt_batch": "tests/peers/test_megatron.py::"
    "test_padded_batches_equal_samples_alone_in_logits_loss_and_gradients",
    "integrations.megatron.packed.packed_seq_params": "tests/peers/test_megatron_packed.py::"
    "test_every_field_of_the_installed_class",
    "integrations.megatron.mcore_bridge.install": "tests/peers/test_mcore_bridge.py::"
    "test_uninstall_gives_back_what_install_took",
    "integrations.torchtitan.masks.get_attention_masks": "tests/peers/test_torchtitan.py::"
    "test_qwen3_5_computes_each_document_alone",
    "integrations.torchtitan.masks.layers_of": "tests/peers/test_torchtitan.py::test_layers_are_read_off_the_model",
    "integrations.torchtitan.stages.masks_in_forward": "tests/peers/test_torchtitan_stages.py::"
    "test_a_schedule_cuts_our_batch_into_right_micro_batches",
    "integrations.axolotl.CollatePlugin": "tests/peers/test_axolotl.py::test_with_the_plugin_each_sequence_is_as_alone",
    "integrations.verl.engine.install": "tests/peers/test_verl_engine.py::"
    "test_log_probabilities_and_entropy_are_those_of_each_sample_alone",
}
"""Examples that need the stack itself, and the test that runs them there."""

UNSHOWN = {
    "Pattern": {"fill", "explaining"},  # optional parts of a new pattern; README's EverySecond needs neither
    "DeliveryCallback": {"on_train_begin"},  # the Trainer calls it
    "CollatePlugin": {"post_trainer_create"},
}

INSIDE = {"testing.kernels", "testing.kernels.causal_conv1d_fn"}

KERNELS = {*fusion_attention.__all__, *gated_delta.__all__}
WORDS = {"install", "route", "context_parallel"}
"""In the texts, the names of many things."""


def docstrings():
    """Dotted name -> docstring, of every module, class, function and method of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from inside(module, ast.parse(path.read_text(encoding="utf-8")))


def inside(name, node):
    if doc := ast.get_docstring(node):
        yield name, doc
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield from inside(f"{name}.{child.name}", child)


DOCSTRINGS = dict(docstrings())
EXAMPLES = {name: doc for name, doc in DOCSTRINGS.items() if ">>> " in doc}
NEEDS_MODELS = r"transformers import|tiny_model|tiny_config|tokenizer\(|hybrid_model_types\(|left_out\(|qwen3_next"
MODELS = {name for name, doc in EXAMPLES.items() if re.search(NEEDS_MODELS, doc[doc.index(">>> ") :])}
MODELS |= {name for name in EXAMPLES if name.startswith("integrations.transformers.")}


def module_of(name):
    """The module that holds a dotted name."""
    parts = name.split(".")
    while not ((path := PACKAGE.joinpath(*parts)).is_dir() or path.with_suffix(".py").exists()):
        parts.pop()
    return ".".join(["collate_npu", *parts])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.models] * (name in MODELS)) for name in EXAMPLES if name not in STACK]
)
def test_an_example_prints_what_is_shown(name, tmp_path, monkeypatch):
    if name in MODELS:
        pytest.importorskip("transformers")
    if "reference_kernels" in name and transformers_version() < (5, 19):
        pytest.skip("no older release hands boundaries to kernels")
    if "Trainer(" in EXAMPLES[name]:
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    names = dict(vars(import_module(module_of(name))))
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, None)
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the neutral form says once whom a 4D mask is for
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)
    assert "SKIP" not in EXAMPLES[name], "an example is skipped where the stack is needed, and listed in STACK"


@pytest.mark.parametrize("name", STACK)
def test_an_example_that_needs_its_stack_is_run_by_a_test_of_that_stack(name):
    parsed = doctest.DocTestParser().get_examples(EXAMPLES[name])
    assert parsed
    assert all(example.options.get(doctest.SKIP) for example in parsed)
    path, _, test = STACK[name].partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), flags=re.M)


def homes(name):
    """Where a dotted name of a text is defined: the dotted names of DOCSTRINGS that end so."""
    last, room = name.split(".")[-1], ".".join(name.split(".")[:-1])
    found = [full for full in DOCSTRINGS if full.split(".")[-1] == last and full.startswith(room) and is_top(full)]
    return [full for full in found if full.count(".") == min(other.count(".") for other in found)]


def is_top(full):
    return module_of(full).removeprefix("collate_npu.") == full.rpartition(".")[0]


def named():
    """What README and the guide import from us, name with its place, or name in passing, as dotted names."""
    for text in TEXTS:
        for code in re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("collate_npu."):
                    yield from (f"{node.module.partition('.')[2]}.{name.name}" for name in node.names)
        yield from re.findall(r"\b((?:integrations|kernels|consumers|masks|collate|parallel|testing)\.[\w.]+\w)", text)
        for word in set(re.findall(r"`(\w+)", text)) - WORDS:
            yield from (full for full in homes(word) if re.match(r"integrations|parallel", full) or word in KERNELS)


PUBLIC = {home for name in collate_npu.__all__ for home in homes(f"{collate_npu._HOME[name]}.{name}")}
PUBLIC |= {home for name in named() for home in homes(name)}
PUBLIC |= {name for name in DOCSTRINGS if re.fullmatch(r"testing(\.kernels)?\.[a-z]\w+", name) and is_top(name)} - INSIDE
CLASSES = sorted(name for name in PUBLIC if name.rpartition(".")[2][0].isupper())


def test_the_list_is_not_empty():
    assert {name.rpartition(".")[2] for name in PUBLIC} >= set(collate_npu.__all__)
    assert {"testing.tiny_model", "integrations.swift.install", "consumers.consumer.Refusal"} <= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example(name):
    assert name in EXAMPLES, f"{name} has no >>> in its docstring"


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_a_public_class_is_shown(name):
    """In the example of the class, or in one of its own. What is for the library's own use says so."""
    shown, cls = EXAMPLES[name], getattr(loaded(name), name.rpartition(".")[2])
    missing = [
        member
        for member, value in vars(cls).items()
        if not member.startswith("_")
        and (callable(value) or isinstance(value, (property, classmethod, staticmethod)) or hasattr(value, "func"))
        and "library's own use" not in (inspect.getdoc(getattr(cls, member)) or inspect.getdoc(value) or "")
        and member not in UNSHOWN.get(cls.__name__, ())
        and not re.search(rf"[.]{member}\b", shown)
        and f"{name}.{member}" not in EXAMPLES
    ]
    assert not missing


def loaded(name):
    """The module of a public name; the test is skipped where it needs a package that is not here."""
    try:
        return import_module(module_of(name))
    except ImportError:
        pytest.skip("its package is not installed")


def functions(node):
    """Of a module and its classes; a function inside a function says nothing to a reader outside."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from functions(child)
        elif isinstance(child, ast.FunctionDef):
            yield child


def test_a_public_function_of_more_than_six_lines_says_what_it_does():
    silent = [
        f"{path.relative_to(PACKAGE)}: {function.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if not function.name.startswith("_") and (function.end_lineno or 0) - function.lineno >= 6
        if not ast.get_docstring(function)
    ]
    assert silent == []
