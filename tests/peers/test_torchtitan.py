"""torchtitan 0.3.0: our masks beside its own, and its real debug models on the CPU, packed and padded versus alone.

FlexAttention has no backward on the CPU, so only forwards are compared. Of Qwen3.5 the real model runs, with torch
stand-ins for fla's two kernels (which need a GPU): what is shown is that offsets and masks arrive and keep documents
apart, not what fla computes.

Tests named `test_upstream_*` pin a limit of torchtitan itself: one that goes red says that it changed.
"""

import pytest
import titan_kernels
import torch
from hypothesis import given, settings, strategies as st
from titan_kernels import built
from torchtitan.models.common import attention

from collate_npu import Pattern, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import torchtitan
from collate_npu.masks import dense

NEEDS = ("torchtitan",)
PATTERNS = ["causal", Pattern.sliding(3), Pattern.chunked(3)]


@st.composite
def rows_of_ids(draw, holes=True):
    """Rows of documents with padding before, between and after them, and, where asked, holes inside."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = [0] * draw(st.integers(0, 3))
        for number in range(1, draw(st.integers(1, 3)) + 1):
            row += [number] * draw(st.integers(1, 5))
            if holes and draw(st.booleans()):
                row += [0, number]
            row += [0] * draw(st.integers(0, 2))
        rows.append(row)
    width = max(map(len, rows))
    return Segments.from_ids(torch.tensor([row + [0] * (width - len(row)) for row in rows]))


def told(predicate, B, S):
    """bool `[B, S, S]`: a mask predicate at every place."""
    b, q, k = torch.meshgrid(torch.arange(B), torch.arange(S), torch.arange(S), indexing="ij")
    return predicate(b, torch.zeros_like(b), q, k)


# --- BlockMask


@given(rows_of_ids(), st.sampled_from([*PATTERNS, "bidirectional", Pattern.prefix(2)]))
@settings(max_examples=60)
def test_real_queries_see_the_pattern_and_padding_sees_itself(segments, pattern):
    B, S = segments.shape
    mask = torchtitan.get_attention_masks(segments, pattern, compiled=False)
    seen = told(mask.mask_mod, B, S)
    keep = segments.keep
    assert torch.equal(seen[keep], dense(segments, pattern=pattern)[:, 0][keep])
    assert seen.any(-1).all(), "no row is empty"
    padding = seen & ~keep[:, :, None]
    assert not (padding & keep[:, None, :]).any(), "padding sees no document"
    assert torch.equal(padding.diagonal(dim1=1, dim2=2), ~keep)
    assert not padding.triu(1).any()


def test_the_compiled_mask_is_the_same():
    segments = Segments.from_lengths([[70, 90], [200]], 256, "left")
    for pattern in PATTERNS:
        one, other = (torchtitan.get_attention_masks(segments, pattern, compiled=c) for c in (True, False))
        tables = ("kv_num_blocks", "full_kv_num_blocks", "kv_indices", "full_kv_indices", "q_num_blocks", "q_indices")
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in tables)


@given(rows_of_ids(holes=False))
@settings(max_examples=60)
def test_torchtitan_makes_the_same_masks_of_our_positions(segments):
    B, S = segments.shape
    positions = torchtitan.positions(segments)
    ours = told(torchtitan.get_attention_masks(segments, compiled=False).mask_mod, B, S)
    causal = told(attention.get_causal_mask_mod(), B, S)
    assert torch.equal(ours, causal & told(attention.get_document_mask_mod(positions), B, S))
    efficient = attention.get_efficient_causal_mask_mod_for_packed_document(positions)
    assert torch.equal(ours, causal & told(efficient, B, S))
    window = told(torchtitan.get_attention_masks(segments, Pattern.sliding(3), compiled=False).mask_mod, B, S)
    theirs = ours & told(attention.get_sliding_window_mask_mod(3), B, S)
    assert torch.equal(window[segments.keep], theirs[segments.keep])
    assert torch.equal(positions[segments.keep], segments.position_ids[segments.keep])


def test_blocks_are_the_size_of_the_models():
    segments = Segments.from_lengths([[70, 90], [200]], 256)
    for compiled in (True, False):
        assert torchtitan.get_attention_masks(segments, block_size=64, compiled=compiled).BLOCK_SIZE == (64, 64)


# --- offsets


@given(rows_of_ids(holes=False))
@settings(max_examples=60)
def test_offsets_are_torchtitans(segments):
    """Host offsets too, which Qwen3.5's Gated DeltaNet demands."""
    ours = torchtitan.varlen_metadata(segments)
    theirs = attention.create_varlen_metadata_for_document(torchtitan.positions(segments), include_host_offsets=True)
    assert isinstance(ours, attention.VarlenMetadata)
    assert torch.equal(ours.cu_seq_q, theirs.cu_seq_q)
    assert torch.equal(ours.cu_seq_k, theirs.cu_seq_k)
    assert ours.cu_seq_q.dtype == theirs.cu_seq_q.dtype
    assert ours[2:] == theirs[2:]


def test_offsets_count_padding_as_documents():
    segments = Segments.from_ids(torch.tensor([[0, 1, 1, 2, 0, 0], [0, 1, 1, 1, 1, 1]]))
    assert torchtitan.varlen_metadata(segments).cu_seq_q_host == (0, 1, 3, 4, 6, 7, 12)
    assert torchtitan.positions(segments).tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4]]


