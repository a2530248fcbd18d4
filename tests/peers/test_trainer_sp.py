"""transformers' Trainer, and Accelerate alone, with `ParallelismConfig(sp_size=2)`: DeepSpeed's Ulysses between two ranks.

`python test_trainer_sp.py OUT FOLDER JOB ...` is one of them. DeepSpeed's engine, loader and attention are its own; Gloo
takes no gather of a number into rows, nor of rows of two widths.
"""

# ruff: noqa: E402
import functools
from contextlib import nullcontext

import openrlhf_world

openrlhf_world.deepspeed_on_cpu()
import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from cells import Stack, gradient_error, of_job, samples, scores
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_grad
from processes import found_by, refusal, run_jobs
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from collate_npu import ContextParallel, PaddingCollator, adapt, gather_sequence
from collate_npu.testing import tiny_model

NEEDS = ("transformers", "deepspeed")
STACK = Stack("transformers Trainer, sp", ("transformers", "accelerate", "deepspeed"), "peers_openrlhf")
FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1")
ONCE = ("accelerate qwen3_next", "trainer qwen3_next left", "trainer qwen3 left")
JOBS = [*(f"trainer {family}" for family in FAMILIES), *ONCE]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    return found_by("test_trainer_sp", folder, folder, *JOBS, variants=({}, {"RUN": "1"}), ranks=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_cells(family, found):
    own, ours = (of_job(each[f"trainer {family}"]) for each in found)
    STACK.tell(family, "context parallel", alone=own, ours=ours, line="collate-npu run --")


def test_accelerate_by_itself_and_what_ulysses_drops(found):
    """It drops every mask and window on sdpa; and accelerate refuses by name again behind a model that was adapted."""
    own, ours = found
    assert [of_job(job)["verdict"] for job in (own[ONCE[0]], ours[ONCE[0]], own[ONCE[2]])] == ["right", "right", "wrong"]
    assert all("padding stands on the left" in ours[job]["refused"] for job in ONCE[1:])
    assert "has a window" in ours["trainer gemma3_text"]["refused"]
    assert "linear_attention" in own[ONCE[1]]["refused"]


# --- a rank of two

WIDTH = 16


def collated(side, rows):
    batch = PaddingCollator(pad_token_id=7, pad_to_multiple_of=WIDTH, padding_side=side, attention_mask="2d")(rows)
    return {key: batch[key] for key in ("input_ids", "labels", "attention_mask", "position_ids")}


def parallel():
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)


ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
DATA = [{"input_ids": ids, "labels": ids} for ids in samples()] * 2
"""A batch of all for each rank's loader."""


class Seen:
    """What the model was given and gave on this rank, and the gradient before DeepSpeed's step."""

    def __init__(self, model):
        self.model, self.calls = model, []
        model.register_forward_hook(self.noted, with_kwargs=True)
        DeepSpeedEngine.step = self.step

    def noted(self, model, args, kwargs, out):
        if model.training:
            self.calls.append((kwargs["input_ids"], out.logits.detach()))

    def step(self, *args, **kwargs):
        """DeepSpeed sums over ranks that share rows where the loss is of both (0.19.6 stage_1_and_2.py:1292)."""
        self.gradient = [safe_get_full_grad(p) / 2 for p in self.model.parameters()]


def judged(seen, family):
    """How far each sample and the gradient are from the samples alone."""
    cp = ContextParallel.from_group(dist.group.WORLD, layout="contiguous")
    ids_BS, logits = (gather_sequence(each, cp) for each in seen.calls[0])
    truth, worst, rows = tiny_model(family, vocab_size=120).train(), 0.0, samples()
    count = sum(map(len, rows)) - len(rows)
    for found, logits_SV in zip(ids_BS.tolist(), logits):
        at, row = next((at, row) for row in rows for at in range(WIDTH) if found[at : at + len(row)] == row)
        alone = truth(torch.tensor([row]), attention_mask=torch.ones(1, len(row))).logits[0]
        (cross_entropy(alone[:-1], torch.tensor(row[1:]), reduction="sum") / count).backward()
        worst = max(worst, float((scores(logits_SV[at:], row) - scores(alone.detach(), row)).abs().max()))
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in truth.parameters()]
    return worst, gradient_error(seen.gradient, wanted)


def by_trainer(model, collator, folder):
    args = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=4, max_steps=1, learning_rate=0.0, use_cpu=True, report_to=[],
        save_strategy="no", remove_unused_columns=False, deepspeed=ZERO, parallelism_config=parallel(), disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=DATA, eval_dataset=DATA, data_collator=collator)
    trainer._get_train_sampler = lambda *_: range(len(DATA))
    trainer.train()
    trainer.evaluate()  # whole rows on each rank


def by_accelerate(model, collator, folder):
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO), parallelism_config=parallel())
    loader = torch.utils.data.DataLoader(DATA, batch_size=4, collate_fn=collator)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0), loader)
    batch = next(iter(loader))
    targets = batch.pop("shift_labels")
    batch.pop("labels", None)
    loss = cross_entropy(model(**batch).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    dist.all_reduce(count := (targets != -100).sum())
    accelerator.backward(2 * loss / count)


def run(folder, door, family, side="right"):
    model, sdpa = tiny_model(family, vocab_size=120).train(), ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen, step = Seen(model), {"trainer": by_trainer, "accelerate": by_accelerate}[door]
    with adapt(model) if door == "accelerate" else nullcontext():
        refused = refusal(lambda: step(model, functools.partial(collated, side), folder))
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa  # as the end of a process leaves it
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    AcceleratorState._reset_state(True)
    worst, learned = (None, None) if refused else judged(seen, family)
    return {"refused": refused, "error": worst, "gradient": learned}


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    own_gather = TorchBackend.all_gather
    TorchBackend.all_gather = lambda self, tensor_list, tensor, *args, **kwargs: own_gather(
        self, tensor_list, tensor.view_as(tensor_list[0]), *args, **kwargs
    )
    run_jobs(run)
    dist.barrier()
