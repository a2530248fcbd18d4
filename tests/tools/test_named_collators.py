"""Collators by name: functions, classes and files; what makes one is known by its arguments; a failure is told in a line."""

import pytest

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.audit import ready_collators

pytestmark = pytest.mark.models

SOURCE = """
from types import SimpleNamespace
def collate(features): return features
def made(model, tokenizer): return lambda features: (tokenizer.padding_side, model)
def bare(): return collate
def plain(tokenizer): return lambda features: tokenizer
def nothing(tokenizer): return 3
class Padder:
    def __init__(self, pad_token_id, side="left"): self.pad = pad_token_id
    def __call__(self, features): return self.pad
class Strange:
    def __init__(self, foo): pass
held = SimpleNamespace(inner=SimpleNamespace(collate=collate))
"""
TOKENIZER, SIDES = byte_tokenizer(), ["left", "right"]


def answers(spec, *features, tokenizer=TOKENIZER, model=None):
    """What each collator of a name gives."""
    made = ready_collators(spec, SIDES, tokenizer=tokenizer, model=model, pad_token_id=7)
    return [collator(each) for collator in made for each in features or ([],)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "my_module_here.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "bad_module_here.py").write_text("raise RuntimeError('broken')", encoding="utf-8")
    (tmp_path / "calls_it.py").write_text("import bad_module_here", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


@pytest.mark.parametrize("place", ["my_module_here", "my_module_here.py", "./my_module_here.py"])
def test_each_kind_of_collator_is_made_ready(place):
    """One for each side where it asks for a tokenizer that is there."""
    given = {"made": [("left", "M"), ("right", "M")], "Padder": [7]}
    given |= {name: [[]] for name in ("collate", "bare", "held.inner.collate")}
    assert {name: answers(f"{place}:{name}", model="M") for name in given} == given
    assert answers(f"{place}:plain", tokenizer=None) == [None]


HERE = "my_module_here"
REFUSED = [
    ("collate", "For example transformers:DataCollatorForSeq2Seq"),
    (f"{HERE}:nothing", "'int' object is not callable"), (f"{HERE}:Strange", "called with nothing"),
    ("calls_it:f", r"^bad_module_here.py, line 1: RuntimeError: broken"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "refusal"), REFUSED)
def test_what_is_no_collator_is_refused_in_a_line(spec, refusal):
    """What is no function of a file or module: test_cli_conformance."""
    with pytest.raises(CollateError, match=refusal) as error:
        answers(spec)
    assert "\n" not in str(error.value)
    assert "--collator: got " in str(error.value)


CLASSES = [f"transformers:DataCollator{name}" for name in ("ForSeq2Seq", "ForLanguageModeling", "WithFlattening")]
CLASSES += ["trl.trainer.sft_trainer:DataCollatorForLanguageModeling", "collate_npu:PaddingCollator"]


@pytest.mark.parametrize("spec", CLASSES)
def test_the_classes_people_use(spec):
    pytest.importorskip(spec.partition(".")[0].partition(":")[0])
    batch, *_ = answers(spec, [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert batch["input_ids"].numel() in (5, 6)


ENDS = {"BaseException('no')": "BaseException: no", "SystemExit(0)": "SystemExit: 0"}
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
    lines = PLACES[moment].format(f"raise {error}").splitlines()
    (tmp_path / "theirs.py").write_text("\n".join(lines), encoding="utf-8")
    line = 1 + next(n for n, text in enumerate(lines) if f"raise {error}" in text)
    with pytest.raises(CollateError) as refusal:
        answers("theirs.py:collate", [], [{}, {}])
    assert str(refusal.value).startswith(f"theirs.py, line {line}: {ENDS[error]}. --collator: got theirs.py:collate. ")


def test_an_interrupt_is_one(tmp_path):
    (tmp_path / "theirs.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        answers("theirs.py:collate")
