"""Code by name: modules of the working directory and beside a file are found while it runs, and at no other time."""

import sys

import pytest

from collate_npu import CollateError
from collate_npu.tools.user_code import named, theirs


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "mine.py").write_text("import near_by\nclass Held:\n    run = near_by.run\n", encoding="utf-8")
    (tmp_path / "inner" / "near_by.py").write_text("def run(): import os; os._exit(3)\nvalue = 1\n", encoding="utf-8")
    (tmp_path / "inner" / "broken.py").write_text("\ndef run(:\n", encoding="utf-8")
    (tmp_path / "inner" / "text.bin").write_bytes(b"\x00")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "near_by", raising=False)


def test_a_file_finds_what_lies_beside_it_and_leaves_the_path_as_it_was():
    before = [*sys.path]
    assert named("run", "inner/mine.py:Held.run", "x.py:run", "Name it.").__name__ == "run"
    assert sys.path == before


def test_what_it_raises_is_told_with_its_line():
    run = named("run", "inner/mine.py:Held.run", "x.py:run", "Name it.")
    said = r"^inner/near_by.py, line 1: SystemExit: os._exit\(3\)\. run: got inner/mine.py:Held.run\. The rule\. The rem"
    with pytest.raises(CollateError, match=said), theirs("run", "inner/mine.py:Held.run", "The rule.", "The remedy."):
        run()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("run", "it: got run. It is named as module:function or file.py:function. For example x.py:run."),
        ("inner/near_by.py:value", "a int. .* Name it."),
        ("inner/mine.py:Held.rum", "no rum in inner/mine.py.*Did you mean run"),
        ("inner/gone.py:run", r"^inner/gone.py: got no such file\..*Write the path of its file"),
        ("inner/nearby.py:run", r"^inner/nearby.py: got no such file\..*Did you mean near_by.py\?"),
        ("inner/broken.py:run", r"^inner/broken.py, line 2: SyntaxError"),
        ("inner/text.bin:run", r"^inner/text.bin: got a file that ends with '.bin'"),
        ("gone:run", r"^it: got gone:run \(ModuleNotFoundError"),
    ],
)
def test_what_is_not_there_is_told_in_words(spec, said):
    with pytest.raises(CollateError, match=said):
        named("it", spec, "x.py:run", "Name it.")
