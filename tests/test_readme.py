"""README and the guide: every block runs (Python in a process of its own, with the output shown below it), every command is
one that exists, every link leads somewhere, every picture and table is what the library says."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lists
import pytest
import warm
from blocks import assert_shown, blocks_of, shown_in

from collate_npu import Segments
from collate_npu.integrations import trainers
from collate_npu.masks import dense
from collate_npu.releases import KERNELS_TOLD, NEWEST, RUN_RELEASES, installed
from collate_npu.tools.cli import parsers
from collate_npu.tools.show import picture

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "collate_npu" / "guide"
README = ROOT / "README.md"
PAGES = sorted(GUIDE.rglob("*.md"))
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
TEXT = {page: page.read_text(encoding="utf-8") for page in (README, *PAGES)}


def shown(language: str, *pages: Path) -> list[tuple[str, str, str]]:
    return [block for page in pages for block in shown_in(TEXT[page], language)]


PYTHON = [*shown("python", README), *(block for block in shown("python", *PAGES) if block[1])]
"""All of README; of the guide those with an output: the others are fragments of a trainer's script."""
RUN = {code: (output, before) for code, output, before in PYTHON}
COMMANDS = [line for code, *_ in shown("console", README) for line in code.splitlines()]
ALL_COMMANDS = [line for code, *_ in shown("console", README, *PAGES) for line in code.splitlines()]
INLINE = [words for text in TEXT.values() for words in re.findall(r"`(collate-npu [^`\n]+)`", text)]

GLOO_ABORT = "SIGABRT"
"""torch 2.13 now and then aborts a finished process that had a DeviceMesh over gloo (its three lines alone do so too)."""


def test_the_readme_is_short_and_its_blocks_are_of_known_kinds():
    assert len(TEXT[README].splitlines()) <= 100
    assert TEXT[README].count("](") <= 15, "links"
    assert {language for language, *_ in blocks_of(TEXT[README])} == {"python", "text", "console", "diff"}


