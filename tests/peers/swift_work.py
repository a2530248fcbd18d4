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


def last_tokens(layout: str, backend: str, lengths: tuple[int, ...]) -> list[float]:
    from megatron.core import mpu, parallel_state

    transformers.utils.is_torch_npu_available = lambda *args, **kwargs: True
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=2)
    swift.install()
    args = swift_world.arguments("qwen3", cp=2, cp_partition_mode=layout, task_type="seq_cls", attention_backend=backend)
    data = swift_world.collate(args, *lengths)
    truth = Segments.from_lengths(lengths, data["input_ids"].shape[1])
    data["labels"] = torch.tensor([0, 1, 2])
    trainer = swift_world.trainer_of(args)
    batch = trainer.get_batch(iter([data]))
    assert backend == "flash" or batch["attention_mask"].shape == (3, 1, truth.shape[1] // 2, truth.shape[1])
    cp = ContextParallel(2, mpu.get_context_parallel_rank(), layout=layout)
    shard = split_batch({"x": truth.position_ids.unsqueeze(-1).float(), "input_ids": truth.ids}, cp)["x"]
    found = trainer.get_last_tokens(shard, None, batch.get("attention_mask"))
    return found.flatten().tolist()
