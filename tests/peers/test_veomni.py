"""VeOmni 0.1.12: `train.py config.yaml` on two ranks, its collator and models in it, with `adapt(trainer.base.model)`.

A CPU enters by the doors that VeOmni leaves open: its registry of kernels, which takes other backends
(ops/kernel_registry.py), and the slot under its flash attention (ops/kernels/attention/flash.py:34-38). Its recurrent and
flash kernels go sequence by sequence; which offsets they are told, and by whom, is VeOmni's. Stand-ins: a package
`flash_attn` that is only looked for, Gloo for its card's backend, and a name for the device. The truth is transformers' own
model on each sequence alone.

`python test_veomni.py OUT.json FOLDER JOB...` is a rank of the trainer, FSDP2 on Gloo; a job is "model attention setting
own|ours". `ours` is one line of the user's train.py, between its trainer and its training.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import yaml
from cells import Stack, alone, gradient_error, scores, verdict
from processes import found_by, refusal, saved_model
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from stand_ins import answer, varlen_attention
from transformers import AutoModelForCausalLM
from veomni.arguments import parse_args
from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from veomni.ops.kernels.attention import flash
from veomni.trainer import text_trainer
from veomni.trainer.text_trainer import TextTrainer, VeOmniArguments

from collate_npu import adapt
from collate_npu.testing import byte_tokenizer

NEEDS = ("veomni",)

STACK = Stack("VeOmni", ("veomni", "transformers"), "peers_veomni")
LINE = "adapt(trainer.base.model)"
FLASH = "flash_attention_2"

sys.modules["flash_attn"] = looked_for = ModuleType("flash_attn")
looked_for.flash_attn_func = looked_for.flash_attn_varlen_func = lambda *args, **kwargs: args
answer(torch.cpu, get_device_name="A CPU", empty_cache=None, memory_stats={"num_alloc_retries": 0})
answer(torch.cpu, **dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved"), 0))


def convolution(x, weight, bias, activation, seq_idx, backend, cu_seqlens):
    return reference_causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens), None


def delta_rule(*args, cu_seqlens, **kwargs):
    return reference_gated_delta_rule(*args, cu_seqlens=cu_seqlens, **kwargs)


def attention(query, key, value, attention_mask, *, cu_seq_lens_q=None, softmax_scale, sliding_window=None, **kwargs):
    """Sequence by sequence, `[1, T, heads, size]`, as a kernel with offsets goes; each row is one without them."""
    assert attention_mask is None or bool(attention_mask.all())
    window = -1 if sliding_window is None else sliding_window - 1
    rows, width = query.shape[:2]
    offsets = torch.arange(rows + 1) * width if cu_seq_lens_q is None else cu_seq_lens_q
    flat = (x.flatten(0, 1) for x in (query, key, value))
    return varlen_attention(*flat, offsets, offsets, softmax_scale, window).view_as(query)


flash._flash_attention_forward = attention
for op, kernel in (("causal_conv1d", convolution), ("chunk_gated_delta_rule", delta_rule)):
    KERNEL_REGISTRY.register(
        KernelSpec("reference", op, "standard", lambda kernel=kernel: kernel, HardwareRequirement(device_type="any"))
    )

EAGER = ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "rms_norm_gated", "load_balancing_loss")


def kernels(attention):
    """`model.ops_implementation` of its YAML."""
    ours = {f"{name}_implementation": "reference" for name in ("causal_conv1d", "chunk_gated_delta_rule")}
    eager = {f"{name}_implementation": "eager" for name in EAGER}
    return {"attn_implementation": attention, "moe_implementation": "eager", **ours, **eager}


# --- train.py config.yaml on two ranks

TEXTS = ["1 a short one", "2 and another, and longer", "3 three", "4 four four"] * 2
"""VeOmni weights ranks by their labels, of which it counts one more than it learns: of these each learns as many."""
PACKED = {"qwen3": "sdpa", "qwen3_5_text": FLASH, "gemma3_text": FLASH}
JOBS = [f"{family} {FLASH} ulysses {who}" for family in PACKED for who in ("own", "ours")]
JOBS += [f"{family} sdpa ulysses ours" for family in PACKED]
JOBS += [f"{family} {kernel} packed {who}" for family, kernel in PACKED.items() for who in ("own", "ours")]
# its mask of ones hides from transformers that rows are packed (masking_utils.py:876-882)
JOBS += ["qwen3_5_text sdpa tail ours", *(f"{family} {kernel} tail ours" for family, kernel in PACKED.items())]
NEXT = [f"qwen3_next sdpa {rest}" for rest in ("packed own", "packed ours", "single ours", "single own", "ulysses ours")]
SINGLE = NEXT[3]


def rows_of(ranks, job):
    """The rows of a job and their logits; ranks of Ulysses hold halves of the same ones."""
    if "ulysses" not in job:
        return [each for rank in ranks for each in rank["seen"]]
    return [(one + two, torch.cat([x, y])) for (one, x), (two, y) in zip(*(rank["seen"] for rank in ranks))]


def judged(ranks, job, texts, truth=None):
    """A job's verdict, and how many of the texts were compared; `texts`: each with its log-probabilities alone. The gradient
    is held against that of the model `truth`, alone on what was compared."""
    if refused := ranks[0]["refused"]:
        return verdict(refused=refused), 0
    worst, compared = 0.0, []
    for ids, logits in rows_of(ranks, job):
        for row, wanted in texts.items():
            for at in (at for at in range(len(ids)) if tuple(ids[at : at + len(row)]) == row):
                worst = max(worst, float((scores(logits[at:], row) - wanted).abs().max()))
                compared.append(row)
    if truth is None:
        return verdict(worst), len(compared)
    wanted, found = learned(truth, compared), ranks[0]["gradient"]
    return verdict(worst, gradient=gradient_error([found[name] for name in wanted], [*wanted.values()])), len(compared)


def learned(model, rows):
    """The gradient of the mean over all tokens."""
    model.zero_grad()
    for ids in map(torch.tensor, rows):
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        (loss / (sum(map(len, rows)) - len(rows))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained_by(folder, jobs, **env):
    """What each job saw, by rank."""
    for job in jobs:
        saved_model(folder, job.split()[0])
    data = "\n".join(json.dumps({"content_split": text}) for text in TEXTS)
    (folder / "data.jsonl").write_text(data, encoding="utf-8")
    found_by("test_veomni", folder, folder, *jobs, variants=(env,), ranks=2)
    ranks = [torch.load(folder / f"test_veomni-0.json.{rank}.pt", weights_only=False) for rank in range(2)]
    return {job: [rank[job] for rank in ranks] for job in jobs}


def test_train_py_on_two_ranks(tmp_path):
    trained = trained_by(tmp_path, JOBS)
    tokenizer, found = byte_tokenizer(), {}
    rows = list({(*ids, tokenizer.eos_token_id) for ids in tokenizer(TEXTS)["input_ids"]})
    for job in JOBS:
        truth = AutoModelForCausalLM.from_pretrained(tmp_path / job.split()[0]).eval()
        texts = dict(zip(rows, torch.no_grad()(alone(truth))(rows)))
        found[job], count = judged(trained[job], job, texts, truth if "ours" in job else None)
        assert count >= 3 * ("ours" in job), job
        assert found[job]["verdict"] == "right" or "own" in job, found
    for family, kernel in PACKED.items():
        cells = {"packed": (f"{kernel} packed", kernel)}
        cells["context parallel"] = (f"{FLASH} ulysses", f"ulysses_size 2, {FLASH}")
        for layout, (how, line) in cells.items():
            own, ours = (found[f"{family} {how} {who}"] for who in ("own", "ours"))
            STACK.tell(family, layout, alone=own, ours=ours, line=f"{LINE}, {line}")


def test_a_model_of_transformers_on_two_ranks(tmp_path):
    """VeOmni has no Qwen3-Next of its own. With MODELING_BACKEND=hf it leaves the experts without their weights: alone is a
    run of its own, of rows of one sequence. Labels that transformers' loss would move again within a part are refused."""
    trained = trained_by(tmp_path, NEXT, MODELING_BACKEND="hf")
    texts = {tuple(ids): scores(logits, ids) for ids, logits in rows_of(trained[SINGLE], SINGLE)}
    (own, _), (ours, count), (single, _), _, _ = (judged(trained[job], job, texts) for job in NEXT)
    STACK.tell("qwen3_next", "packed", alone=own, ours=ours, line=f"{LINE}, MODELING_BACKEND=hf, sdpa")
    assert (single["verdict"], count >= 3) == ("right", True)
    assert "moves labels within this rank's part" in trained[NEXT[-1]][0]["refused"]


