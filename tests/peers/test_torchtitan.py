"""torchtitan 0.3.0: our masks beside its own, and its real debug models on the CPU, packed and padded versus alone.

FlexAttention has no backward on the CPU, so only forwards are compared. Of Qwen3.5 the real model runs, with torch
stand-ins for fla's two kernels (which need a GPU): what is shown is that offsets and masks arrive and keep documents
apart, not what fla computes.

Tests named `test_upstream_*` pin a limit of torchtitan itself: one that goes red says that it changed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import titan_kernels
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

if importlib.util.find_spec("triton") is None:
    # Expert-parallel copies on CUDA, in triton: imported with every model, used by none that runs here.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
attention = pytest.importorskip(
    "torchtitan.models.common.attention",
    reason="torchtitan 0.3.0 is not installed (nox -s peers_misc)",
    exc_type=ImportError,
)

from titan_alone import TEXT_ALONE  # noqa: E402

from collate_npu import CollateError, Pattern, Segments, UnsupportedFormError, dense  # noqa: E402
from collate_npu.integrations import torchtitan  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

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


# --- documents


def test_documents_end_with_eos():
    tokens = torch.tensor([[5, 6, 9, 7, 9, 8, 8], [9, 9, 5, 9, 9, 9, 9]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]).bool()
    assert torchtitan.documents(tokens, 9).ids.tolist() == [[1, 1, 1, 2, 2, 3, 3], [1, 2, 3, 3, 4, 5, 6]]
    assert torchtitan.documents(tokens, 9, keep=keep).ids.tolist() == [[1, 1, 1, 2, 2, 3, 0], [1, 2, 3, 3, 0, 0, 0]]
    with pytest.raises(CollateError, match=r"got \[1, 7\]. The tokens of the batch are \[2, 7\]"):
        torchtitan.documents(tokens, 9, keep=keep[:1])


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


def built(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = config.build()
        model.init_states(buffer_device=torch.device("cpu"))
        for name, weight in model.named_parameters():  # small random models hide wrong masks
            if weight.ndim > 1 and "vision" not in name:
                nn.init.normal_(weight, std=0.05)
    return model


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
    worst = 0.0
    for b, start, stop in segments.spans:
        one = Segments.from_lengths([stop - start])
        masks = torchtitan.get_attention_masks(one, layers, compiled=False)
        ids = tokens[b : b + 1, start:stop]
        alone = model(ids, positions=torchtitan.positions(one), attention_masks=masks, **given)
        worst = max(worst, float((out[b : b + 1, start:stop] - alone).abs().max()))
    return worst


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
    plain = type("Plain", (), {"get_attention_masks": type(qwen3).get_attention_masks})()
    plain.config = qwen3_configs["debugmodel"]("varlen")
    assert torchtitan.layers_of(plain) == "varlen"
    own = type("GptOss", (), {"get_attention_masks": lambda self, positions: {}, "config": qwen3.config})()
    with pytest.raises(UnsupportedFormError, match=r"GptOss.*Pass layers="):
        torchtitan.layers_of(own)


def test_gpt_oss_masks_by_name():
    masks = torchtitan.get_attention_masks(
        PADDED["left"], {"basic_mask": "causal", "sliding_window_mask": Pattern.sliding(4), "none": None}, compiled=False
    )
    assert list(masks) == ["basic_mask", "sliding_window_mask", "none"]
    assert masks["none"] is None
    assert told(masks["sliding_window_mask"].mask_mod, 2, 16)[0].sum(-1).max() == 4


# --- Qwen3.5, with fla's kernels in torch


@pytest.fixture(scope="module")
def qwen3_5():
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("fla is installed: its kernels would be dispatched to a GPU")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in titan_kernels.fla_modules().items():
            patch.setitem(sys.modules, name, module)
        from torchtitan.models.qwen3_5 import qwen3_5_configs

        patch.setattr("torchtitan.distributed.utils._spmd_backend", "default")  # no mesh to check types against
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


@pytest.mark.parametrize("where", PADDED)
def test_qwen3_5_computes_each_document_alone(qwen3_5, where):
    tokens = torch.randint(1, 512, PADDED[where].shape, generator=torch.Generator().manual_seed(0))
    assert error(qwen3_5, PADDED[where], torchtitan.layers_of(qwen3_5), tokens, **TEXT_ALONE) <= 1e-5


def test_qwen3_5_comparison_has_power(qwen3_5):
    segments, layers = PADDED["left"], torchtitan.layers_of(qwen3_5)
    tokens = torch.randint(1, 512, segments.shape, generator=torch.Generator().manual_seed(0))
    joined = torchtitan.varlen_metadata(Segments.from_lengths([[16], [16]]))
    masks = {**torchtitan.get_attention_masks(segments, layers), "deltanet": joined}
    assert error(qwen3_5, segments, layers, tokens, masks, **TEXT_ALONE) > 1e-2


# --- limits of torchtitan


def test_upstream_counts_chunks_from_the_row():
    """A document's chunks begin where its row does, so that the same document alone is cut elsewhere."""
    segments = Segments.from_lengths([[2, 6]])
    positions = torchtitan.positions(segments)
    document = told(attention.get_document_mask_mod(positions), 1, 8) & told(attention.get_causal_mask_mod(), 1, 8)
    theirs = (document & told(attention.get_fixed_block_mask_mod(4), 1, 8))[0, 2:, 2:]
    ours = told(torchtitan.get_attention_masks(segments, Pattern.chunked(4), compiled=False).mask_mod, 1, 8)[0, 2:, 2:]
    alone = dense(Segments.from_lengths([6]), pattern=Pattern.chunked(4))[0, 0]
    assert torch.equal(ours, alone)
    assert not torch.equal(theirs, alone)


