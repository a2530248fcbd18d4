"""The scripts of guide/examples run as their docstrings say, print what these say, and go red where our line is missing."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from collate_npu.releases import KERNELS_TOLD
from collate_npu.tools.guide import GUIDE

EXAMPLES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((GUIDE / "examples").glob("*.py"))}
NEEDS = {"grpo": "trl", "ray_data": "ray"}
THEIRS = """(lambda rows: {
        **tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt"),
        "labels": torch.nn.utils.rnn.pad_sequence([torch.tensor(row["labels"]) for row in rows], True, -100, "left"),
    })"""  # as DataCollatorForSeq2Seq does it: the first label of a row is predicted from padding
BROKEN = {
    "sft_left_padding": [("PaddingCollator(tokenizer, model=model)", THEIRS), ("[DeliveryCallback(collator)]", "[]")],
    "packed_qwen3_5": [("    adapt(model)\n", "")],
    "planned_batches": [("zip(step, loss_weights(step, sampler=sampler))", "zip(step, [1 / len(step)] * len(step))")],
    "own_loop_context_parallel": [('    adapt(model, sequence_group=dist.group.WORLD, layout="head_tail")\n', "")],
}
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.xdist_group("examples")]


def run(name: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the first command of the docstring on this text of the script."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    program, *args = shlex.split(re.findall(r"^    ((?:python|torchrun) .*)", text, flags=re.M)[0], comments=True)
    torchrun = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1", "PYTHONPATH": str(GUIDE.parents[1])}
    done = [sys.executable, *torchrun, *args]
    return subprocess.run(done, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_and_finds_no_difference(name, tmp_path):
    if find_spec(NEEDS.get(name, "torch")) is None or (name == "packed_qwen3_5" and not KERNELS_TOLD.holds()):
        pytest.skip("what it needs is not installed")
    done = run(name, EXAMPLES[name], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    promised = re.findall(r"^    (.*off by \.\.\..*)", EXAMPLES[name], flags=re.M)
    assert promised
    for line in promised:
        assert re.search(re.escape(line).replace(r"\.\.\.", r"\d.*"), done.stdout), done.stdout


@pytest.mark.parametrize("name", BROKEN)
def test_its_own_check_goes_red_without_our_line(name, tmp_path):
    text = EXAMPLES[name]
    for line, other in BROKEN[name]:
        assert line in text
        text = text.replace(line, other)
    done = run(name, text, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "off by" in done.stdout, done.stderr
