"""Parity of the split and the gather with the trainers' own code, on their real packages and real processes.

Needs an environment of its own (megatron-core, mcore-bridge, ms-swift, verl beside torch); skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]


def missing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def needs(*names: str) -> pytest.MarkDecorator:
    gone = missing(*names)
    return pytest.mark.skipif(bool(gone), reason=f"not installed: {', '.join(gone)}")


if missing("megatron"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from gloo_pool import Pool  # noqa: E402

few = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4)
IMPORTS = 120
"""Seconds: the first call imports the peers in each rank."""


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"cp {size}")
def pool(request):
    pool = Pool(request.param)
    pool("peer_work.start", seconds=IMPORTS)
    yield pool
    pool.close()


@given(lengths=lengths, side=st.sampled_from(["left", "right"]), with_mask=st.booleans())
@few
def test_megatron_core_on_every_key_with_2d_and_4d_masks(pool, lengths, side, with_mask):
    pool("peer_work.megatron", lengths, side, with_mask, seconds=IMPORTS)


@needs("mcore_bridge")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "document_zigzag"])
@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3), dim=st.sampled_from([0, 1, 2, -1, -2]))
@few
def test_mcore_bridge_split(pool, layout, lengths, dim):
    pool("peer_work.mcore_bridge", layout, lengths, dim, seconds=IMPORTS)


@needs("mcore_bridge")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])  # by document it calls a kernel of Transformer Engine
def test_mcore_bridge_gather_and_its_gradient(pool, layout):
    pool("peer_work.mcore_bridge_gather", layout, [1, 2], seconds=IMPORTS)


@needs("swift", "mcore_bridge")
@pytest.mark.parametrize("mode", ["zigzag", "contiguous"])
@given(lengths=lengths)
@few
def test_ms_swift_batches_and_the_2d_mask_it_forgets(pool, mode, lengths):
    for widths in pool("peer_work.swift_batch", lengths, mode, seconds=IMPORTS):
        assert widths["ours"] * pool.size == widths["whole"]
        assert widths["theirs"] == widths["whole"]  # not in ms-swift's whitelist: left whole beside split tokens


@needs("swift", "mcore_bridge")
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("recipe", [None, "fp8", "mxfp8", "blockwise"])
@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_our_multiple_is_a_multiple_of_ms_swifts(pool, tp, recipe, backend):
    theirs, ours = pool("peer_work.swift_padding", tp, recipe, backend, seconds=IMPORTS)[0]
    assert ours % theirs == 0
    assert ours == (theirs if recipe or backend == "fused" else 2 * theirs)  # zigzag's factor, which ms-swift leaves out


@needs("swift")
@given(data=st.data(), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3))
@few
def test_ms_swift_ulysses_and_ring(pool, data, lengths):
    ulysses = data.draw(st.sampled_from([n for n in (1, 2, 4) if n <= pool.size]))
    pool("peer_work.swift_sequence_parallel", ulysses, lengths, seconds=IMPORTS)


@needs("swift")
def test_ms_swifts_recurrent_layers_share_a_row_between_ulysses_ranks_and_refuse_rings(pool):
    """As many Ulysses ranks as go into the key-value heads; what is left over are rings, which its layer refuses itself."""
    for found in pool("peer_work.swift_gated_delta_net", pool.size, 16 * pool.size, seconds=IMPORTS):
        assert found["rings"] == 1
        assert found["error"] < 1e-5 * found["size"]
    with pytest.raises(AssertionError, match="does not support derived ring attention"):
        pool("peer_work.swift_gated_delta_net", pool.size // 2, 16 * pool.size, seconds=IMPORTS)


@needs("verl")
@given(lengths=lengths)
@few
def test_verl_padded_zigzag(pool, lengths):
    pool("peer_work.verl_padded", lengths, seconds=IMPORTS)


@needs("verl")
@given(lengths=lengths)
@few
def test_verl_flat_zigzag(pool, lengths):
    pool("peer_work.verl_flat", lengths, seconds=IMPORTS)
