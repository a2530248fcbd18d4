"""DeepSpeed between two ranks: `adapt` under ZeRO-3, and Ulysses (`ParallelismConfig(sp_size=2)`) under a Trainer
and under Accelerate alone; and PEFT, which wraps a model behind `adapt`.

`python test_deepspeed.py OUT FOLDER JOB ...` is one of them. DeepSpeed's engine, loader and attention are its own; Gloo
takes no gather of a number into rows, nor of rows of two widths.
"""

# ruff: noqa: E402
import functools
from contextlib import nullcontext

import openrlhf_world

openrlhf_world.deepspeed_on_cpu()
import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from adapt_work import PARTS, ROWS, VOCAB, batch_of, mean_of_ranks
from cells import Stack, check_job, gradient_error, of_job, samples, scores
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_grad
from processes import found_by, refusal, run_jobs
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from collate_npu import ContextParallel, PaddingCollator, adapt, gather_sequence
from collate_npu.errors import UnsupportedFormError
from collate_npu.testing import tiny_model

NEEDS = ("transformers", "deepspeed", "peft")
STACK = Stack("transformers Trainer, sp", ("transformers", "accelerate", "deepspeed"), "peers_openrlhf")
FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1")
CELLS = {(family, "context parallel"): f"trainer {family}" for family in FAMILIES}
ALONE, LEFT, LEFT_DENSE = ONCE = ("accelerate qwen3_next", "trainer qwen3_next left", "trainer qwen3 left")
ZERO_3 = [f"{first} {case}" for first in ("before", "behind") for case in ("qwen3_next padded", "qwen3 packed")]


def test_behind_adapt_lora_is_refused_until_it_is_merged():
    """LoRA's wrapper calls `model.forward`, and no hook of the model runs: in silence, were the backbone not asked."""
    batch = {key: value for key, value in batch_of(ROWS, "padded left").items() if key != "labels"}
    model = tiny_model("gpt2", vocab_size=VOCAB)
    adapt(model)
    told = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**told)).eval()
    with pytest.raises(UnsupportedFormError, match="Call adapt on what get_peft_model returned"):
        wrapped(**batch)
    merged, row = wrapped.merge_and_unload(), ROWS[0]
    alone = merged(input_ids=row[None], attention_mask=torch.ones_like(row)[None]).logits[0]
    assert (merged(**batch).logits[0, -len(row) :] - alone).abs().max() < 1e-4


def test_zero_3_on_two_ranks(tmp_path):
    """`adapt` before and behind `deepspeed.initialize`."""
    (found,) = found_by("test_deepspeed", tmp_path, tmp_path, *ZERO_3, ranks=2)
    for job in ZERO_3:
        check_job(found[job])


def test_ulysses_on_two_ranks(tmp_path):
    """Ulysses drops every mask and window on sdpa; and accelerate refuses by name again behind a model that was adapted."""
    own, ours = found_by("test_deepspeed", tmp_path, tmp_path, *CELLS.values(), *ONCE, variants=({}, {"RUN": "1"}), ranks=2)
    STACK.tell_both(own, ours, CELLS, line="collate-npu run --")
    assert of_job(ours[ALONE])["verdict"] == "right"
    assert all("padding stands on the left" in ours[job]["refused"] for job in (LEFT, LEFT_DENSE))
    assert "has a window" in ours["trainer gemma3_text"]["refused"]
    if own:
        assert [of_job(own[job])["verdict"] for job in (ALONE, LEFT_DENSE)] == ["right", "wrong"]
        assert "linear_attention" in own[LEFT]["refused"]


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


PARTITIONED = {
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}  # fmt: skip


def under_zero_3(first, family, layout):
    """How far a step's gradient is from that of the samples alone; `compared`: its parameters that are not whole here."""
    model, wanted = tiny_model(family, vocab_size=VOCAB), mean_of_ranks(family)
    if first == "before":
        adapt(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=PARTITIONED)
    if first == "behind":
        adapt(engine)
    batch = batch_of(PARTS[dist.get_rank()], "padded left" if layout == "padded" else layout)
    engine.backward(engine(**batch).loss)
    grads = [(safe_get_full_grad(p), p.ds_shape) for p in model.parameters()]
    found = torch.cat([(torch.zeros(shape) if grad is None else grad).flatten() for grad, shape in grads])
    error = gradient_error([found], [wanted])
    return {"refused": "", "error": error, "gradient": error, "compared": sum(p.numel() == 0 for p in model.parameters())}


def run(folder, door, family, side="right"):
    if door in ("before", "behind"):
        return under_zero_3(door, family, side)
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
