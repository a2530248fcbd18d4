"""Audit: one table of its command lines, with the exit code, what it finds of the user's batches, and what it says of the
rest; and each kind of model and of collator, with an answer and never a traceback. Each form of a file: test_files."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, LlamaForSequenceClassification
from typed import typed

from collate_npu import PaddingCollator
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools import audit, checkpoints

pytestmark = pytest.mark.models

EOS = 256
FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3, 4, 5, EOS], [6, 7, EOS], [8, 9, 10, EOS])]
MINE = """
import torch
from types import SimpleNamespace
from transformers import DataCollatorForSeq2Seq
def right(tokenizer): return DataCollatorForSeq2Seq(tokenizer)
def wrong(features):
    width = max(len(feature["input_ids"]) for feature in features)
    ids = torch.tensor([feature["input_ids"] + [256] * (width - len(feature["input_ids"])) for feature in features])
    return {"input_ids": ids, "attention_mask": (ids != 256).long()}
def cuts(features): return {"input_ids": torch.tensor([feature["input_ids"][:2] for feature in features])}
def raises(features): raise KeyError("images")
def bare(): return wrong
def made(model, tokenizer): return DataCollatorForSeq2Seq(tokenizer, model=model)
def unread(tokenizer): return right(tokenizer) if tokenizer else wrong
def number(tokenizer): return 3
class Padder:
    def __init__(self, pad_token_id, side="left"): self.pad = pad_token_id
    def __call__(self, features): return wrong(features) if self.pad == 256 else {}
class Strange:
    def __init__(self, foo): pass
class Ends:
    def __init__(self): raise SystemExit(0)
class Unsigned:
    def __call__(self, features): pass
    @property
    def __signature__(self): raise BaseException("no")
unsigned, held = Unsigned(), SimpleNamespace(inner=SimpleNamespace(right=right))
"""


def dumps():
    """Batches as a trainer would write them."""
    right = dict(DataCollatorForSeq2Seq(byte_tokenizer())([{key: [*ids] for key, ids in row.items()} for row in FEATURES]))
    ids, labels = right["input_ids"], right["labels"].clone()
    labels[:, :2] = -100
    layers = SimpleNamespace(layer_types=["full_attention"])
    megatron = PaddingCollator(pad_token_id=EOS, padding_side="left", consumer="megatron", model=layers)
    real = right["attention_mask"].sum(1)[:, None] > torch.arange(1, labels.shape[1] + 1)  # all but the last token, as eos
    odd = {f"odd{n}": {**right, "input_ids": held} for n, held in enumerate((ids[0], ids[:0], ids.float(), ids.tolist()))}
    return {
        "right": right,
        "flat": dict(DataCollatorWithFlattening()(FEATURES)),
        "megatron": dict(megatron(FEATURES)),
        "few": {**right, "labels": labels},
        "at_padding": {**right, "labels": torch.where(right["attention_mask"] == 1, labels, 5)},
        "eos": {**right, "attention_mask": real.long()},
        "moved": {**right, "labels": torch.nn.functional.pad(right["labels"][:, 1:], (0, 1), value=-100)},
        "bare": {key: value for key, value in right.items() if key != "attention_mask"},
        "far": {**right, "input_ids": ids + 50_000},
        "too_far": {**right, "input_ids": ids + checkpoints.MOST_IDS},
        **odd,
        "odd4": {"labels": labels},
    }


CONFIGS = {"pair": '{"model_type": "t5"}', "unknown": '{"model_type": "qwen9"}', "broken": "{"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command lines below name."""
    here = tmp_path_factory.mktemp("here")
    spoken = [{"messages": [{"role": "user", "content": "word " * n}]} for n in (1, 5, 9)]
    files = {"mine_here.py": MINE, "bad_module_here.py": "raise RuntimeError('x')", "calls_it.py": "import bad_module_here"}
    files |= {f"{name}/config.json": text for name, text in CONFIGS.items()}
    files |= {"a.txt": "one\n", "spoken.jsonl": "\n".join(map(json.dumps, spoken))}
    files |= {"ids.jsonl": '{"input_ids": [1, 700, 2]}\n{"input_ids": [3, 4]}\n{"input_ids": [5]}\n'}
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text, encoding="utf-8")
    for name, batch in dumps().items():
        torch.save(batch, here / f"{name}.pt")
    tiny_model("bert", vocab_size=8).save_pretrained(here / "models" / "bert")
    reader, llama = byte_tokenizer(), tiny_model("llama", vocab_size=257)
    llama.save_pretrained(here / "models" / "llama")
    kinds = {"no_head": llama.model, "classifier": LlamaForSequenceClassification(llama.config)}
    kinds |= {"sharded": tiny_model("qwen3_next", vocab_size=257), "cut": llama, "no_weights": llama}
    for name, model in kinds.items():
        model.save_pretrained(here / name, max_shard_size="200KB" if name == "sharded" else "1GB")
        reader.save_pretrained(here / name)
    (here / "cut" / "model.safetensors").write_bytes((here / "cut" / "model.safetensors").read_bytes()[:5000])
    (here / "no_weights" / "model.safetensors").unlink()
    reader.save_pretrained(here / "reader")
    reader.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    reader.save_pretrained(here / "chat")
    reader.eos_token = reader.pad_token = None
    reader.save_pretrained(here / "endless")
    return here


