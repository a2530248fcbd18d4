"""ms-swift 4.6.0 packs Qwen3.5 by fla's kernels, here in Triton's interpreter; adapt keeps it right."""

import fla_interpreted  # first
import swift_world
from rotation import NIGHTLY
from swift.model.models import qwen

from collate_npu import adapt
from collate_npu.consumers import tiny_models
from collate_npu.testing import tiny_model

NEEDS = ("fla", "triton", "swift")


def test_its_trainer_on_a_flat_row_alone_and_adapted(monkeypatch):
    if not NIGHTLY:  # each head costs its time
        monkeypatch.setitem(tiny_models._FAMILY, "qwen3_5_text", {f"linear_num_{of}_heads": 1 for of in ("key", "value")})
    model = tiny_model("qwen3_5_text", vocab_size=swift_world.VOCABULARY)
    del model.model.layers[2:]  # one of each kind is left: its kernels take a minute
    wanted = swift_world.alone(model)
    qwen._patch_qwen3_5_linear_attention_sequence_parallel()
    fla_interpreted.count_in_triton()
    if NIGHTLY:  # nothing of ours runs
        assert swift_world.apart(swift_world.trained(model), wanted) < 1e-4
        assert qwen.causal_conv1d.__module__.startswith("fla.")
    with adapt(model):
        assert swift_world.apart(swift_world.trained(model), wanted) < 1e-4
