"""megatron-core 0.16.1 on two Gloo processes: one real `GPTModel` under context parallelism, or under tensor and sequence
parallelism, against one process. Attention is the test's own in the place of a GPU kernel's (megatron_world.py)."""

import megatron_work as work
import pytest
from megatron_world import far

NEEDS = ("megatron",)
pytestmark = pytest.mark.usefixtures("cpu")

IMPORTS = 120


@pytest.fixture
def pool(ranks):
    """Two ranks of a context-parallel group."""
    ranks(2)("megatron_work.start", 1, seconds=IMPORTS)
    return ranks(2)


@pytest.fixture
def tensor_ranks(ranks):
    """Two ranks of a tensor-parallel group."""
    ranks(2)("megatron_work.start", 2, seconds=IMPORTS)
    return ranks(2)


@pytest.mark.parametrize("case", work.CASES)
def test_two_ranks_equal_one_process_in_loss_logits_and_gradients(pool, case):
    alone = work.run(case)
    for found in pool("megatron_work.run", case, seconds=IMPORTS):
        gaps = work.compare(found, alone)
        assert max(gaps.values()) <= 1e-5, gaps
        B, S = alone["shapes"]["input_ids"]
        assert found["shapes"]["input_ids"][0] == B
        assert S / 2 <= found["shapes"]["input_ids"][1] <= (S + 3 * 4) / 2  # flat: alignment behind each sequence


@pytest.mark.parametrize(("case", "how"), [(case, how) for case, ways in work.SPOILT.items() for how in ways])
def test_it_has_power(pool, case, how):
    alone = work.run(case)
    for found in pool("megatron_work.run", case, how, seconds=IMPORTS):
        assert max(work.compare(found, alone).values()) > 1e-2


def test_a_rank_whose_batch_is_refused_says_so(pool):
    told, refused = pool("megatron_work.refused", seconds=IMPORTS)
    assert "rank 1 raised CollateError: loss_mask" in told
    assert refused.startswith("loss_mask: got beside labels")


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_key_is_what_megatrons_own_split_gives_the_rank(pool, side):
    pool("megatron_work.same_as_megatron", side, seconds=IMPORTS)


@pytest.mark.parametrize(
    ("multiple", "padding_free", "shape"), [(8, False, [3, 8]), (16, False, [3, 16]), (1, True, [1, 16])]
)
def test_routers_under_sequence_parallelism_count_no_padding(tensor_ranks, multiple, padding_free, shape):
    """GPTModel shares the mask out itself, so it takes that of all tokens; a flat row is padded to what it can share."""
    alone = work.sequence_parallel(multiple, padding_free)
    for found in tensor_ranks("megatron_work.sequence_parallel", multiple, padding_free, seconds=IMPORTS):
        assert found["shape"] == shape
        assert abs(found["loss"] - alone["loss"]) <= 1e-5 * alone["loss"]
        assert (found["aux"] - alone["aux"]).abs().max() <= 1e-5
        assert far(found["routers"], alone["routers"]) <= 1e-5


def test_a_width_that_sequence_parallelism_cannot_share_out(tensor_ranks):
    for said in tensor_ranks("megatron_work.refusal", seconds=IMPORTS):
        assert "width: got 7 tokens" in said
        assert "pad_to_multiple_of=2" in said
