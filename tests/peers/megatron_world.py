"""megatron-core on a CPU: what stands in for a card, for Transformer Engine and for fla, real `GPTModel`s, and what comes of
their batches.

`hardware(put)`, `layers(put)` and `kernels(put)` name every stand-in. `put` is `setattr` in a process of its own, where
nothing is given back (`start`), and that of a MonkeyPatch elsewhere (`on_cpu`). fla's kernels are the references, which
leave unwritten what no sequence covers.
"""

import copy
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins
import torch
from cells import gradient_error
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from collate_npu import Segments
from collate_npu.outputs import per_sequence
from collate_npu.parallel import ContextParallel, gather_sequence, query_rows

RELEASE = int(version("megatron-core").split(".")[1])
NATIVE = RELEASE >= 18
"""Its own Gated DeltaNet takes flat rows, and a row on several ranks."""
if NATIVE:
    stand_ins.triton()

Put = Callable[[Any, str, Any], None]
VOCABULARY, PAD, HIDDEN = 64, 63, 32
UNFUSED = dict.fromkeys(
    ("bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "apply_rope_fusion",
     "masked_softmax_fusion"), False
)  # fmt: skip
"""What a CPU cannot fuse."""
DENSE = {
    **dict.fromkeys(("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")),
    **dict.fromkeys(("moe_permute_fusion", "moe_grouped_gemm"), False),
}
"""A model of a family with experts, without them."""


# --- what a CPU lacks