QUICK = "--batches 1 --batch-size 3 --no-gradients --max-length 48"


def run(folder, line, **how):
    """Return the exit code, the report and what is said on the way."""
    sdpa = "" if "--attn" in line else "--attn sdpa"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = typed("audit", *f"{line} {sdpa} {QUICK} --json".split(), COLUMNS="250", **how)
    assert ("Traceback" in done.output, "\x1b" in done.output) == (False, False)
    return done.exit_code, json.loads(done.stdout or '{"findings": []}'), " ".join(done.stderr.split())


def summed_up(report):
    """Return the side of each case of the user's, and whether it is right; and the sides of ours. None: no model was run."""
    if "settings" not in report:
        return None
    yours = [f"{f['side']} {'right' if f['right'] else 'wrong'}" for f in report["findings"] if f["by"] != "ours"]
    beside = sorted({f["side"] for f in report["findings"] if f["by"] == "ours"})
    return "; ".join([*yours, f"beside {', '.join(beside)}"] if beside else yours)


NEWER = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="a family of newer transformers")
LLAMA, BOTH = "--model llama", "beside left, right"
BY = f"{LLAMA} --side right --collator"
ROWS = [
    # your collator: a function of features, or what makes one by the names of its arguments
    (f"{BY} mine_here.py:right", 0, "right right; beside right", ""),
    (f"{BY} mine_here.py:wrong", 1, "right wrong; beside right", "from the lengths"),
    (f"{LLAMA} --collator mine_here.py:right", 1, f"left wrong; right right; {BOTH}", "First labels are predicted"),
    *((f"{BY} {name}", 0, "right right; beside right", "") for name in (
        "mine_here:held.inner.right", "./mine_here.py:made", "collate_npu:PaddingCollator")),
    *((f"{BY} mine_here.py:{name}", 1, "right wrong; beside right", "") for name in ("bare", "Padder")),
    ("--model models/llama --batch right.pt --collator mine_here.py:unread", 1, f"right right; right wrong; {BOTH}", ""),
    (f"{BY} transformers:DataCollatorWithFlattening", 0, "packed right; beside right", ""),
    (f"{BY} transformers:DataCollatorForLanguageModeling", 1, "right wrong; beside right",
     "3 are ignored, as where labels are made by labels == pad_token_id"),
    (f"{BY} mine_here.py:cuts", 2, "beside right", "Switch off what changes tokens"),
    *((f"{BY} mine_here.py:{name}", 2, "beside right", said) for name, said in {
        "raises": "mine_here.py, line 11: KeyError: 'images'. --collator: got mine_here.py:raises. ",
        "number": "'int' object is not callable", "Strange": "called with nothing",
        "Ends": "mine_here.py, line 22: SystemExit: 0. --collator: got mine_here.py:Ends. ",
        "unsigned": "mine_here.py, line 26: BaseException: no. --collator: got mine_here.py:unsigned. "}.items()),
    (f"{BY} no_such_module:collate", 2, None, "No module named"),
    (f"{BY} calls_it:f", 2, None, "collate-npu: bad_module_here.py, line 1: RuntimeError: x"),
    (f"{BY} collate", 2, None, "For example transformers:DataCollatorForSeq2Seq"),
    # a batch that you saved
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
    # a number, device, file, model, tokenizer or attention that cannot be used
    *((f"{LLAMA} --tolerance {error}", 2, None, "An error is 0 or more") for error in (-1, "inf", "nan")),
    (f"{LLAMA} --device cuda:99", 2, None, "Name a device of this machine"),
    (f"{LLAMA} --html absent/report.html", 2, None, "Name a file in a folder that exists"),
    ("--model bert", 2, "", "its tokens attend later tokens"), ("--model lama", 2, None, "Did you mean .*llama"),
    ("--model owner/model", 2, None, "hf download owner/model"), ("--model ./\x1b[2J", 2, None, r"/\\x1b.*no folder here"),
    ("--model models", 2, None, "a folder without config.json"), ("--model pair/config.json", 2, None, "a file"),
    ("--model t5", 2, "", "encoder"), ("--model pair", 2, None, "t5"),
    *((f"--model {name}", 2, None, "Its config.json does not load") for name in ("broken", "unknown")),
    *((f"--model {name}", 2, "", said) for name, said in {
        "cut": "SafetensorError: ", "no_weights": "OSError: ", "models/llama": "no file of a tokenizer"}.items()),
    *((f"--model {name} --side left", 0, "beside left", "") for name in ("sharded", "no_head", "classifier", "gpt2")),
    pytest.param("--model qwen3_5 --side left", 0, "beside left", "", marks=NEWER),
    (f"{LLAMA} --tokenizer endless", 2, None, "neither pad nor eos"),
    *((f"{LLAMA} --tokenizer {name}", 2, None, "no folder with its files") for name in ("nowhere", "pair", "a.txt")),
    (f"{LLAMA} --tokenizer reader --side right", 0, "beside right", ""),
    (f"{LLAMA} --data ids.jsonl --side right", 0, "beside right", ""),
    (f"{LLAMA} --data spoken.jsonl --tokenizer chat --side right", 0, "beside right", ""),
    (f"{LLAMA} --data spoken.jsonl --tokenizer reader", 2, "", "no chat template"),
    ("--model models/llama --data spoken.jsonl", 2, "", "no file of a tokenizer"),
    (f"{LLAMA} --data a.txt", 2, "", r"The audit draws 3 lines\."),
    (f"{LLAMA} --attn sdp", 2, "", "sdp"), (f"{LLAMA} --attn flash_attention_2", 2, "", "ImportError: |InvalidVersion: "),
    ("--model rwkv --attn eager --side left", 2, "beside left", "pad right"),
]  # fmt: skip


