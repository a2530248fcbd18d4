"""verl 0.9.1's engine forward on real megatron-core models, padded and packed, a row on one rank and shared by two.

megatron-core 0.16.1 has no Gated DeltaNet for packed rows or two ranks; 0.19.2 has, with references for fla's kernels.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest
from cells import Stack, worst_of

NEEDS = ("verl", "megatron")

try:
    NEWEST = int(version("megatron-core").split(".")[1]) >= 18
except PackageNotFoundError:
    NEWEST = False
PLACE = ("verl, newest Megatron", "peers_newest") if NEWEST else ("verl, Megatron", "peers_misc")
STACK = Stack(PLACE[0], ("verl", "megatron-core"), PLACE[1])
LAYOUTS = {"packed": (1, ("thd",)), "context parallel": (2, ("bshd", "thd"))}
LAYOUTS |= {"padded right": (1, ("bshd",))} if NEWEST else {}  # test_verl
"""Ranks, and verl's data formats."""


def model_of(kinds):
    from megatron_world import TEDotProductAttention, gpt, hybrid

    return hybrid(kinds) if NEWEST and "g" in kinds else gpt(kinds, flash=TEDotProductAttention)


def learned(model, rows):
    """Logits of each row, and the gradient of the sum of its tokens' log-probabilities."""
    from verl_models import jagged

    model.zero_grad()
    told = [row[:-1].log_softmax(-1).gather(-1, ids[1:, None]).sum() for row, ids in zip(rows, jagged().unbind())]
    sum(told).backward()
    return [row.detach() for row in rows], {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def on_ranks(kinds, ranks, formats, ours):
    """In each of two processes: what verl's forward gives, against each row alone."""
    import torch.distributed as dist
    from megatron_world import apart, far, on_cpu, regroup
    from verl.models.mcore import registry, util
    from verl_models import PAD, alone, config, jagged

    from collate_npu.integrations import verl as engine

    patch = pytest.MonkeyPatch()
    util.is_npu_available = True
    on_cpu(patch)
    try:
        engine.install() if ours else None
        regroup(context_parallel_size=ranks)
        runs, forward = [], registry.get_mcore_engine_forward_fn(config())
        for data_format in formats:
            model, given = model_of(kinds), {"vision_model": False, "pad_token_id": PAD, "data_format": data_format}
            runs.append(learned(model, forward(model, jagged(), {}, **given).unbind()))
    except Exception as raised:
        return {"refused": f"{type(raised).__name__}: {raised}"}
    finally:
        engine.uninstall()
    for grad in (grad for _, told in runs for grad in told.values() if ranks > 1):
        dist.all_reduce(grad)
    regroup(context_parallel_size=1)
    model = model_of(kinds)
    wanted, gradient = learned(model, alone(model, jagged()))
    patch.undo()
    return {"refused": "", "error": max(max(apart(rows, wanted), far(told, gradient)) for rows, told in runs)}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "kinds"), [("attention", "aa"), ("Gated DeltaNet hybrid", "gag")])
def test_its_cells(ranks, family, kinds, layout):
    """The worse of both formats under context parallelism."""
    size, formats = LAYOUTS[layout]
    run = lambda who: ranks(2)("test_verl_cp.on_ranks", kinds, size, formats, who == "ours", seconds=300)  # noqa: E731
    both = {who: worst_of(run(who)) for who in ("alone", "ours")}
    hybrid, line = family != "attention", "actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin"
    name = "packed, kernels there" if layout == "packed" and NEWEST and hybrid else layout
    same = "right" if NEWEST or not hybrid else "refused"
    assert STACK.tell(family, name, **both, line=line) == (same, same), both
