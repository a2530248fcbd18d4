"""Sharded: does a batch shared out between ranks give the same numbers as each sample alone?

The route is the one transformers' Trainer and Accelerate take: torch's context parallelism, accelerate's hooks and its
context. Each rank runs its part; logits are gathered, losses and gradients added up. Right padding, since that route
throws every mask away; sdpa, the only attention it reads. Recurrent layers are refused, as the library refuses them.

A stand-in holds what accelerate's context reads of an `Accelerator`: its own constructor refuses a CPU and asks for FSDP2
on a card, which shards weights and is not what is looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from collate_npu.collate.collators import PaddingCollator
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations.context_parallel import context_parallel, context_parallel_collator, refuse_model
from collate_npu.outputs import per_sequence, shift_labels
from collate_npu.parallel import ContextParallel, gather_sequence
from collate_npu.rows import Side
from collate_npu.segments import Segments
from collate_npu.testing import tiny_config
from collate_npu.testing.measure import IGNORED, Batch, Errors, Numbers, alone, by_position, errors, worst
from collate_npu.testing.yardstick import Yardstick, measure_noise
from collate_npu.tools.audit.candidates import Candidate
from collate_npu.tools.audit.case import Finding, batches_of, judged
from collate_npu.tools.audit.checkpoints import config_of_checkpoint, is_checkpoint
from collate_npu.tools.audit.ranks import BACKENDS, together
from collate_npu.tools.audit.samples import Drawing

Shared = AbstractContextManager[Mapping[str, Any]]
_SHARED = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""What `Trainer._prepare_context_parallel_inputs` shares out of a batch (transformers 5.23 trainer.py:2431-2475)."""


def check_ranks(size: int, device: str, attentions: Sequence[str]) -> None:
    """Refuse ranks that this machine has no device for, attention that is not sdpa, and a machine without accelerate."""
    if "sdpa" not in attentions:
        rule = "torch's context parallelism reads sdpa alone; another attention would see one rank's tokens."
        raise CollateError(explain("--cp", f"--attn {' '.join(attentions)}", rule, "Add --attn sdpa, or leave --cp out."))
    kind = device.partition(":")[0]
    if kind not in BACKENDS:
        rule = f"Ranks meet over {', '.join(BACKENDS.values())}, on {', '.join(BACKENDS)}."
        raise CollateError(explain("--cp", f"{size} ranks on {device}", rule, "Name one of them with --device."))
    held = size if kind == "cpu" else getattr(torch, kind).device_count()
    if held < size:
        rule = f"Each rank has a device of its own, and {held} of {kind} are here."
        raise CollateError(explain("--cp", f"{size} ranks on {device}", rule, f"Name at most {held}, or --device cpu."))
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        rule = "The route is accelerate's context parallelism."
        raise CollateError(explain("--cp", str(error), rule, "Install accelerate 1.10 or newer.")) from None


def audit_sharded(
    candidate: Candidate, drawing: Drawing, *, size: int, batch_size: int, gradients: bool, seconds: float,
    plugins: Sequence[str],
) -> tuple[list[Finding], Yardstick | None]:  # fmt: skip
    """The findings of one candidate on `size` ranks, started for it, and its yardstick; none where it is refused.

    Raises `RanksError` where a rank fails or hangs.
    """
    where = {"model": candidate.name, "attn_implementation": candidate.attn, "side": f"cp {size}", "whose": "ours"}
    try:
        refuse_model(_config_of(candidate))
    except UnsupportedFormError as error:
        note = str(error).splitlines()[0][:400]
        return [Finding(**where, column=column, note=note, refused=True) for column in OURS_SHARDED], None  # type: ignore[arg-type]
    kind = candidate.device.partition(":")[0]
    how = {"batch_size": batch_size, "gradients": gradients}
    found: tuple[list[Finding], Yardstick]
    found = together(_on_a_rank, size, candidate, drawing, how, where, device=kind, seconds=seconds, plugins=plugins)
    return found


def _config_of(candidate: Candidate) -> Any:
    if is_checkpoint(candidate.name):
        return config_of_checkpoint(candidate.name, trust=candidate.trust)
    return tiny_config(candidate.name, vocab_size=8)


def _on_a_rank(
    candidate: Candidate, drawing: Drawing, how: dict[str, Any], where: dict[str, Any]
) -> tuple[list[Finding], Yardstick]:
    import torch.distributed as dist

    kind = candidate.device.partition(":")[0]
    here = kind if kind == "cpu" else f"{kind}:{dist.get_rank()}"
    model, tokenizer = replace(candidate, device=here).build()
    model.eval()
    gradients = how["gradients"]
    batches = batches_of(drawing.samples(tokenizer), how["batch_size"], ["right"])
    references = [alone(model, batch, gradients) for batch in batches]  # each rank for itself: no rank waits for long
    noise = measure_noise(model, batches, references, gradients=gradients)
    rank = _Rank(model, kind, candidate.pad_token_id(model, tokenizer), gradients)
    found, about = {}, {}
    for column, (side, handover) in {**OURS_SHARDED, **OTHERS_SHARDED}.items():
        each: list[Errors] = []
        positions: list[tuple[float, ...]] = []
        for batch, reference in zip(batches, references):
            mine = rank.run(handover, side, batch)
            each.append(errors(mine, reference))
            positions += by_position(mine, reference)
        found[column], about[column] = worst(each), {**where, "column": column, "by_position": tuple(positions)}
    findings = [
        judged({**about[column], "whose": whose}, found[column], Yardstick(noise), gradients=gradients)
        for whose, columns in (("ours", OURS_SHARDED), ("elsewhere", OTHERS_SHARDED))
        for column in columns
    ]
    dist.barrier()  # leave together
    return findings, Yardstick(noise, found["Trainer, left"])


