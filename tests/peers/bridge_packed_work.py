"""What the processes of `bridge_work` do with flat rows. Real models; fla's kernels are the references, which leave
unwritten what no sequence covers, and Transformer Engine's attention goes by the offsets, as in megatron_world."""

import contextlib
from collections.abc import Iterator
from typing import Any

import bridge_world as world  # first: the stand-ins
import torch
from bridge_work import Alone, apart, furthest, gradients, loss_of, said
from megatron.core.extensions import transformer_engine_spec_provider as te_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_world import TEDotProductAttention
from swift_world import PAD, arguments, collate, prepare, samples
from torch import Tensor

from collate_npu import PaddingCollator, Segments
from collate_npu.integrations.megatron import gpt_batch, mcore_bridge
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.parallel import ContextParallel, pad_documents

RANKS = ContextParallel(2, 0).for_documents(), ContextParallel(2, 0, tensor_parallel=2).for_documents()
ROWS = {
    "side by side": ((7, 3, 5), 1, None),
    "one-token sequences": ((1, 4, 1, 1, 3), 1, None),
    "a tail": ((7, 3, 5), 8, None),
    "each padded": ((7, 3, 5), 1, RANKS[0]),
    "each padded, and a tail": ((1, 6, 1, 2), 1, RANKS[1]),
}
"""Lengths, what the width is padded to, and the ranks that each sequence is padded for."""


def convolution(x: Tensor, weight: Tensor, **given: Any) -> tuple[Tensor, None]:
    return reference_causal_conv1d(x, weight, **given), None


def kernels_on_cpu() -> None:
    """fla's kernels, where the layers look for them, and attention that takes offsets."""
    te_specs.TESpecProvider.core_attention = lambda self: TEDotProductAttention
    from mcore_bridge.model.mm_gpts import qwen3_5
    from mcore_bridge.model.modules import gated_delta_net as native
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

    with contextlib.suppress(ImportError):  # from 0.18 on Megatron's constructor looks for the rule, too
        from megatron.core.ssm.gated_delta_net import gdn

        gdn.chunk_gated_delta_rule = reference_gated_delta_rule
    native.causal_conv1d, native.chunk_gated_delta_rule = convolution, reference_gated_delta_rule
    qwen3_5._fla_causal_conv1d = convolution
    # transformers' wrapper takes fla's rule where fla is: it reads cu_seqlens. Its convolution stays as it is.
    theirs.torch_chunk_gated_delta_rule = reference_gated_delta_rule


def flat(name: str) -> dict[str, Any]:
    lengths, multiple, cp = ROWS[name]
    rows = [{"input_ids": row["input_ids"]} for row in samples(*lengths)]
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple)(rows)
    if cp is None:
        return batch
    batch, _ = pad_documents(batch, cp, pad_token_id=PAD)
    return {key: batch[key] for key in ("input_ids", "cu_seqlens", "cu_seqlens_padded")}


def alone(stages: list[Any], name: str) -> Alone:
    """Each sample by itself, without padding and without us."""
    logits = []
    for row in samples(*ROWS[name][0]):
        ids = torch.tensor([row["input_ids"]])
        given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "attention_mask": None}
        logits += world.run(stages, given)
        loss_of(logits[-1:], learned(ids)).backward()
    return Alone([row.detach() for row in logits], gradients(stages))


def learned(ids: Tensor) -> Tensor:
    return ids.masked_fill(torch.arange(ids.shape[1]) == 0, -100)


def measure(stages: list[Any], inputs: dict[str, Any], truth: Segments, by_itself: Alone) -> dict[str, Any]:
    """Logits and gradients against each sample alone."""
    given = {key: value for key, value in inputs.items() if key not in ("labels", "loss_mask")}
    logits = world.run(stages, given)
    parts = [logits[0, start : start + n] for n, (_, start, _) in zip(truth.sequence_lengths, truth.spans)]
    ids = [inputs["input_ids"][:, start : start + n] for n, (_, start, _) in zip(truth.sequence_lengths, truth.spans)]
    torch.stack([loss_of([part], learned(row)) for part, row in zip(parts, ids)]).sum().backward()
    found = {"logits": max(furthest(part.detach(), one) for part, one in zip(parts, by_itself.logits))}
    return found | {"gradients": apart(gradients(stages), by_itself.gradients)}


def params_of(real: list[int], padded: list[int] | None, longest: int) -> Any:
    """As somebody else builds them."""
    offsets = [torch.tensor(each, dtype=torch.int32) if each else None for each in (real, padded)]
    sides = {f"cu_seqlens_{side}{kind}": each for side in ("q", "kv") for kind, each in zip(("", "_padded"), offsets)}
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **sides)


