"""llama4 with iRoPE: local layers of chunks with rope, and every second layer over everything, without rope.

torchtitan 0.2.1 is the last release that computes it (0.2.2 hands every layer the mapping itself, model.py:291-297; 0.3.0
has it no more). The session puts that release in front of 0.3.0; the kernel is `titan_kernels`'.
"""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import titan_kernels
import torch

from collate_npu import Pattern, Segments
from collate_npu.integrations import torchtitan

NEEDS = ("torchtitan",)
if find_spec("triton") is None:
    sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
if find_spec("torchtitan.models.llama4") is None:
    pytest.skip("this torchtitan has no llama4", allow_module_level=True)
from torchtitan.models import attention  # noqa: E402
from torchtitan.models.llama4 import llama4_args  # noqa: E402
from torchtitan.models.llama4.model.model import Transformer  # noqa: E402

CHUNK, EOS = 4, 3
LAYERS = {"rope": Pattern.chunked(CHUNK), "nope": "causal"}
ROWS = {
    "one a row": Segments.from_lengths([[16], [16]]),
    "right": Segments.from_lengths([[16], [9]], 16),
    "left": Segments.from_lengths([[13], [6]], 16, "left"),
    "packed on chunks": Segments.from_lengths([[4, 12], [8, 8]]),
    "packed": Segments.from_lengths([[5, 11], [7, 6, 3]]),
}


@pytest.fixture(scope="module", autouse=True)
def kernel():
    def dense(q, k, v, *, block_mask, scale, return_lse):
        settings = {"score_mod": None, "return_aux": SimpleNamespace(lse=return_lse)}
        return titan_kernels.dense_flex_attention(q, k, v, block_mask=block_mask, scale=scale, **settings)[0]

    counted = torch.histc  # a CPU counts no whole numbers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "histc", lambda x, **bins: counted(x.float(), **bins).to(x.dtype))
        patch.setattr(attention.FlexAttentionWrapper, "_compiled_flex_attn", staticmethod(dense))
        yield


@pytest.fixture(scope="module")
def model():
    args = llama4_args["debugmodel_irope"]
    args.n_layers, args.every_n_layers_nope, args.fixed_attn_block_size, args.max_seq_len = 2, 2, CHUNK, 64
    args.moe_args.use_grouped_mm = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = Transformer(args)
        built.init_weights(buffer_device=torch.device("cpu"))
        for weight in built.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
    return built.eval()


def tokens_of(segments):
    """Documents end with eos, by which 0.2.1 tells them apart."""
    tokens = torch.randint(4, 2048, segments.shape, generator=torch.Generator().manual_seed(1))
    for b, _, stop in segments.spans:
        tokens[b, stop - 1] = EOS
    return tokens


@torch.no_grad()
def logits(model, tokens, segments, layers=LAYERS):
    masks = torchtitan.get_attention_masks(segments, layers, compiled=False)
    return model(tokens, attention_masks=masks, positions=torchtitan.positions(segments))


@torch.no_grad()
def own_logits(model, tokens, segments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_compiled_create_block_mask", attention.create_block_mask)
        patch.setattr(torch.nn.attention.flex_attention, "_DEFAULT_SPARSE_BLOCK_SIZE", 128)
        masks = model.get_attention_masks(tokens, SimpleNamespace(eos_id=EOS))
    return model(tokens, attention_masks=masks, positions=torchtitan.positions(segments))


def error(model, tokens, segments, found):
    parts = [(tokens[b : b + 1, i:j], Segments.from_lengths([j - i])) for b, i, j in segments.spans]
    alone = torch.cat([logits(model, ids, one)[0] for ids, one in parts])
    return float((found[segments.keep] - alone).abs().max())


@pytest.mark.parametrize("where", ROWS)
def test_chunks_and_global_layers_are_those_of_each_sample_alone(model, where):
    segments = ROWS[where]
    tokens = tokens_of(segments)
    assert error(model, tokens, segments, logits(model, tokens, segments)) <= 1e-5
    joined = logits(model, tokens, segments, dict.fromkeys(LAYERS, "causal"))
    assert error(model, tokens, segments, joined) > 0.05, "chunks change nothing here"


def test_upstream_counts_chunks_from_the_rows_start(model):
    """A packed document that begins inside a chunk is cut elsewhere than alone (models/attention.py:218-246)."""
    segments = ROWS["packed"]
    tokens = tokens_of(segments)
    assert error(model, tokens, segments, own_logits(model, tokens, segments)) > 0.05
