"""CLI: one table of command lines, with the exit code of each and the words it prints; and what no line of it can show.

The lines of `audit` stand in test_audit, those of `need` in test_need, those of `run` and `watch` in files of their own.
"""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("rich")
from house import PACKAGE, ROOT, tree_of
from typed import typed

import collate_npu
from collate_npu import Segments
from collate_npu.masks import dense
from collate_npu.tools.cli import parsers
from collate_npu.tools.guide import MOST_HITS
from collate_npu.tools.show import MOST, WIDEST

EVIL = "a\x1b[2J\x9b31mb\u202ec"
"""What a terminal would obey."""
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
STACK = """
import torch
from beside import weights
def score(ids):
    x = weights[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
    return torch.log_softmax(x[:-1], -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
def run(samples, layout="right"): return [score(ids) for ids in samples]
def turned(samples):
    from later import rolled
    return rolled(run(samples))
def constant(samples): return [[-1.0] * (len(ids) - 1) for ids in samples]
def fails(samples): raise KeyError("logprobs[0]")
def ends(samples): raise SystemExit(0)
def long(samples): raise ValueError("x" * 500)
def stops(samples): raise KeyboardInterrupt
class Held: run = staticmethod(run)
number = 3
"""
FILES = {
    "stack.py": STACK,
    "beside.py": "import torch\nweights = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))\n",
    "later.py": "def rolled(rows): return rows[1:] + rows[:1]\n",
    "broken.py": "\ndef run(:\n",
    "lazy.py": "def __getattr__(name):\n    raise SystemExit(0)\n",
    "text.bin": "\0",
    "site-packages/installed.py": "def run(samples): {}[3]\n",
    f"{EVIL}.py": f"raise ValueError({EVIL!r})",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that the lines below name: code in `stacks`, saved batches, and places that are no file."""
    here = tmp_path_factory.mktemp("here")
    for name, text in FILES.items():
        (here / "stacks" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "stacks" / name).write_text(text, encoding="utf-8")
    left = Segments.from_lengths([2, 3], side="left")
    ids = torch.tensor([[9, 4, 5], [6, 7, 8]])
    broken = dense(left)
    broken[1, 0, 1, 2] = True
    for name, mask in {"left": dense(left), "refused": broken, EVIL: {EVIL: dense(left)}}.items():
        batch = {"input_ids": ids, "attention_mask_2d": left.keep, "attention_mask": mask, EVIL: ids}
        torch.save(batch, here / f"{name}.pt")
    (here / "folder.html").mkdir()
    (here / "link.html").symlink_to(here / "precious.txt")
    return here


OF = "conformance stacks/stack.py:"
ROWS = [
    # how a line is typed
    ("nonsense", 2, "invalid choice: 'nonsense'"), ("--nonsense", 2, "arguments are required: COMMAND"),
    ("show --len 3", 2, "unrecognized arguments: --len 3"), ("show --lengths 3 more", 2, "unrecognized arguments: more"),
    ("watch --steps 1.5 -- true", 2, "--steps: invalid whole_number value: '1.5'"),
    ("watch --steps 1048577 -- a", 2, r"--steps: 1048577 is not in the range 1..1048576\."),
    ("audit --batch-size 1", 2, r"--batch-size: 1 is not in the range 2..inf\."), ("conformance", 2, "required: run"),
    ("audit --side both", 2, "invalid choice: 'both'"), ("shw --lengths 3", 2, r"Did you mean show\?"),
    ("show --lenghts 3", 2, "Did you mean --lengths"), ("show --side lft", 2, r"Did you mean left\?"),
    (f"env {EVIL}", 2, r"unrecognized arguments: a\\x1b\[2J"),
    *((f"watch{end}", 2, "no such command. Write what you would type") for end in ("", " --", " -- no-such-command")),
    # help
    ("--help", 0, r"(?s)watch +Run a command, and print the boundaries"), ("--version", 0, collate_npu.__version__),
    ("show --help", 0, "Draw a batch: its rows and masks.\n(?s:.*)Examples:\n  collate-npu show --lengths 3,5"),
    ("show --help", 0, r"--side \{left,right\} +Padding side of --lengths. \[default: right\]"),
    ("audit --help", 0, r"--max-length MAX_LENGTH\s+Longest sample of text, in tokens. \[default: 96\]"),
    ("audit --help", 0, r"--gradients, --no-gradients\s+Compare gradients too\.( \(default: True\))?\n"),  # by Python 3.10
    # conformance: a stack that is right, wrong, or cannot be judged; and how a function of the user's is named
    (f"{OF}Held.run --seed=5 --vocab-size=300 --pad-id=299 --layout=left --layout=mine", 0,
     r"(?s)^✔ conformance: right in all 23 batches \(seed=5\)\n[^\n]*passes.*\nleft .*pad id as text.*\nmine .*pad id as"),
    (f"{OF}turned", 1, "(?s)^✘ conformance: WRONG in .*the order of the samples is lost"),
    (f"{OF}constant", 2, "do not depend on the tokens"), (f"{OF}constant --layout left", 2, "does not take layout"),
    (f"{OF}fails", 2, r"^collate-npu: stacks/stack.py, line 12: KeyError: 'logprobs.0.'\. run: got stacks/stack.py:fails\."),
    (f"{OF}ends", 2, "line 13: SystemExit: 0"), (f"{OF}long", 2, r"ValueError: x{400}\. run"),
    (f"{OF}stops", 130, "INTERRUPTED: nothing was measured"), (f"{OF}number", 2, "an int.* Name a function that takes"),
    (f"{OF}nothing", 2, "no nothing in stacks/stack.py"), (f"{OF}Held.rum", 2, "no rum in stacks/.*Did you mean run"),
    (f"{OF}run --pad-id 256", 2, "pad_token_id"), (f"{OF}run --vocab-size {2**62}", 2, "16777216"),
    ("conformance stack.py", 2, "It is named as module:function or file.py:function. For example my_stack.py:run."),
    ("conformance stacks/zzzzzz.py:run", 2, "stacks/zzzzzz.py: got no such file.*Write the path of its file"),
    ("conformance stacks/stakk.py:run", 2, r"got no such file\. .*Did you mean stack.py\?"),
    ("conformance there/stack.py:run", 2, "got no such folder as there"),
    ("conformance stacks/broken.py:run", 2, "^collate-npu: stacks/broken.py, line 2: SyntaxError"),
    ("conformance stacks/lazy.py:run", 2, "^collate-npu: stacks/lazy.py, line 2: SystemExit: 0"),
    ("conformance stacks/text.bin:run", 2, "got a file that ends with '.bin'"),
    ("conformance gone:run", 2, r"run: got gone:run \(ModuleNotFoundError"),
    ("conformance stacks/site-packages/installed.py:run", 2, r"^collate-npu: run: got \S+installed.py:run \(KeyError: 3\)"),
    # show: lengths and saved batches are drawn, or it is said why not
    ("show --lengths 3,5 --side left", 0, "mask: bool .2, 1, 5, 5., True = blocked\n(?s:.*)⬚ ⬚ ■ ■ ■\n■ ■ ■ ■ ■\n"),
    (f"show --lengths 3,{WIDEST} --side left", 0, rf"attention_mask: bool \[2, 1, {WIDEST}, {WIDEST}\]"),
    (f"show --lengths 3,{WIDEST + 1} --side left", 0, rf"attention_mask: bool \[2, {WIDEST + 1}\]"),
    (f"show --lengths=1,{MOST // 2}", 0, rf"int64 \[2, {MOST // 2}\]"),
    *((f"show --lengths={n}", 2, f"at most {MOST} places are drawn") for n in (f"1,{MOST // 2 + 1}", "9999999", "-3")),
    ("show --lengths 3+2,5", 0, "1 1 1 2 2\n1 1 1 1 1"),
    ("show --lengths 3,2 --packed", 0, "1 1 1 2 2\n"),
    ("show --batch left.pt", 0, r"attention_mask: bool \[2, 1, 3, 3\], True = attends"),
    ("show --batch refused.pt", 1, "padding: not known. "), ("show --lengths a", 2, r"Lengths are whole numbers\."),
    *((f"show {line}", 2, "One thing is shown") for line in ("", "--lengths 3 --batch left.pt")),
    ("show --lengths 3 --out page.svg", 2, "End the name with .html."),
    *((f"show --lengths 3 --out {n}", 2, "Name a file in a folder that exists") for n in ("absent/a.html", "folder.html")),
    ("show --lengths 3 --out link.html", 2, "Name that file itself"),
    # what a terminal would obey, in the name of a file, in a file, and in what is typed
    (f"show --batch '{EVIL}.pt' --out '{EVIL}.html'", 0, "attention_mask: "), (f"show --lengths '{EVIL}'", 2, r"a\\x1b\[2J"),
    (f"conformance 'stacks/{EVIL}.py:{EVIL}'", 2, r"ValueError: a\\x1b\[2J"), (f"guide '{EVIL}'", 2, "the first page"),
    # guide: a name or words lead to a page, a section or a list
    ("guide", 0, r"\[Errors\]\(errors"), *((f"guide {name}", 0, "^# ms-swift ") for name in ("ms-swift.md", "MS-Swift")),
    ("guide zh/ascend", 0, "^# "), ("guide verl#measured", 0, "^## Measured\n"),
    ("guide errors#polarity", 0, "^### `PolarityError`\n"), ("guide zh/errors#polarity", 0, "^### "),
    ("guide errors.md#refused-here", 0, "^## "), ("guide ascend#versions", 0, "^## "),
    ("guide masked_select", 0, "FlashAttentionScore refuses a mask"), ("guide mask", 0, r"^\* `masks#"),
    ("guide left padding", 0, r"^\* `errors#causal-kernel`: "), ("guide 左填充", 0, r"^\* `zh/errors#"),
    ("guide lora deepspeed", 0, "^# training\n"), ("guide examples/grpo", 0, "^```python\n(?s:.*)```\n\nTo run it: /"),
    ("guide Can only concatenate tensors but got NoneType", 0, "^# errors\n"), ("guide try-it", 0, "^To run it: /.*ipynb"),
    ("guide ms-swfit", 2, "Did you mean ms-swift"), ("guide zh/asend", 2, "Did you mean zh/ascend or"),
    ("guide errors#polaritty", 2, "Did you mean polarity"),
    ("guide errors#nothing-like-it", 2, "`collate-npu guide errors` shows the whole page."),
    *((f"guide {name}", 2, "`collate-npu guide` shows the first page.") for name in ("../../secrets", "`")),
    ("guide Qwen3-VL", 0, r"^\* `scope#"), ("guide gradient accumulation", 0, r"^\* `planned-batches#"),
    ("guide 梯度累积", 0, r"^\* `zh/index#"), ("guide fp8", 0, r"^\* `ms-swift#megatron`"),
    *((f"guide {words}", 0, f"^# {page}\n") for page, several in {
        "scope": ("sentence-transformers", "mRoPE", "prefix tuning", "LLaVA"), "trl": ("online DPO", "GKD"),
        "planned-batches": ("num_items_in_batch", "token budgets", "normalization"), "outputs": ("eval_loss",),
        "context-parallel": ('"torch\'s context parallel"', "torch context_parallel", "deadlock"),
        "megatron": ("middle stage",), "training": ("dummy batches",)}.items() for words in several),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "words"), ROWS, ids=[ascii(line[:60]) for line, *_ in ROWS])
def test_a_line_ends_with_its_code_and_says_why_on_stderr_or_prints_on_stdout(folder, monkeypatch, line, code, words):
    """Whatever is typed: no traceback, nothing that a terminal obeys, and no folder stays where Python looks for modules."""
    monkeypatch.chdir(folder)
    path = [*sys.path]
    done = typed(*shlex.split(line), COLUMNS="250")
    printed, silent = (done.stdout, done.stderr) if code < 2 else (done.stderr, done.stdout)
    assert (done.exit_code, silent, sys.path) == (code, "", path), done.output
    assert re.search(words, printed if code < 2 else " ".join(printed.split())), printed
    assert printed.startswith(("Try 'collate-npu ", "collate-npu: ")) or code < 2
    assert not RAW.search(printed), repr(printed)
    assert printed.count("\n* `") <= MOST_HITS
    assert not (folder / f"{EVIL}.html").exists() or not RAW.search((folder / f"{EVIL}.html").read_text("utf-8"))


def test_nothing_typed_prints_the_help_and_is_an_error():
    assert (typed().stdout, typed().exit_code) == (typed("--help").stdout, 2)


def test_what_stands_behind_the_command_of_a_watch_is_its_own(capfd):
    for args in ("--steps 1 /bin/echo --stop -- b --help", "--steps=1 -- /bin/echo --stop -- b --help"):
        assert typed("watch", *args.split()).exit_code == 0
        assert capfd.readouterr().out == "--stop -- b --help\n"


NOT_OURS = {"--", "--local-dir", "--config", "--nproc-per-node", "--version"}
"""Of hf, of a training script, of torchrun, and of the whole command line."""


def test_every_option_that_a_message_names_is_one():
    known = {option for each in parsers()[1].values() for action in each._actions for option in action.option_strings}
    nodes = [node for path in sorted((PACKAGE / "tools").rglob("*.py")) for node in ast.walk(tree_of(path))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {option for text in texts for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert {"--packed", "--batch-size"} <= named <= known | NOT_OURS


# --- where a package is absent or broken

ABSENT = ("rich", "transformers", "accelerate", "wrapt", "datasets")
WITHOUT = f"""import sys
sys.modules.update(dict.fromkeys({ABSENT}))
from collate_npu.tools.cli import run_command_line
sys.exit(run_command_line(sys.argv[1:]))"""


@pytest.mark.parametrize("args", ["--version", "--help", "audit --help", "guide", "guide errors#polarity"])
def test_what_needs_torch_and_numpy_alone_prints_the_same_without_the_rest(args):
    """`env` too: test_env."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, *args.split()], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", typed(*args.split()).stdout)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("audit", "collate-npu: transformers does not load: "),
        ("conformance os:getpid", "pip install rich."),
        ("watch -- python", "pip install wrapt."),
        ("show --lengths 3", "pip install rich."),
    ],
)
def test_the_others_say_in_one_line_what_to_install(monkeypatch, args, words):
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    done = typed(*args.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n"), words in done.stderr) == (2, "", 1, True)


def test_a_package_that_breaks_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "wrapt.py").write_text("raise RuntimeError('gone')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrapt", raising=False)
    done = typed("watch", "--", "python")
    assert done.stderr == "collate-npu: wrapt does not load: RuntimeError: gone. `collate-npu env` says more.\n"