def hardware(put: Put) -> None:
    """CUDA's device, streams and random state, fla's norm, and what Megatron asks of Transformer Engine beside layers."""
    import megatron.core.ssm.gated_delta_net as core_gdn
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import attention, transformer_block, utils
    from megatron.core.transformer.moe import moe_utils

    nothing = lambda *args, **kwargs: None  # noqa: E731
    tracker = {"is_initialized": lambda: False, "fork": lambda *args: nullcontext(), "get_states": dict}
    tracker |= dict.fromkeys(("set_states", "reset", "add"), nothing)
    put(random, "_CUDA_RNG_STATE_TRACKER", SimpleNamespace(**tracker))
    put(random, "initialize_rng_tracker", nothing)
    put(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    put(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    put(torch.cuda, "current_device", lambda: torch.device("cpu"))
    put(schedules, "torch", _Torch())
    put(transformer_block, "get_cpu_offload_context", lambda *args, **kwargs: (nullcontext(), None))
    for module in (fused_softmax, utils):
        put(module, "get_default_causal_mask", lambda size: torch.ones(size, size).triu(1).bool())
    put(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", rotary_part)  # its index goes by pinned memory
    put(attention, "SplitAlongDim", None)
    put(moe_utils, "te_general_gemm", None)  # 0.16.1 reads the name and sets it with TE alone
    # Alone in its group a rank gets its own tensor back, as it is; this torch refuses to change that in place (mlp.py:247).
    reduce = staticmethod(lambda ctx, tensor, group: mappings._reduce(tensor.clone(), group))
    put(mappings._ReduceFromModelParallelRegion, "forward", reduce)
    for name in (core_gdn.__name__, f"{core_gdn.__name__}.common", "mcore_bridge.model.modules.gated_delta_net"):
        if name in sys.modules:
            put(sys.modules[name], "HAVE_FLA", True)
            put(sys.modules[name], "l2norm", lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6))


class _Torch:
    """torch for Megatron's schedules, which count their tokens on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **kwargs)


def rotary_part(frequencies: Tensor, dim: int, group: Any) -> Tensor:
    """Chunks r and 2 * size - 1 - r, as rope_utils.py:45-65 of 0.16.1 picks them on a GPU."""
    size, rank = group.size(), group.rank()
    chunks = frequencies.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def kernels(put: Put) -> None:
    """The references for fla's kernels, where layers of Megatron (from 0.18 on) and of mcore-bridge look for them."""
    with suppress(ImportError):
        import megatron.core.ssm.gated_delta_net.gdn  # noqa: F401
    for name in ("megatron.core.ssm.gated_delta_net.gdn", "mcore_bridge.model.modules.gated_delta_net"):
        if name in sys.modules:
            put(sys.modules[name], "causal_conv1d", causal_conv1d)
            put(sys.modules[name], "chunk_gated_delta_rule", chunk_gated_delta_rule)


def causal_conv1d(
    x: Tensor, weight: Tensor, *, initial_state: Any = None, output_final_state: bool = False, **given: Any
) -> tuple[Tensor, None]:
    """fla's, by the reference: what it gives, and no state."""
    assert initial_state is None
    assert not output_final_state
    return reference_causal_conv1d(x, weight, **given), None


def chunk_gated_delta_rule(*args: Tensor, **given: Any) -> Any:
    """fla's, by the reference; under this name `watch` knows it."""
    return reference_gated_delta_rule(*args, **given)


# --- processes and their groups


def groups(**sizes: int) -> None:
    """Megatron's groups anew; of one process, or of those that RANK, WORLD_SIZE and STORE name."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        store = torch.distributed.FileStore(os.environ["STORE"], size) if size > 1 else torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    parallel_state.destroy_model_parallel()
    for group in [*torch.distributed.distributed_c10d._world.pg_map][1:]:  # its threads would wake 100 times a second
        torch.distributed.destroy_process_group(group)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)


def on_cpu(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    """A CPU in the place of CUDA, groups, and from megatron-core 0.18 on the references for fla's kernels."""
    if "mcore_bridge" in sys.modules:
        pytest.skip("mcore-bridge, once imported, changes Megatron's classes: run these files in a process of their own")
    groups(**sizes)
    for stands_in in (hardware, kernels):
        stands_in(partial(patch.setattr, raising=False))


def start(attention: type | None = None, **sizes: int) -> None:
    """The same for a process of its own, and layers that compute in the place of Transformer Engine's."""
    groups(**sizes)
    hardware(setattr)
    layers(setattr, attention)
    kernels(setattr)


def start_ranks(tensor_parallel: int = 1) -> None:
    """In each process of a Pool: Megatron's groups for all of them, tensor parallel or as ranks of one row."""
    warnings.simplefilter("ignore")
    cp = torch.distributed.get_world_size() // tensor_parallel
    on_cpu(pytest.MonkeyPatch(), tensor_model_parallel_size=tensor_parallel, context_parallel_size=cp)


# --- layers in the place of Transformer Engine's


class Norm(nn.Module):
    """TENorm, as an RMS norm: its gain is the weight, or 1 + weight where the gamma is centred on zero."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight + float(self.zero_centered_gamma), self.eps)


class Experts(nn.Module):
    """TEGroupedLinear: one projection an expert, of the tokens that are its own."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, **rest: Any
    ) -> None:
        super().__init__()
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            self.register_parameter(f"weight{i}", weight)
            init_method(weight)

    def forward(self, x: Tensor, tokens: list[int]) -> Any:
        return torch.cat([part @ getattr(self, f"weight{i}").T for i, part in enumerate(x.split(tokens))]), None


class Linear(nn.Module):
    """TELinear, of a head that every rank holds whole."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **rest: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.in_features, self.out_features, self.use_bias, self.tp_size = input_size, output_size, False, 1
        init_method(self.weight)

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight.T, None


def _norm_then_linear() -> type:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormThenLinear(ColumnParallelLinear):
        """TELayerNormColumnParallelLinear: the norm of its input, then the projection."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **rest: Any) -> None:
            super().__init__(input_size, output_size, config=config, **rest)
            self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

        def forward(self, input_: Tensor, *rest: Any, **kwargs: Any) -> Any:
            gain = self.layer_norm_weight + float(self.config.layernorm_zero_centered_gamma)
            normed = rms_norm(input_, input_.shape[-1:], gain, self.config.layernorm_epsilon)
            return super().forward(normed, *rest, **kwargs)

    return NormThenLinear


def layers(put: Put, attention: type | None = None) -> None:
    """Wherever Megatron or mcore-bridge imported a layer of Transformer Engine, it gets one that computes."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    ours = {
        "TELinear": Linear,
        "TEColumnParallelGroupedLinear": Experts,
        "TERowParallelGroupedLinear": Experts,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TELayerNormColumnParallelLinear": _norm_then_linear(),
        "TEDotProductAttention": attention or DotProductAttention,
        "TENorm": Norm,
        "SplitAlongDim": lambda x, dim, parts: torch.split(x, parts, dim),
    }
    theirs = {id(getattr(transformer_engine, name)): layer for name, layer in ours.items()}
    assert id(None) not in theirs, "te_stub comes before megatron"
    for name, module in list(sys.modules.items()):
        if name.startswith(("megatron.", "mcore_bridge.")) and module is not None:
            for key in [key for key, value in vars(module).items() if id(value) in theirs]:
                put(module, key, theirs[id(vars(module)[key])])


def takes(attention: type) -> None:
    """Let attention that mcore-bridge builds from now on be this one; for a process of its own."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    TESpecProvider.core_attention = lambda self: attention


# --- attention in the place of a card's


class Attention(nn.Module):
    """Ascend's: causal, dense masks `[B, 1, S, S]`, True = blocked, flat rows by their PackedSeqParams, no `[B, S]` mask.
    Keys and values are gathered over the context-parallel group."""

    lenient, reads_dense = False, True

    def __init__(self, config: Any, *_: Any, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        self.config, self.group = config, getattr(pg_collection, "cp", None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, masked: Any, attn_mask_type: Any = None,
        packed_seq_params: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """`[S, B, H, D]`, or `[T, H, D]` with `packed_seq_params`: this rank's queries against everybody's keys."""
        assert self.lenient or masked is None or masked.ndim == 4, "a mask [B, S] is invalid"
        size, rank = (self.group.size(), self.group.rank()) if self.group else (1, 0)
        flat = packed_seq_params is not None
        group = self.group if size > 1 else None
        cp = ContextParallel(size, rank, layout="document_zigzag" if flat else "zigzag", group=group)
        bounds = places(packed_seq_params) if flat else None
        keys, values = (gather_sequence(x, cp, dim=0, cu_seqlens=bounds, loss="local") for x in (key, value))
        rows = query_rows(len(keys), cp, bounds)
        if flat:
            query, keys, values = (x.reshape(len(x), 1, *x.shape[-2:]) for x in (query, keys, values))
            return _softmax(query, keys, values, _allowed(packed_seq_params, len(keys), size)[rows]).flatten(1)
        if self.reads_dense and masked is not None and masked.ndim == 4:
            assert masked.shape[-2:] == (len(rows), len(keys))
            return _softmax(query, keys, values, ~masked).flatten(2)
        return _softmax(query, keys, values, torch.ones(len(keys), len(keys)).tril().bool()[rows]).flatten(2)


class TEDotProductAttention(Attention):
    """A mask that is given is not looked at, as Transformer Engine does under `causal`."""

    lenient, reads_dense = True, False


class DotProductAttention(Attention):
    """Megatron's local one, which refuses context parallelism: here with the dense mask of this rank's queries."""


def _softmax(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, -10000.0).softmax(-1)  # core/transformer/utils.py:54-55
    return torch.einsum("bhqk,kbhd->qbhd", weights, value)


def _allowed(params: Any, width: int, size: int) -> Tensor:
    """bool `[T, T]`: causal inside the real tokens of each sequence, which the physical offsets place.

    What Transformer Engine decides where nobody says it: v2.9 to v2.16, dot_product_attention.py `pad_between_seqs is None`.
    """
    real, physical = params.cu_seqlens_q.tolist(), places(params).tolist()
    told = getattr(params, "pad_between_seqs", None)
    between = physical[:-1] != real[:-1] if told is None else told
    if not between and size > 1:
        assert not any((stop - start) % (2 * size) for start, stop in pairwise(real)), "TransformerEngine issue 3331"
    assert physical[-1] == width
    allowed = torch.zeros(width, width, dtype=torch.bool)
    for (start, stop), at in zip(pairwise(real), (physical if between else real)[:-1]):
        part = slice(at, at + stop - start)
        allowed[part, part] = torch.ones(stop - start, stop - start).tril().bool()
    return allowed


def places(params: Any) -> Tensor:
    """Some send no padded offsets (ms-swift): then there is nothing between sequences."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


# --- models of megatron-core

EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss",
}  # fmt: skip


def gpt(kinds: str = "aa", *, flash: Any = Attention, positions: str = "rope", **changed: Any) -> Any:
    """A model of these layers: `a` attention, `g` Gated DeltaNet; the same weights at every call. It needs `hardware`.

    `flash` is the kernel in the place of TransformerEngine's; None leaves Megatron's local attention."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.manual_seed(0)
    settings = {**UNFUSED, "linear_num_key_heads": 4}
    settings["context_parallel_size"] = parallel_state.get_context_parallel_world_size()
    if "g" in kinds:
        settings |= {"experimental_attention_variant": "gated_delta_net", "deterministic_mode": True}
        settings["linear_attention_freq"] = [kind == "g" for kind in kinds]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=len(kinds), hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=64,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3,
            linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_value_heads=4,
            **{**settings, **changed},
        )  # fmt: skip
        layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LayerNorm
        if flash:
            layer.submodules.self_attention.submodules.core_attention = flash
        specs = [_gated_delta(layer) if kind == "g" else layer for kind in kinds]
        spec = TransformerBlockSubmodules(specs, layer_norm=LayerNorm)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
        made = GPTModel(config, spec, VOCABULARY, 64, position_embedding_type=positions, mtp_block_spec=mtp)
    with torch.no_grad():  # a zero row for the padding would hide what reaches it
        held = made.embedding.word_embeddings
        first = held.vocab_start_index
        held.weight[[token - first for token in (0, PAD) if first <= token < first + len(held.weight)]] += 1.0
    return made.eval()


def _gated_delta(layer: Any) -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    layer = copy.deepcopy(layer)
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return layer


def hybrid(kinds: str = "gag", **changed: Any) -> Any:
    """Gated DeltaNet and attention, with fla's kernels; from 0.18 on."""
    model = gpt(kinds, **{"flash": TEDotProductAttention, "deterministic_mode": False, "activation_func": silu, **changed})
    for layer in model.decoder.layers:  # a state that is kept for long, so that one that leaks shows
        if hasattr(layer.self_attention, "A_log"):
            layer.self_attention.A_log.data.fill_(-3.0)
    return model


class LayerNorm(nn.LayerNorm):
    """In the place of Transformer Engine's: Megatron's torch one refuses sequence parallelism (torch_norm.py:32)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)


def fill(model: nn.Module) -> None:
    """Weights by the name a parameter has in the whole model, so that stages of one model agree; a recurrent state lasts."""
    inner = getattr(model, "language_model", model)
    shift = inner.decoder.layers[0].layer_number - 1 if hasattr(inner, "decoder") else 0
    for name, parameter in model.named_parameters():
        whole = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(int(found[0]) + shift), name)
        draw = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        owner = model.get_submodule(name.rpartition(".")[0])
        centered = getattr(owner, "zero_centered_gamma", inner.config.layernorm_zero_centered_gamma)
        with torch.no_grad():
            if "A_log" in name or "dt_bias" in name:
                parameter.uniform_(-1.5, -0.5, generator=draw)
            elif parameter.ndim == 1:
                parameter.normal_(0.0 if centered else 1.0, 0.1, generator=draw)
            else:
                parameter.normal_(0.0, 0.5 if "conv1d" in name else 2.0 * parameter[0].numel() ** -0.5, generator=draw)


# --- the cells of a stack, a row on one rank and shared by all


def cells_on_ranks(families: Any, layouts: Any, truth: Any, run: Any) -> dict[str, Any]:
    """Family -> layout -> who -> what each form of the layout gave, on groups of one rank and then of all.

    `layouts(family, ranks)` gives the forms of each layout, `truth(family)` the rows and the gradient of the samples alone,
    and `run(family, form, ours)` those of all samples together."""
    torch.compiler.set_stance("force_eager")
    found: dict[str, Any] = {family: {} for family in families}
    known: dict[str, Any] = {}
    for ranks in (1, torch.distributed.get_world_size()):
        groups(context_parallel_size=ranks)
        for family in families:
            known[family] = known.get(family) or truth(family)
            for layout, forms in layouts(family, ranks).items():
                for who in ("alone", "ours"):
                    jobs = [judged(partial(run, family, form, who == "ours"), known[family]) for form in forms]
                    found[family].setdefault(layout, {})[who] = jobs
    return found


def judged(run: Callable[[], tuple[list[Tensor], Any]], known: tuple[list[Tensor], Any]) -> dict[str, Any]:
    """How far rows and gradients are from the known ones, or why there are none; as `cells.of_job` reads it."""
    try:
        rows, gradient = run()
        learned = gradient_error([gradient[name] for name in known[1]], [*known[1].values()])
        return {"refused": "", "error": max(apart(rows, known[0]), far(gradient, known[1])), "gradient": learned}
    except Exception as raised:
        return {"refused": f"{type(raised).__name__}: {raised}", "error": None}


def gathered(out: Tensor, lengths: Any, bounds: Tensor | None = None) -> list[Tensor]:
    """The rows of the samples, from this rank's part of padded rows, or of a flat one with these offsets."""
    cp = ContextParallel.from_megatron()
    whole = gather_sequence(out.detach(), cp if bounds is None else cp.for_documents(), cu_seqlens=bounds)
    starts = [(b, 0) for b in range(len(lengths))] if bounds is None else [(0, start) for start in bounds.tolist()]
    return [whole[b, start : start + n] for (b, start), n in zip(starts, lengths)]


def summed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all ranks that share a row."""
    from megatron.core import parallel_state

    for gradient in gradients.values() if parallel_state.get_context_parallel_world_size() > 1 else ():
        torch.distributed.all_reduce(gradient)
    return gradients


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each gradient, by the name of its parameter."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- samples and what comes of them


def samples(*lengths: int) -> list[dict[str, Any]]:
    ids = [[(5 * i + 3 * b) % 60 + 1 for i in range(length)] for b, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": row} for row in ids]


def packed_rows(rows: list[dict[str, Any]], lengths: Any) -> dict[str, Tensor]:
    """The samples in rows as `lengths` says, padded on the right, with the three keys of the wire."""
    truth = Segments.from_lengths(lengths)
    tokens = torch.tensor([i for row in rows for i in row["input_ids"]])
    whole = torch.full(truth.shape, PAD).masked_scatter(truth.keep, tokens)
    labels = whole.masked_fill(~truth.keep, -100)
    return {"input_ids": whole, "labels": labels, "attention_mask_2d": truth.keep, "segment_ids": truth.ids}


def outcome(model: Any, *runs: tuple[dict[str, Any], Segments]) -> dict[str, Any]:
    """What batches `(inputs, truth)` give on all ranks that share a row: summed loss, logits of each sample, losses of
    routers, gradients."""
    from megatron.core import parallel_state

    model.zero_grad()
    total, aux, logits = torch.zeros(()), torch.zeros(()), []
    shared = parallel_state.get_context_parallel_world_size() > 1
    for inputs, truth in runs:
        out, params = logits_of(model, inputs).detach(), inputs.get("packed_seq_params")
        if shared:
            cp = ContextParallel.from_megatron(layout="zigzag" if params is None else "document_zigzag")
            out = gather_sequence(out, cp, truth, cu_seqlens=None if params is None else params.cu_seqlens_q_padded)
        logits += per_sequence(out, truth)
        aux_losses()
        total = total + (model(**inputs) * inputs["loss_mask"]).sum()
        aux = aux + aux_losses()
    total.backward()
    gradients = gradients_of(model)
    for value in (total.detach(), aux, *gradients.values()) if shared else ():
        torch.distributed.all_reduce(value)
    return {"loss": total.detach(), "logits": logits, "aux": aux, "gradients": gradients}


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """With multi-token prediction 0.16.1 takes no labels=None; the logits are those of the main head."""
    if getattr(model.config, "mtp_num_layers", None):
        seen: list[Tensor] = []
        hook = model.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        model(**inputs)
        hook.remove()
        return seen[-1].transpose(0, 1)
    return model(**{**inputs, "labels": None})


def aux_losses() -> Tensor:
    """The sum of the losses that Megatron logged of its routers since the last call, of any number of names and layers."""
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    tracked = get_moe_layer_wise_logging_tracker()
    told = sum((held["values"].detach().sum() for held in tracked.values()), torch.zeros(()))
    clear_aux_losses_tracker()
    tracked.clear()
    return told


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to its size; inf where one is not finite."""
    gaps = [float((ours[key] - theirs[key]).abs().max() / (1 + theirs[key].abs().max())) for key in theirs]
    assert ours.keys() == theirs.keys()
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any logit."""
    gaps = [float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True) if y.numel()]
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


def gaps(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """How far an outcome is from another: loss, logits, gradients, and losses of routers where there are any."""
    aux = alone.get("aux", torch.zeros(()))
    return {
        "loss": float((found["loss"] - alone["loss"]).abs() / (1 + alone["loss"].abs())),
        "logits": apart(found["logits"], alone["logits"]),
        "gradients": far(found["gradients"], alone["gradients"]),
        "aux": float((found.get("aux", aux) - aux).abs()),
    }
