"""verl 0.9.1's engine forward on real megatron-core models, padded and packed, a row on one rank and shared by two.

megatron-core 0.16.1 has no Gated DeltaNet for packed rows or two ranks; 0.19.2 has, with references for fla's kernels.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest
from cells import Stack, scores

NEEDS = ("verl", "megatron")

try:
    NEWEST = int(version("megatron-core").split(".")[1]) >= 18
except PackageNotFoundError:
    NEWEST = False
PLACE = ("verl, newest Megatron", "peers_newest") if NEWEST else ("verl, Megatron", "peers_misc")
LINE = "actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin"
KINDS = {"attention": "aa", "Gated DeltaNet hybrid": "gag"}


def test_its_cells(ranks):
    Stack(PLACE[0], ("verl", "megatron-core"), PLACE[1]).tell_jobs(ranks(2)("test_verl_cp.cells", seconds=600)[0], line=LINE)


def layouts(family, ranks):
    """verl's data formats of each layout."""
    if ranks > 1:
        return {"context parallel": ["bshd", "thd"]}
    packed = "packed, kernels there" if NEWEST and family != "attention" else "packed"
    return {packed: ["thd"]} | ({"padded right": ["bshd"]} if NEWEST else {})  # else in test_verl


def model_of(family):
    from megatron_world import TEDotProductAttention, gpt, hybrid

    kinds = KINDS[family]
    return hybrid(kinds) if NEWEST and "g" in kinds else gpt(kinds, flash=TEDotProductAttention)


def learned(model, rows):
    """Logits of each row, and the gradient of the sum of its tokens' log-probabilities."""
    from megatron_world import summed
    from verl_models import jagged

    sum(scores(row, ids.tolist()).sum() for row, ids in zip(rows, jagged().unbind())).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [row.detach() for row in rows], summed(gradients)


def truth(family):
    from verl_models import alone, jagged

    model = model_of(family)
    return learned(model, alone(model, jagged()))


def run(family, data_format, ours):
    from verl.models.mcore import registry
    from verl_models import PAD, config, jagged

    from collate_npu.integrations import verl as engine

    engine.install() if ours else None
    try:
        model, forward = model_of(family), registry.get_mcore_engine_forward_fn(config())
        given = {"vision_model": False, "pad_token_id": PAD, "data_format": data_format}
        return learned(model, forward(model, jagged(), {}, **given).unbind())
    finally:
        engine.uninstall()


def cells():
    """As beside torch_npu."""
    from megatron_world import cells_on_ranks, on_cpu
    from verl.models.mcore import util

    util.is_npu_available = True
    on_cpu(pytest.MonkeyPatch())
    return cells_on_ranks(KINDS, layouts, truth, run)