def test_holes_have_no_offsets():
    segments = Segments.from_keep(torch.tensor([[1, 1, 1], [1, 0, 1]]))
    with pytest.raises(UnsupportedFormError, match="row 1: got holes"):
        torchtitan.varlen_metadata(segments)


# --- the real models


@pytest.fixture(scope="module", autouse=True)
def always_compiled():
    """Beyond eight shapes and patterns torch falls back to an unfused FlexAttention, which is not what trains.

    Each shape is compiled for itself: with dynamic ones torch 2.13's CPU template writes its variable into the names of
    symbols that begin like the one it stands for (`ks17` becomes `cur_kvSplitSize7`), and the C++ does not compile.
    """
    with torch._dynamo.config.patch(
        recompile_limit=64, fail_on_recompile_limit_hit=True, automatic_dynamic_shapes=False, assume_static_by_default=True
    ):
        yield


@pytest.fixture(scope="module")
def qwen3():
    from torchtitan.models.qwen3 import qwen3_configs

    return built(qwen3_configs["debugmodel"]("flex"))


PADDED = {
    "right": Segments.from_lengths([[5, 7], [9]], 16),
    "left": Segments.from_lengths([[5, 7], [9]], 16, "left"),
    "between": Segments.from_ids(torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 0], [0] * 7 + [1] * 9])),
}


@torch.no_grad()
def error(model, segments, layers, tokens, masks=None, **given):
    """The largest difference of a logit between the batch and each sequence alone."""
    masks = torchtitan.get_attention_masks(segments, layers) if masks is None else masks
    out = model(tokens, positions=torchtitan.positions(segments), attention_masks=masks, **given)
    assert out.isfinite().all()
    gaps = []
    with pytest.MonkeyPatch.context() as patch:  # each length of its own would be compiled anew
        patch.setattr(attention.FlexAttention, "_compiled_flex_attn", staticmethod(titan_kernels.dense_flex_attention))
        for b, start, stop in segments.spans:
            one = Segments.from_lengths([stop - start])
            masks = torchtitan.get_attention_masks(one, layers, compiled=False)
            ids = tokens[b : b + 1, start:stop]
            alone = model(ids, positions=torchtitan.positions(one), attention_masks=masks, **given)
            gaps.append(float((out[b : b + 1, start:stop] - alone).abs().max()))
    return max(gaps)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("where", PADDED)
def test_qwen3_computes_each_document_alone(qwen3, where, pattern):
    tokens = torch.randint(1, 2048, PADDED[where].shape, generator=torch.Generator().manual_seed(0))
    assert error(qwen3, PADDED[where], pattern, tokens) <= 1e-5


def test_another_batch_of_the_same_shape_compiles_nothing(qwen3):
    def forward(lengths, side):
        segments = Segments.from_lengths(lengths, 128, side)
        masks = torchtitan.get_attention_masks(segments, Pattern.sliding(5))
        with torch.no_grad():
            qwen3(torch.ones(2, 128, dtype=torch.int64), torchtitan.positions(segments), masks)

    forward([[30, 40], [99]], "right")
    torch._dynamo.utils.counters.clear()
    forward([[3, 7, 60], [5]], "left")
    assert not torch._dynamo.utils.counters["stats"]


def test_the_comparison_has_power(qwen3):
    segments = PADDED["left"]
    tokens = torch.randint(1, 2048, segments.shape, generator=torch.Generator().manual_seed(0))
    joined = Segments.from_lengths([[16], [16]])
    assert error(qwen3, segments, "causal", tokens, torchtitan.get_attention_masks(joined)) > 0.1


def test_torchtitans_own_masks_of_our_positions_compute_each_document_alone(qwen3):
    segments = PADDED["between"]
    tokens = torch.randint(1, 2048, segments.shape, generator=torch.Generator().manual_seed(0))
    assert error(qwen3, segments, "causal", tokens, qwen3.get_attention_masks(torchtitan.positions(segments))) <= 1e-5


def test_layers_are_read_off_the_model(qwen3):
    from torchtitan.models.qwen3 import qwen3_configs

    assert torchtitan.layers_of(qwen3) == "causal"
    plain = type("Plain", (torch.nn.Module,), {"get_attention_masks": type(qwen3).get_attention_masks})()
    plain.config = qwen3_configs["debugmodel"]("varlen")
    assert torchtitan.layers_of(plain) == "varlen"
    own = type("GptOss", (torch.nn.Module,), {"get_attention_masks": lambda self, positions: {}, "config": qwen3.config})()
    with pytest.raises(UnsupportedFormError, match=r"GptOss.*Pass layers="):
        torchtitan.layers_of(own)


# --- Qwen3.5, with fla's kernels in torch


@pytest.fixture(scope="module")
def qwen3_5():
    with titan_kernels.with_fla():
        from torchtitan.models.qwen3_5 import qwen3_5_configs

        config = qwen3_5_configs["debugmodel"]("flex")
        config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = 512
        yield built(config)


def test_qwen3_5_layers_take_a_mapping(qwen3_5):
    layers = torchtitan.layers_of(qwen3_5)
    assert layers == {"quadratic_attention": "causal", "deltanet": "varlen"}
    segments = PADDED["between"]
    ours = torchtitan.get_attention_masks(segments, layers)
    theirs = qwen3_5.get_attention_masks(torchtitan.positions(segments))
    assert set(ours) == set(theirs)
    assert ours["deltanet"].cu_seq_q_host == theirs["deltanet"].cu_seq_q_host
    assert torch.equal(ours["quadratic_attention"].kv_indices, theirs["quadratic_attention"].kv_indices)
