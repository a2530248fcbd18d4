"""VeOmni 0.1.12: its collator, its models and `train.py config.yaml` on two ranks, with `adapt(trainer.base.model)`.

Its recurrent and flash kernels are stand-ins that go sequence by sequence (veomni_work.py); which offsets they are told, and
by whom, is VeOmni's. The truth is transformers' own model on each sequence alone.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import veomni_work
from cells import Stack, samples, verdict
from processes import found_by
from transformers import AutoModelForCausalLM
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.data.data_collator import MainCollator
from veomni.models import build_foundation_model

from collate_npu import CollateError, adapt
from collate_npu.consumers import transformers
from collate_npu.testing import byte_tokenizer, tiny_model

NEEDS = ("veomni",)

STACK = Stack("VeOmni", ("veomni", "transformers"), "peers_veomni")
LINE = "adapt(trainer.base.model)"
PADDED = "VeOmni packs every batch into one row"
FLASH = "flash_attention_2"
WRONG = 0.05


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(model type)`: where a tiny model of it lies, with a tokenizer."""
    folder = tmp_path_factory.mktemp("veomni")
    if not dist.is_initialized():  # it leaves models of other ranks empty, and without a rank this is one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @cache
    def path(name):
        tokenizer, where = byte_tokenizer(), folder / name
        tiny_model(name, vocab_size=len(tokenizer)).save_pretrained(where)
        tokenizer.save_pretrained(where)
        return str(where)

    yield path
    dist.destroy_process_group()


def built(path, attention):
    """As its trainer builds it, and transformers' model of the same weights."""
    kernels = OpsImplementationConfig(**veomni_work.kernels(attention))
    model = build_foundation_model(path, path, torch_dtype="float32", init_device="cpu", ops_implementation=kernels)
    return model.eval(), AutoModelForCausalLM.from_pretrained(path).eval()


def batch_of(rows, **settings):
    features = [{key: torch.tensor(ids) for key in ("input_ids", "labels")} for ids in rows]
    return dict(MainCollator(**settings)([f | {"attention_mask": torch.ones_like(f["labels"])} for f in features]))


@torch.no_grad()
def log_probabilities(logits_TV, rows):
    """Of each sequence of a flat row, its tokens but the first."""
    parts = logits_TV[: sum(map(len, rows))].log_softmax(-1).split(list(map(len, rows)))
    return [part[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0] for part, ids in zip(parts, rows)]


@torch.no_grad()
def packed(model, rows, **settings):
    batch = batch_of(rows, **settings)
    return log_probabilities(model(**batch | {"labels": None}, use_cache=False).logits[0], rows)


@torch.no_grad()
def alone(model, rows):
    return [one for ids in rows for one in log_probabilities(model(input_ids=torch.tensor([ids])).logits[0], [ids])]


def with_ours(model, run):
    handle = adapt(model)
    try:
        return run()
    finally:
        handle.remove()


