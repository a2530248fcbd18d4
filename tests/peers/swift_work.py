"""What two ranks do in test_swift: ms-swift's own pooling of a row they share, on Gloo."""

from __future__ import annotations

import warnings

import swift_world
import torch
import transformers.utils

from collate_npu import Segments, split_batch
from collate_npu.integrations import swift
from collate_npu.parallel import ContextParallel

warnings.filterwarnings("ignore")


def last_tokens(layout: str, backend: str, batches: list[tuple[int, ...]], order: list[int]) -> list[list[float]]:
    """Prepare every batch, pool them in `order`: in which place each row's last token stands."""
    from megatron.core import mpu, parallel_state

    transformers.utils.is_torch_npu_available = lambda *args, **kwargs: True
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=2)
    swift.install()
    args = swift_world.arguments("qwen3", cp=2, cp_partition_mode=layout, task_type="seq_cls", attention_backend=backend)
    trainer, cp = swift_world.trainer_of(args), ContextParallel(2, mpu.get_context_parallel_rank(), layout=layout)
    trainer.seq_cls_loss_func = lambda output, *, attention_mask, packed_seq_params, labels: trainer.get_last_tokens(
        output, packed_seq_params, attention_mask
    )
    steps = []
    for lengths in batches:
        data = swift_world.collate(args, *lengths)
        truth = Segments.from_lengths(lengths, data["input_ids"].shape[1])
        data["labels"] = torch.zeros(len(lengths), dtype=torch.long)
        places = split_batch({"x": truth.position_ids.unsqueeze(-1).float(), "input_ids": truth.ids}, cp)["x"]
        steps.append((places, trainer.forward_step(iter([data]), swift_world.Recorder())[1]))
    return [loss(places).flatten().tolist() for places, loss in (steps[i] for i in order)]
