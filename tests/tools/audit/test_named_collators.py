"""Collators by name: functions, classes and files; what makes one is told by its arguments, what is not there in words."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.audit.named_collators import ready_collators

pytestmark = pytest.mark.models

SOURCE = """
from types import SimpleNamespace
def collate(features): return features
def made(model, tokenizer): return lambda features: (tokenizer.padding_side, model)
def bare(): return collate
def plain(tokenizer): return lambda features: tokenizer
def fails(tokenizer): raise ValueError("no such thing")
def nothing(tokenizer): return 3
class Padder:
    def __init__(self, pad_token_id, side="left"): self.pad = pad_token_id
    def __call__(self, features): return self.pad
class Strange:
    def __init__(self, foo): pass
held = SimpleNamespace(inner=SimpleNamespace(collate=collate))
number = 3
"""
GIVEN = {"tokenizer": SimpleNamespace(), "model": "M", "pad_token_id": 7}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "my_module_here.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "bad_module_here.py").write_text("raise RuntimeError('broken')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


@pytest.mark.parametrize("place", ["my_module_here", "my_module_here.py", "./my_module_here.py"])
def test_each_kind_of_collator_is_made_ready(place):
    answers = {"collate": [], "made": ("left", "M"), "bare": [], "Padder": 7, "held.inner.collate": []}
    for name, answer in answers.items():
        (ready,) = ready_collators(f"{place}:{name}", ["left"], **GIVEN)
        assert ready([]) == answer, name


def test_one_is_made_for_each_side_where_it_asks_for_a_tokenizer_that_is_there():
    sides = ["left", "right"]
    assert [each([])[0] for each in ready_collators("my_module_here:made", sides, **GIVEN)] == sides
    assert len(ready_collators("my_module_here:Padder", sides, **GIVEN)) == 1
    (bare,) = ready_collators("my_module_here:plain", sides, **{**GIVEN, "tokenizer": None})
    assert bare([]) is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("collate", "module:function"),
        ("my_module_here:", "module:function"),
        ("my_module_here:colate", "Did you mean collate?"),
        ("my_module_here:number", "a int"),
        ("no_module_here:collate", "No module named"),
        ("no_file_here.py:collate", "no such file"),
        ("bad_module_here:collate", "RuntimeError: broken"),
        ("my_module_here:fails", "ValueError: no such thing"),
        ("my_module_here:nothing", "a int"),
        ("my_module_here:Strange", "called with nothing"),
    ],
)
def test_what_is_no_collator_is_refused_in_a_line(spec, said):
    with pytest.raises(CollateError, match=said) as error:
        ready_collators(spec, ["left"], **GIVEN)
    assert "\n" not in str(error.value)
    assert "--collator: got " in str(error.value) or "no such file" in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        "transformers:DataCollatorForSeq2Seq",
        "transformers:DataCollatorForLanguageModeling",
        "transformers:DataCollatorWithFlattening",
        "trl.trainer.sft_trainer:DataCollatorForLanguageModeling",
        "collate_npu:PaddingCollator",
    ],
)
def test_the_classes_people_use(spec):
    pytest.importorskip(spec.partition(".")[0].partition(":")[0])
    (collator,) = ready_collators(spec, ["left"], tokenizer=byte_tokenizer(), model=None, pad_token_id=256)
    batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert batch["input_ids"].numel() in (5, 6)


ENDS = {
    "SystemExit(0)": "SystemExit: 0",
    "BaseException('no')": "BaseException: no",
    "GeneratorExit('no')": "GeneratorExit: no",
    "Mute()": "Mute: no message: RuntimeError",
    "__import__('os')._exit(0)": "SystemExit: os._exit(0)",
}
PLACES = {
    "import": "{}",
    "attribute": "def __getattr__(name):\n    {}",
    "signature": "class C:\n    def __call__(s): ...\n    @property\n    def __signature__(s):\n        {}\ncollate = C()",
    "construction": "class collate:\n    def __init__(self):\n        {}",
    "call": "def collate(features):\n    {}",
    "a later call": "def collate(features):\n    if len(features) > 1:\n        {}\n    return features",
}


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("moment", PLACES)
def test_whatever_a_file_raises_is_told_with_its_line(tmp_path, moment, error):
    mute = "class Mute(Exception):\n    def __str__(self): raise RuntimeError\n"
    lines = (mute + PLACES[moment]).format(f"raise {error}").splitlines()
    (tmp_path / "theirs.py").write_text("\n".join(lines), encoding="utf-8")
    line = 1 + next(n for n, text in enumerate(lines) if f"raise {error}" in text)

    def used():
        (ready,) = ready_collators("theirs.py:collate", ["left"], **GIVEN)
        ready([])
        ready([{}, {}])

    with pytest.raises(CollateError) as refusal:
        used()
    assert str(refusal.value).startswith(f"theirs.py, line {line}: {ENDS[error]}. --collator: got theirs.py:collate. ")


def test_of_a_file_that_is_no_python_and_of_its_neighbour(tmp_path):
    (tmp_path / "bad_syntax.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    with pytest.raises(CollateError, match=r"^bad_syntax.py, line 2: SyntaxError"):
        ready_collators("bad_syntax.py:f", ["left"], **GIVEN)
    (tmp_path / "calls_it.py").write_text("import bad_module_here", encoding="utf-8")
    with pytest.raises(CollateError, match=r"^bad_module_here.py, line 1: RuntimeError: broken"):
        ready_collators("calls_it:f", ["left"], **GIVEN)


def test_an_interrupt_is_one(tmp_path):
    (tmp_path / "theirs.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        ready_collators("theirs.py:collate", ["left"], **GIVEN)