# --- a process of its own


@pytest.mark.slow
@pytest.mark.parametrize("line", ["guide", "guide errors", "env", "show --lengths 3,5", "conformance --help"])
def test_a_pipe_that_nobody_reads_leaves_the_exit_code(line):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "collate_npu", *line.split()]
    with open(writing, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.draws(1)
@pytest.mark.parametrize("event", ["SIGINT", "SIGTERM", "the reader leaves"])
def test_an_audit_that_is_interrupted_says_what_it_found_and_one_that_nobody_reads_ends_as_it_would(event):
    """In a group of its own, as a terminal starts it; `collate-npu audit | head -1` under pipefail keeps its exit code."""
    pytest.importorskip("transformers")
    line = "--model llama --attn sdpa --attn eager --batch-size 3 --max-length 48 --json --batches"
    command = [sys.executable, "-m", "collate_npu", "audit", *line.split(), "8" if "SIG" in event else "1"]
    # a shell starts what it sends to the background deaf to Ctrl-C, and children stay so
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, preexec_fn=hears, **streams) as process:
        if "SIG" in event:
            assert process.stderr.readline().startswith("[1/2]")
            os.killpg(process.pid, signal.Signals[event])
            out, err = process.communicate(timeout=120)
        else:
            process.stdout.close()
            err = process.stderr.read()
            process.wait(timeout=120)
    assert (process.returncode, "Traceback" in err) == (130 if "SIG" in event else 0, False), err
    if "SIG" in event:
        found = json.loads(out)
        assert (found["passed"], found["verdict"], found["interrupted"]) == (False, "INTERRUPTED", True)
        assert found["findings"]


