"""OpenRLHF 0.11.2 on a CPU: its `Actor`, reward and critic models on its own batches, ranks that share rows, `train_sft`.

`python test_openrlhf.py OUT FOLDER MODEL...` runs `openrlhf.cli.train_sft` as its launcher does, and may go through
`collate-npu run`. With another rank beside it, it is one of two that share rows by `--ds.ring_attn_size 2`: the true
ring_flash_attn 0.1.8, below which flash_attn's kernel stands in.
"""

# ruff: noqa: E402
import json
import os
import runpy
import sys
from types import SimpleNamespace

import openrlhf_world
import pytest
import torch

openrlhf_world.start()
from cells import PAD, Stack, samples
from openrlhf.models import Actor, actor, get_llm_for_sequence_regression, ring_attn_utils
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import zero_pad_sequences
from processes import TEXTS, found_by, process_group, refusal, run_jobs, saved_model, watched
from rotation import some
from watching import Watch

from collate_npu import adapt
from collate_npu.testing import byte_tokenizer

NEEDS = ("openrlhf", "deepspeed", "peft", "ray")
STACK = Stack("OpenRLHF", ("openrlhf", "transformers", "deepspeed"), "peers_openrlhf")
LINE = "collate-npu run --"
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3", "gemma3_text")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models, as `--model.model_name_or_path` names one."""
    folder = tmp_path_factory.mktemp("models")
    return lambda family: saved_model(folder, family)


def built(path, adapted, build=Actor, *words, **settings):
    """Through OpenRLHF's own builder; float32 afterwards, which it does not offer. `adapted` as `collate-npu run` does."""
    model = build(path, *words, attn_implementation="sdpa", **settings).float().eval()
    if adapted:
        adapt(model)
    return model


def batch_of(samples, side):
    """As its datasets' collate_fn joins rows: chosen by side, the mask with zeros."""
    rows = [torch.tensor([ids]) for ids in samples]
    return zero_pad_sequences(rows, side, PAD), zero_pad_sequences([torch.ones_like(row) for row in rows], side)


def scored(actor, side):
    """Log-probabilities as its SFT trainer asks for them (sft_trainer.py:170-176)."""

    def run(samples):
        ids, keep = batch_of(samples, side)
        log_probs, _ = actor(ids, attention_mask=keep, return_output=True, return_logprobs=True)
        starts = [0 if side == "right" else ids.shape[1] - len(row) for row in samples]
        return [row[at : at + len(ids) - 1] for row, at, ids in zip(log_probs, starts, samples)]

    return run


def test_cells_of_ring_attention(tmp_path):
    """The true ring_flash_attn, which makes other windows than the model's (gemma3_text)."""
    for family in (families := some(FAMILIES, 2)):
        saved_model(tmp_path, family)
    own, ours = found_by("test_openrlhf", tmp_path, tmp_path, *families, variants=({}, {"RUN": "1"}), ranks=2)
    cells = {(family, "context parallel"): family for family in families}
    STACK.tell_both(own, ours, cells, line=f"{LINE} ... --ds.ring_attn_size 2")


@pytest.mark.parametrize("layout", ["padded right", "padded left", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cells(family, layout, saved):
    side, packing = "left" if layout == "padded left" else "right", {"packing_samples": layout == "packed"}
    own, with_ours = (scored(built(saved(family), armed, **packing), side) for armed in (False, True))
    truth = scored(built(saved(family), False), "right")
    STACK.cell(family, layout, truth=truth, alone=own, ours=with_ours, line=LINE)


@pytest.mark.parametrize("kind", ["reward", "critic"])
@pytest.mark.parametrize("packing", [False, True])
@torch.no_grad()
def test_value_heads_call_the_backbone(kind, packing, saved):
    """Their forward takes no positions and packs inside; the adapter stands in front of the backbone."""
    for family in ("qwen3", "qwen3_next"):
        given = {"packing_samples": packing, "init_value_head": True}
        model = built(saved(family), True, get_llm_for_sequence_regression, kind, **given)

        def answer(rows, model=model):
            ids, keep = batch_of(rows, "left")
            more = {"action_mask": torch.ones(len(rows), 1)} if kind == "critic" else {}
            return model(ids, attention_mask=keep, **more)

        alone = torch.cat([answer([row]) for row in samples()])
        assert float((answer(samples()) - alone).abs().max()) < 1e-5


def test_train_sft_under_zero_3_through_run(tmp_path):
    """Hidden states are in bfloat16, which its command line asks for."""
    job = found_by("test_openrlhf", tmp_path, tmp_path, "qwen3_next", variants=({"RUN": "1"},), ranks=1)[0]["qwen3_next"]
    assert (job["refused"], job["compared"]) == ("", 4)
    assert job["error"] < 0.1
    assert job["masks"] == {"linear_attn": ["None"], "self_attn": ["bool [1, 1, 1, 1]"]}  # of a flat row


@torch.no_grad()
def share(folder, family):
    path = saved_model(folder, family)
    truth = Actor(path, attn_implementation="sdpa").float().eval()
    actor = built(path, False, packing_samples=True)
    actor.model.config._attn_implementation = "flash_attention_2"
    ids, keep = batch_of(samples(), "right")
    given = {"return_logprobs": True, "ring_attn_group": ring_attn_utils.RING_ATTN_GROUP}
    found = []
    if refused := refusal(lambda: found.extend(actor(ids, attention_mask=keep, **given))):
        return {"refused": refused}
    wanted = [scored(truth, "right")([row])[0] for row in samples()]
    return {"refused": "", "error": max(float((x[: len(y)] - y).abs().max()) for x, y in zip(found, wanted))}


def start_ring():
    process_group()
    ds = SimpleNamespace(zero_stage=3, param_dtype="bf16", ring_attn_size=2)
    train = SimpleNamespace(seed=0, micro_batch_size=4, batch_size=4)
    get_strategy(SimpleNamespace(ds=ds, train=train, local_rank=-1)).setup_distributed()


NAME = "openrlhf.cli.train_sft"


def settings(folder, model):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"input": text}) + "\n" for text in TEXTS), encoding="utf-8")
    named = {
        "model.model_name_or_path": saved_model(folder, model), "data.dataset": data, "data.max_len": 64,
        "train.batch_size": 4, "train.micro_batch_size": 4, "train.max_epochs": 1, "ds.zero_stage": 3,
        "ds.attn_implementation": "sdpa", "adam.lr": 0, "ckpt.output_dir": folder / "out", "ckpt.path": folder / "ckpt",
    }  # fmt: skip
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*words, "--model.pretrain_mode_enable", "--ckpt.disable_ds"]


def train(folder, model):
    """One training step; the model is watched from the moment when OpenRLHF has built it."""
    build, seen = actor.Actor.__init__, []

    def watched_build(self, *args, **kwargs):
        build(self, *args, **kwargs)
        seen.append(Watch(self.model).__enter__())

    actor.Actor.__init__ = watched_build
    sys.argv = ["python", "--local_rank=0", *settings(folder, model)]
    refused = refusal(lambda: runpy.run_module(NAME, run_name="__main__", alter_sys=True))
    rows = {tuple(byte_tokenizer()(text)["input_ids"]) for text in TEXTS}
    return watched(seen[0], rows, refused) if seen else {"refused": refused}


if __name__ == "__main__":
    if os.environ["WORLD_SIZE"] == "2":
        start_ring()
        run_jobs(share)
    else:
        run_jobs(train)