SETTINGS = {"packed": {}, "tail": {"pad_to_length": True}, "ulysses": {"ulysses_size": 2}}
SETTINGS["single"] = {"dyn_bsz": False, "max_steps": 4}


def config(folder, model, attention, *, pad_to_length=False, ulysses_size=1, dyn_bsz=True, max_steps=1):
    told_kernels = kernels(attention)
    data = {"train_path": str(folder / "data.jsonl"), "data_type": "plaintext", "text_keys": "content_split"}
    data |= {"max_seq_len": 64, "train_size": 256, "dyn_bsz_buffer_size": 4}
    data |= {"dataloader": {"num_workers": 0, "pin_memory": False, "drop_last": False}}
    whole = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32")
    parallel = {"ulysses_size": ulysses_size, "fsdp_config": {"fsdp_mode": "fsdp2", "mixed_precision": whole}}
    train = {"accelerator": parallel, "init_device": "meta", "micro_batch_size": 1, "global_batch_size": 2}
    train |= {"num_train_epochs": 1, "max_steps": max_steps, "pad_to_length": pad_to_length, "dyn_bsz": dyn_bsz}
    train |= {key: {"enable": False} for key in ("gradient_checkpointing", "wandb")}
    train |= {"optimizer": {"lr": 0.0, "max_grad_norm": 1e9}}
    train |= {"checkpoint": {"output_dir": str(folder / "out"), "save_steps": 0, "save_epochs": 0, "save_hf_weights": False}}
    named = {"model_path": str(folder / model), "tokenizer_path": str(folder / model), "ops_implementation": told_kernels}
    path = folder / f"{model}-{os.environ['RANK']}.yaml"
    path.write_text(yaml.safe_dump({"model": named, "data": data, "train": train}), encoding="utf-8")
    return str(path)


