"""mcore-bridge 1.6.5: is what stands in the batch what a layer of its real models reads?"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
if importlib.util.find_spec("swift") is None:
    pytest.skip("ms-swift is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before Megatron is imported)
from gloo_pool import Pool  # noqa: E402
from mcore_bridge.model import GPTModel, MultimodalGPTModel  # noqa: E402
from mcore_bridge.model.modules import TransformerLayer  # noqa: E402
from swift_fixtures import LENGTHS, as_kind  # noqa: E402
from swift_world import (  # noqa: E402
    MODEL_TYPES,
    MULTIMODAL,
    arguments,
    prepare,
)

from collate_npu import UnsupportedFormError  # noqa: E402
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


def test_a_multimodal_class_that_cannot_be_helped_is_reported_once():
    class Language:
        pass

    class Old:
        language_model_cls = Language

        def forward(self, **kwargs): ...

    with pytest.warns(UserWarning, match=r"Old.forward drops attention_mask_2d .* Remedy: .*install\(\)"):
        mcore_bridge.pass_through_forward(Old, {}, {"attention_mask_2d": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mcore_bridge.pass_through_forward(Old, {}, {"attention_mask_2d": 1}) == {"attention_mask_2d": 1}


def test_a_forward_with_no_door_is_refused():
    class Closed:
        def forward(self, input_ids): ...

    with pytest.raises(UnsupportedFormError, match="takes neither it nor extra_block_kwargs"):
        mcore_bridge.pass_through_forward(Closed, {}, {"attention_mask_2d": 1})


def test_upstream_the_text_forward_and_every_layer_refuse_the_2d_mask():
    for takes in (GPTModel.forward, TransformerLayer._forward_attention):
        parameters = inspect.signature(takes).parameters
        assert "attention_mask_2d" not in parameters
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.fixture(scope="module")
def real():
    """mcore-bridge's models need stand-ins that would change what every other test sees: a process of their own."""
    pool = Pool(1)
    yield lambda name, *given: pool(f"swift_models_work.{name}", *given, seconds=180)[0]
    pool.close()


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe"])
def test_left_padded_samples_equal_themselves_alone_in_a_real_model_with_use_mcore_gdn_0(real, model_type):
    found = real("padded_and_alone", model_type, "left", LENGTHS)
    assert found["model"] == ("MultimodalGPTModel" if model_type in MULTIMODAL else "GPTModel")
    assert found["given"] == [True, True]
    assert found["error"] < 1e-5 * (1 + found["size"])
    assert found["blind"] > 0.5  # the same model, told nothing


@pytest.mark.parametrize("first", [True, False], ids=["first stage, with a vision tower", "later stage"])
def test_the_multimodal_model_hands_the_2d_mask_to_each_recurrent_layer(real, first):
    assert real("reaches_layers", True, first) == [True, True]


@pytest.mark.parametrize("first", [True, False], ids=["first stage, with a vision tower", "later stage"])
def test_upstream_the_multimodal_model_drops_the_2d_mask(real, first):
    assert real("reaches_layers", False, first) == [False, False]


def test_upstream_qwen3_next_cannot_be_built_with_use_mcore_gdn_0(real):
    """transformers 5 asks the config for `layer_types`; `install()` says it while the layer is built."""
    assert "layer_types" in real("built_without_us")


def test_the_config_says_layer_types_only_while_a_layer_is_built():
    bare, own = SimpleNamespace(), SimpleNamespace(layer_types=["linear_attention"])
    build = lambda self, config, submodules, number: config.layer_types[number]  # noqa: E731
    for number in (1, 3):
        assert mcore_bridge._gated_delta_net_init(build, None, bare, None, number) == "linear_attention"
        assert not vars(bare)
    mcore_bridge._gated_delta_net_init(build, None, own, None, 0)
    assert own.layer_types == ["linear_attention"]
