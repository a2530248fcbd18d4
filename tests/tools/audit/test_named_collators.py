"""Collators by name: functions, classes and files; what makes one is told by its arguments, what is not there in words."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.audit.session import ready_collators

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
    (tmp_path / "bad_syntax.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    (tmp_path / "calls_it.py").write_text("import bad_module_here", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


SIDES = ["left", "right"]
READY = [
    ("collate", {}, [[]]), ("made", {}, [("left", "M"), ("right", "M")]), ("bare", {}, [[]]), ("Padder", {}, [7]),
    ("held.inner.collate", {}, [[]]), ("plain", {"tokenizer": None}, [None]),
]  # fmt: skip


@pytest.mark.parametrize("place", ["my_module_here", "my_module_here.py", "./my_module_here.py"])
@pytest.mark.parametrize(("name", "changed", "answers"), READY)
def test_each_kind_of_collator_is_made_ready(place, name, changed, answers):
    """One for each side where it asks for a tokenizer that is there."""
    assert [each([]) for each in ready_collators(f"{place}:{name}", SIDES, **{**GIVEN, **changed})] == answers


NAMED, HERE = "--collator: got ", "my_module_here"
REFUSED = [
    ("collate", "module:function"), (f"{HERE}:", "module:function"), (f"{HERE}:colate", "Did you mean collate?"),
    (f"{HERE}:number", "a int"), ("no_module_here:collate", "No module named"), ("no_file_here.py:collate", "no such file"),
    ("bad_module_here:collate", "RuntimeError: broken"), (f"{HERE}:fails", "ValueError: no such thing"),
    (f"{HERE}:nothing", "a int"), (f"{HERE}:Strange", "called with nothing"),
    ("bad_syntax.py:f", r"^bad_syntax.py, line 2: SyntaxError"),
    ("calls_it:f", r"^bad_module_here.py, line 1: RuntimeError: broken"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "said"), REFUSED)
def test_what_is_no_collator_is_refused_in_a_line(spec, said):
    with pytest.raises(CollateError, match=said) as error:
        ready_collators(spec, ["left"], **GIVEN)
    assert "\n" not in str(error.value)
    assert NAMED in str(error.value) or "no such file" in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        *(f"transformers:DataCollator{name}" for name in ("ForSeq2Seq", "ForLanguageModeling", "WithFlattening")),
        *("trl.trainer.sft_trainer:DataCollatorForLanguageModeling", "collate_npu:PaddingCollator"),
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


def test_an_interrupt_is_one(tmp_path):
    (tmp_path / "theirs.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        ready_collators("theirs.py:collate", ["left"], **GIVEN)
