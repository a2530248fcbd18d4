"""ms-swift's Megatron trainers, built by their own pipelines and constructors, in a process where a CPU stands for CUDA.

Every function runs in a rank of a `gloo_pool`, which has the process group already. Batches come from the trainer's own
collator; a sample alone goes the same way.
"""

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import megatron_on_cpu  # noqa: F401  (before swift.megatron)
import torch
from mcore_bridge.model.modules import gated_delta_net as native
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_world import Attention
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from swift.megatron.pipelines.train.rlhf import MegatronRLHF
from swift.megatron.pipelines.train.sft import MegatronSft
from test_swift_sft import MEGATRON, save_rows

from collate_npu.integrations import swift
from collate_npu.proof import watch

REACHED: list[Any] = []
"""The offsets of each convolution, and its width."""
_BUILT: dict[str, Any] = {}
_local = DotProductAttention.forward


def question(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "q" * (2 + 3 * i)}]


def answered(i: int, text: str) -> list[dict[str, str]]:
    return [*question(i), {"role": "assistant", "content": text}]


def pair(i: int) -> dict[str, Any]:
    return {"messages": answered(i, "good"), "rejected_messages": answered(i, "b" * (i + 1))}


KINDS: dict[str, tuple[type, tuple[str, ...], Any]] = {
    "seq_cls": (
        MegatronSft,
        ("--task_type", "seq_cls", "--num_labels", "3", "--problem_type", "single_label_classification"),
        lambda i: {"messages": question(i), "label": i % 3},
    ),
    "rm": (MegatronRLHF, ("--rlhf_type", "rm"), pair),
    "dpo": (MegatronRLHF, ("--rlhf_type", "dpo"), pair),
    "flat": (
        MegatronSft,
        ("--padding_free", "true", "--megatron_extra_kwargs", '{"deterministic_mode": false, "persist_layer_norm": false}'),
        lambda i: {"messages": answered(i, "ok" * i)},
    ),
}


def build(kind: str, model: str, folder: str) -> Any:
    """The trainer that `megatron sft` or `megatron rlhf` would train, and its encoded samples."""
    if kind not in _BUILT:
        pipeline_class, words, row = KINDS[kind]
        rows = save_rows(Path(folder) / f"{kind}.jsonl", [row(i) for i in range(1, 6)])
        argv = [*MEGATRON, *words, "--model", model, "--dataset", rows, "--output_dir", f"{folder}/{kind}"]
        argv += ["--attention_backend", "local", "--global_batch_size", "3", "--dataset_shuffle", "false"]
        with contextlib.redirect_stdout(io.StringIO()):
            pipeline = pipeline_class(argv)
            samples, _ = pipeline._prepare_dataset()
            pipeline.args.init_iters(samples, None)
            trainer = pipeline.prepare_trainer()
        _BUILT[kind] = trainer, samples
    return _BUILT[kind]


def step(trainer: Any, rows: list[Any]) -> Any:
    """The trainer's own collator and `forward_step`: the output, and the loss that is to come."""
    batch = trainer.data_collator(copy.deepcopy(rows))
    with torch.no_grad():
        return trainer.forward_step(iter([batch]), trainer.wrapped_models[0])


def convolution(x: torch.Tensor, weight: torch.Tensor, *, cu_seqlens: Any = None, **given: Any) -> Any:
    REACHED.append([None if cu_seqlens is None else cu_seqlens.tolist(), x.shape[1]])
    return reference_causal_conv1d(x, weight, cu_seqlens=cu_seqlens, **given), None