class _Rank:
    """A model on one rank, with accelerate's hooks and context around its forward passes."""

    def __init__(self, model: Any, kind: str, pad_token_id: int, gradients: bool) -> None:
        import torch.distributed as dist
        from accelerate.big_modeling import _attach_context_parallel_hooks
        from torch.distributed.device_mesh import init_device_mesh

        if kind == "cpu":
            from collate_npu.tools.audit import ring_on_cpu

            ring_on_cpu.install()
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("cp",))
        self.cp = ContextParallel.from_mesh(mesh)
        self.accelerator = _accelerator(mesh)
        _attach_context_parallel_hooks(model)
        self.model, self._pad, self._gradients = model, pad_token_id, gradients

    def collator(self, side: Side) -> PaddingCollator:
        """A batch with its 2D mask, of a width that can be shared out."""
        return PaddingCollator(
            pad_token_id=self._pad,
            consumer="transformers",
            model=self.model,
            padding_side=side,
            pad_to_multiple_of=self.cp.multiple,
        )

    def run(self, handover: Callable[[_Rank, list[Batch]], Shared], side: Side, features: list[Batch]) -> Numbers:
        """One step over all ranks: whole logits, the summed loss, the gradients of all."""
        import torch.distributed as dist

        lengths = [len(feature["input_ids"]) for feature in features]
        width = -(-max(lengths) // self.cp.multiple) * self.cp.multiple
        segments = Segments.from_lengths(lengths, side=side, width=width)
        self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self._gradients), handover(self, features) as shard:
            read = {key: value for key, value in shard.items() if key not in ("labels", "shift_labels")}
            logits = self.model(**read, use_cache=False).logits
            targets = shard["shift_labels"].flatten()
            loss = cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")
            if self._gradients:
                torch.autograd.backward(loss)
        dist.all_reduce(total := loss.detach().clone())
        found = {name: p.grad.detach() for name, p in self.model.named_parameters() if p.grad is not None}
        for gradient in found.values():
            dist.all_reduce(gradient)
        self.model.zero_grad(set_to_none=True)
        whole = gather_sequence(logits.detach().float(), self.cp, segments)
        finite = all(bool(torch.isfinite(x).all()) for x in (whole, total, *found.values()))
        return Numbers(list(per_sequence(whole, segments)), float(total), found, finite)

    def moved(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {key: x.to(self.model.device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}


def _accelerator(mesh: Any) -> Any:
    from accelerate import Accelerator
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    config = SimpleNamespace(cp_backend="torch", cp_enabled=True, cp_size=mesh.size())
    stand_in = SimpleNamespace(parallelism_config=config, _cp_context=partial(torch_context_parallel, mesh=mesh))
    stand_in.maybe_context_parallel = MethodType(Accelerator.maybe_context_parallel, stand_in)
    return stand_in


def _by_accelerate(rank: _Rank, features: list[Batch]) -> Shared:
    batch = rank.moved(rank.collator("right")(features))
    return context_parallel(rank.accelerator, batch, model=rank.model)


def _by_trainer(rank: _Rank, features: list[Batch]) -> Shared:
    collator = context_parallel_collator(rank.collator("right"), size=rank.cp.size, model=rank.model)
    return _as_trainer(rank, rank.moved(collator(features)))


def _left(rank: _Rank, features: list[Batch]) -> Shared:
    """An ordinary left-padded batch: Trainer takes it, and drops its mask in silence."""
    batch = rank.moved(rank.collator("left")(features))
    lengths = [len(feature["input_ids"]) for feature in features]
    segments = Segments.from_lengths(lengths, side="left", width=batch["input_ids"].shape[1])
    batch["position_ids"] = segments.position_ids.to(rank.model.device)
    batch["shift_labels"] = shift_labels(batch["labels"], segments)
    return _as_trainer(rank, batch)


@contextmanager
def _as_trainer(rank: _Rank, batch: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    shard = {key: batch[key].clone() for key in _SHARED if key in batch}
    buffers = list(shard.values())
    shares = rank.accelerator.maybe_context_parallel
    with shares(buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
        yield shard


Way = tuple[Side, Callable[[_Rank, list[Batch]], Shared]]
OURS_SHARDED: dict[str, Way] = {"accelerate": ("right", _by_accelerate), "Trainer": ("right", _by_trainer)}
OTHERS_SHARDED: dict[str, Way] = {"Trainer, left": ("left", _left)}
