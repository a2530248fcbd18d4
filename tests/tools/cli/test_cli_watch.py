"""`collate-npu watch`: any command, unchanged, in all its processes."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("wrapt")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
TRAIN = """
import os, sys, torch
if "nothing" in sys.argv:
    sys.exit(print("hello"))
from collate_npu.testing import tiny_model
model = tiny_model("qwen3_next", vocab_size=64).train()
if "fault" in sys.argv:
    lost = lambda module, args, kwargs: (args, kwargs | {"attention_mask": None})
    model.model.layers[0].linear_attn.register_forward_pre_hook(lost, with_kwargs=True)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
ids = torch.tensor([[9, 9, 9, 9, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7]])
keep = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1] * 7])
told = {"attention_mask": {"inverted": 1 - keep, "ones": keep | 1, "unsaid": None}.get(sys.argv[-1], keep)}
labels = torch.where(keep > 0, ids, -100)
for step in range(4):
    model(input_ids=ids, labels=labels, **told).loss.backward()
    optimizer.step()
print("trained", os.environ.get("RANK"), torch.nn.functional.scaled_dot_product_attention.__name__)
sys.exit(3 if "three" in sys.argv else 0)
"""


def watched(*command, options=(), **env):
    line = [sys.executable, "-m", "collate_npu", "watch", *options, "--", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture
def train(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return str(tmp_path / "train.py")


def test_both_processes_of_a_torchrun(train, tmp_path):
    out = tmp_path / "seen.jsonl"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    run = watched(*torchrun, train, "fault", options=["--out", str(out)])
    assert run.returncode == 0, run.stderr
    for rank in (0, 1):
        assert f"step 1 rank {rank} · 2 recurrent: convolution nothing in 1 of 2 ✘" in run.stderr
        assert f"step 2 rank {rank}" not in run.stderr
        assert f"trained {rank} scaled_dot_product_attention" in run.stdout
    assert "2 processes, 4 of 4 forwards with a fault" in run.stderr.splitlines()[-1]
    faults = [fault["layer"] for line in out.read_text().splitlines() for fault in json.loads(line)["faults"]]
    assert set(faults) == {"model.layers.0.linear_attn"}


@pytest.mark.draws(4)
@pytest.mark.parametrize(
    ("how", "options", "code", "said"),
    [
        ("three", [], 3, "1 process, no fault in 2 of 2 forwards"),
        ("nothing", [], 0, "NOTHING WAS SEEN"),
        ("nothing", ["--stop"], 2, "NOTHING WAS SEEN"),
        ("right", ["--stop"], 0, "no fault in 2 of 2"),
        ("fault", ["--stop"], 1, "forwards with a fault (model.layers.0.linear_attn"),
        ("inverted", ["--stop"], 1, "✘ (the batch), attention_mask: got keys that contradict each other"),
        ("ones", ["--stop"], 1, "row 0: got 4 times the token 9 where a sequence begins"),
        ("unsaid", ["--stop"], 2, "NOT JUDGED: 2 forwards, none compared with its batch: batch: got keys input_ids, "),
    ],
)
def test_the_exit_code_is_the_commands_own_and_with_stop_says_what_was_judged(train, how, options, code, said):
    run = watched(sys.executable, train, how, options=options)
    assert run.returncode == code, run.stderr
    assert (said in run.stderr, "✘" in run.stderr) == (True, how in ("fault", "inverted", "ones")), run.stderr
    assert run.stderr.rstrip().endswith("This is not a pass.") or how != "unsaid"


def test_a_python_that_cannot_be_watched_runs_and_so_does_its_own_sitecustomize(tmp_path):
    broken = tmp_path / "library" / "collate_npu" / "proof"
    broken.mkdir(parents=True)
    for folder in (broken, broken.parent):
        (folder / "__init__.py").write_text("", encoding="utf-8")
    (broken / "delivery.py").write_text("raise KeyError('broken')", encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text("print('mine')", encoding="utf-8")
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'library')!r}); import torch; print('imported')"
    run = watched(
        sys.executable, "-c", script, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    assert (run.returncode, run.stdout.endswith("mine\nimported\n")) == (0, True)
    assert "is not watched: KeyError: 'broken'" in run.stderr
    assert "NOTHING WAS SEEN" in run.stderr


def test_an_interrupt_is_the_runs_own(tmp_path):
    script = tmp_path / "saves.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a machine may start its jobs without one\n"
        "try:\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1)\n    print('saved', flush=True)\n    sys.exit(7)\n"
    )
    command = [sys.executable, "-m", "collate_npu", "watch", "--", sys.executable, str(script)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout.readline() == "begun\n"
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert (said, run.returncode) == ("saved\n", 7)
