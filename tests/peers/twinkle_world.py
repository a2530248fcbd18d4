"""twinkle-kit 0.5.1's own `MegatronModel` and `TransformersModel`, built by their constructors on a CPU.

Stand-ins for hardware alone: the platform's device, CUDA's random state and streams, TransformerEngine's modules (Megatron's
local ones instead), FLA's norm, MindSpeed. `worker` prepares a process of Ray's in the same way.
"""

import os
import warnings
from typing import Any

import te_stub  # noqa: F401  (before megatron and mcore_bridge)
import torch
from cpu_world import Attention, hardware, layers
from torch import nn

PAD = 63
TEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
UNFUSED = dict.fromkeys((
    "bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "apply_rope_fusion",
    "moe_permute_fusion", "moe_grouped_gemm", "masked_softmax_fusion",
), False) | dict.fromkeys(("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"))  # fmt: skip


def checkpoint(folder: Any, kind: str = "qwen3_next", **changed: Any) -> str:
    """A config and a tokenizer, as twinkle downloads them. Without experts, every second layer attention."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3NextConfig

    made = (Qwen3NextConfig if kind == "qwen3_next" else Qwen3Config)(**{**TEXT, **changed})
    if kind == "qwen3_next":
        made.num_experts, made.full_attention_interval = 0, 2
        made.layer_types = ["linear_attention", "full_attention"] * 2
    else:
        made.architectures = ["Qwen3ForCausalLM"]
    made.save_pretrained(folder)
    words = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="63", eos_token="62").save_pretrained(folder)
    return str(folder)


def device(name: str = "cuda") -> None:
    """What twinkle takes this machine for; tensors go to the CPU."""
    from twinkle import Platform

    Platform.get_local_device = staticmethod(lambda *_, **__: "cpu")
    Platform.device_prefix = staticmethod(lambda *_, **__: name)


def worker() -> None:
    """For each process of Ray's, before anything else in it. Those without a model of twinkle's need nothing."""
    warnings.filterwarnings("ignore")
    if "WORKER_NAME" in os.environ:
        device()
        on_cpu()


def on_cpu() -> None:
    """A CPU where a card would be, for this whole process."""
    from mcore_bridge.model import gpts  # noqa: F401  (its layers get what Megatron's get)

    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    hardware(setattr)
    layers(setattr, Attention)


def megatron_model(folder: str, cls: Any = None, **settings: Any) -> Any:
    """As twinkle's README makes one, the fused kernels switched off."""
    import twinkle
    from megatron.core import parallel_state
    from twinkle import DeviceMesh
    from twinkle.model.megatron import MegatronModel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    mesh = settings.pop("device_mesh", None) or DeviceMesh.from_sizes(dp_size=1)
    if "remote_group" not in settings:
        twinkle.initialize(mode="local", global_device_mesh=mesh)
    made = (cls or MegatronModel)(
        model_id=folder, device_mesh=mesh, mixed_precision="no", load_weights=False, recompute_granularity=None,
        **{"deterministic_mode": True, **UNFUSED, **settings},
    )  # fmt: skip
    for chunk in getattr(made, "model", ()):
        whole(chunk)
    return made


def whole(chunk: nn.Module) -> None:
    """In float32, every weight drawn: twinkle 0.5.1 takes "no" mixed precision for bfloat16 (strategy/megatron.py
    `params_type`), and layers built on a CPU leave some of theirs as memory had it."""
    chunk.float().config.params_dtype = torch.float32
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in chunk.named_parameters():
            if "A_log" in name or "dt_bias" in name:
                p.uniform_(-1.5, -0.5, generator=draw)
            elif p.ndim == 1:
                p.normal_(0.0 if chunk.config.layernorm_zero_centered_gamma else 1.0, 0.1, generator=draw)
            else:
                p.normal_(0.0, 2.0 * p[0].numel() ** -0.5, generator=draw)


def features(*lengths: int, **more: Any) -> list[dict[str, Any]]:
    """What twinkle's templates emit for samples: labels are shifted already."""
    rows = []
    for b, length in enumerate(lengths):
        ids = [(5 * i + 3 * b) % 60 + 1 for i in range(length)]
        rows.append({
            "input_ids": ids, "labels": [*ids[1:], -100], "attention_mask": [1] * length,
            "position_ids": list(range(length)), **{key: make(length) for key, make in more.items()},
        })  # fmt: skip
    return rows
