"""Every kind of data with a good model, every kind of model with good data: an answer, its exit code, never a traceback.

The full cross is printed by `input_kinds.py`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from input_kinds import DATA, MODELS, QUICK, make_data, make_model
from typer.testing import CliRunner

from collate_npu.consumers.models import transformers_version
from collate_npu.tools.cli import app

pytestmark = pytest.mark.models


def ended(arguments, typed=b""):
    result = CliRunner().invoke(app, ["audit", *arguments, *QUICK], input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert result.output.strip()
    return result


@pytest.mark.parametrize("kind", DATA)
def test_each_kind_of_data(tmp_path, kind):
    if kind in ("json", "parquet", "csv", "broken parquet"):
        pytest.importorskip("datasets")
    (tmp_path / "model").mkdir()
    given, typed = make_data(kind, tmp_path)
    model = make_model("hybrid" if kind == "jsonl messages" else "model type", tmp_path / "model")
    result = ended([*model, *given], typed)
    assert result.exit_code == DATA[kind], result.output


@pytest.mark.parametrize("kind", MODELS)
def test_each_kind_of_model(tmp_path, monkeypatch, kind):
    if kind == "vision" and transformers_version() < (5, 13):
        pytest.skip("a family of newer transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    result = ended(make_model(kind, tmp_path / "model"))
    assert result.exit_code == MODELS[kind], result.output
    assert not (tmp_path / "it_ran").exists()


def test_tokens_need_no_tokenizer(tmp_path):
    (tmp_path / "model").mkdir()
    given, _ = make_data("jsonl input_ids", tmp_path)
    assert ended([*make_model("no tokenizer", tmp_path / "model"), *given]).exit_code == 0


def test_text_without_a_tokenizer_is_told_so(tmp_path):
    (tmp_path / "model").mkdir()
    assert "no file of a tokenizer" in " ".join(ended(make_model("no tokenizer", tmp_path / "model")).output.split())


def test_code_of_the_folder_runs_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "model").mkdir()
    arguments = make_model("code of its own", tmp_path / "model")
    assert "--trust-remote-code" in " ".join(ended(arguments).output.split())
    ended([*arguments, "--trust-remote-code"])
    assert (tmp_path / "it_ran").exists()