@pytest.mark.parametrize(("family", "attention"), [("qwen3", "sdpa"), ("qwen3_5_text", FLASH)])
def test_the_gradient_is_that_of_each_sequence_alone(saved, family, attention):
    model, truth = built(saved(family), attention)
    rows = samples()
    for ids in map(torch.tensor, rows):  # its own loss is VeOmni's by now
        torch.nn.functional.cross_entropy(truth(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum").backward()
    own, taught = gradients(truth), sum(map(len, rows)) - len(rows)
    batch = batch_of(rows, pad_to_length=64)
    with_ours(model, lambda: (model(**batch, use_cache=False).loss * taught).backward())
    error = max(float((x - own[name]).norm() / own[name].norm()) for name, x in gradients(model).items())
    assert error < 1e-3, error


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_recurrent_layers_beside_dense_masks_are_refused(saved):
    """VeOmni's mask of ones hides from transformers that its rows are packed (masking_utils.py:876-882)."""
    model, truth = built(saved("qwen3_5_text"), "sdpa")
    rows = samples()
    off = max(float((x - y).abs().max()) for x, y in zip(packed(model, rows), alone(truth, rows)))
    assert off > WRONG
    with pytest.raises(CollateError, match="use flash attention for flat rows"):
        with_ours(model, lambda: packed(model, rows))


def test_a_window_is_lost_on_an_npu_and_that_is_refused(saved, monkeypatch):
    """There its flash attention is transformers' (5.9 integrations/npu_flash_attention.py:83-128), which takes no window."""
    model, _ = built(saved("gemma3_text"), FLASH)
    real = transformers.find_spec
    monkeypatch.setattr(transformers, "find_spec", lambda name: name == "torch_npu" or real(name))
    with pytest.raises(CollateError, match="drops windows in silence"):
        with_ours(model, lambda: packed(model, samples()))


# --- cells

CASES = [("qwen3", "sdpa"), ("qwen3_5_text", FLASH), ("gemma3_text", FLASH)]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_cells(saved, family, attention):
    model, truth = built(saved(family), attention)
    verdicts = STACK.cell(
        family,
        "packed",
        truth=lambda rows: alone(truth, rows),
        alone=lambda rows: packed(model, rows, pad_to_length=64),
        ours=lambda rows: with_ours(model, lambda: packed(model, rows, pad_to_length=64)),
        line=f"{LINE}, {attention}",
    )
    assert verdicts == (("wrong" if attention == "sdpa" else "right"), "right")


# --- the trainer

TEXTS = ["1 a short one", "2 and another that is longer", "3 three", "4 four four"] * 2
JOBS = [f"qwen3_5_text {FLASH} {rest}" for rest in ("tail ours", "ulysses own", "ulysses ours")]
NEXT = [f"qwen3_next sdpa {rest}" for rest in ("packed own", "packed ours", "single ours", "single own")]


@pytest.fixture(scope="module")
def trained(saved, tmp_path_factory):
    """What each job saw, by rank. VeOmni has no Qwen3-Next of its own: MODELING_BACKEND=hf runs transformers'."""
    folder, found = Path(saved("qwen3")).parent, {}
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"content_split": text}) for text in TEXTS), encoding="utf-8")
    for job in (*JOBS, *NEXT):
        saved(job.split()[0])
    for jobs, backend in ((JOBS, {}), (NEXT, {"MODELING_BACKEND": "hf"})):
        out = tmp_path_factory.mktemp("trained")
        found_by("veomni_work", out, folder, *jobs, variants=(backend,), ranks=2)
        ranks = [torch.load(out / f"veomni_work-0.json.{rank}.pt", weights_only=False) for rank in range(2)]
        found |= {job: [rank[job] for rank in ranks] for job in jobs}
    return found


def rows_of(ranks, job):
    """The rows of a job and their logits; ranks of Ulysses hold halves of the same ones."""
    if "ulysses" not in job:
        return [each for rank in ranks for each in rank["seen"]]
    return [(one + two, torch.cat([x, y])) for (one, x), (two, y) in zip(*(rank["seen"] for rank in ranks))]


def errors(trained, saved, job):
    """How far each sample of the job's rows is from the sample alone, and how many were compared; or why it refused.

    With MODELING_BACKEND=hf VeOmni leaves the experts of Qwen3-Next without their weights: there alone is its own run.
    """
    if refused := trained[job][0]["refused"]:
        return verdict(refused=refused), 0
    if job in NEXT:
        truth = {tuple(ids): log_probabilities(logits, [ids])[0] for ids, logits in rows_of(trained[NEXT[3]], NEXT[3])}
    else:
        model, texts = AutoModelForCausalLM.from_pretrained(saved(job.split()[0])).eval(), map(byte_tokenizer(), TEXTS)
        rows = {tuple(text["input_ids"]) for text in texts}
        truth = {row: alone(model, [list(row)])[0] for row in rows}
    worst, count = 0.0, 0
    for ids, logits in rows_of(trained[job], job):
        for row, wanted in truth.items():
            for at in (at for at in range(len(ids)) if tuple(ids[at : at + len(row)]) == row):
                worst = max(worst, float((log_probabilities(logits[at:], [list(row)])[0] - wanted).abs().max()))
                count += 1
    return verdict(worst), count


@pytest.mark.parametrize("job", [*JOBS, "qwen3_next sdpa single ours"])
def test_train_py_on_two_ranks(trained, saved, job):
    told, count = errors(trained, saved, job)
    assert told["verdict"] == "right"
    assert count >= 3


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_cells_of_the_trainer(trained, saved, family):
    jobs, layout, line = (NEXT[:2], "packed", f"{LINE}, MODELING_BACKEND=hf, sdpa") if family == "qwen3_next" else (
        JOBS[1:], "context parallel", f"{LINE}, ulysses_size 2, {FLASH}"
    )  # fmt: skip
    own, ours = (errors(trained, saved, job)[0] for job in jobs)
    found = STACK.tell(family, layout, alone=own, ours=ours, line=line)
    assert found == (("wrong", "refused") if family == "qwen3_next" else ("right", "right"))


@pytest.mark.parametrize("layout", ["padded right", "padded left"])
def test_cells_that_it_never_makes(layout):
    STACK.tell("qwen3_5_text", layout, alone=verdict(not_run=PADDED), ours=verdict(not_run=PADDED), line=LINE)
