"""ms-swift 4.6.0 on its transformers backend: what its real template sends is right for recurrent models, or refused."""

from contextlib import nullcontext

import pytest
import torch
from cells import Stack, gradient_error, verdict
from swift.model.models import qwen
from swift_world import LENGTHS, VOCABULARY, alone, apart, samples, template, trained
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from collate_npu import BatchAdapter, CollateError, Segments, adapt
from collate_npu.testing import tiny_model

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def logits(model, batch):
    read = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
    with torch.no_grad():
        return model(**read).logits


STACK = Stack("ms-swift", ("ms-swift", "transformers"), "peers_swift")
LINE = "collate-npu run -- swift sft"


@pytest.fixture
def loaded(monkeypatch):
    """What its loader of Qwen3.5 puts into the layers (model/models/qwen.py:1294-1435, 1558-1634), without fla."""
    layers = (modeling_qwen3_5.Qwen3_5GatedDeltaNet, modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet)
    before = [dict(vars(layer)) for layer in layers]
    for name in ("causal_conv1d", "chunk_gated_delta_rule"):
        monkeypatch.setattr(qwen, name, None)
    qwen._patch_qwen3_5_linear_attention_sequence_parallel()
    yield
    for layer, known in zip(layers, before):
        for name in {*vars(layer)} - {*known}:
            delattr(layer, name)
        layer.forward = known["forward"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "qwen3_5_text"])
@pytest.mark.usefixtures("loaded")
def test_its_trainer_on_flat_rows(family):
    """Logits, loss and gradient. It packs Qwen3.5 itself where fla's kernels are, and raises where not."""
    model, found = tiny_model(family, vocab_size=VOCABULARY), {}
    wanted, forwards = alone(model), {type(module): type(module).forward for module in model.modules()}
    for who in ("alone", "ours"):
        try:
            with adapt(model) if who == "ours" else nullcontext():
                given = trained(model)
            found[who] = verdict(apart(given, wanted), gradient=gradient_error([given[2]], [wanted[2]]))
        except (CollateError, ImportError) as error:
            found[who] = verdict(refused=f"{type(error).__name__}: {error}")
    assert all(kind.forward is forward for kind, forward in forwards.items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    STACK.tell(family, "packed", **found, line=LINE)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "qwen3_5_text"])
def test_its_padded_batches_are_what_our_adapter_makes_and_each_sample_is_as_alone(family, implementation, side):
    model, found = tiny_model(family, vocab_size=VOCABULARY, attn_implementation=implementation), {}
    model.config.use_cache = False  # as its trainer sets it (trainers/mixin.py:972)
    truth = Segments.from_lengths(LENGTHS, side=side).keep
    wanted = [logits(model, {"input_ids": torch.tensor([row["input_ids"]])})[0] for row in samples(*LENGTHS)]
    batch = template(transformers=family, side=side).data_collator(samples(*LENGTHS))
    for who in ("alone", "ours"):
        with adapt(model) if who == "ours" else nullcontext():
            rows = logits(model, batch)
        found[who] = verdict(max(float((x[keep] - y).abs().max()) for x, keep, y in zip(rows, truth, wanted)))
    ours = BatchAdapter(model)(batch)
    assert batch["attention_mask"].dtype == ours["attention_mask"].dtype == torch.int64
    assert torch.equal(batch["attention_mask"], ours["attention_mask"])
    STACK.tell(family, f"padded {side}", **found, line=LINE)
