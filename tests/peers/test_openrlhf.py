"""OpenRLHF 0.11.2: its `Actor`, reward and critic models on its own batches, and `train_sft`."""

from pathlib import Path

import openrlhf_world
import pytest
import torch

openrlhf_world.start()

from cells import PAD, Stack, of_job  # noqa: E402
from openrlhf.models import Actor, get_llm_for_sequence_regression  # noqa: E402
from openrlhf.utils.utils import zero_pad_sequences  # noqa: E402
from processes import found_by  # noqa: E402

from collate_npu import CollateError, adapt  # noqa: E402
from collate_npu.integrations import openrlhf as ours  # noqa: E402
from collate_npu.testing import tiny_model  # noqa: E402

NEEDS = ("openrlhf", "deepspeed", "peft", "ray")
STACK = Stack("OpenRLHF", ("openrlhf", "transformers", "deepspeed"), "peers_openrlhf")
LINE = "--module collate_npu.integrations.openrlhf"
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3", "gemma3_text")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models, as `--model.model_name_or_path` names one."""
    folder = tmp_path_factory.mktemp("models")

    def path(family):
        if not (folder / family).exists():
            tiny_model(family, vocab_size=128).save_pretrained(folder / family)
        return str(folder / family)

    return path


@pytest.fixture(autouse=True)
def disarmed():
    yield
    ours.disarm()


def built(path, armed, build=Actor, *words, **settings):
    """Through OpenRLHF's own builder, armed as its processes are; float32 afterwards, which it does not offer."""
    if armed:
        ours.arm()
    try:
        return build(path, *words, attn_implementation="sdpa", **settings).float().eval()
    finally:
        ours.disarm()


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory, saved):
    """What two ranks of ring attention gave."""
    folder = Path(saved(FAMILIES[0])).parent
    jobs = [f"{family} {who}" for family in FAMILIES if saved(family) for who in ("own", "ours")]
    return found_by("openrlhf_ring_work", tmp_path_factory.mktemp("ring"), folder, *jobs, ranks=2)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_of_ring_attention(family, shared):
    """The true ring_flash_attn, which makes other windows than the model's (gemma3_text)."""
    own, mine = (of_job(shared[f"{family} {who}"]) for who in ("own", "ours"))
    found = STACK.tell(family, "context parallel", alone=own, ours=mine, line=f"{LINE}, --ds.ring_attn_size 2")
    assert found == (("right", "right") if family == "qwen3" else ("wrong", "refused"))


@pytest.mark.parametrize("layout", ["padded right", "padded left", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cells(family, layout, saved):
    side, packing = "left" if layout == "padded left" else "right", {"packing_samples": layout == "packed"}
    own, with_ours = (scored(built(saved(family), armed, **packing), side) for armed in (False, True))
    truth = scored(built(saved(family), False), "right")
    alone, mine = STACK.cell(family, layout, truth=truth, alone=own, ours=with_ours, line=LINE)
    hybrid_packed = layout == "packed" and family in FAMILIES[:2]
    assert (alone, mine) == (("wrong", "refused") if hybrid_packed else ("right", "right"))


@pytest.mark.parametrize("kind", ["reward", "critic"])
@pytest.mark.parametrize("packing", [False, True])
@torch.no_grad()
def test_value_heads_call_the_backbone(kind, packing, saved):
    """Their forward takes no positions and packs inside; the adapter stands in front of the backbone."""
    samples = [[5, 9, 2, 77, 3, 12], [40, 41, 42], [PAD, 1, 8, 3, 100, 31, 64, 12, 6]]
    for family, right in (("qwen3", True), ("qwen3_next", not packing)):
        given = {"packing_samples": packing, "init_value_head": True}
        torch.manual_seed(0)
        model = built(saved(family), True, get_llm_for_sequence_regression, kind, **given)

        def answer(rows, model=model):
            ids, keep = batch_of(rows, "left")
            more = {"action_mask": torch.ones(len(rows), 1)} if kind == "critic" else {}
            return model(ids, attention_mask=keep, **more)

        if not right:
            with pytest.raises(CollateError, match="Give each sequence its own row"):
                answer(samples)
            continue
        alone = torch.cat([answer([row]) for row in samples])
        assert float((answer(samples) - alone).abs().max()) < 1e-5


def test_armed_and_disarmed(saved):
    model = built(saved("qwen3"), True).model
    assert model._forward_pre_hooks
    assert not built(saved("qwen3"), False).model._forward_pre_hooks
    lora = built(saved("qwen3"), True, lora_rank=2, target_modules="all-linear").model
    assert lora._forward_pre_hooks  # PEFT's wrapper, which runs no hook of the model inside


def test_an_actor_is_adapted_by_what_is_in_it(saved):
    actor = built(saved("qwen3_next"), False, packing_samples=True)
    with adapt(actor), pytest.raises(CollateError, match="Give each sequence its own row"):
        scored(actor, "right")([[5, 9, 2], [40, 41, 42, 43]])
    assert not actor.model._forward_pre_hooks


RIGHT = 0.1
"""Of hidden states in bfloat16, which its command line asks for."""


def test_train_sft_under_zero_3_is_armed(tmp_path):
    (found,) = found_by("openrlhf_work", tmp_path, tmp_path, "qwen3_next ours")
    job = found["qwen3_next ours"]
    assert (job["refused"], job["compared"]) == ("", 4)
    assert job["error"] < RIGHT
    assert job["masks"]["linear_attn"] == ["int64 [4, 45]"]  # as `BatchAdapter` gives it; OpenRLHF's own is a bool
    assert job["hooked"]


def test_rays_own_loader_finds_the_hook(saved):
    """What each worker runs where a user names it (ray 2.55 _private/workers/default_worker.py:314-318)."""
    from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook

    assert load_and_execute_setup_hook("collate_npu.integrations.openrlhf.arm") is None
    assert Actor(saved("qwen3"), attn_implementation="sdpa").model._forward_pre_hooks
