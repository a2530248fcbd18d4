"""`adapt` beside DDP and FSDP2, two processes on Gloo: each rank's own batch, and the gradient of all samples alone."""

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_next", "padded left"), ("qwen3", "padded left"), ("qwen3", "packed")]
)
@pytest.mark.parametrize("first", ["adapt", "wrapper"])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients_of_all_ranks_are_those_of_the_samples_alone(wrapper, first, family, layout, pair):
    for error, refused in pair("adapt_work.gradient_error", wrapper, first, family, layout):
        assert error < 1e-4
        assert refused
