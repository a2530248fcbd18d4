"""A plain Accelerate loop in two real processes (torchrun, gloo), the dispatcher among its ways to share batches out."""

import json
import os
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate.utils import concatenate, find_batch_size, slice_tensors
from hypothesis import given, strategies as st
from rotation import examples
from trained import loss_of
from transformers import DataCollatorForSeq2Seq

from collate_npu import CollateError, PaddingCollator, wrap_collator
from collate_npu.integrations.accelerate import DispatchCollator, dispatch_problems
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model
from collate_npu.tools.files import samples_of_rows, shipped_text

pytestmark = pytest.mark.xdist_group("accelerate")  # its processes are started once
LOOP = Path(__file__).with_name("accelerate_loop.py")
NAMES = [name for name in ("qwen3_next", "qwen3_5_text") if name in hybrid_model_types()]
CASES = [f"{NAMES[0]} left dispatch", f"{NAMES[-1]} left shard", f"{NAMES[0]} right split"]
ONE_WIDTH = {
    "join max_length": {"shapes": [[6, 16]]},
    "split max_length": {"shapes": [[3, 16], [3, 16]]},
    "split_drop_last longest": {"shapes": [[3, 6]]},
}
"""By what two processes need one width, and the remedies that are named."""
ALL = [*CASES, *ONE_WIDTH, "split longest", "planned"]
MODELS = ("gpt2", "llama", "opt", "roberta", NAMES[0])
model_of = cache(partial(tiny_model, vocab_size=257))


def ids_of(count):
    return [row["input_ids"] for row in samples_of_rows(shipped_text(), byte_tokenizer(), count=count, max_length=48)]


FEATURES = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}]


@pytest.fixture(scope="module")
def reports():
    """Of all cases, from two processes that are started once; both are ended when one hangs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(LOOP)]
    path = os.pathsep.join([str(LOOP.parents[2]), str(LOOP.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*torchrun, *ALL], env=env, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err[-3000:]
    (line,) = [line for line in out.splitlines() if line.startswith("REPORT ")]
    return dict(zip(ALL, json.loads(line.removeprefix("REPORT "))))


@torch.no_grad()
def losses_alone(name, ids):
    logits = [model_of(name)(input_ids=torch.tensor([row])).logits[0] for row in ids]
    return [float(loss_of(each, torch.tensor(row), 0.0)) for each, row in zip(logits, ids)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_share_the_batches_and_lose_no_mask(reports, case):
    report, ids = reports[case], ids_of(8)
    alone = losses_alone(case.split()[0], ids)
    assert report["world"] == 2
    assert sorted(report["lengths"]) == sorted(map(len, ids))
    assert report["losses"] == pytest.approx([sum(alone[:4]), sum(alone[4:])], rel=1e-5)


@pytest.mark.slow
def test_a_planned_trainer_gives_both_processes_like_batches_and_weighs_them_by_their_tokens(reports):
    ranks, losses = reports["planned"]["ranks"], reports["planned"]["losses"]
    ids = ids_of(20)
    alone = dict(zip(map(tuple, ids), losses_alone("qwen3_next", ids)))
    (per_epoch,) = {len(rank) // 2 for rank in ranks}
    for first in (0, per_epoch):
        epoch = [rank[first : first + per_epoch] for rank in ranks]
        assert sorted(row for batches in epoch for batch in batches for row in batch) == sorted(ids)
        for at in range(0, per_epoch, 2):
            step = [tuple(row) for batches in epoch for batch in batches[at : at + 2] for row in batch]
            mean = sum(alone[row] for row in step) / sum(len(row) - 1 for row in step)
            assert losses.pop(0) == pytest.approx(mean, abs=2e-4)  # the Trainer rounds what it logs
    assert losses == []


@pytest.mark.slow
def test_a_batch_that_does_not_divide_needs_one_width_or_is_left_out(reports):
    """The remedies are `DispatchCollator`'s docstring's; without them accelerate's own concatenation fails."""
    assert {case: reports[case] for case in ONE_WIDTH} == ONE_WIDTH
    assert "Sizes of tensors must match" in reports["split longest"]["error"]


