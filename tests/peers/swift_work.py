"""What two ranks do in test_swift_pooling: ms-swift's own pooling of a row they share, on Gloo."""

import peer_work
import pytest
import swift_world
import torch

from collate_npu import Segments, split_batch
from collate_npu.integrations import swift


def last_tokens(layout: str, backend: str, batches: list[tuple[int, ...]], order: list[int]) -> list[list[float]]:
    """Prepare every batch, pool them in `order`: in which place each row's last token stands."""
    cp = peer_work.place(layout=layout)
    args = swift_world.arguments("qwen3", cp=2, cp_partition_mode=layout, task_type="seq_cls", attention_backend=backend)
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        swift_world.World(patch).npu()
        swift.install()
        try:
            trainer = swift_world.pooling_trainer(args)
            for lengths in batches:
                data = swift_world.collate(args, *lengths)
                truth = Segments.from_lengths(lengths, data["input_ids"].shape[1])
                data["labels"] = torch.zeros(len(lengths), dtype=torch.long)
                places = split_batch({"x": truth.position_ids.unsqueeze(-1).float(), "input_ids": truth.ids}, cp)["x"]
                steps.append((places, trainer.forward_step(iter([data]), swift_world.Recorder())[1]))
            return [loss(places).flatten().tolist() for places, loss in (steps[i] for i in order)]
        finally:
            swift.uninstall()
