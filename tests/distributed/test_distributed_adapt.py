"""`adapt` and `check_delivery` beside DDP and FSDP2, two processes on Gloo: each rank has its own batch."""

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_next", "padded left"), ("qwen3_next", "packed"), ("qwen3", "padded left"), ("qwen3", "packed")],
)
@pytest.mark.parametrize("first", ["adapt", "wrapper"])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "FSDP2 inside mixers"])
def test_gradients_of_all_ranks_are_those_of_the_samples_alone(wrapper, first, family, layout, pair):
    for error, refused in pair("adapt_work.gradient_error", wrapper, first, family, layout):
        assert error < 1e-4
        assert refused


@pytest.mark.parametrize("alone", [False, True], ids=["in the batch", "alone"])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "FSDP"])
def test_ranks_that_compute_together_run_as_many_forwards(wrapper, alone, pair):
    """One rank's rows are padded, the other has one sequence: a forward that one rank runs alone would wait for ever."""
    (padded, many), (one, as_many) = pair("adapt_work.delivered", wrapper, alone)
    assert "convolution" in padded
    assert "moves no real token" in padded
    assert many == as_many
    assert ("alone" in one) == ("alone" in padded) == alone


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_the_gradient_of_a_planned_step_is_that_of_its_samples(wrapper, pack, pools):
    """On four ranks with several micro-batches each; the mean of means, which a count for each micro-batch gives, is off."""
    for gaps in pools(4)("adapt_work.planned_error", wrapper, pack):
        assert gaps["planned"] < 1e-5
        assert gaps["each alike"] > 1e-2
