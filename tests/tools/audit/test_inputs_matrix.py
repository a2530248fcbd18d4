"""Every kind of data with a good model, every kind of model with good data: an answer, its exit code, never a traceback.

Each form of a file, and what is refused in it, is in test_data; folders that are refused by their config, in test_sessions.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from typed import typed

from collate_npu.releases import MASK_MAPPING
from collate_npu.testing import byte_tokenizer, tiny_model

pytestmark = pytest.mark.models

QUICK = ["--batches", "1", "--batch-size", "3", "--max-length", "24", "--attn", "sdpa", "--no-gradients"]
TEXT = ["a", "some words", "a line that is longer than the others", "two\tparts", "short", "one more line of text"]
ROWS = {
    "messages": [{"messages": [{"role": "user", "content": line}]} for line in TEXT],
    "input_ids": [{"input_ids": list(range(1, n)), "labels": [-100] * (n - 2) + [5]} for n in range(4, 9)],
    "too few": [{"text": "one"}],
}
FAMILIES = {"plain decoder": "gpt2", "encoder": "bert", "vision": "qwen3_5", "no head": "llama", "classifier": "bert"}
CONFIGS = {
    "unknown type": {"model_type": "qwen9_far"},
    "code of its own": {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
}
GOOD = ("hybrid", "sharded", *FAMILIES)
BAD = ("no weights", "truncated weights", "no tokenizer", *CONFIGS)


def make_model(kind: str, folder: Path) -> list[str]:
    """The arguments that name this kind of model, made in a folder."""
    tokenizer = byte_tokenizer(pad_is_eos=FAMILIES.get(kind) != "bert")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    model = tiny_model(FAMILIES.get(kind, "qwen3_next"), vocab_size=len(tokenizer))
    if kind == "no head":
        model = model.model
    if kind == "classifier":
        from transformers import BertForSequenceClassification

        model = BertForSequenceClassification(model.config)
    model.save_pretrained(folder, **({"max_shard_size": "200KB"} if kind == "sharded" else {}))
    if kind != "no tokenizer":
        tokenizer.save_pretrained(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "no weights":
        weights.unlink()
    elif kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind in CONFIGS:
        config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | CONFIGS[kind]), encoding="utf-8")
        (folder / "modeling_own.py").write_text("from pathlib import Path\nPath('it_ran').touch()\n", encoding="utf-8")
    return ["--model", str(folder)]


def ended(arguments, given=b""):
    """The exit code, and what was said, on one line."""
    result = typed("audit", *arguments, *QUICK, given=given)
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("rows", "model", "code", "said"),
    [
        ("messages", "hybrid", 0, "PASS"),
        ("input_ids", "qwen3_next", 0, "PASS"),
        ("input_ids", "no tokenizer", 0, "PASS"),
        ("messages", "no tokenizer", 2, "no file of a tokenizer"),
        ("too few", "qwen3_next", 2, "The audit draws 3 lines."),
    ],
)
def test_each_kind_of_rows(tmp_path, rows, model, code, said):
    named = ["--model", model] if model == "qwen3_next" else make_model(model, tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]), encoding="utf-8")
    found, output = ended([*named, "--data", str(path)])
    assert (found, said in output) == (code, True), output


def test_lines_of_standard_input():
    assert ended(["--model", "qwen3_next", "--data", "-"], "\n".join(TEXT).encode())[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*GOOD, *BAD])
def test_each_kind_of_model(tmp_path, monkeypatch, kind):
    if kind == "vision" and not MASK_MAPPING.holds():
        pytest.skip("a family of newer transformers")
    monkeypatch.chdir(tmp_path)
    code, output = ended(make_model(kind, tmp_path / "model"))
    assert code == (0 if kind in GOOD else 2), output
    assert not (tmp_path / "it_ran").exists()


def test_code_of_the_folder_runs_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    arguments = make_model("code of its own", tmp_path / "model")
    assert "--trust-remote-code" in ended(arguments)[1]
    ended([*arguments, "--trust-remote-code"])
    assert (tmp_path / "it_ran").exists()