def run(folder, model, attention, setting, who):
    seen, gradient = [], {}
    sys.argv = ["train.py", config(folder, model, attention, **SETTINGS[setting])]
    trainer = TextTrainer(parse_args(VeOmniArguments))
    if who == "ours":
        adapt(trainer.base.model)

    def note(module, args, kwargs, output):
        seen.append((kwargs["input_ids"][0].tolist(), output.logits.detach().view(-1, output.logits.shape[-1])))

    def clipped(model, *args, **kwargs):
        whole = ((name, getattr(p.grad, "full_tensor", lambda p=p: p.grad)()) for name, p in model.named_parameters())
        gradient.update({name: grad.clone() for name, grad in whole if grad is not None})
        return clip(model, *args, **kwargs)

    trainer.base.model.register_forward_hook(note, with_kwargs=True)
    clip, text_trainer.veomni_clip_grad_norm = text_trainer.veomni_clip_grad_norm, clipped
    refused = refusal(trainer.train)
    text_trainer.veomni_clip_grad_norm = clip
    if refused:
        trainer.base.destroy_distributed()
    return {"seen": seen, "refused": refused, "gradient": gradient}


if __name__ == "__main__":
    out, folder, *jobs = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {}
    for n, job in enumerate(jobs):
        store = dist.FileStore(f"{os.environ['STORE']}-{n}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found[job] = run(Path(folder), *job.split())
    torch.save(found, f"{out}.{rank}.pt")
    Path(out).write_text("null", encoding="utf-8")
    os._exit(0)  # a trainer that refused leaves threads of its data behind
