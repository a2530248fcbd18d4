"""The gate: forty-odd faults that a user would see, planted one at a time into a copy of the tree. The tests must see them.

`nox -s faults` plants ten, drawn by the seed; `-- --all` all of them; `-- halo` those whose name has this word. A row is a
text of the package, which stands there once, and what takes its place; it does not say in which file, so that code may move.
`by` are the tests that a commit always runs and that must see it: files or folders of tests.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from reported import report

ROOT = Path(__file__).parents[2]
DRAWN, LATE = 10, 400
"""So many of them a commit; seconds after which tests that do not end have seen nothing."""


class Fault(NamedTuple):
    """What a user would see, the text, what it becomes, and the tests that see it."""

    name: str
    was: str
    becomes: str
    by: str


FAULTS = [
    # --- collators
    Fault("padding is learned", '"ignored": collator.writer.label_pad_token_id}', '"ignored": 3}', "laws/test_collating.py"),
    Fault("the first label of a packed sequence is learned",
          "labels_BS[b, start] = self.label_pad_token_id if start else labels_BS[b, 0]", "continue",
          "laws/test_collating.py"),
    Fault("images of packed rows keep the samples' order", "order=slots.order)", "order=None)", "collate/test_collators.py"),
    Fault("packed masks lose a boundary", "row + np.int64(b * width), 0)", "row, 0)", "test_refusals.py"),
    Fault("positions of a flat row go on from sequence to sequence",
          'offsets: dict[str, Any] = {"position_ids": flat.position_ids,',
          'offsets: dict[str, Any] = {"position_ids": torch.arange(sum(held))[None],', "laws/test_collating.py collate"),
    Fault("labels that a collator made anew pass", "if wrong_T.any():", "if False:", "integration/test_labels_at_doors.py"),
    Fault("a mask unlike samples passes", "_refuse_disagreement(segments, standing)", "pass", "collate/test_wrapping.py"),
    # --- masks that arrive
    Fault("an inverted 2D mask passes", "_refuse_inverted(sources, truth.segments, empty=by_keys and bool(squares))",
          "pass", "masks"),
    Fault("two sources with other boundaries pass", "_check_same_boundaries([each for each in found if each.parted])",
          "pass", "masks"),
    Fault("ALiBi is lost", "if values.valued:", "if False:", "masks"),
    Fault("an end token under the mask is unlearned", "return with_labels(sources, truth.segments) if labels else",
          "return truth.segments if labels else", "masks"),
    Fault("a window is one key too wide", "return (k <= q) & (q - k < self.size)", "return (k <= q) & (q - k <= self.size)",
          "masks/test_batch_reader.py laws"),
    Fault("None for left padding", "if segments.padding_side in PADS_BEFORE:\n        where = ",
          "if False:\n        where = ", "laws/test_collating.py masks"),
    Fault("a bias that blocks too little", "return dtype, 0.0, torch.finfo(dtype).min", "return dtype, 0.0, -1.0",
          "masks/test_batch_reader.py laws"),
    # --- adapters
    Fault("attention_mask_2d is popped for recurrent layers",
          'kept = case.recurrent if self.keeps_mask_2d == "recurrent"', 'kept = False if self.keeps_mask_2d == "recurrent"',
          "laws/test_doors.py consumers"),
    Fault("packed rows of recurrent layers pass",
          'return f"rows {[b for b, row in enumerate(case.segments.lengths) if len(row) > 1][:8]} hold several sequences"',
          'return ""', "consumers/test_mask_choice.py laws"),
    Fault("labels that are moved already are moved again",
          'if moved and shifted is False and sources.get("shift_labels") is None:', "if False:", "consumers collate"),
    Fault("a label behind padding inside a sequence passes",
          'if holes and rule == "next" and shifted is not None and segments.hole_rows:', "if False:", "test_refusals.py"),
    Fault("rows padded in the data set pass", "        check_starts(sources, case.segments)", "        pass", "consumers"),
    Fault("tokens of images are taken for text", "        check_image_types(case, sources)", "        pass",
          "integration/test_vision.py"),
    # --- models that run by sequence
    Fault("buckets come back in another order",
          "torch.cat([each.flatten(0, 1) for each in rows]) if len(rows) > 1",
          "torch.cat([each.flatten(0, 1) for each in rows[::-1]]) if len(rows) > 1", "integration/test_differential.py"),
    Fault("the gradient of a flat row is doubled", "_moved(grads[0], ctx.saved_tensors[0], ctx.R), None, None",
          "_moved(grads[0] * 2, ctx.saved_tensors[0], ctx.R), None, None", "integration/test_differential.py"),
    Fault("a window is lost in rows by sequence", "if x_nLD.shape[1] <= (getattr(config, reach, None) or 0):", "if True:",
          "integration/test_differential.py"),
    Fault("what is computed again has no plan", "run_under(plan, function, *given, **named)",
          "run_under(None, function, *given, **named)",
          "integration/test_differential.py integration/test_adapted_models.py"),
    Fault("the first label of a flat row's sequence is learned",
          'out["labels"] = labels.index_fill(1, torch.from_numpy(self.plan.starts).to(labels.device), IGNORED)', "pass",
          "integration/test_differential.py integration/test_adapted_models.py"),
    Fault("labels that a trainer counted are ignored", "    if lost:\n        rule = f\"A trainer counted",
          "    if False:\n        rule = f\"A trainer counted", "integration/test_trainer.py"),
    # --- ranks
    Fault("the halo is one token short", "(max(at - reach, begin), at,", "(max(at - reach + 1, begin), at,",
          "consumers/test_shared_rows.py distributed"),
    Fault("zigzag's second chunk is another's",
          "runs.append((stop - (cp.rank + 1) * size, stop - cp.rank * size))",
          "runs.append((start + (cp.size + cp.rank) * size, start + (cp.size + cp.rank + 1) * size))", "parallel"),
    Fault("a key is not split", "return self.of_tokens(key, value, (rule or TOKENS).dim)",
          'return value if key == "labels" else self.of_tokens(key, value, (rule or TOKENS).dim)', "parallel"),
    Fault("documents are not padded behind themselves", "real_W = at_W < lengths_N[number_W]",
          "real_W = place_W < lengths_N.sum()", "parallel"),
    Fault("padding of documents is learned", '"pad_type": 0, "ignored": -100}', '"pad_type": 0, "ignored": 0}', "parallel"),
    Fault("a gather with losses of their own keeps one gradient", 'if ctx.loss == "same":', "if True:", "distributed"),
    Fault("a gathered row stands in another order", "return sorted(pieces)", "return pieces", "distributed parallel"),
    Fault("ranks with other batches go on", "if apart := list(_apart(messages)):", "if not list(_apart(messages)) and 0:",
          "distributed"),
    # --- steps and plans
    Fault("a factor of ranks is lost", "return [ranks * count / total for count in counts]",
          "return [count / total for count in counts]", "distributed"),
    Fault("weights of a step count first labels", 'first = int(per == "token" and key == "labels")', "first = 0", "collate"),
    Fault("one plan for every epoch", "np.random.default_rng((self.seed, key))", "np.random.default_rng((self.seed, 0))",
          "collate"),
    Fault("a resumed plan begins anew", "self._begin = self._yielded = begin", "self._begin = self._yielded = 0",
          "collate"),
    Fault("ranks get the same batch", "k = n if self.rank is None else n * self.num_replicas + self.rank",
          "k = n if self.rank is None else n * self.num_replicas", "laws/test_planning.py"),
    Fault("columns of the collator are dropped", "[*trainer._signature_columns, *COLUMNS, *names]",
          "[*trainer._signature_columns, *names]", "integration/test_trainer.py"),
    # --- kernels
    Fault("the last chunk of a sequence is missing", "for c in range(-(-length // size))", "for c in range(length // size)",
          "kernels"),
    Fault("a band of the operator is one token wide too many", '{"pre_tockens": terms.before,',
          '{"pre_tockens": terms.before + 1,', "kernels"),
    # --- what is said
    Fault("a fault is seen and not said", 'wrong = [record for record in records if record["faults"]]', "wrong = []",
          "proof/test_watching.py"),
    Fault("a NaN is right", "not getattr(found, name) <= TIMES", "getattr(found, name) > TIMES", "proof/test_measure.py"),
    Fault("a remedy names a pattern that is none", "Pass pattern={found.expression} if the model attends so, else",
          "Pass pattern={found.name}() if the model attends so, else", "test_refusals.py"),
    Fault("an audit that finds a fault ends with 0", "return 1\n        return 0 if any(f.right for",
          "return 0\n        return 0 if any(f.right for", "tools/test_audit.py"),
    Fault("need finds nothing wrong", '1 if "right" in lost or any(', '0 if "right" in lost or any(', "tools/test_need.py"),
]  # fmt: skip


EVERY = " ".join(dict.fromkeys(path for fault in FAULTS for path in fault.by.split()))
NOTHING = Fault("nothing, which no test sees", "def read_mask(", "def read_mask(", EVERY)


def drawn(words: list[str]) -> list[Fault]:
    """Those asked for, else ten of the seed."""
    if words == ["--all"]:
        return FAULTS
    some = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    seed = int(os.environ.get("COLLATE_NPU_SEED") or time.time_ns() // 1000 % 1_000_000)
    return some or random.Random(seed).sample(FAULTS, DRAWN)


def copied(into: Path) -> Path:
    """The tree as git sees it."""
    listed = subprocess.run(
        ("git", "ls-files", "-co", "--exclude-standard"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    shutil.rmtree(into, ignore_errors=True)
    for name in filter(None, listed.stdout.splitlines()):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, into / name)
    return into


def outcome(fault: Fault, n: int) -> tuple[str, float]:
    """ "seen", or what is wrong, and the seconds that took."""
    start, tree = time.monotonic(), copied(ROOT / "build" / "faults" / str(n))
    for path in (tree / "collate_npu").rglob("*.py"):
        path.write_text(path.read_text("utf-8").replace(fault.was, fault.becomes), "utf-8")
    own = {name: value for name, value in os.environ.items() if name != "COLLATE_NPU_REPORT"}  # what it finds is no red
    env = own | {"PYTHONPATH": os.pathsep.join((str(tree), str(tree / "tests")))}
    tests = [f"tests/{path}" for path in fault.by.split()]
    command = (sys.executable, "-m", "pytest", "-q", "-x", "--hypothesis-profile=first", "-m", "not slow", *tests)
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LATE)
        said = {0: "NOT SEEN", 1: "seen"}.get(done.returncode, f"pytest ends with {done.returncode}: {done.stdout[-300:]}")
    except subprocess.TimeoutExpired:
        said = f"NOT SEEN within {LATE} s"
    seen = [line for line in done.stdout.splitlines() if line.startswith("FAILED")] if said == "seen" else []
    shutil.rmtree(tree, ignore_errors=True)
    return f"{said} {seen[0][7:90] if seen else ''}".strip(), time.monotonic() - start


def main() -> int:
    """Plant them, two at once. 1 if one was not seen."""
    faults, red = drawn(sys.argv[1:]), {}
    faults = [NOTHING, *faults] if len(faults) == len(FAULTS) else faults
    with ThreadPoolExecutor(2) as two:
        for fault, (said, seconds) in zip(faults, two.map(outcome, faults, range(len(faults)))):
            print(f"{fault.name}: {said}, {seconds:.0f} s", flush=True)
            if said.startswith("seen") == (fault is NOTHING):
                red[fault.name] = said
    report({"faults planted": len(faults), "seen": len(faults) - len(red)}, red)
    return bool(red)


if __name__ == "__main__":
    raise SystemExit(main())
