"""verl 0.9.1's Megatron engines through their constructors: log probabilities, entropy, values and gradients of a batch.

Their `initialize` builds the model with Megatron-Bridge, which needs CUDA; here it is a megatron-core model built on a CPU.
"""

from __future__ import annotations

import pytest
import torch

why = "verl 0.9.1 and megatron-core 0.16.1 are not installed (nox -s peers_misc)"
util = pytest.importorskip("verl.models.mcore.util", reason=why, exc_type=ImportError)
mpu = pytest.importorskip("megatron.core.parallel_state", reason=why, exc_type=ImportError)

import gpt_on_cpu  # noqa: E402
from gpt_on_cpu import gpt, received, seen, watch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.models.mcore import model_forward_fused  # noqa: E402
from verl_models import LENGTHS, ValueHead, alone, jagged  # noqa: E402

from collate_npu.integrations.verl import engine as ours  # noqa: E402

NEAR = 2e-5


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with gpt_on_cpu.one_rank() as patch:
        patch.setattr("verl.workers.engine.megatron.transformer_impl.get_device_id", lambda: "cpu")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3's config and a tokenizer: what verl's `HFModelConfig` reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3Config(architectures=["Qwen3ForCausalLM"], vocab_size=64, hidden_size=32, num_hidden_layers=2).save_pretrained(
        folder
    )
    words = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="63", eos_token="62").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.setattr(util, "is_npu_available", True)


@pytest.fixture
def installed():
    ours.install()
    yield
    ours.uninstall()


def engine_of(checkpoint, model, *, kind="language_model", **settings):
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.engine import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    classes = {"language_model": MegatronEngineWithLMHead, "value_model": MegatronEngineWithValueHead}
    config = McoreEngineConfig(use_dynamic_bsz=False, **settings)
    made = classes[kind](HFModelConfig(path=checkpoint, model_type=kind), config, None, None)
    made.module, made.tf_config = [model], model.config
    return made


def batch(values):
    from verl.utils import tensordict_utils as tu

    ones = torch.nested.nested_tensor_from_jagged(torch.ones_like(values.values()), values.offsets())
    data = TensorDict(
        {"input_ids": values, "loss_mask": ones, "temperature": torch.ones(len(LENGTHS))}, batch_size=len(LENGTHS)
    )
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, calculate_entropy=True)
    return data


def of_tokens(rows, values):
    """Log probability of each next token, and the entropy, of each row."""
    logs = [torch.log_softmax(row, -1) for row in rows]
    chosen = [row[:-1].gather(-1, ids[1:, None]).squeeze(-1) for row, ids in zip(logs, values.unbind())]
    return chosen, [-(row.exp() * row).sum(-1) for row in logs]


def far(output, expected):
    """The last token of a row has no next one; verl learns nothing there."""
    rows = [row[: len(other)] for row, other in zip(output.unbind(), expected)]
    return max(float((row - other).detach().abs().max()) for row, other in zip(rows, expected) if len(other))


@pytest.mark.parametrize("kinds", ["aa", "ga"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_log_probabilities_and_entropy_are_those_of_each_sample_alone(checkpoint, kinds, packed, npu, installed):
    if packed and "g" in kinds:
        pytest.skip("megatron-core's GatedDeltaNet takes no packed rows and says so (test_verl_forward)")
    model, values = watch(gpt(kinds)), jagged()
    chosen, entropy = of_tokens(alone(model, values), values)
    made = engine_of(checkpoint, model, use_remove_padding=packed)
    output = made.forward_backward_batch(batch(values), None, forward_only=True)["model_output"]
    assert far(output["log_probs"], chosen) <= NEAR
    assert far(output["entropy"], entropy) <= NEAR
    assert received(model) == {None}


def test_the_gradient_of_a_batch_is_the_sum_over_samples_alone(checkpoint, npu, installed):
    model, values = gpt("ga"), jagged()

    def loss(model_output, data, dp_group):
        rows = model_output["log_probs"].unbind()
        return -sum((row[:-1].sum() for row in rows), torch.zeros(())), {}

    made = engine_of(checkpoint, model, use_remove_padding=False)
    made.forward_backward_batch(batch(values), loss, forward_only=False)
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (-sum(row.sum() for row in of_tokens(alone(model, values), values)[0])).backward()
    worst = max(
        float((got[name] - p.grad).abs().max() / (1 + p.grad.abs().max()))
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    assert worst <= NEAR


def test_values_are_those_of_each_sample_alone(checkpoint, npu, installed):
    model, values = gpt("ga"), jagged()
    model.output_layer = ValueHead(32, 1)
    expected = [row.squeeze(-1) for row in alone(model, values)]
    made = engine_of(checkpoint, model, kind="value_model", use_remove_padding=False)
    output = made.forward_backward_batch(batch(values), None, forward_only=True)["model_output"]
    assert far(output["values"], expected) <= NEAR
    assert seen(model)["attention"] == [None]


def test_fused_kernels(checkpoint, npu, installed, monkeypatch):
    from test_verl_forward import plain_cross_entropy

    monkeypatch.setattr(model_forward_fused, "linear_cross_entropy", plain_cross_entropy)
    model, values = gpt(), jagged()
    chosen, entropy = of_tokens(alone(model, values), values)
    model_forward_fused.patch_fused_forward(model)
    made = engine_of(checkpoint, model, use_fused_kernels=True)
    output = made.forward_backward_batch(batch(values), None, forward_only=True)["model_output"]
    assert far(output["log_probs"], chosen) <= NEAR
    assert far(output["entropy"], entropy) <= NEAR


def test_upstream_two_ranks_would_attend_their_own_keys_alone(npu, monkeypatch):
    """Under context parallelism verl's square mask is this rank's tokens by this rank's tokens; ours is None."""
    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: 2)
    assert util.preprocess_bshd_engine(jagged(8))[1].shape == (1, 1, 4, 4)
