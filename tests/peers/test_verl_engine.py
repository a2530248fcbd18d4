"""verl 0.9.1's Megatron engine through its constructor: log probabilities, entropy and gradients of a batch.

Its `initialize` builds the model with Megatron-Bridge, which needs CUDA; here it is a megatron-core model built on a CPU.
"""

import pytest
import torch
from cpu_world import received, watch
from megatron_world import gpt
from tensordict import TensorDict
from verl_models import LENGTHS, alone, jagged

NEEDS = ("verl", "megatron")
pytestmark = pytest.mark.usefixtures("one_rank")

NEAR = 2e-5


@pytest.fixture(scope="module")
def checkpoint(one_rank, tmp_path_factory):
    """A tiny Qwen3's config and a tokenizer: what verl's `HFModelConfig` reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    one_rank.setattr("verl.workers.engine.megatron.transformer_impl.get_device_id", lambda: "cpu")
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3Config(architectures=["Qwen3ForCausalLM"], vocab_size=64, hidden_size=32, num_hidden_layers=2).save_pretrained(
        folder
    )
    words = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="63", eos_token="62").save_pretrained(folder)
    return str(folder)


def engine_of(checkpoint, model, **settings):
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.engine import MegatronEngineWithLMHead

    config = McoreEngineConfig(use_dynamic_bsz=False, **settings)
    made = MegatronEngineWithLMHead(HFModelConfig(path=checkpoint, model_type="language_model"), config, None, None)
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


@pytest.mark.parametrize(("kinds", "packed"), [("aa", False), ("ga", False), ("aa", True)])  # "ga" takes no packed rows
def test_log_probabilities_and_entropy_are_those_of_each_sample_alone(checkpoint, kinds, packed, verl_npu, verl_ours):
    model, values = watch(gpt(kinds)), jagged()
    chosen, entropy = of_tokens(alone(model, values), values)
    made = engine_of(checkpoint, model, use_remove_padding=packed)
    output = made.forward_backward_batch(batch(values), None, forward_only=True)["model_output"]
    assert far(output["log_probs"], chosen) <= NEAR
    assert far(output["entropy"], entropy) <= NEAR
    assert received(model) == {None}


def test_the_gradient_of_a_batch_is_the_sum_over_samples_alone(checkpoint, verl_npu, verl_ours):
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
