"""Kinds of data and kinds of model folders that people name; each with the exit code it must end with.

`python tests/tools/audit/input_kinds.py` runs every kind of data with every kind of model, and prints a Markdown table.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path

from collate_npu.testing import byte_tokenizer, tiny_model

QUICK = ["--batches", "1", "--batch-size", "3", "--max-length", "24", "--attn", "sdpa", "--no-gradients"]
TEXT = ["a", "some words", "a line that is longer than the others", "two\tparts", "short", "one more line of text"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"

DATA = {
    "txt": 0, "txt.gz": 0, "jsonl text": 0, "jsonl messages": 0, "jsonl input_ids": 0, "json": 0, "parquet": 0, "csv": 0,
    "standard input": 0, "empty file": 2, "wrong column": 2, "broken json": 2, "latin-1": 2, "broken parquet": 2,
    "a folder": 2, "missing file": 2, "too few rows": 2,
}  # fmt: skip
MODELS = {
    "model type": 0, "hybrid": 0, "plain decoder": 0, "vision": 0, "encoder": 0, "no head": 0,
    "classifier": 0, "sharded": 0, "encoder-decoder": 2, "no weights": 2, "truncated weights": 2, "broken config": 2,
    "unknown type": 2, "code of its own": 2,
    "no tokenizer": 2, "no pad and no eos": 2, "a file": 2, "missing folder": 2, "misspelt type": 2,
}  # fmt: skip


def make_data(kind: str, folder: Path) -> tuple[list[str], bytes]:
    """The arguments that name this kind of data, and what stands in standard input."""
    records = [{"text": line} for line in TEXT]
    messages = [{"messages": [{"role": "user", "content": line}]} for line in TEXT]
    ids = [{"input_ids": list(line.encode())} for line in TEXT]
    written = {
        "txt": ("a.txt", "\n".join(TEXT).encode()),
        "txt.gz": ("a.txt.gz", gzip.compress("\n".join(TEXT).encode())),
        "jsonl text": ("a.jsonl", _lines(records)),
        "jsonl messages": ("a.jsonl", _lines(messages)),
        "jsonl input_ids": ("a.jsonl", _lines(ids)),
        "json": ("a.json", json.dumps(records).encode()),
        "csv": ("a.csv", ("text\n" + "\n".join(TEXT)).encode()),
        "empty file": ("a.txt", b""),
        "wrong column": ("a.jsonl", _lines([{"question": "why"}])),
        "broken json": ("a.jsonl", b'{"text": "one"}\n{"text": "tw\n'),
        "latin-1": ("a.txt", "caf\u00e9\n".encode("latin-1") * 9),
        "broken parquet": ("a.parquet", b"PAR1\x15\x04\xf0\xffPAR1"),
        "too few rows": ("a.txt", b"one\n"),
    }
    if kind == "standard input":
        return ["--data", "-"], "\n".join(TEXT).encode()
    name, content = written.get(kind, ("a.parquet" if kind == "parquet" else "absent.txt", None))
    path = folder / name
    if content is not None:
        path.write_bytes(content)
    if kind == "parquet":
        import datasets

        datasets.Dataset.from_list(records).to_parquet(str(path))
    return ["--data", str(folder if kind == "a folder" else path)], b""


def _lines(records: list[dict]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def make_model(kind: str, folder: Path) -> list[str]:
    """The arguments that name this kind of model, made in an empty folder."""
    if kind in ("model type", "misspelt type"):
        return ["--model", "qwen3_next" if kind == "model type" else "qwen3_nxt"]
    if kind == "missing folder":
        return ["--model", str(folder / "absent")]
    families = {"plain decoder": "gpt2", "encoder": "bert", "vision": "qwen3_5", "no head": "llama", "classifier": "bert"}
    tokenizer = byte_tokenizer(pad_is_eos=kind not in ("encoder", "classifier"))
    tokenizer.chat_template = TEMPLATE
    model = tiny_model(families.get(kind, "qwen3_next"), vocab_size=len(tokenizer))
    if kind == "no head":
        model = model.model
    if kind == "classifier":
        from transformers import BertForSequenceClassification

        model = BertForSequenceClassification(model.config)
    model.save_pretrained(folder, **({"max_shard_size": "200KB"} if kind == "sharded" else {}))
    if kind != "no tokenizer":
        tokenizer.save_pretrained(folder)
    _spoil(kind, folder)
    return ["--model", str(folder / "config.json" if kind == "a file" else folder)]


def _spoil(kind: str, folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    told = json.loads(config.read_text(encoding="utf-8"))
    if kind == "no weights":
        weights.unlink()
    elif kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind == "broken config":
        config.write_text("{", encoding="utf-8")
    elif kind in ("unknown type", "code of its own", "encoder-decoder"):
        changed = {
            "unknown type": {"model_type": "qwen9_far"},
            "code of its own": {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "encoder-decoder": {"model_type": "t5", "is_encoder_decoder": True},
        }
        config.write_text(json.dumps(told | changed[kind]), encoding="utf-8")
        (folder / "modeling_own.py").write_text("from pathlib import Path\nPath('it_ran').touch()\n", encoding="utf-8")
    elif kind == "no pad and no eos":
        path = folder / "tokenizer_config.json"
        names = ("eos_token", "pad_token", "bos_token")
        kept = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in names}
        path.write_text(json.dumps(kept), encoding="utf-8")
        (folder / "special_tokens_map.json").unlink(missing_ok=True)


def main() -> None:
    """Every kind of data with every kind of model: exit code and last line, as a Markdown table."""
    from typer.testing import CliRunner

    from collate_npu.tools.cli import app

    print("| model \\ data | " + " | ".join(DATA) + " |\n|" + "---|" * (len(DATA) + 1))
    for model in MODELS:
        cells = []
        for data in DATA:
            folder = Path(tempfile.mkdtemp())
            (folder / "model").mkdir()
            (folder / "data").mkdir()
            given, typed = make_data(data, folder / "data")
            result = CliRunner().invoke(app, ["audit", *make_model(model, folder / "model"), *given, *QUICK], input=typed)
            fault = "" if result.exception is None or isinstance(result.exception, SystemExit) else " TRACEBACK"
            cells.append(f"{result.exit_code}{fault}")
            print(f"{model} x {data}: {result.exit_code} {result.output.strip()[:300]!r}", file=sys.stderr)
            shutil.rmtree(folder)
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
