"""torchtitan 0.3.0's families beside its own masks, and beside each sample alone; the kernels are `titan_kernels`'.

Its llama4 is in `test_torchtitan_llama4`: 0.3.0 has it no more.
"""

import pytest
import titan_kernels
import torch
import torch.distributed as dist
from titan_families import LAYERS, config_of
from torch.nn.functional import cross_entropy
from torchtitan.models.common import attention

from collate_npu import Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import torchtitan
from collate_npu.outputs import shift_labels

NEEDS = ("torchtitan",)
ROWS = {
    "right": Segments.from_lengths([[16], [9]], 16),
    "left": Segments.from_lengths([[13], [6]], 16, "left"),
    "packed": Segments.from_lengths([[5, 11], [7, 6, 3]], 16),
    "between": Segments.from_ids(torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 0], [0] * 7 + [1] * 9])),
}
EXACT = 1e-5


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.distributed.utils._spmd_backend", "default")
        patch.setattr(attention.FlexAttention, "_compiled_flex_attn", staticmethod(titan_kernels.dense_flex_attention))
        patch.setattr(attention, "varlen_attn", titan_kernels.dense_varlen_attention)
        patch.setattr("spmd_types.assert_type", lambda *_: None)  # no mesh to check types against
        titan_kernels.float32_experts(patch)
        yield


@pytest.fixture(scope="module", params=["llama3", "deepseek_v3", "gpt_oss", "muse_glimmer"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return titan_kernels.built(config_of(family))


def layers_of(family, model):
    return LAYERS.get(family) or torchtitan.layers_of(model)


def tokens_of(segments):
    return torch.randint(1, 512, segments.shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens, segments, layers):
    masks = torchtitan.get_attention_masks(segments, layers, compiled=False)
    return model(tokens, positions=torchtitan.positions(segments), attention_masks=masks)


def alone(model, tokens, segments, layers):
    parts = [(tokens[b : b + 1, i:j], Segments.from_lengths([j - i])) for b, i, j in segments.spans]
    return torch.cat([logits(model, ids, one, layers)[0] for ids, one in parts])


@pytest.mark.parametrize("where", ROWS)
def test_logits_are_those_of_the_trainers_own_masks_and_of_each_sample_alone(family, model, where):
    segments, layers = ROWS[where], layers_of(family, model)
    tokens, keep = tokens_of(segments), segments.keep
    ours = logits(model, tokens, segments, layers)
    positions = torchtitan.positions(segments)
    with torch.no_grad():
        theirs = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    assert torch.equal(ours[keep], theirs[keep])
    assert float((ours[keep] - alone(model, tokens, segments, layers)).abs().max()) <= EXACT


@pytest.mark.parametrize("where", ["left", "packed"])
def test_the_comparison_has_power(family, model, where):
    """Without documents, and in a family of two kinds without its windows."""
    segments, layers = ROWS[where], layers_of(family, model)
    tokens = tokens_of(segments)
    truth = alone(model, tokens, segments, layers)
    joined = logits(model, tokens, Segments.from_lengths([[16], [16]]), layers)[segments.keep]
    assert float((joined - truth).abs().max()) > 0.05
    if isinstance(layers, dict):
        wide = logits(model, tokens, segments, dict.fromkeys(layers, "causal"))[segments.keep]
        assert float((wide - truth).abs().max()) > 0.05


def test_each_kind_of_layer_receives_its_own_mask(family, model):
    segments, layers = ROWS["packed"], layers_of(family, model)
    titan_kernels.RECEIVED.clear()
    logits(model, tokens_of(segments), segments, layers)
    received = {int(mask.sum()) for mask in titan_kernels.RECEIVED}
    assert len(titan_kernels.RECEIVED) == len(model.layers) == 2
    assert len(received) == (2 if isinstance(layers, dict) else 1)


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
@pytest.mark.parametrize("where", ["left", "packed"])
def test_offsets_in_the_place_of_masks(family, where):
    """VarlenAttention computes in bfloat16."""
    model = titan_kernels.built(config_of(family, "varlen"))
    layers = torchtitan.layers_of(model)
    assert layers == "varlen"
    segments = ROWS[where]
    tokens, positions = tokens_of(segments), torchtitan.positions(segments)
    ours = logits(model, tokens, segments, layers)
    with torch.no_grad():
        theirs = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    assert torch.equal(ours, theirs)
    assert float((ours[segments.keep] - alone(model, tokens, segments, layers)).abs().max()) <= 0.02


def test_scaled_dot_product_attention_takes_no_mask():
    """torchtitan's trainer gives its backend `sdpa` no mask, padded or packed (trainer.py:737-751): ours names no layers."""
    config = config_of("llama3", "flex")
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    model = titan_kernels.built(config)
    with pytest.raises(UnsupportedFormError, match="or take none"):
        torchtitan.layers_of(model)
    segments = ROWS["packed"]
    with pytest.raises(ValueError, match="does not support attention_masks"):
        logits(model, tokens_of(segments), segments, "causal")


# --- pipeline stages


def test_stages_make_the_masks_of_their_kinds(family, model, tmp_path):
    """torchtitan's own cut into stages behind torch's schedule: the loss of each micro-batch, as of its samples alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    from torchtitan.distributed.pipeline_parallel import _pipeline_module_split

    def loss_of(logits, labels):
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    segments, layers = Segments.from_ids([[1] * 5 + [2] * 11, [0] * 3 + [1] * 13]), layers_of(family, model)
    tokens = tokens_of(segments)
    labels = shift_labels(tokens.masked_fill(~segments.keep, -100), segments)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        names = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
        stages, parts = _pipeline_module_split(model, mesh, "Interleaved1F1B", torch.device("cpu"), names)
        for part in parts:
            torchtitan.masks_in_forward(part, LAYERS.get(family), compiled=False)
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=loss_of, scale_grads=False)
        losses: list[torch.Tensor] = []
        schedule.step(tokens, target=labels, losses=losses, segment_ids=segments.ids)
    finally:
        dist.destroy_process_group()
    logits_of = iter(alone(model, tokens, segments, layers).split(list(segments.sequence_lengths)))
    for row, loss in enumerate(losses):
        expected = sum(
            float(loss_of(next(logits_of)[None], labels[row : row + 1, i:j])) for b, i, j in segments.spans if b == row
        )
        assert loss.item() == pytest.approx(expected, rel=1e-5)