# --- files that merely lie in the working directory run in no command

NAMES = ("platform", "signal", "torch", "numpy", "datasets", "tokenizers", "collate_npu", "kernels", "wandb", "helper", "re")
MARK = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
MINE = """
import datasets, helper, tokenizers, collate_npu
from collate_npu import PaddingCollator
assert "lies" not in datasets.__file__ + tokenizers.__file__ + collate_npu.__file__
def collate(tokenizer, model):
    import later_helper
    return PaddingCollator(tokenizer, model=model)
"""
AS_PIP_WRITES_IT = "import sys; from collate_npu.__main__ import main; sys.exit(main())"
AUDIT = "audit --model llama --attn sdpa --batches 1 --batch-size 3 --no-gradients --json"
NAMED = f"{AUDIT} --collator beside/json.py:collate --data a.json"
AS_A_MODULE, NEIGHBOURS = "-m collate_npu", ["helper", "later_helper"]


@pytest.mark.slow
@pytest.mark.draws(2)
@pytest.mark.parametrize("entry", ["../collate-npu", AS_A_MODULE])
@pytest.mark.parametrize(
    ("line", "ran"),
    [
        ("env --json", []),
        ("show --lengths 3,5", []),
        pytest.param(NAMED, ["helper", "later_helper"], marks=pytest.mark.models),
    ],
)
def test_no_command_runs_a_file_that_was_not_named(tmp_path, line, ran, entry):
    """A collator that was named finds its neighbours, behind what is installed."""
    if line == NAMED:
        pytest.importorskip("datasets")
    lies = tmp_path / "lies"
    (lies / "beside").mkdir(parents=True)
    for name in (*NAMES, *(f"beside/{name}" for name in NAMES), "beside/later_helper"):
        (lies / f"{name}.py").write_text(MARK)
    (lies / "beside" / "json.py").write_text(MINE)  # it hides no json
    (lies / "a.json").write_text(json.dumps([{"text": "word " * n} for n in range(3, 12)]))
    (tmp_path / "collate-npu").write_text(AS_PIP_WRITES_IT)
    if entry == AS_A_MODULE:
        (lies / "collate_npu.py").unlink()  # that one is named
    command, env = [sys.executable, *entry.split(), *line.split()], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=lies, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.stem for path in lies.rglob("*.ran")) == ran
    assert "torch does not load" not in done.stdout
    assert line != NAMED or [f["right"] for f in json.loads(done.stdout)["findings"] if f["by"] == "collate"] == [True] * 2


@pytest.mark.slow
def test_an_import_of_any_module_changes_nothing_of_the_process():
    """Every module is imported but verl's plugin, whose own import arms it: at once where verl's engine is loaded."""
    code = """if True:
        import pkgutil, signal, sys, types, warnings
        import collate_npu, torch, transformers.trainer
        if loaded := len(sys.argv) > 1:
            for name in ("verl", "verl.models", "verl.models.mcore"):
                sys.modules[name] = types.ModuleType(name)
        from collate_npu.integrations import patching, verl as engine
        changed = []
        patching.patch, engine.install = (lambda *given, **how: changed.append(given)), lambda: changed.append("verl")
        before = list(sys.meta_path), list(sys.path), signal.getsignal(signal.SIGTERM)
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(collate_npu.__path__, "collate_npu."):
            try:
                module.name.endswith("verl.plugin") or __import__(module.name)
            except ImportError:
                pass  # of a trainer that is not installed
        assert (list(sys.meta_path), list(sys.path), signal.getsignal(signal.SIGTERM), changed) == (*before, [])
        import collate_npu.integrations.verl.plugin
        assert changed == ["verl"] * loaded
    """
    for more in ([], ["loaded"]):
        done = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
