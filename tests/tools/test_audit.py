"""One table: a command line of the audit, its exit code, what it finds of yours, and what it says of the rest; and each kind
of model, with an answer and never a traceback. Each form of a file: test_data."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, LlamaForSequenceClassification
from transformers.utils import logging
from typed import typed

from collate_npu import PaddingCollator
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools import audit, checkpoints
from collate_npu.tools.audit import Report

pytestmark = pytest.mark.models

EOS = 256
SAMPLES = [[1, 2, 3, 4, 5, EOS], [6, 7, EOS], [8, 9, 10, EOS]]
FEATURES = [{"input_ids": ids, "labels": ids} for ids in SAMPLES]
MINE = """
import torch
from transformers import DataCollatorForSeq2Seq
def right(tokenizer): return DataCollatorForSeq2Seq(tokenizer)
def wrong(features):
    width = max(len(feature["input_ids"]) for feature in features)
    ids = torch.tensor([feature["input_ids"] + [256] * (width - len(feature["input_ids"])) for feature in features])
    return {"input_ids": ids, "attention_mask": (ids != 256).long()}
def cuts(features): return {"input_ids": torch.tensor([feature["input_ids"][:2] for feature in features])}
def raises(features): raise KeyError("images")
"""


def dumps():
    """Batches as a trainer would write them."""
    right = dict(DataCollatorForSeq2Seq(byte_tokenizer())([{key: [*ids] for key, ids in row.items()} for row in FEATURES]))
    ids, labels = right["input_ids"], right["labels"].clone()
    labels[:, :2] = -100
    layers = SimpleNamespace(layer_types=["full_attention"])
    megatron = PaddingCollator(pad_token_id=EOS, padding_side="left", consumer="megatron", model=layers)
    yield "right", right
    yield "flat", dict(DataCollatorWithFlattening()(FEATURES))
    yield "megatron", dict(megatron(FEATURES))
    yield "few", {**right, "labels": labels}
    yield "at_padding", {**right, "labels": torch.where(right["attention_mask"] == 1, labels, 5)}
    real = right["attention_mask"].sum(1)[:, None] > torch.arange(1, labels.shape[1] + 1)  # all but the last token, as eos
    yield "eos", {**right, "attention_mask": real.long()}
    yield "moved", {**right, "labels": torch.nn.functional.pad(right["labels"][:, 1:], (0, 1), value=-100)}
    yield "bare", {key: value for key, value in right.items() if key != "attention_mask"}
    yield "far", {**right, "input_ids": ids + 50_000}
    yield "too_far", {**right, "input_ids": ids + checkpoints.MOST_IDS}
    for n, odd in enumerate((ids[0], ids[:0], ids.float(), ids.tolist())):
        yield f"odd{n}", {**right, "input_ids": odd}
    yield "odd4", {"labels": labels}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command lines below name."""
    here = tmp_path_factory.mktemp("here")
    (here / "mine_here.py").write_text(MINE, encoding="utf-8")
    (here / "a.txt").write_text("one\n", encoding="utf-8")
    (here / "ids.jsonl").write_text("".join(f'{{"input_ids": [{ids}]}}\n' for ids in ("1, 700, 2", "3, 4", "5")), "utf-8")
    spoken = [[{"role": "user", "content": "word " * n}] for n in (1, 5, 9)]
    (here / "spoken.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in spoken), "utf-8")
    for name, batch in dumps():
        torch.save(batch, here / f"{name}.pt")
    tiny_model("llama", vocab_size=257).save_pretrained(here / "models" / "llama")
    tiny_model("bert", vocab_size=8).save_pretrained(here / "models" / "bert")
    for name, fields in {"pair": '{"model_type": "t5"}', "broken": "{"}.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(fields, encoding="utf-8")
    reader = byte_tokenizer()
    reader.save_pretrained(here / "reader")
    reader.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    reader.save_pretrained(here / "chat")
    reader.eos_token = reader.pad_token = None
    reader.save_pretrained(here / "endless")
    return here


QUICK = "--batches 1 --batch-size 3 --no-gradients --max-length 48"


def run(folder, line, **how):
    """The exit code, the report and what is said on the way."""
    sdpa = "" if "--attn" in line else "--attn sdpa"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = typed("audit", *f"{line} {sdpa} {QUICK} --json".split(), COLUMNS="250", **how)
    assert "Traceback" not in done.output
    return done.exit_code, json.loads(done.stdout or '{"findings": []}'), " ".join(done.stderr.split())


def summed_up(report):
    """Of each case of yours its side, and whether it is right; and the sides of ours. None: no model was looked at."""
    if "settings" not in report:
        return None
    yours = [f"{f['side']} {'right' if f['right'] else 'wrong'}" for f in report["findings"] if f["by"] != "ours"]
    beside = sorted({f["side"] for f in report["findings"] if f["by"] == "ours"})
    return "; ".join([*yours, f"beside {', '.join(beside)}"] if beside else yours)


LLAMA, BOTH = "--model llama", "beside left, right"
ROWS = [
    (f"{LLAMA} --collator mine_here.py:right --side right", 0, "right right; beside right", ""),
    (f"{LLAMA} --collator mine_here.py:wrong --side right", 1, "right wrong; beside right", "from the lengths"),
    (f"{LLAMA} --collator mine_here.py:right", 1, f"left wrong; right right; {BOTH}", "First labels are predicted"),
    (f"{LLAMA} --collator mine_here.py:cuts --side right", 2, "beside right", "Switch off what changes tokens"),
    (f"{LLAMA} --collator mine_here.py:raises --side right", 2, "beside right", "py, line 10: KeyError: 'images'"),
    (f"{LLAMA} --collator no_such_module:collate", 2, None, "No module named"),
    (f"{LLAMA} --collator transformers:DataCollatorForLanguageModeling --side right", 1, "right wrong; beside right",
     "3 are ignored, as where labels are made by labels == pad_token_id"),
    (f"{LLAMA} --batch right.pt", 0, f"right right; {BOTH}", ""),
    (f"{LLAMA} --batch flat.pt", 0, "packed right; beside packed", ""),
    (f"{LLAMA} --batch megatron.pt", 1, f"left wrong; {BOTH}", "True = blocked"),
    (f"{LLAMA} --batch few.pt", 0, f"right right; {BOTH}", ""),
    (f"{LLAMA} --batch at_padding.pt", 2, "", "learned at padding"),
    (f"{LLAMA} --batch eos.pt", 1, f"right wrong; {BOTH}", "drops 1 of 6 real tokens"),
    (f"{LLAMA} --batch moved.pt", 1, f"right wrong; {BOTH}", "They are shifted"),
    (f"{LLAMA} --batch moved.pt --tolerance 1e9", 1, f"right wrong; {BOTH}", "They are shifted"),
    ("--batch right.pt", 2, None, "Name the model that it was made for"),
    (f"{LLAMA} --data a.txt --batch right.pt", 2, None, "Leave --data out"),
    (f"{LLAMA} --batch bare.pt", 2, "", r"Pass attention_mask \[B, S\]"),
    (f"{LLAMA} --batch too_far.pt", 2, "", f"A tiny model is built for ids below {checkpoints.MOST_IDS}"),
    ("--model models/llama --batch far.pt", 2, "", "token id 50256"),
    *((f"{LLAMA} --batch odd{n}.pt", 2, None, r"input_ids \[B, S\], whole numbers|keys") for n in range(5)),
    *((f"{LLAMA} --tolerance {error}", 2, None, "An error is 0 or more") for error in (-1, "inf", "nan")),
    (f"{LLAMA} --device cuda:99", 2, None, "Name a device of this machine"),
    (f"{LLAMA} --html absent/report.html", 2, None, "Name a file in a folder that exists"),
    ("--model bert", 2, "", "its tokens attend later tokens"), ("--model lama", 2, None, "Did you mean .*llama"),
    ("--model owner/model", 2, None, "hf download owner/model"), ("--model ./owner", 2, None, "no folder here"),
    ("--model models", 2, None, "a folder without config.json"), ("--model pair/config.json", 2, None, "a file"),
    ("--model t5", 2, "", "encoder"),
    ("--model pair", 2, None, "t5"),
    ("--model broken", 2, None, "Its config.json does not load"),
    (f"{LLAMA} --tokenizer endless", 2, None, "neither pad nor eos"),
    *((f"{LLAMA} --tokenizer {name}", 2, None, "no folder with its files") for name in ("nowhere", "pair", "a.txt")),
    (f"{LLAMA} --tokenizer reader --side right", 0, "beside right", ""),
    (f"{LLAMA} --data ids.jsonl --side right", 0, "beside right", ""),
    (f"{LLAMA} --data spoken.jsonl --tokenizer chat --side right", 0, "beside right", ""),
    ("--model models/llama --data spoken.jsonl", 2, "", "no file of a tokenizer"),
    (f"{LLAMA} --data a.txt", 2, "", r"The audit draws 3 lines\."),
    (f"{LLAMA} --attn sdp", 2, "", "sdp"), (f"{LLAMA} --attn flash_attention_2", 2, "", "ImportError: |InvalidVersion: "),
    ("--model rwkv --attn eager --side left", 2, "beside left", "pad right"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "found", "said"), ROWS, ids=[line for line, *_ in ROWS])
def test_a_command_line_ends_with_its_code_and_says_why(folder, line, code, found, said):
    ended, report, err = run(folder, line)
    assert (ended, summed_up(report)) == (code, found), err
    assert re.search(said, err + json.dumps(report, ensure_ascii=False))


def test_the_verdict_comes_first_and_names_what_did_not_run():
    done = typed("audit", *f"--model qwen3_next {QUICK} --attn sdpa --attn flash_attention_2".split(), COLUMNS="180")
    assert done.exit_code == 2
    assert re.match(r"\? NOT PROVED: 2 of 2 cases are right\.", done.stdout)
    assert re.search(r"✔ +qwen3_next +ours +2 of 2 +\S+e-06 ", done.stdout)
    assert re.search(r"NOT RUN +qwen3_next \(flash_attention_2\): ", done.stdout)


def test_the_audit_sees_a_layer_that_is_deaf_and_says_where_it_could_not(folder, monkeypatch):
    """Every number is the same with and without padding: nothing would show."""
    monkeypatch.setattr(audit.Reference, "tells", lambda self, lost: False)
    ended, report, _ = run(folder, LLAMA)
    assert (ended, report["cannot_tell"]) == (2, ["llama (sdpa)"])
    monkeypatch.undo()
    module = "transformers.models.qwen3_next.modeling_qwen3_next"
    monkeypatch.setattr(f"{module}.apply_mask_to_padding_states", lambda hidden_states, attention_mask: hidden_states)
    monkeypatch.setattr("collate_npu.consumers.probe.leak_reasons", lambda *asked, **_: dict.fromkeys(asked[2:], ""))
    ended, report, _ = run(folder, "--model qwen3_next")
    assert (ended, {f["side"]: f["right"] for f in report["findings"]}) == (1, {"left": False, "right": True})


def test_transformers_is_quiet_unless_its_variable_is_set(monkeypatch):
    called = []
    monkeypatch.setattr(audit, "audit_all", lambda **how: Report(settings={}))
    for name in ("set_verbosity_error", "disable_progress_bar"):
        monkeypatch.setattr(logging, name, partial(called.append, name))
    for verbosity, quiet in (("info", []), (None, ["set_verbosity_error", "disable_progress_bar"])):
        typed("audit", "--json", TRANSFORMERS_VERBOSITY=verbosity)
        assert called == quiet


FAMILIES = {"plain decoder": "gpt2", "vision": "qwen3_5", "no head": "llama", "classifier": "llama", "encoder": "bert"}
GOOD = ("hybrid", "sharded", *[*FAMILIES][:-1])
BAD = ("encoder", "no weights", "truncated weights", "no tokenizer", "unknown type")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*GOOD, *BAD])
def test_each_kind_of_checkpoint(tmp_path, kind):
    if kind == "vision" and not KERNELS_TOLD.holds():
        pytest.skip("a family of newer transformers")
    tokenizer = byte_tokenizer()
    model = tiny_model(FAMILIES.get(kind, "qwen3_next"), vocab_size=len(tokenizer))
    model = {"no head": lambda: model.model, "classifier": lambda: LlamaForSequenceClassification(model.config)}.get(
        kind, lambda: model
    )()
    model.save_pretrained(tmp_path / "model", **({"max_shard_size": "200KB"} if kind == "sharded" else {}))
    if kind != "no tokenizer":
        tokenizer.save_pretrained(tmp_path / "model")
    weights, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    if kind == "no weights":
        weights.unlink()
    elif kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind == "unknown type":
        config.write_text('{"model_type": "qwen9_far"}', encoding="utf-8")
    assert run(tmp_path, "--model model")[0] == (0 if kind in GOOD else 2)