SPOILT = {
    "real offsets alone, each padded": ([0, 7, 10, 15], None),
    "real offsets alone, a tail": ([0, 7, 10, 15], None),
    "padded offsets that end early": ([0, 7, 10, 15], [0, 8, 12, 18]),
    "lengths": ([7, 3, 5], None),
    "real offsets, and a tail of their own": ([0, 7, 10, 15, 20], None),
    "real beside padded": ([0, 7, 10, 15], [0, 8, 12, 20]),
}
"""Rows 7, 3, 5 by offsets of others; the second reads "a tail", `0 7 10 16`, the others "each padded", `0 8 12 20`."""


@contextlib.contextmanager
def recurrent_layers_get(stages: list[Any], params: Any) -> Iterator[None]:
    """Another `packed_seq_params` for them alone: the attention keeps the right one."""
    spoil = lambda module, args, kwargs: (args, {**kwargs, "packed_seq_params": params})  # noqa: E731
    layers = [part for stage in stages for part in stage.modules() if type(part).__name__.endswith("GatedDeltaNet")]
    hooks = [layer.register_forward_pre_hook(spoil, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def traps(stages: list[Any]) -> dict[str, Any]:
    """What offsets of others do upstream, and what is said of them with `install`."""
    found = {}
    for name, (real, padded) in SPOILT.items():
        row = "a tail" if name.endswith("a tail") else "each padded"
        inputs, truth = gpt_batch(flat(row), stages[0], padding_free=True)
        by_itself, inputs = alone(stages, row), {**inputs, "extra_block_kwargs": {}}
        with recurrent_layers_get(stages, params_of(real, padded, 8)):
            mcore_bridge.uninstall()
            upstream = tried(stages, inputs, truth, by_itself)
            mcore_bridge.install()
            found[name] = {"upstream": upstream, "ours": tried(stages, inputs, truth, by_itself)}
    return found


def tried(stages: list[Any], inputs: dict[str, Any], truth: Segments, by_itself: Alone) -> dict[str, Any]:
    """What `measure` finds, or what was raised."""
    found: dict[str, Any] = {}
    raised = said(lambda: found.update(measure(stages, inputs, truth, by_itself)))
    gradients(stages)
    return found | ({"raised": raised} if raised else {})


def main() -> dict[str, Any]:
    kernels_on_cpu()
    mcore_bridge.install()
    out: dict[str, Any] = {}
    names = ("qwen3_next", "qwen3_next moe", "qwen3_5") if world.NATIVE else ("qwen3_next", "qwen3_5")
    for name in names:
        model_type, _, moe = name.partition(" ")
        stages = world.build(model_type, moe=bool(moe), deterministic_mode=False, moe_aux_loss_coeff=0.0)
        if model_type == "qwen3_5" and not world.NATIVE:
            out |= unseparated(stages)
            continue
        for row in ROWS:
            inputs, truth = gpt_batch(flat(row), stages[0], padding_free=True)
            params = inputs["packed_seq_params"]
            found = measure(stages, inputs, truth, alone(stages, row))
            found |= {"offsets": params.cu_seqlens_q.tolist(), "padded": params.cu_seqlens_q_padded.tolist()}
            out[f"{name}, {row}"] = found
        if name == "qwen3_next":
            out["traps"] = traps(stages)
            out["swift, aligned"] = from_swift(stages)
    return out


def from_swift(stages: list[Any]) -> dict[str, Any]:
    """ms-swift's own template and `prepare_batch`, the row aligned to 16 as for fp8; nothing of ours in between."""
    args = arguments("qwen3_next", padding_free=True, fp8_format="e4m3")
    batch = prepare(args, collate(args, *ROWS["side by side"][0]))
    params = batch["packed_seq_params"]
    truth = Segments.from_lengths([ROWS["side by side"][0]], 16)
    found = measure(stages, only_tokens(batch), truth, alone(stages, "side by side"))
    return found | {"offsets": params.cu_seqlens_q.tolist(), "samples": params.num_samples}


def only_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask", "packed_seq_params")}


def unseparated(stages: list[Any]) -> dict[str, Any]:
    """Qwen3.5 with transformers' layer: what upstream makes of a flat row, and who says so."""
    found: dict[str, Any] = {}
    by_itself = alone(stages, "side by side")
    found["qwen3_5, gpt_batch"] = said(lambda: gpt_batch(flat("side by side"), stages[0], padding_free=True))
    row, truth = flat("side by side"), Segments.from_lengths([ROWS["side by side"][0]])
    offsets = truth.cu_seqlens.tolist()
    params = params_of(offsets, offsets, 7)
    inputs = {"input_ids": row["input_ids"], "position_ids": truth.position_ids, "attention_mask": None}
    inputs["packed_seq_params"] = params
    found["qwen3_5, install"] = tried(stages, inputs, truth, by_itself)
    mcore_bridge.uninstall()
    found["qwen3_5, upstream"] = tried(stages, inputs, truth, by_itself)
    mcore_bridge.install()
    one = {"input_ids": inputs["input_ids"][:, :7], "cu_seqlens": torch.tensor([0, 7])}
    found["qwen3_5, one sequence"] = said(lambda: gpt_batch(one, stages[0], padding_free=True))
    return found
