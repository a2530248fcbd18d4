"""verl 0.9.1 with Megatron: its forwards and engine on real megatron-core models (CPU), without ours and with, a row on one
rank and shared by two; and who installs ours in its processes (`python test_verl.py OUT` is one of them).

Forwards are taken from verl's registry as its engine takes them: every row equals its logits alone. The engine is made by
its constructor; its `initialize` builds the model with Megatron-Bridge, which needs CUDA: here it is one of megatron-core.
As a card's kernels do, attention refuses a `[B, S]` mask on an NPU and ignores one elsewhere (`megatron_world`).
megatron-core 0.16.1 has no Gated DeltaNet for packed rows or two ranks; 0.19.2 has.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

if __name__ != "__main__":  # a process of verl's imports nothing before it
    import megatron_world as world
    import torch
    from cells import Stack, scores
    from megatron_world import EXPERTS, NATIVE, PAD, Attention, TEDotProductAttention, apart, far, gpt, gradients_of, hybrid
    from processes import found_by, saved_model
    from tensordict import TensorDict
    from torch import nn
    from verl.models.mcore import registry, util

    from collate_npu.errors import UnsupportedFormError
    from collate_npu.integrations import verl as engine

NEEDS = ("verl", "megatron")
LENGTHS, NEAR = (7, 3, 1, 5, 2, 4, 6), 2e-5
"""As many rows as tokens: Megatron's own attention then takes a mask of rows and columns for one of queries and keys."""
PLUGIN = "collate_npu.integrations.verl.plugin"