@pytest.mark.parametrize(
    ("side", "settings", "shape"),
    [("left", {"attention_mask": "omit"}, None), ("left", {}, (4, 1, 3, 3)), ("right", {}, None)],
)
def test_the_batch_survives_concatenate_slice_and_find_batch_size(side, settings, shape):
    """The neutral form too: a mask where None is not exact, and None is left out where it is."""
    batch = DispatchCollator(PaddingCollator(pad_token_id=0, padding_side=side, **settings))(FEATURES)
    assert find_batch_size(batch) == 2
    both = concatenate([batch, batch])
    assert both["attention_mask_2d"].sum() == 8
    assert ("attention_mask" in both) == (shape is not None)
    assert shape is None or both["attention_mask"].shape == shape
    for key, value in slice_tensors(both, slice(2, 4)).items():
        assert torch.equal(value, batch[key])


ROWS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=1, max_size=3)


def samples_of(rows, packed):
    """A sample a row: its sequences one behind the other."""
    made = [{"input_ids": ids, "labels": ids} for ids in (list(range(1, 1 + sum(row))) for row in rows)]
    return [sample | {"seq_lengths": row} for sample, row in zip(made, rows)] if packed else made


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("who", ["2d, DispatchCollator", *MODELS, *(f"wrapped, {name}" for name in MODELS)])
@examples(8)
@given(one=ROWS, other=ROWS)
def test_which_keys_a_batch_has_does_not_depend_on_its_rows(who, side, one, other):
    """The dispatcher takes the keys of the first process's batch for those of all: another's are lost in silence."""
    neutral, tokenizer = who.startswith("2d"), byte_tokenizer(padding_side=side)
    if neutral:
        collator = DispatchCollator(PaddingCollator(tokenizer, attention_mask="2d"))
    elif who.startswith("wrapped"):
        collator = wrap_collator(DataCollatorForSeq2Seq(tokenizer), model=model_of(who.partition(", ")[2]))
    else:
        collator = PaddingCollator(tokenizer, model=model_of(who), pad_token_id=7)  # not the id that RoBERTa does not count
    first, second = (collator(samples_of(rows, neutral)) for rows in (one, other))
    assert set(first) == set(second)


def test_what_accelerate_cannot_carry_is_named():
    features = [{**feature, "name": "a"} for feature in FEATURES]
    with pytest.raises(CollateError, match="name is a list"):
        DispatchCollator(PaddingCollator(pad_token_id=0))(features)
    flat = PaddingCollator(padding_free=True)(FEATURES)
    assert set(dispatch_problems(flat)) == {
        "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_lens",
    }  # fmt: skip
    others = {"names": ["a"], "temperature": torch.tensor(0.5)}
    assert set(dispatch_problems(others | {"input_ids": torch.zeros(2, 3)})) == set(others)


@pytest.mark.parametrize("counts", [(1, 1), (0, 2), (2, 0), (2, 1)], ids=str)
def test_images_go_to_the_rank_of_their_row_or_are_refused(counts):
    """As many images as samples, and not one in each: Accelerate cuts them by their number."""
    image = torch.zeros(3, 4, 4)
    rows = [{"input_ids": [5, 6], "pixel_values": torch.stack([image] * n) if n else None} for n in counts]
    collate = DispatchCollator(PaddingCollator(pad_token_id=0, attention_mask="2d"))
    if counts == (1, 1):
        assert collate(rows)["pixel_values"].shape == (2, 3, 4, 4)
    else:
        with pytest.raises(CollateError, match=r"pixel_values is images.*Set dispatch_batches=False"):
            collate(rows)


@pytest.mark.parametrize("ids", [[1, 1, 2], [1, 1, 0]])
def test_segment_ids_of_a_batch_are_kept_and_made_where_there_are_none(ids):
    told = {"input_ids": torch.ones(1, 3).long(), "attention_mask_2d": torch.tensor([ids]) > 0}
    for batch, wanted in (
        (told | {"segment_ids": torch.tensor([ids]).int()}, ids),
        (told, [min(each, 1) for each in ids]),
        ({"input_ids": told["input_ids"]}, None),
    ):
        made = DispatchCollator(lambda features: dict(batch))([{}])  # noqa: B023
        assert (("segment_ids" in made and made["segment_ids"][0].tolist()) or None) == wanted
