"""mcore-bridge 1.6.5: does a batch fit the real forwards, and is its config left as it was? test_mcore_bridge runs them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
if importlib.util.find_spec("swift") is None:
    pytest.skip("ms-swift is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before Megatron is imported)
from mcore_bridge.model import GPTModel, MultimodalGPTModel  # noqa: E402
from swift_fixtures import as_kind  # noqa: E402
from swift_world import (  # noqa: E402
    MODEL_TYPES,
    MULTIMODAL,
    arguments,
    prepare,
)

from collate_npu.integrations.megatron import mcore_bridge  # noqa: E402

pytest_plugins = "swift_fixtures"
pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_every_batch_fits_the_signature_of_the_real_forward(world, model_type):
    world.npu()
    args = arguments(model_type)
    batch = prepare(args, as_kind(args, "template")[0])
    batch.pop("loss_scale", None)
    real = MultimodalGPTModel if model_type in MULTIMODAL else GPTModel
    inspect.signature(inspect.unwrap(real.forward)).bind(None, **batch)


def test_the_config_says_layer_types_only_while_a_layer_is_built():
    bare, own = SimpleNamespace(), SimpleNamespace(layer_types=["linear_attention"])
    build = lambda self, config, submodules, number: config.layer_types[number]  # noqa: E731
    for number in (1, 3):
        assert mcore_bridge._gated_delta_net_init(build, None, bare, None, number) == "linear_attention"
        assert not vars(bare)
    mcore_bridge._gated_delta_net_init(build, None, own, None, 0)
    assert own.layer_types == ["linear_attention"]
