"""Masks inside a model part of torchtitan, behind torch's own pipeline schedule; the kernels are `titan_kernels`'.

Tests named `test_upstream_*` pin what happens without us: one that goes red says that it changed.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import titan_kernels
import torch
import torch.distributed as dist
from titan_kernels import TEXT_ALONE, alone
from torch import nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.functional import cross_entropy
from torchtitan.models.common import attention

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import torchtitan
from collate_npu.outputs import shift_labels

NEEDS = ("torchtitan",)
WIDTH = 32
ROWS = [[1] * 20 + [0] * 12, [0] * 9 + [1] * 23, [1] * 7 + [0] * 3 + [2] * 14 + [3] * 8]
HOLE, TWO = [1] * 9 + [0] * 4 + [1] * 9 + [0] * 10, [1] * 16 + [2] * 16
SEGMENTS = {"qwen3": Segments.from_ids([*ROWS, HOLE]), "qwen3_5": Segments.from_ids([*ROWS, TWO])}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with titan_kernels.with_fla() as patch:
        patch.setattr(attention.FlexAttention, "_compiled_flex_attn", staticmethod(titan_kernels.dense_flex_attention))
        yield


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    """Two layers of the debug model: of Qwen3.5 a recurrent one and one of full attention."""
    if family == "qwen3":
        from torchtitan.models.qwen3 import qwen3_configs as configs
    else:
        from torchtitan.models.qwen3_5 import qwen3_5_configs as configs
    config = configs["debugmodel"]("flex")
    config.layers = config.layers[2:4]
    config.enable_weight_tying = False
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = 512
    config.tok_embeddings.param_init = {"weight": partial(nn.init.normal_, std=0.02)}
    return titan_kernels.built(config)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A group of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield lambda name: init_device_mesh("cpu", (1,), mesh_dim_names=(name,))
    dist.destroy_process_group()


@pytest.fixture
def hooked():
    handles: list[Any] = []

    def hook(part, *given, **settings):
        handles.append(torchtitan.masks_in_forward(part, *given, compiled=False, **settings))
        return part

    yield hook
    for handle in handles:
        handle.remove()


def tokens_of(segments):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 512, segments.shape, generator=generator).masked_fill(~segments.keep, 0)


def samples_of(segments, rows=slice(None)):
    pairs = zip(tokens_of(segments).tolist()[rows], segments.ids.tolist()[rows])
    return [{"input_ids": ids, "attention_mask": numbers} for ids, numbers in pairs]


def extra(family):
    return TEXT_ALONE if family == "qwen3_5" else {}


def masks_of(model, segments):
    return torchtitan.get_attention_masks(segments, torchtitan.layers_of(model), compiled=False)


# --- behind torch's schedule


def summed(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def test_a_schedule_cuts_our_batch_into_right_micro_batches(family, model, world, hooked):
    """torchtitan's own cut into stages, torch's own schedule on the whole batch; each micro-batch's loss, and gradients."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    from torchtitan.distributed.pipeline_parallel import _pipeline_module_split

    segments = SEGMENTS[family]
    names = [["vision_encoder", "tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    stages, parts = _pipeline_module_split(model, world("pp"), "Interleaved1F1B", torch.device("cpu"), names)
    for part in parts:
        hooked(part)
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=summed, scale_grads=False)
    labels = shift_labels(tokens_of(segments).masked_fill(~segments.keep, -100), segments)
    losses: list[Any] = []
    schedule.step(tokens_of(segments), target=labels, losses=losses, segment_ids=segments.ids, **extra(family))

    weights = dict(model.state_dict())
    for n, rows in enumerate((slice(0, 2), slice(2, 4))):
        loss, _ = alone(model.config, weights, samples_of(segments, rows))
        count = int((labels[rows] != -100).sum())
        assert losses[n].item() / count == pytest.approx(loss, abs=2e-5)
    _, expected = alone(model.config, weights, samples_of(segments))
    found = {name: weight.grad for part in parts for name, weight in part.named_parameters()}
    total = int((labels != -100).sum())
    for name, gradient in expected.items():
        assert torch.allclose(found[name] / total, gradient, atol=2e-6), name


@pytest.mark.parametrize("family", ["qwen3_5"], scope="module")
def test_offsets_cut_by_a_schedule_are_refused(family, model, hooked):
    segments = SEGMENTS[family]
    given = {"attention_masks": masks_of(model, segments), "positions": torchtitan.positions(segments)}
    args, kwargs = split_args_kwargs_into_chunks((tokens_of(segments),), given, 2)
    hooked(model)
    for n in (0, 1):
        with pytest.raises(CollateError, match=r"(?s)deltanet: got \d+ offsets, 0 to 128.*segment_ids"):
            model(*args[n], **kwargs[n], **extra(family))


@pytest.mark.parametrize("family", ["qwen3_5"], scope="module")
def test_offsets_that_leave_tokens_out_are_refused(family, model, hooked):
    """As torchtitan makes them of positions whose padding is not 0 (transformers' left padding has 1 there)."""
    segments = Segments.from_lengths([20, 32], WIDTH, "left")
    theirs = torchtitan.positions(segments).masked_fill(~segments.keep, 1)
    hooked(model)
    for host in (True, False):  # it makes none for full attention
        own = attention.create_varlen_metadata_for_document(theirs, include_host_offsets=host)
        masks = {**masks_of(model, segments), "deltanet": own}
        with pytest.raises(CollateError, match=r"deltanet: got 3 offsets, 12 to 64"):
            model(tokens_of(segments), positions=theirs, attention_masks=masks, **TEXT_ALONE)


# --- masks of other tokens


@pytest.mark.parametrize("family", ["qwen3"], scope="module")
def test_masks_of_other_tokens_are_refused(family, model, hooked):
    """A whole row's mask with a rank's tokens, a whole batch's with some of its rows, segments of another width."""
    segments = SEGMENTS[family]
    tokens, whole = tokens_of(segments), masks_of(model, segments)
    hooked(model)
    half = WIDTH // 2
    wrong = {
        "cp_shard": (tokens[:, :half], {"attention_masks": whole}),
        "segment_ids": (tokens[:2], {"attention_masks": whole}),
        "schedule": (tokens, {"attention_masks": masks_of(model, Segments.from_ids(segments.ids[:1]))}),
        "leave segment_ids out": (tokens[:, :half], {"segment_ids": segments.ids}),
    }
    for remedy, (ids, given) in wrong.items():
        with pytest.raises(CollateError, match=rf"(?s)tokens of this call are \[\d, \d+\].*{remedy}"):
            model(ids, positions=torchtitan.positions(segments)[: len(ids), : ids.shape[1]], **given)
    with pytest.raises(CollateError, match="tokens of this call"):
        model(tokens[:2], torchtitan.positions(segments)[:2], whole)
    assert model(tokens, positions=torchtitan.positions(segments), attention_masks=whole).isfinite().all()
    assert model(tokens, segment_ids=segments.ids).isfinite().all()


def test_a_stage_of_distributed_tokens_takes_the_masks_of_its_rows():
    """Two of four rows are here, and half of the width: that of a DTensor over data and tensor parallel ranks."""
    segments = SEGMENTS["qwen3_5"]
    tokens = SimpleNamespace(shape=(4, WIDTH, 8), device="cpu", to_local=lambda: torch.zeros(2, WIDTH // 2, 8))
    received: list[dict[str, Any]] = []

    class Part(nn.Module):
        config = SimpleNamespace(first_attention=SimpleNamespace(inner_attention=SimpleNamespace(block_size=64)))

        def forward(self, tokens, **kwargs):
            received.append(kwargs)

    part = Part()
    torchtitan.masks_in_forward(part, {"full": "causal", "deltanet": "varlen"}, compiled=False)
    part(tokens, segment_ids=segments.ids[:2])
    part(tokens, **received[0])
    assert [set(kwargs) for kwargs in received] == [{"attention_masks", "positions"}] * 2
    assert received[0]["attention_masks"]["full"].BLOCK_SIZE == (64, 64)
    for wrong in (segments.ids[:3], segments.ids[:2, :9]):
        with pytest.raises(CollateError, match="segment_ids"):
            part(tokens, segment_ids=wrong)
    three = Segments.from_ids(segments.ids[:3])
    for kind in ("causal", "varlen"):
        with pytest.raises(CollateError, match="attention_masks"):
            part(tokens, attention_masks=torchtitan.get_attention_masks(three, kind, compiled=False))


def test_upstream_reads_a_mask_of_more_rows_from_its_first():
    """Without an error (compiled on a CPU it ends the process); a mask of another width it refuses itself."""
    from torch.nn.attention.flex_attention import flex_attention

    segments = Segments.from_lengths([[128], [128], [40], [9]], 128, "left")
    mask = torchtitan.get_attention_masks(segments, compiled=False)
    rows = torch.randn(2, 1, 128, 16, generator=torch.Generator().manual_seed(0))
    first = torchtitan.get_attention_masks(Segments.from_ids(segments.ids[:2]), compiled=False)
    last = torchtitan.get_attention_masks(Segments.from_ids(segments.ids[2:]), compiled=False)
    found, of_first, of_last = (flex_attention(rows, rows, rows, block_mask=one) for one in (mask, first, last))
    assert torch.equal(found, of_first)
    assert float((found - of_last).abs().max()) > 0.1
    with pytest.raises(ValueError, match="larger length"):
        flex_attention(rows[:, :, 64:], rows, rows, block_mask=first)


@pytest.mark.parametrize("family", ["qwen3_5"], scope="module")
def test_a_hole_on_a_recurrent_layer_is_refused_in_the_stage(family, model, hooked):
    segments = SEGMENTS["qwen3"]
    hooked(model)
    with pytest.raises(UnsupportedFormError, match="row 3: got holes"):
        model(tokens_of(segments), segment_ids=segments.ids, **TEXT_ALONE)
