"""Families: each hybrid of the installed transformers has its row, and each row speaks of code that is there."""

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from collate_npu import Segments, releases
from collate_npu.consumers.consumer import Case, Model
from collate_npu.consumers.models import kernel_calls
from collate_npu.consumers.transformers import READ_BY, RUNS_ON, also_told, why_state_runs_on
from collate_npu.releases import NEWEST, installed
from collate_npu.testing import hybrid_model_types, tiny_model

PACKED = Segments.from_lengths([[3, 2]])
NEWEST_HERE = pytest.mark.skipif(installed("transformers") != NEWEST["transformers"], reason="lines of the newest release")


def flat(family, **known):
    return Case(segments=PACKED, padding_free=True, model=Model(model_type=family, needs_mask_2d=True, **known))


def test_every_hybrid_family_has_one_row():
    assert READ_BY.keys() & RUNS_ON.keys() == set()
    text = {"glm5_next": "glm5_next_text"}
    assert {text.get(name, name) for name in hybrid_model_types()} <= READ_BY.keys() | RUNS_ON.keys()


def source(family):
    names = [family, family.removesuffix("_text")]
    found = [find_spec(f"transformers.models.{name}") for name in names]
    folder = next(Path(spec.origin).parent for spec in found if spec is not None)
    return next(folder.glob("modeling_*.py")).read_text("utf-8")


@NEWEST_HERE
@pytest.mark.parametrize("family", RUNS_ON)
def test_a_reason_names_layers_and_lines_that_are_there(family):
    code, why = source(family), RUNS_ON[family]
    for name in re.findall(
        r"\b(?:[A-Z]\w+(?:Attention|Indexer|Conv|Convolution|Projection|Model|Rglru)|\w+_fn|rwkv_\w+)\b", why
    ):
        assert name in code, name
    lines = code.splitlines()
    for first, last in re.findall(r"\.py:(\d+)(?:-(\d+))?", why):
        near = "\n".join(lines[int(first) - 3 : int(last or first) + 12])
        assert re.search(r"conv|Conv|Lightning|Projection|rwkv_linear|backbone\(|visible", near), near


@NEWEST_HERE
@pytest.mark.models
@pytest.mark.parametrize("family", sorted(READ_BY))
def test_the_kernels_of_a_row_are_those_that_its_layers_call(family):
    calls = {call.kernel for call in kernel_calls(tiny_model(family, vocab_size=99))}
    named = set(re.findall(r"causal_conv1d_fn|chunk_\w+|mamba_\w+", READ_BY[family]))
    assert named == {name for name in calls if not re.search("update|fused|split", name)}


def test_what_is_said():
    assert why_state_runs_on(flat("minimax")).startswith("in minimax, MiniMaxLightningAttention is plain torch")
    assert why_state_runs_on(flat("of_tomorrow")) == "in of_tomorrow, of which nothing is known here"
    assert why_state_runs_on(flat("")) == "nobody said which model it is"
    by_layer = flat("qwen4_exp_text", config=SimpleNamespace(ple_layer_ids=[0]), boundaries_unread="")
    assert "ple_layer_ids" in why_state_runs_on(by_layer)
    told = [also_told(flat(name)) for name in ("kimi_linear", "bailing_hybrid", "qwen3_next")]
    assert told == [("cu_seqlens",), ("cu_seqlens",), ()]


@pytest.mark.parametrize(
    ("version", "unread", "why"),
    [
        *(("5.18.1", unread, "before transformers 5.19") for unread in ("a kernel", None)),
        *((version, "", "") for version in ("5.18.1", "5.19.0", "5.20.0")),
        *((version, "a kernel", "a kernel") for version in ("5.19.0", "5.20.0")),
        ("5.19.0", None, "before 5.20"),
        ("5.20.0", None, ""),
    ],
)
def test_what_a_model_was_asked_counts_where_the_release_lets_it_see(monkeypatch, version, unread, why):
    monkeypatch.setitem(releases._FOUND, "transformers", version)
    said = why_state_runs_on(flat("kimi_linear", config=SimpleNamespace(), boundaries_unread=unread))
    assert said.startswith(why) if why else said == ""
