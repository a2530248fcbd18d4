"""Profiles of hypothesis: `ci` (the default, the same examples each time), `dev`, and `fuzz`, which looks further.

HYPOTHESIS_PROFILE chooses. Small tensors, so one thread.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

# Slow generation is judged by the whole run, not by one loaded machine; examples need no database to be found again.
common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=200, derandomize=True, **common)
settings.register_profile("dev", max_examples=30, **common)
settings.register_profile("fuzz", max_examples=2500, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
torch.set_num_threads(1)


def no_models() -> str:
    """Why transformers cannot build a model here, if so: with the torch_npu wheel and no CANN it tries to import it."""
    if find_spec("torch_npu") is None or find_spec("transformers") is None:
        return ""
    try:
        import transformers.modeling_utils  # noqa: F401
    except ImportError as error:
        return f"transformers does not load beside torch_npu without CANN: {error}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("models")]
    if marked and (reason := no_models()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def newest_transformers():
    """Routes for transformers depend on the release installed; the rules of older ones are tested by their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collate_npu.consumers.models.transformers_version", lambda: (5, 23))
        yield
