"""Numbers in every floating dtype: whatever stands at padding and however a mask is filled, real tokens are finite, and near
what they are alone. float16 ends at 65,504: nothing is counted or added up in it."""

from copy import deepcopy
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from in_float64 import in_float64
from rotation import SEED
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, softmax

from collate_npu import BatchAdapter, PaddingCollator, Segments, adapt, last_token, repad, unpad
from collate_npu.consumers.labels_and_positions import IGNORED
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.gated_delta import zero_padding
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.outputs import per_sequence, to_nested
from collate_npu.parallel import ContextParallel, gather_sequence, split_tensor
from collate_npu.proof.measure import apart
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import hybrid_model_types

NEAR = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""|x - alone| / |alone|."""
by_dtype = pytest.mark.parametrize("dtype", NEAR, ids=str)
by_side = pytest.mark.parametrize("side", ["left", "right"])
ROWS = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]


def far(found, alone):
    """How far two results are apart; what is not finite is as far as can be."""
    if not all(bool(torch.isfinite(x).all()) for x in found):
        return float("inf")
    return apart([x.detach() for x in found], [x.detach() for x in alone])


def model_of(family, dtype, attention):
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    if family == "qwen3_next" and not KERNELS_TOLD.holds():
        pytest.skip("4.57 has no gradient of its layers on a CPU")
    model = tiny_model(family, vocab_size=64, dtype=dtype, attn_implementation=attention)
    if dtype == torch.float64 and any("experts" in name for name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    for module in model.modules():
        if hasattr(module, "top_k"):  # all experts, so that rounding turns no choice
            module.top_k = getattr(module, "num_experts", module.top_k)
    return model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def learned(model, rows, logits):
    """The logits of each sequence, and the gradient of the loss of all."""
    losses = [cross_entropy(x[:-1].float(), torch.tensor(row[1:]), reduction="sum") for x, row in zip(logits, rows)]
    return [x.detach() for x in logits], gradients(model, sum(losses))


ROUTES = {
    "padded left": {"padding_side": "left"},
    "padded right": {"padding_side": "right"},
    "one flat row": {"padding_free": True},
    "packed rows": {"packing": True, "max_length": 40},
}
LEFT_OUT = {"inkling2_text", "recurrent_gemma", "rwkv", "xlstm"}  # testing.left_out() asks each
HYBRIDS = sorted({*hybrid_model_types()} - LEFT_OUT) if find_spec("transformers") else []
LOW = (torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.models
@pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="layers hand no boundary on")
@pytest.mark.draws(1)
@pytest.mark.parametrize(("family", "dtype", "route"), [*product(HYBRIDS, LOW, ROUTES)], ids=str)
def test_every_route_is_as_near_as_each_sample_alone(family, dtype, route):
    """Its own rounding is how far the samples alone are from float64: in two of three batches, as by chance it is small."""
    draw, model, near = torch.Generator().manual_seed(SEED), model_of(family, dtype, "sdpa"), {"logits": 0, "gradient": 0}
    for _ in range(3):
        rows = [torch.randint(1, 60, (length,), generator=draw).tolist() for length in (12, 25, 5, 18)]
        one_by_one = lambda model: learned(model, rows, [model(input_ids=torch.tensor([row])).logits[0] for row in rows])  # noqa: B023, E731
        exact, alone = in_float64(model, one_by_one), one_by_one(model)
        batch = PaddingCollator(pad_token_id=0, **ROUTES[route])([{"input_ids": row} for row in rows])
        segments = segments_from_batch(dict(batch))
        order = [rows.index(ids.tolist()) for ids in per_sequence(batch.pop("input_ids"), segments)]
        ids = repad(torch.cat([torch.tensor(rows[n]) for n in order]), segments)
        with adapt(model):
            try:
                logits = per_sequence(model(input_ids=ids, **batch).logits, segments)
            except UnsupportedFormError:  # as in float32
                with adapt(same := deepcopy(model).float()), pytest.raises(UnsupportedFormError):
                    same(input_ids=ids, **batch)
                return
            found = learned(model, [rows[n] for n in order], logits)
        for at, name in enumerate(near):
            exact_at, own_at = (([each[0][n] for n in order] if at == 0 else each[1]) for each in (exact, alone))
            near[name] += far(found[at], exact_at) <= (2 + at) * far(own_at, exact_at) + 2e-5
    assert min(near.values()) >= (3 if dtype == torch.float64 else 2), near


@pytest.mark.models
@by_side
@by_dtype
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_batch_through_a_model_is_its_samples_alone(family, attention, dtype, side):
    """With a row of padding alone, which `segment_ids` may say. Gradients are finite too. Or it is refused: transformers'
    eager attention takes its softmax in float32, in which the lowest float64 is -inf."""
    model = model_of(family, dtype, attention)
    batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="omit")([{"input_ids": ids} for ids in ROWS])
    ids = torch.cat([batch["input_ids"], torch.zeros_like(batch["input_ids"][:1])])
    truth = Segments.from_lengths([len(row) for row in ROWS] + [0], ids.shape[1], side)
    labels = ids.masked_fill(~truth.keep, IGNORED)
    batch, adapter = {"input_ids": ids, "labels": labels, "segment_ids": truth.ids}, BatchAdapter(model)
    if (attention, dtype) == ("eager", torch.float64):
        with pytest.raises(UnsupportedFormError, match="gives NaN"):
            adapter(batch)
        batch = {key: x[:2] for key, x in batch.items()}
        if side == "left":
            return
    given, segments = adapter.with_segments(batch)
    out = model(**given)
    alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    assert far(per_sequence(out.logits, segments), alone) <= NEAR[dtype]
    assert all(bool(torch.isfinite(x).all()) for x in gradients(model, out.loss))


EMPTY = Segments.from_lengths([2, 5, 0], 6, "left")


def two_layers(x, attend):
    """NaN of a row that sees nothing would reach the others in the second layer: 0 * NaN is NaN."""
    return attend(attend(x) + x)


@by_dtype
def test_a_row_that_sees_nothing_spoils_no_other(dtype):
    x = torch.randn(3, 1, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    bias, keep = dense(EMPTY, polarity="bias", dtype=dtype), dense(EMPTY, polarity="keep")
    assert torch.isfinite(bias).all()
    ways = {
        "eager": lambda x: softmax(x @ x.mT + bias, -1) @ x,
        "sdpa, a bias": lambda x: scaled_dot_product_attention(x, x, x, attn_mask=bias, scale=1.0),
        "sdpa, bool": lambda x: scaled_dot_product_attention(x, x, x, attn_mask=keep, scale=1.0),
    }
    for name, way in ways.items():
        found = per_sequence(two_layers(x, way)[:, 0], EMPTY)
        by_itself = lambda x: scaled_dot_product_attention(x, x, x, is_causal=True, scale=1.0)  # noqa: E731
        alone = [two_layers(x[b, :, 6 - n :], by_itself)[0] for b, n in ((0, 2), (1, 5))]
        assert far(found, alone) <= NEAR[dtype], name
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in found), x)
        assert torch.isfinite(gradient).all(), name


WAYS = {
    "unpad": lambda x, s: [unpad(x, s)],
    "repad": lambda x, s: per_sequence(repad(unpad(x, s), s), s),
    "last_token": lambda x, s: [last_token(x, s)],
    "per_sequence": per_sequence,
    "to_nested": lambda x, s: [to_nested(x, s).values()],
    "zero_padding": lambda x, s: [zero_padding(x, s)],
    "split": lambda x, s: per_sequence(torch.cat([split_tensor(x, cp) for cp in CPS], 1), s),
    "gather": lambda x, s: per_sequence(gather_sequence(x, ContextParallel(1, 0), s), s),
}
CPS = [ContextParallel(2, rank, layout="contiguous") for rank in (0, 1)]


@by_dtype
@pytest.mark.parametrize("padding", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", WAYS)
def test_what_stands_at_padding_goes_nowhere(name, padding, dtype):
    """Neither forward nor backward, beside the largest numbers of the dtype."""
    segments = Segments.from_lengths([3, 8], 8, "left")
    x = torch.full((2, 8, 4), torch.finfo(dtype).max, dtype=dtype).masked_fill_(~segments.keep[..., None], padding)
    x.requires_grad_()
    found = WAYS[name](x, segments)
    assert all(bool(torch.isfinite(x).all()) for x in found)
    (gradient,) = torch.autograd.grad(sum(x.float().sum() for x in found), x)
    assert torch.isfinite(gradient).all()
    assert not gradient[~segments.keep].any()
