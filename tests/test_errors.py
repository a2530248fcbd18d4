"""Messages: what COLLATE_NPU_DEBUG=1 logs, as a user meets it, and old names, each of which warns and gives the thing."""

import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pkgutil import resolve_name

import house
import pytest

import collate_npu
from collate_npu.errors import GONE_IN, MOVED, CollateError


def process(code, on=True, tmp_path=None, *arguments):
    """What a process says on both streams; a file where its workers must import it again."""
    env = {name: value for name, value in os.environ.items() if name != "COLLATE_NPU_DEBUG"}
    env |= {"PYTHONPATH": str(house.ROOT), "COLLATE_NPU_DEBUG": "1" if on else "0"}
    command = ["-c", code]
    if tmp_path is not None:
        file = tmp_path / "load.py"
        file.write_text(code, encoding="utf-8")
        command = [str(file), *arguments]
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def said(code, *settings):
    return process(code, *settings)[1].split("collate_npu [")[1:]


ROUTES = """
from collate_npu import BatchAdapter, PaddingCollator
rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9]}]
for side in ("left", "right"):
    collate = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")
    adapter = BatchAdapter(needs_mask_2d=True, consumer="megatron")
    for _ in range(3):
        adapter(collate(rows))
BatchAdapter(needs_mask_2d=True, consumer="transformers")(PaddingCollator(pad_token_id=0, padding_side="left")(rows))
"""
FORMS = {
    "left": "attention_mask: 4D, True is blocked, 32 bytes (padding stands on the left",
    "right": "attention_mask: None (causal attention, padding on the right only",
}


@pytest.mark.slow
def test_a_route_is_said_once_with_its_reasons():
    neutral, *others = said(ROUTES)
    assert "no consumer named: the neutral form, for a BatchAdapter" in neutral
    (route,) = (text for text in others if "consumer transformers, model not named" in text)
    assert "attention_mask: the 2D mask, True or 1 = real (every layer of a transformers model reads the 2D mask)" in route
    assert "attention_mask_2d: removed (no layer reads it)" in route
    routes = [text for text in others if "consumer megatron" in text]
    for route, (side, form) in zip(routes, FORMS.items(), strict=True):
        assert "MainProcess" in route
        assert "consumer megatron, model not named\n" in route
        assert "attention_mask_2d: stays (recurrent layers read it)" in route
        assert f"2 rows of 4, one sequence each; padding on the {side}, 3 of 8 places (38%)" in route
        assert form in route
        assert "context parallelism: none" in route
    assert said(ROUTES, False) == [], "without the variable"


HAZARD = """
import torch
from collate_npu import BatchAdapter, Segments, describe
from collate_npu.masks import dense
segments = Segments.from_lengths([2, 3], side="left")
ids = torch.tensor([[7, 5, 7], [5, 6, 4]])
batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": dense(segments).to(torch.int8)}
print(describe(batch))
for _ in range(2):
    BatchAdapter(needs_mask_2d=True, consumer="megatron")(batch)
"""


def test_every_hazard_that_describe_names_is_said_where_the_batch_arrives():
    out, err = process(HAZARD)
    named = [line.partition("hazard: ")[2] for line in out.splitlines() if line.startswith("hazard: ")]
    assert len(named) == 4
    for text in named:
        assert err.count(f"hazard in a batch as it arrives: {text}") == 1
    assert len(re.findall(r"^collate_npu \[MainProcess \d+\] consumer megatron", err, flags=re.M)) == 1


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader
from collate_npu import PaddingCollator
if __name__ == "__main__":
    rows = [{"input_ids": list(range(1, n))} for n in (4, 7, 3, 5, 6, 2, 8, 3)]
    collate = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
    collate(rows[:2])
    for _ in DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=2, multiprocessing_context=sys.argv[1]):
        pass
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_each_worker_says_a_route_once(tmp_path, start):
    found = said(WORKERS, True, tmp_path, start)
    who = [text.partition("]")[0] for text in found if "neutral form" in text]
    assert len(who) == len(set(who)) == 3  # the process that started them, and two workers


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_gives_the_thing_and_says_where_it_is(old, new):
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(f'{old} is {new} now')}.* goes in {GONE_IN}") as said:
        exec(f"from {module} import {name}", found := {})
    assert {each.filename for each in said} == {"<string>"}  # the line that names it, none of ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found[name] is resolve_name(new)