def cells_of(row):
    return getattr(row, "values", row)


@pytest.mark.parametrize(("line", "code", "found", "said"), ROWS, ids=[ascii(line) for line, *_ in map(cells_of, ROWS)])
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


def test_what_was_asked_is_told_and_a_page_that_loads_nothing_holds_it(folder):
    page = folder / "page.html"
    _, report, err = run(folder, f"{LLAMA} {LLAMA} --model gpt2 --seed 7 --tolerance 0.5 --html {page}")
    assert err.endswith(f"collate-npu: wrote {page}")
    asked = {"seed": 7, "data": None, "batch_size": 3, "device": "cpu", "tolerance": 0.5}
    assert asked.items() <= report["settings"].items()
    text = page.read_text("utf-8")
    said = "lang.*utf-8.*viewport.*<title>.*scheme: dark.*<h2>V.*PASS.*<h2>C.*<pre class=wide>.*llama.*gpt2.*<h2>S.*seed.* 7"
    assert re.search(said, text, flags=re.S)
    assert not re.search(r"url\(|@import|<script|<link|<img|\b(src|href)=", text)


# --- models and their attention


def test_code_of_the_folder_runs_where_it_is_trusted(tmp_path, monkeypatch):
    """A checkpoint of a class that no transformers has, with the Python that makes it."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    fields = {"model_type": "own_type", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (tmp_path / "model" / "own.py").write_text("from pathlib import Path\nPath('it_ran').touch()\n", encoding="utf-8")
    for trusted in ("", "--trust-remote-code"):
        code, _, err = run(tmp_path, f"--model model {trusted}")
        assert (code, "--trust-remote-code" in err) == (2, True), err
        assert (tmp_path / "it_ran").exists() == bool(trusted)


def changed(monkeypatch, change):
    """Let the audit build tiny models that this has changed."""

    def built(*args, **settings):
        model = tiny_model(*args, **{**settings, "attn_implementation": "eager"})
        change(model)
        return model

    monkeypatch.setattr(checkpoints, "tiny_model", built)


def test_a_side_that_raises_is_a_finding(folder, monkeypatch):
    def change(model):
        forward = model.forward

        def some_masks(input_ids, **kwargs):
            if len(input_ids) > 1 and kwargs.get("attention_mask") is not None:
                raise RuntimeError("does not compile")
            return forward(input_ids=input_ids, **kwargs)

        model.forward = some_masks

    changed(monkeypatch, change)
    ended, report, _ = run(folder, f"{LLAMA} --side right --packed --attn eager")
    found = {f["side"]: f["note"] for f in report["findings"]}
    assert (ended, found) == (1, {"right": "RuntimeError: does not compile", "packed": ""})


FLASH = "flash_attention_2"
RUNS = [("eager", "sdpa"), (FLASH, "sdpa"), ("eager", FLASH), ("kernels-community/flash-attn2", FLASH), (None, "sdpa")]


@pytest.mark.parametrize(("runs", "named", "told"), [(*pair, n < 3) for n, pair in enumerate(RUNS)])
def test_a_model_that_runs_another_attention_was_not_audited_with_the_one_named(folder, monkeypatch, runs, named, told):
    changed(monkeypatch, lambda model: setattr(model.config, "_attn_implementation", runs))
    _, report, _ = run(folder, f"{LLAMA} --side right --attn {named}")
    assert (f"runs {runs} in the place of {named}" in str(report["not_run"])) == told


def test_an_attention_that_a_named_model_has_not_is_not_run_and_of_the_default_ones_left_out(folder, monkeypatch):
    flex = "--attn flex_attention --side right"
    monkeypatch.setattr(audit, "hybrid_model_types", lambda: ["qwen3_next", "llama"])
    monkeypatch.setattr(audit, "left_out", lambda attention: {"qwen3_next": f"it has no {attention}"})
    assert audit.candidates(["qwen3_next"], ["sdpa"]) == ([("qwen3_next", "sdpa")], {})
    assert audit.candidates([], ["sdpa"]) == ([("llama", "sdpa")], {"qwen3_next (sdpa)": "it has no sdpa"})
    ended, report, _ = run(folder, f"--model qwen3_next {flex}")
    assert (ended, "does not support" in report["not_run"]["qwen3_next (flex_attention)"]) == (2, True)
    monkeypatch.setattr("torch.compile", lambda function, **settings: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.integrations.flex_attention.WrappedFlexAttention._instance", None)
    ended, report, _ = run(folder, flex)
    assert (list(report["left_out"]), report["not_run"]) == (["qwen3_next (flex_attention)"], {})
    assert ({f["model"] for f in report["findings"]}, ended, report["passed"]) == ({"llama"}, 0, True)


def test_a_row_is_padded_with_the_id_of_the_tokenizer_else_of_the_model_else_0(folder):
    """A language model's own end, as most checkpoints do."""
    _, reader, pad = checkpoints.load_model("llama", "sdpa", trust=False)
    assert pad == reader.pad_token_id == reader.eos_token_id
    config = folder / "models" / "llama" / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    for of_config, pad in ((3, 3), (None, 0)):
        config.write_text(json.dumps({**fields, "pad_token_id": of_config}), "utf-8")
        assert checkpoints.load_model(str(config.parent), "sdpa", trust=False)[1:] == (None, pad)
    for own, padded_with in (("<|pad|>", 257), (None, 256)):
        reader.pad_token = own
        reader.save_pretrained(folder / "other")
        assert checkpoints.load_tokenizer(folder / "other").pad_token_id == padded_with


def test_a_checkpoint_is_of_the_class_that_it_names(folder):
    config = folder / "models" / "bert" / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    kinds = {"BertForMaskedLM": ["BertForMaskedLM"], "BertModel": ["Gone", "BertModel"], "BertLMHeadModel": None}
    for made, named in kinds.items():
        config.write_text(json.dumps({**fields, "architectures": named}), "utf-8")
        assert type(checkpoints.load_checkpoint(str(config.parent), trust=False)).__name__ == made