def test_upstream_host_offsets_are_left_out_by_default():
    """Which Qwen3.5's Gated DeltaNet raises for; ours always carry them."""
    positions = torchtitan.positions(PADDED["left"])
    assert attention.create_varlen_metadata_for_document(positions).cu_seq_q_host is None
    assert torchtitan.varlen_metadata(PADDED["left"]).cu_seq_q_host is not None


def test_upstream_has_no_mask_for_sdpa(qwen3):
    sdpa = attention.ScaledDotProductAttention(attention.ScaledDotProductAttention.Config())
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="does not support attention_masks"):
        sdpa(x, x, x, attention_masks=torchtitan.get_attention_masks(Segments.from_lengths([4]), compiled=False))


# --- context parallelism is torchtitan's own


CUTS = {"headtail": Pattern.sliding(70), "ptrr": "causal"}
"""torchtitan's load balancers, each with the pattern of a mask."""


def on_two_ranks():
    """Real queries of this rank's rows attend the same keys as uncut; keys arrive rank after rank, as tokens do."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import cp_shard

    mesh = init_device_mesh("cpu", (2,))
    segments = Segments.from_lengths([[200, 150], [500]], 512, "left")
    segments = Segments.from_ids(segments.ids.where(torch.arange(512) % 97 > 3, 0))  # with holes
    places = torch.arange(512).expand(2, 512).contiguous()
    found = {}
    for balancer, pattern in CUTS.items():
        mask = torchtitan.get_attention_masks(segments, pattern, compiled=False)
        given = (places, torchtitan.positions(segments))
        (mine, positions), shard = cp_shard(mesh, given, mask, balancer)
        assert torch.equal(positions, torchtitan.positions(segments).gather(1, mine))
        ranks = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(ranks, mine.contiguous())
        keys = torch.cat(ranks, 1)
        keep = segments.keep.gather(1, mine)
        whole = torch.stack([dense(segments, pattern=pattern)[b, 0][mine[b]][:, keys[b]] for b in (0, 1)])
        assert torch.equal(titan_kernels.attended(shard)[:, 0][keep], whole[keep]), balancer
        found[balancer] = (tuple(shard.shape), mine[:, ::128].tolist())
    return found


def test_torchtitan_shares_out_our_block_mask():
    from gloo_pool import Pool

    pool = Pool(2)
    try:
        ranks = pool("test_torchtitan.on_two_ranks", seconds=600)
        assert all(shape == (2, 1, 256, 512) for found in ranks for shape, _ in found.values())
        assert all(ranks[0][balancer] != ranks[1][balancer] for balancer in CUTS)
        assert ranks[0]["ptrr"][1][0] != ranks[0]["ptrr"][1][1], "each row is shared out by its own work"
    finally:
        pool.close()