@pytest.mark.parametrize("module", sorted({old.rpartition(".")[0] for old in MOVED}))
def test_a_name_that_was_never_there_says_so(module):
    with pytest.raises(AttributeError, match=re.escape(f"module '{module}' has no attribute 'dens'")):
        import_module(module).dens  # noqa: B018


NEAR = {
    "PaddingCollator(None, paddingside='left')": "padding_side",
    "wrap_collator(print, polarty='keep')": "polarity",
    "ContextParallel(2, 0, layot='zigzag')": "layout",
    "ContextParallel(2, 0, layout='zig-zag')": "zigzag",
    "BatchAdapter(needs_mask_2d=True, consumr='megatron')": "consumer",
    "BatchAdapter(needs_mask_2d=True, consumer='Megatorn')": "megatron",
    "PaddingCollator(pad_token_id=0, padding_side='LEFT')": "left",
    "PaddingCollator(pad_token_id=0, attention_mask='2D')": "2d",
    "derive_segments([[1]], polarity='kep')": "keep",
    "derive_segments([[1]], patern='causal')": "pattern",
    "derive_segments([[1]], pattern='casual')": "causal",
    "collate_npu.Paddingcollater": "PaddingCollator",
}


@pytest.mark.parametrize("typed", NEAR)
def test_a_misspelt_name_is_answered_with_the_nearest(typed):
    with pytest.raises((CollateError, AttributeError), match=f"Did you mean {NEAR[typed]}"):
        exec(f"import collate_npu\nfrom collate_npu import *\n{typed}", {})


def lost_names(had, has, version):
    """Public names that went without one edition of warning: lines that are lost, of names that are no old names."""
    numbers = [int(n) for n in version.split(".")[:2]]
    old = {name: until for name, _, until in (line.partition(", until ") for line in has) if until}
    for line in had - has:
        name, _, until = line.partition(", until ")
        gone = until and [int(n) for n in until.split(".")] <= numbers
        if not gone and name.partition("(")[0] not in old:
            yield line


def test_a_public_name_warns_for_an_edition_before_it_goes():
    """`tests/lists.py` writes the list of them."""
    path = "tests/data/public_names.txt"
    now = {*(house.ROOT / path).read_text("utf-8").splitlines()}
    assert [*lost_names({*house.before(path).splitlines()}, now, collate_npu.__version__)] == []


WENT = [
    ("a.b|a.b(x=)", "", "0.8.0", "a.b|a.b(x=)"), ("a.b|a.b(x=)", "a.b", "0.8.0", "a.b(x=)"), ("a --b", "", "1.0", "a --b"),
    ("a.b|a.b(x=)", "a.b, until 0.9", "0.8.0", ""), ("a.b, until 0.9", "", "0.8.3", "a.b, until 0.9"),
    ("a.b, until 0.9", "", "0.9.0", ""), ("a.b, until 0.9", "", "0.10.0", ""),
]  # fmt: skip


@pytest.mark.parametrize(("had", "has", "version", "lost"), WENT)
def test_what_goes_without_a_warning_is_found(had, has, version, lost):
    assert "|".join(sorted(lost_names({*had.split("|")}, {*has.split("|")}, version))) == lost


def test_old_names_go_after_this_edition_and_stand_in_the_changelog():
    assert tuple(map(int, collate_npu.__version__.split(".")[:2])) < tuple(map(int, GONE_IN.split(".")))
    text = (house.PACKAGE / "guide" / "changelog.md").read_text(encoding="utf-8")
    told = [{old.rpartition(".")[2], old.rpartition(".")[0].partition(".")[2] or old} for old in MOVED]
    assert [names for names in told if not any(name in text for name in names)] == []
