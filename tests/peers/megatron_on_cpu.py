"""A CPU in the place of CUDA, and layers of Megatron's own in the place of Transformer Engine's: `megatron sft` then trains.

For a process of its own (`swift_site/sitecustomize.py` imports it there). Nothing of ms-swift or collate_npu is touched, and
no forward of mcore-bridge: what stands in is hardware, Transformer Engine's layers, and fla's norm of a vector.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import te_stub  # noqa: F401  (before anything imports Megatron)
import torch
from megatron.core import optimizer, utils
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer import clip_grads
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from torch.nn.functional import normalize, rms_norm
from torch.optim import SGD, AdamW
from torch.overrides import TorchFunctionMode


class Norm(torch.nn.Module):
    """TENorm, as an RMS norm: its gain is the weight, or 1 + weight where the gamma is centred on zero."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weight + float(self.zero_centered_gamma), self.eps)


class NormThenLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: the norm of its input, then the projection."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **rest: Any) -> None:
        super().__init__(input_size, output_size, config=config, **rest)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, input_: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        gain = self.layer_norm_weight + float(self.config.layernorm_zero_centered_gamma)
        return super().forward(rms_norm(input_, input_.shape[-1:], gain, self.config.layernorm_epsilon), *rest, **kwargs)


class Experts(torch.nn.Module):
    """TEGroupedLinear: one projection an expert, of the tokens that are its own."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, **rest: Any
    ) -> None:
        super().__init__()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            self.register_parameter(f"weight{i}", weight)
            init_method(weight)

    def forward(self, x: torch.Tensor, tokens: list[int]) -> Any:
        return torch.cat([part @ getattr(self, f"weight{i}").T for i, part in enumerate(x.split(tokens))]), None


class Linear(torch.nn.Module):
    """TELinear, of a head that every rank holds whole."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **rest: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.in_features, self.out_features, self.use_bias, self.tp_size = input_size, output_size, False, 1
        init_method(self.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight.T, None


OURS = {
    "TELinear": Linear,
    "TEColumnParallelGroupedLinear": Experts,
    "TERowParallelGroupedLinear": Experts,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
    "TELayerNormColumnParallelLinear": NormThenLinear,
    "TEDotProductAttention": DotProductAttention,
    "TENorm": Norm,
    "SplitAlongDim": lambda x, dim, parts: torch.split(x, parts, dim),
}


def put_layers() -> None:
    """Wherever Megatron imported a layer of Transformer Engine, it gets one that computes."""
    theirs = {id(getattr(transformer_engine, name)): layer for name, layer in OURS.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            for key in [key for key, value in vars(module).items() if id(value) in theirs]:
                setattr(module, key, theirs[id(vars(module)[key])])
    transformer_block.get_cpu_offload_context = lambda *args, **kwargs: (contextlib.nullcontext(), None)
    moe_utils.te_general_gemm = None
    optimizer.Adam, optimizer.SGD, optimizer.USING_PYTORCH_OPTIMIZER = AdamW, SGD, True
    for user in (clip_grads, optimizer.optimizer):
        user.multi_tensor_applier = utils.local_multi_tensor_applier
        user.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm


class Stream:
    """Streams and events of a CPU: nobody waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Stream()


class OnCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, in every call of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*("cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args), **kwargs)


def cuda_is_the_cpu() -> None:
    nothing = lambda *args, **kwargs: None  # noqa: E731
    zero = lambda *args, **kwargs: 0  # noqa: E731
    same = lambda self, *args, **kwargs: self  # noqa: E731
    names = {
        "current_device": lambda: torch.device("cpu"),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "get_rng_state": torch.get_rng_state,
        "stream": lambda *args: contextlib.nullcontext(),
        **dict.fromkeys(("synchronize", "empty_cache"), nothing),
        **dict.fromkeys(("max_memory_reserved", "memory_allocated", "memory_reserved"), zero),
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = torch.nn.Module.cuda = same  # type: ignore[method-assign,assignment]
    OnCpu().__enter__()
    # CUDA's random states: none, and nobody asks for one.
    never = {"is_initialized": lambda: False, "fork": lambda *args: contextlib.nullcontext(), "get_states": dict}
    random._CUDA_RNG_STATE_TRACKER = SimpleNamespace(**never)
    random.initialize_rng_tracker = nothing
    # Alone in its group a rank gets its own tensor back; this torch refuses to change that in place (mlp.py:247).
    mappings._ReduceFromModelParallelRegion.forward = staticmethod(lambda ctx, tensor, group: tensor.clone())


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return normalize(x, dim=-1)


put_layers()
cuda_is_the_cpu()
gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, l2norm

from mcore_bridge.model.modules import gated_delta_net as bridged  # noqa: E402

bridged.l2norm = l2norm