SCRIPT = """
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from collate_npu.testing import byte_tokenizer, tiny_model
tokenizer = byte_tokenizer(padding_side="left")
model = tiny_model("qwen3_next", vocab_size=len(tokenizer))
data = [dict(tokenizer(text), labels=tokenizer(text)["input_ids"]) for text in ("a short one", "and a longer one")]
"""


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("left_out", "+-")
def test_the_diff_is_of_a_script_that_runs_before_and_after(left_out, tmp_path):
    (diff,) = {code for code, *_ in shown("diff", README, GUIDE / "zh" / "index.md")}
    lines = [line[1:] for line in diff.splitlines() if not line.startswith(left_out)]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "\n".join(lines), encoding="utf-8")
    code, printed, errors = warm.run(script, {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"})
    assert (code, "train_loss" in printed) == (0, True), errors[-2000:]


OLDER = not KERNELS_TOLD.holds()


@pytest.mark.models
@pytest.mark.draws(3)
@pytest.mark.parametrize("code", RUN, ids=range(1, len(RUN) + 1))
def test_python_blocks_run_and_print_what_is_shown(code, tmp_path):
    output, before = RUN[code]
    if "from datasets" in code:
        pytest.importorskip("datasets")
    if re.search(r"with adapt\(model\)|reference_kernels|transformers.causal_conv1d_fn", code + (output or "")) and OLDER:
        pytest.skip("no older release hands boundaries to kernels")
    if "transformers" in code or "testing" in code or "model_type" in code:
        pytest.importorskip("transformers")
    env = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "ACCELERATE_USE_CPU": "true"}
    script = tmp_path / "shard.py"
    script.write_text(code, encoding="utf-8")
    code, printed, errors = torchrun(script, env) if "torchrun" in before else warm.run(script, env)
    assert code == 0, errors[-2000:]
    if output:
        assert_shown(output, printed)


def torchrun(script, env):
    """Again where torch aborts behind it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    settings = {"env": {**os.environ, **env, "PYTHONPATH": path}, "cwd": script.parent, "timeout": 300}
    for _ in range(4):
        done = subprocess.run(command, capture_output=True, text=True, **settings)
        if GLOO_ABORT not in done.stderr:
            break
    return done.returncode, done.stdout, done.stderr


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "output"), sorted({(code, output) for code, output, _ in shown("console", *TEXT) if output})
)
def test_commands_print_what_is_shown(command, output):
    pytest.importorskip("rich")
    words = shlex.split(command)
    assert words[0] == "collate-npu"
    if words[1] == "audit":
        pytest.importorskip("transformers")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "dumb"}
    run = [sys.executable, "-m", "collate_npu", *words[1:]]
    done = subprocess.run(run, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_shown(output, done.stdout)


@pytest.mark.parametrize("line", sorted({*(line for line in ALL_COMMANDS if "collate-npu " in line), *INLINE}))
def test_every_command_of_ours_is_real(line):
    """Their names, options and the form of their values; nothing is run."""
    words = shlex.split(line.partition("collate-npu ")[2].removesuffix(')"'), comments=True)
    commands = parsers()[1]
    if set(words) <= {*commands, "|", "--version"}:  # a list of them
        return
    assert words[0] in commands
    commands[words[0]].parse_args(words[1:])


def test_commands_of_trainers_name_the_file_of_the_plugin():
    """The line that finds it, run; the trainer stands in for itself with `echo`."""
    assigned = {line for line in ALL_COMMANDS if line.startswith("PLUGIN=")}
    launched = {line for line in ALL_COMMANDS if "external_plugins" in line}
    assert len(assigned) == 1
    assert len(launched) > 1
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in launched:
        script = f'python() {{ {sys.executable} "$@"; }}\n{assigned.copy().pop()}\necho {line}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=True)
        assert Path(done.stdout.split()[-1]).is_file(), done.stdout


@pytest.mark.parametrize(("page", "column"), [("index.md", 14), ("zh/index.md", 14)])
def test_the_first_picture_is_drawn_by_the_library(page, column):
    segments = Segments.from_lengths([3], width=5, side="left")
    square = picture(dense(segments)).splitlines()[:5]
    text = TEXT[README if page == README.name else GUIDE / page]
    lines = [line for line in blocks_of(text)[0][1].splitlines() if re.fullmatch(r"[■⬚ ]+", line)]
    assert [line[column : column + 9] for line in lines] == square
    assert [line[:9] for line in lines if line[0] != " "] == [picture(segments)]
    assert [line[2 * column :] for line in lines if line[2 * column :]] == ["■ ■ ■ ■ ■"]


@pytest.mark.slow
@pytest.mark.skipif(installed("transformers") != NEWEST["transformers"], reason="families are those of the newest")
def test_lists_are_what_the_code_says_of_itself():
    """Where one differs, `python tests/lists.py` writes it."""
    assert [path.name for path, text in lists.written().items() if path.read_text("utf-8") != text] == []


@pytest.mark.parametrize("page", ["ascend", "errors", "ms-swift"])
def test_each_number_of_a_chinese_page_stands_on_the_english_one(page):
    chinese, english = ({*re.findall(r"\d+(?:\.\d+)+", TEXT[GUIDE / name])} for name in (f"zh/{page}.md", f"{page}.md"))
    assert sorted(chinese - english) == []


def test_a_page_installs_a_release_that_was_run():
    named = {*re.findall(r"install \. ([\w-]+)==([\d.]+)", "".join(TEXT.values()))}
    assert [(name, at) for name, at in named if at not in (trainers().get(name, at), *RUN_RELEASES.get(name, ()))] == []


@pytest.mark.parametrize("page", TEXT, ids=lambda page: page.name)
def test_every_name_of_ours_in_the_text_is_real(page):
    """`integrations.swift.install()`, `keys.py` and the like: modules, their names, files, and what blocks import."""
    text = re.sub(r"\]\([^)]*\)", "", TEXT[page])
    names = set(re.findall(r"\b(?:collate_npu\.)?((?:integrations|kernels|consumers|masks|collate)\.[\w.]+\w)", text))
    for code in re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("collate_npu."):
                names |= {f"{node.module.partition('.')[2]}.{name.name}" for name in node.names}
    for name in names:
        assert is_ours(name.split(".")), name
    files = set(re.findall(r"`((?:collate_npu|tests|benchmarks)/[\w./-]+)`", text))
    assert all((ROOT / file).exists() for file in files)


def is_ours(parts):
    """Is it a module or package, or a name that stands at the top of one?"""
    path = ROOT / "collate_npu" / Path(*parts)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    home = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return home.exists() and re.search(rf"\b{parts[-1]}\b", home.read_text(encoding="utf-8")) is not None


def test_the_two_commands_need_python_and_venv_alone_and_are_what_ci_runs():
    """A system's Python may refuse to install packages (externally managed), and has no nox."""
    pasted = [line for line in COMMANDS if "nox -s" in line]
    assert [line.rsplit(" ", 1)[1] for line in pasted] == ["need", "tests"]
    for line in pasted:
        assert re.fullmatch(r"python3 -m venv \.venv && \.venv/bin/pip install nox && \.venv/bin/nox -s \w+", line)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for line in pasted:
        assert re.search(rf'\$nox"?( -R)? -s .*\b{line.rsplit(" ", 1)[1]}\b', script)
    assert ".venv/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    install = TEXT[GUIDE / "install.md"]
    assert "COLLATE_NPU_TORCH_INDEX=CPU_INDEX" in install
    assert 'environ.get("COLLATE_NPU_TORCH_INDEX")' in NOXFILE
    for name, pin in re.findall(r"(COLLATE_NPU_\w+)=(torch\S+)", install):
        assert f'"{name}", "{pin.removesuffix("+cpu")}"' in NOXFILE


def test_every_session_and_extra_that_is_named_exists():
    named = {name for text in TEXT.values() for name in re.findall(r"\bnox(?: -R)? -s \"?(\w+)", text)}
    assert named > {"audit", "tests", "bench"}
    assert [name for name in named if not re.search(rf"^def {name}\(", NOXFILE, flags=re.M)] == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'name = "collate-npu"' in project
    extras = set(re.findall(r"(?:collate-npu|\.)\[(\w+)\]", "\n".join(TEXT.values())))
    assert extras
    assert [extra for extra in extras if not re.search(rf"^{extra} = \[", project, flags=re.M)] == []


@pytest.mark.parametrize("page", TEXT, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub(r"^```.*?^```$", "", TEXT[page], flags=re.M | re.S)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert page == README or GUIDE in file.parents, f"{target}: the site holds the guide alone"
        assert not anchor or anchor in headings(TEXT[file]), target


def headings(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return slugs | set(re.findall(r'<a id="([\w-]+)">', text))