def attention(self: Any, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
    if packed_seq_params is None:
        return _local(self, query, key, value, *args, **kwargs)
    return Attention(None)(query, key, value, None, packed_seq_params=packed_seq_params)


def flat(model: str, folder: str) -> dict[str, Any]:
    """A flat row, watched: which offsets reached Gated DeltaNet, and each sample against itself alone without us."""
    native.causal_conv1d, native.chunk_gated_delta_rule = convolution, reference_gated_delta_rule
    DotProductAttention.forward = attention
    trainer, samples = build("flat", model, folder)
    swift.install()
    try:
        with watch(say=False, stop=True) as seen:
            step(trainer, [samples[i] for i in (1, 4, 2)])
        raw, reached = trainer.data_collator(copy.deepcopy([samples[i] for i in (1, 4, 2)])), REACHED[0]
        given = trainer._prepare_batch({key: value for key, value in raw.items() if key != "channel"})
    finally:
        swift.uninstall()
    inner, starts, errors = trainer.unwrapped_models[0], given["packed_seq_params"].cu_seqlens_q.tolist(), []
    with torch.no_grad():
        whole = inner(**{key: value for key, value in given.items() if key not in ("labels", "loss_scale", "channel")})[0]
        for start, length in zip(starts, raw["seq_lens"]):
            ids = raw["input_ids"][:, start : start + length]
            row = inner(input_ids=ids, position_ids=torch.arange(length)[None], attention_mask=None)[0]
            errors.append(float((whole[start : start + length] - row).abs().max()))
    told = {"reached": reached, "lengths": list(raw["seq_lens"]), "width": raw["input_ids"].shape[1]}
    return {**told, "errors": errors, "said": seen.summary()}


def watched(trainer: Any, name: str, seen: list[Any]) -> None:
    """Keep what the trainer's own method returns, each time its loss calls it."""
    trainer.__dict__.pop(name, None)
    method = getattr(trainer, name)

    def watching(*args: Any, **kwargs: Any) -> Any:
        seen.append(method(*args, **kwargs))
        return seen[-1]

    setattr(trainer, name, watching)


def rows_of(kind: str, samples: Any, sizes: list[int]) -> list[list[Any]]:
    """Batches of different sizes and widths, of the same samples in turn."""
    drawn = iter([samples[i % len(samples)] for i in range(sum(sizes))])
    return [[next(drawn) for _ in range(size)] for size in sizes]


def measure(model: str, folder: str, kind: str, sizes: list[int], order: list[int]) -> dict[str, Any]:
    """Prepare every batch, then take the losses in `order`: the worst error of what each loss pooled against the samples
    alone, and how far another batch's tokens would have been."""
    trainer, samples = build(kind, model, folder)
    swift.install()
    try:
        return _measure(kind, trainer, samples, sizes, order)
    finally:
        swift.uninstall()


def _measure(kind: str, trainer: Any, samples: Any, sizes: list[int], order: list[int]) -> dict[str, Any]:
    seen: list[Any] = []
    watched(trainer, "get_logps" if kind == "dpo" else "get_last_tokens", seen)
    batches = rows_of(kind, samples, sizes)
    steps = [step(trainer, rows) for rows in batches]
    losses, pooled = {}, {}
    for i in order:
        output, loss = steps[i]
        seen.clear()
        losses[i] = loss(output)[0]
        pooled[i] = [x.flatten(1) if x.ndim > 1 else x for x in seen]
    alone = {}
    for i, rows in enumerate(batches):
        runs = []
        for row in rows:
            output, loss = step(trainer, [row])
            seen.clear()
            loss(output)
            runs.append([x.flatten(1) if x.ndim > 1 else x for x in seen])
        # one call of each run at a time; in a batch, all first halves (chosen, anchors) stand before the second ones
        halves = kind in ("rm", "dpo")
        alone[i] = [_joined([run[c] for run in runs], halves) for c in range(len(runs[0]))]
    error = max(float((a - b).abs().max()) for i in order for a, b in zip(pooled[i], alone[i]))
    size = max(float(b.abs().max()) for i in order for b in alone[i])
    finite = all(bool(torch.isfinite(loss)) for loss in losses.values())
    widths = [int(output.shape[1]) for output, _ in steps]
    return {"trainer": type(trainer).__name__, "error": error, "size": size, "finite": finite, "widths": widths}


def _joined(parts: list[Any], halves: bool) -> Any:
    if not halves:
        return torch.cat(parts)
    return torch.cat([*(part[: len(part) // 2] for part in parts), *(part[len(part) // 2 :] for part in parts)])
