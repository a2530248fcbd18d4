"""transformers' own hybrids, whose dispatch finds fla's released kernels: each sequence of a flat row as alone.

The kernels run in Triton's interpreter. causal-conv1d is CUDA: its place is taken by our reference, where transformers looks
for the package. Alone a sequence is run by transformers' own torch functions, without any kernel.
"""

import inspect
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from rotation import some

pytest.importorskip("fla_interpreted", reason="fla and triton are what is tested")
pytest.importorskip("transformers", reason="its models are what is tested")

import fla_interpreted
from recurrent_oracle import causal_conv1d_fn

from collate_npu import PaddingCollator, adapt
from collate_npu.consumers import tiny_models
from collate_npu.testing import tiny_model

PAD = 256
IDS = [[5, 9, 2, 77, 3, 8], [40, 41, 42, 43, 44, 41, 200, 31, 64]]
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]

RULES = {
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "qwen3_5_text": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
}
"""Family -> transformers' name for its rule."""


FAMILIES = some(("qwen3_next", "qwen3_5_text", "kimi_linear"), 1)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    package = ModuleType("causal_conv1d")
    package.__spec__ = ModuleSpec("causal_conv1d", None)
    package.causal_conv1d_fn, package.causal_conv1d_update = causal_conv1d_fn, None
    sys.modules["causal_conv1d"] = package
    small = dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 1)
    small |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    small |= {"mlp_layer_types": ["dense", "sparse"]} if request.param == "kimi_linear" else {}
    with pytest.MonkeyPatch.context() as patch:  # for the interpreter's sake
        patch.setitem(tiny_models._FAMILY, request.param, small)
        built = tiny_model(request.param, vocab_size=PAD + 1)
    fla_interpreted.count_in_triton()
    return built


def run(model, batch):
    model.zero_grad(set_to_none=True)
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def called_by(wrapped):
    """The packages of the functions that transformers' wrapper holds."""
    held = (cell.cell_contents for cell in wrapped.__closure__)
    return {function.__module__.split(".")[0] for function in held if callable(function)}


@pytest.fixture(scope="module")
def alone(model):
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        for name, package in ((RULES[model.config.model_type], "fla"), ("causal_conv1d_fn", "recurrent_oracle")):
            wrapped = getattr(module, name)
            assert package in called_by(wrapped), "transformers does not dispatch to it"
            patch.setattr(module, name, inspect.unwrap(wrapped))
        runs = [run(model, {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])}) for ids in IDS]
    gradients = {name: sum(grads[name] for _, grads in runs) for name in runs[0][1]}
    return torch.cat([logits[0] for logits, _ in runs]), gradients


def errors(found, expected):
    logits, gradients = found
    apart = torch.cat([(gradients[name] - y).flatten() for name, y in expected[1].items()]).norm()
    size = torch.cat([y.flatten() for y in expected[1].values()]).norm()
    return float((logits - expected[0]).abs().max()), float(apart / size)


def test_a_flat_row_is_as_alone(model, alone):
    with adapt(model) as adapted:
        assert adapted.way == "by sequence"
        batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
        logits, gradients = run(model, {**batch, "use_cache": False})
    assert max(errors((logits[0], gradients), alone)) < 1e-4
    with torch.no_grad():
        assert (model(input_ids=batch["input_ids"]).logits[0] - alone[0]).abs().max() > 0.5


ON_HOST = """
import sys, torch
package = sys.modules["causal_conv1d"] = type(sys)("causal_conv1d")
exec("def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None): raise RuntimeError", vars(package))
from collate_npu import adapt
from collate_npu.testing import left_out, tiny_model
for name in sys.argv[1:]:
    model = tiny_model(name, vocab_size=64)
    print(name, name in left_out(), adapt(model).way)
model(input_ids=torch.tensor([[1]]), attention_mask=torch.ones(1, 1))  # raises: alone none runs here
"""


def test_a_model_on_the_cpu_is_probed_where_its_kernels_run_on_a_card_alone():
    env = os.environ | {"TRITON_INTERPRET": "0", "FLA_KERNELS": ""}
    ran = subprocess.run([sys.executable, "-c", ON_HOST, *RULES], env=env, capture_output=True, text=True, check=False)
    assert (ran.stdout.splitlines(), ran.returncode) == ([f"{name} False by sequence" for name in RULES], 1), ran.stderr