def own_code(folder):
    """A checkpoint of a class that no transformers has, with the Python that makes it."""
    folder.mkdir()
    fields = {"model_type": "own_type", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (folder / "own.py").write_text("from pathlib import Path\nPath('it_ran').touch()\n", encoding="utf-8")


def test_code_of_the_folder_runs_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    own_code(tmp_path / "model")
    for trusted in ("", "--trust-remote-code"):
        code, _, err = run(tmp_path, f"--model model {trusted}")
        assert (code, "--trust-remote-code" in err) == (2, True), err
        assert (tmp_path / "it_ran").exists() == bool(trusted)


def test_what_was_asked_is_told_and_a_page_holds_it(folder):
    page = folder / "page.html"
    _, report, err = run(folder, f"{LLAMA} {LLAMA} --model gpt2 --seed 7 --tolerance 0.5 --html {page}")
    assert err.endswith(f"collate-npu: wrote {page}")
    asked = {"seed": 7, "data": None, "batch_size": 3, "device": "cpu", "tolerance": 0.5}
    assert asked.items() <= report["settings"].items()
    text = page.read_text("utf-8")
    said = "lang.*utf-8.*viewport.*<title>.*scheme: dark.*<h2>V.*PASS.*<h2>C.*<pre class=wide>.*llama.*gpt2.*<h2>S.*seed.* 7"
    assert re.search(said, text, flags=re.S)
    assert not re.search(r"url\(|@import|<script|<link|<img|\b(src|href)=", text)


def test_a_side_that_raises_is_a_finding(folder, monkeypatch):
    def built(*args, **settings):
        model = tiny_model(*args, **settings)
        forward = model.forward

        def some_masks(input_ids, **kwargs):
            if len(input_ids) > 1 and kwargs.get("attention_mask") is not None:
                raise RuntimeError("does not compile")
            return forward(input_ids=input_ids, **kwargs)

        model.forward = some_masks
        return model

    monkeypatch.setattr(checkpoints, "tiny_model", built)
    ended, report, _ = run(folder, f"{LLAMA} --side right --packed")
    found = {f["side"]: f["note"] for f in report["findings"]}
    assert (ended, found) == (1, {"right": "RuntimeError: does not compile", "packed": ""})


def test_an_attention_that_a_named_model_has_not_is_not_run_and_of_the_default_ones_left_out(folder, monkeypatch):
    flex = "--attn flex_attention --side right"
    monkeypatch.setattr(audit, "hybrid_model_types", lambda: ["qwen3_next", "llama"])
    ended, report, _ = run(folder, f"--model qwen3_next {flex}")
    assert "does not support" in report["not_run"]["qwen3_next (flex_attention)"]
    assert ended == 2
    monkeypatch.setattr("torch.compile", lambda function, **settings: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.integrations.flex_attention.WrappedFlexAttention._instance", None)
    ended, report, _ = run(folder, flex)
    assert (list(report["left_out"]), report["not_run"]) == (["qwen3_next (flex_attention)"], {})
    assert ({f["model"] for f in report["findings"]}, ended, report["passed"]) == ({"llama"}, 0, True)


# --- the models themselves


def test_names_are_taken_as_they_are_and_the_default_leaves_out_what_cannot_be_tested():
    assert audit.candidates(["rwkv"], ["eager"]) == ([("rwkv", "eager")], {})
    chosen, excluded = audit.candidates([], ["eager"])
    assert "rwkv (eager)" in excluded
    assert ("qwen3_next", "eager") in chosen
    assert audit.candidates([], ["flex_attention"])[1] == {}, "what may have to compile is not measured"


def test_a_row_is_padded_with_the_id_of_the_tokenizer_else_of_the_model_else_0(folder):
    """A language model's own end, as most checkpoints do."""
    how = {"tokenizer": None, "device": "cpu", "dtype": torch.float32, "seed": 0, "trust": False, "largest_id": 5}
    _, reader, pad = checkpoints.load_model("llama", "sdpa", **how)
    assert pad == reader.pad_token_id == reader.eos_token_id
    config = folder / "models" / "llama" / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    for of_config, pad in ((3, 3), (None, 0)):
        config.write_text(json.dumps({**fields, "pad_token_id": of_config}), "utf-8")
        assert checkpoints.load_model(str(config.parent), "sdpa", **how)[1:] == (None, pad)
    for own, padded_with in (("<|pad|>", 257), (None, 256)):
        reader.pad_token = own
        reader.save_pretrained(folder / "other")
        assert checkpoints.load_tokenizer(folder / "other").pad_token_id == padded_with


FLASH = "flash_attention_2"
RUNS = [("eager", "sdpa"), (FLASH, "sdpa"), ("eager", FLASH), ("kernels-community/flash-attn2", FLASH), (None, "sdpa")]


@pytest.mark.parametrize(("runs", "named", "told"), [(*pair, n < 3) for n, pair in enumerate(RUNS)])
def test_a_model_that_runs_another_attention_was_not_audited_with_the_one_named(folder, monkeypatch, runs, named, told):
    def built(*args, **settings):
        model = tiny_model(*args, **{**settings, "attn_implementation": "eager"})
        model.config._attn_implementation = runs
        return model

    monkeypatch.setattr(checkpoints, "tiny_model", built)
    _, report, _ = run(folder, f"{LLAMA} --side right --attn {named}")
    assert (f"runs {runs} in the place of {named}" in str(report["not_run"])) == told


def test_a_checkpoint_is_of_the_class_that_it_names(folder):
    config = folder / "models" / "bert" / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    kinds = {"BertForMaskedLM": ["BertForMaskedLM"], "BertModel": ["Gone", "BertModel"], "BertLMHeadModel": None}
    for made, named in kinds.items():
        config.write_text(json.dumps({**fields, "architectures": named}), "utf-8")
        assert type(checkpoints.load_checkpoint(str(config.parent), trust=False)).__name__ == made