def jagged(*lengths):
    rows = [torch.tensor([(5 * i + 3 * b) % 60 + 1 for i in range(n)]) for b, n in enumerate(lengths or LENGTHS)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def config(vision=False):
    name = "Qwen3_5ForConditionalGeneration" if vision else "Qwen3ForCausalLM"
    return SimpleNamespace(architectures=[name], **({"vision_config": None} if vision else {}))


def padded(model, values, data_format="bshd", **more):
    """The forward that its engine takes, of jagged rows; its output as rows."""
    vision = hasattr(model, "language_model")
    given = {"vision_model": vision, "pad_token_id": PAD, "data_format": data_format, **more}
    return registry.get_mcore_engine_forward_fn(config(vision))(model, values, given.pop("pixels", {}), **given).unbind()


def older(model, values, data_format="bshd", dtype=None, pixels=None):
    """The forward for rows padded on the left."""
    rows = values.unbind()
    width = max(map(len, rows))
    keep = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    ids = torch.full(keep.shape, PAD).masked_scatter(keep, values.values())
    forward = registry.get_mcore_forward_fn(config(hasattr(model, "language_model")))
    output = forward(model, ids, keep.to(dtype), (keep.cumsum(1) - 1).clamp(min=0), pixels or {}, data_format=data_format)
    return [row[real] for row, real in zip(output, keep)]


def alone(model, values, pixels=None):
    """The logits of each row when it is the whole batch."""
    more = [{} if pixels is None else {"pixel_values": pixels[row : row + 1]} for row in range(len(values.unbind()))]
    rows = zip(values.unbind(), more)
    return [model(input_ids=ids[None], position_ids=None, attention_mask=None, **more)[0] for ids, more in rows]


@pytest.fixture
def npu(monkeypatch):
    """What verl decides once, at import, by looking for torch_npu."""
    monkeypatch.setattr(util, "is_npu_available", True)


# --- forwards


def vision_model(language):
    """Whole rows in, pixels added to the first real token of each, then the language model. Megatron-Bridge's needs CUDA:
    like it, this takes the 2D mask, or None, and counts positions itself."""

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model, self.config = language, language.config
            self.pre_process, self.post_process = language.pre_process, language.post_process

        def forward(self, input_ids, position_ids, attention_mask, pixel_values, packed_seq_params=None, **more):
            embedded = language.embedding(input_ids=input_ids, position_ids=None)  # [S, B, H]
            keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            first = nn.functional.one_hot(keep.int().argmax(1), len(embedded)).T[..., None]
            given = {"input_ids": None, "position_ids": None, "attention_mask": attention_mask, **more}
            return language(**given, decoder_input=embedded + first * pixel_values)

    return Vision()


@pytest.mark.parametrize("here", [True, False], ids=["npu", "other"])
@pytest.mark.parametrize(("forward", "more"), [(padded, {}), (older, {}), (older, {"dtype": "int64"})])
@pytest.mark.parametrize("kind", ["vision", "local, one row"])
def test_padded_rows_are_each_sample_alone(forward, more, kind, here, monkeypatch, verl_ours, cpu):
    """Those of text alone are cells."""
    monkeypatch.setattr(util, "is_npu_available", here)
    if kind == "vision":
        values, pixels = jagged(), torch.randn(len(LENGTHS), 32)
        model, given = vision_model(gpt("ga", flash=Attention if here else TEDotProductAttention)), {"pixel_values": pixels}
    else:
        values, model, pixels, given = jagged(7), gpt("ga", flash=None), None, {}
    more = ({"dtype": torch.long} if more else {}) | ({"pixels": given} if given else {})
    assert apart(forward(model, values, **more), alone(model, values, pixels)) <= NEAR


def test_routers_count_no_padding(npu, verl_ours, cpu):
    """The gradient of the aux loss alone, of the same rows in two widths."""
    model, found = gpt("aa", **EXPERTS).train(), []
    for width in (7, 21):
        model.zero_grad()
        sum((row * 0).sum() for row in padded(model, jagged(), forced_max_seqlen=width)).backward()
        found.append({name: grad for name, grad in gradients_of(model).items() if "router" in name})
    assert far(*found) <= 1e-5
    assert max(float(grad.abs().max()) for grad in found[0].values()) > 1e-2


FORWARDS = {
    "padded": padded,
    "packed": lambda model, values: padded(model, values, "thd"),
    "older": older,
    "older packed": lambda model, values: older(model, values, "thd"),
    "fused": lambda model, values: registry.get_mcore_forward_fused_model_engine_fn(config())(
        model, values, values, {}, 1.0, False, PAD
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_window_shorter_than_the_rows_is_refused_on_an_npu(name, npu, verl_ours, cpu):
    with pytest.raises(UnsupportedFormError, match=r"(?s)longer than 4.*Keep rows to 5 tokens"):
        FORWARDS[name](gpt(window_size=(4, 0)), jagged())


def test_a_window_no_row_reaches_is_computed_and_elsewhere_it_is_verls_own_business(npu, verl_ours, monkeypatch, cpu):
    for window in ((6, 0), (-1, 0)):
        model, values = gpt(window_size=window), jagged()
        assert apart(padded(model, values), alone(model, values)) <= NEAR
    monkeypatch.setattr(util, "is_npu_available", False)
    padded(gpt(window_size=(4, 0), flash=TEDotProductAttention), jagged())


def test_what_was_taken_from_the_registry_before_an_uninstall_is_verls_own_again(npu, monkeypatch, cpu):
    engine.install()
    taken = registry.get_mcore_forward_fn(config())
    engine.uninstall()
    monkeypatch.setattr(registry, "get_mcore_forward_fn", lambda config: taken)
    with pytest.raises(AssertionError, match="invalid"):
        older(gpt(), jagged())


# --- the engine: log-probabilities, entropy and gradients of a batch


def engine_of(model, folder):
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.engine import MegatronEngineWithLMHead

    config = McoreEngineConfig(use_dynamic_bsz=False, use_remove_padding=False)
    path = saved_model(folder, "qwen3")
    made = MegatronEngineWithLMHead(HFModelConfig(path=path, model_type="language_model"), config, None, None)
    made.module, made.tf_config = [model], model.config
    return made


def batch(values):
    from verl.utils import tensordict_utils as tu

    ones = torch.nested.nested_tensor_from_jagged(torch.ones_like(values.values()), values.offsets())
    held = {"input_ids": values, "loss_mask": ones, "temperature": torch.ones(len(values.unbind()))}
    data = TensorDict(held, batch_size=len(values.unbind()))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, calculate_entropy=True)
    return data


def test_log_probabilities_entropy_and_gradients_are_those_of_each_sample_alone(tmp_path, monkeypatch, npu, verl_ours, cpu):
    """The last token of a row has no next one; verl learns nothing there."""
    monkeypatch.setattr("verl.workers.engine.megatron.transformer_impl.get_device_id", lambda: "cpu")
    model, values = gpt("ga"), jagged(*LENGTHS[:4])
    rows = alone(model, values)
    logs = [row.log_softmax(-1) for row in rows]
    chosen = [scores(row, ids.tolist()) for row, ids in zip(rows, values.unbind())]
    made = engine_of(model, tmp_path)
    output = made.forward_backward_batch(batch(values), None, forward_only=True)["model_output"]
    assert apart([row[:-1] for row in output["log_probs"].unbind()], chosen) <= NEAR
    assert apart([*output["entropy"].unbind()], [-(log.exp() * log).sum(-1) for log in logs]) <= NEAR

    def loss(model_output, data, dp_group):
        return -sum(row[:-1].sum() for row in model_output["log_probs"].unbind()), {}

    made.forward_backward_batch(batch(values), loss, forward_only=False)
    found = gradients_of(model)
    model.zero_grad()
    (-sum(row.sum() for row in chosen)).backward()
    assert far(found, gradients_of(model)) <= NEAR


# --- its cells: the worst of an NPU and of other devices, a row on one rank and shared by two

KINDS = {"attention": "aa", "Gated DeltaNet hybrid": "gag"}


def test_its_cells_on_one_rank_and_on_two(ranks):
    name, session = ("verl, newest Megatron", "peers_newest") if NATIVE else ("verl, Megatron", "peers_misc")
    line = f"actor_rollout_ref.model.external_lib={PLUGIN}"
    Stack(name, ("verl", "megatron-core"), session).tell_jobs(ranks(2)("test_verl.cells", seconds=600)[0], line=line)


def layouts(family, ranks):
    """Of each layout its forms: the forward, its data format, whether there is an NPU, and the attention."""
    on_card = (True, TEDotProductAttention)
    if ranks > 1:
        return {"context parallel": [(padded, data_format, *on_card) for data_format in ("bshd", "thd")]}
    packed = "packed, kernels there" if NATIVE and family != "attention" else "packed"
    if NATIVE:
        return {packed: [(padded, "thd", *on_card)], "padded right": [(padded, "bshd", *on_card)]}
    ways = ((True, Attention), (False, TEDotProductAttention), (False, None))
    found = {name: [(forward, "bshd", *way) for way in ways]
             for name, forward in (("padded right", padded), ("padded left", older))}  # fmt: skip
    return {packed: [(padded, "thd", *on_card)], **found}


def model_of(family, flash):
    kinds = KINDS[family]
    return (hybrid if NATIVE and "g" in kinds else gpt)(kinds, flash=flash)


def learned(model, rows):
    """Logits of each row, and the gradient of the sum of its tokens' log-probabilities."""
    sum(scores(row, ids.tolist()).sum() for row, ids in zip(rows, jagged().unbind())).backward()
    return [row.detach() for row in rows], world.summed(gradients_of(model))


def truth(family):
    model = model_of(family, TEDotProductAttention)
    return learned(model, alone(model, jagged()))


def run(family, form, ours):
    forward, data_format, util.is_npu_available, flash = form
    engine.install() if ours else None
    try:
        model = model_of(family, flash)
        return learned(model, forward(model, jagged(), data_format))
    finally:
        engine.uninstall()


def cells():
    world.on_cpu(pytest.MonkeyPatch())
    return world.cells_on_ranks(KINDS, layouts, truth, run)


# --- who installs ours in its processes, and when: `wraps` leaves `__wrapped__` on ours


def test_the_plugin_waits_until_verl_imports_its_megatron_functions_and_named_late_it_reaches_every_module(tmp_path):
    """By then verl has imported MindSpeed (workers/engine/__init__.py:54-65). Late, as `external_lib` of a model config may
    be, only what a module outside verl took before stays verl's own."""
    variants = ({"VERL_USE_EXTERNAL_MODULES": PLUGIN}, {})
    early, (before, late) = found_by("test_verl", tmp_path, variants=variants)
    assert early == {"megatron before": False, "taken first": True, "ours": [True] * 5}
    assert before == {"megatron before": False, "taken first": False, "ours": [False] * 5}
    assert late == {"taken first": False, "ours": [True] * 5}


_TAKEN: dict[str, Any] = {}


def functions() -> list[Any]:
    from verl.models.mcore import model_forward, registry, util

    return [
        model_forward.preprocess_bshd_engine, registry.model_forward_gen, registry.gptmodel_forward_model_engine,
        util.postprocess_bshd_engine, registry.fused_forward_model_engine,
    ]  # fmt: skip


def ours() -> dict[str, Any]:
    """Of a name taken by itself first, and of verl's modules."""
    from verl.models.mcore.util import preprocess_bshd_engine as taken_first

    first = _TAKEN.setdefault("first", taken_first)
    return {"taken first": hasattr(first, "__wrapped__"), "ours": [hasattr(each, "__wrapped__") for each in functions()]}


def in_a_process(named: bool) -> Any:
    """The answer of a process in which the plugin is named from the start, or after verl's modules are imported."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # a process without Megatron imports verl as before
    import verl  # noqa: F401

    del sys.modules["megatron"]
    import megatron_world  # noqa: F401  triton, which Megatron asks for from 0.18 on
    from verl.utils.import_utils import import_external_libs

    told = {"megatron before": "megatron.core" in sys.modules, **ours()}
    if named:
        return told
    import_external_libs([PLUGIN])
    return [told, ours()]


if __name__ == "__main__":
    from processes import write

    write(in_a_process("VERL_USE_EXTERNAL_MODULES" in os.environ))
