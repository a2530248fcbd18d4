"""Megatron-Bridge 0.3.1: what its datasets collate, what its `get_packed_seq_params` gives a Megatron model, and its
providers' models through its `forward_step`, a row on one rank and shared by two.

`python test_megatron_bridge.py OUT` is one of two ranks: the loss of each token and the gradient, against each sample in a
batch of its own. TransformerEngine, its split of a packed row, and modelopt are stand-ins; the datasets are built by their
own constructors, of files.
"""

# ruff: noqa: E402
import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import te_stub
import torch
from stand_ins import stand_in

stand_in(modelopt=te_stub.VERSION)
from cells import Stack
from megatron.bridge.data.datasets.sft import GPTSFTDataset, GPTSFTPackedDataset
from megatron.bridge.models.qwen.qwen_provider import Qwen3ModelProvider, Qwen3NextModelProvider
from megatron.bridge.training import gpt_step
from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.utils import StragglerDetector
from megatron_world import DENSE, UNFUSED, TEDotProductAttention, cells_on_ranks, gathered, gradients_of, start, summed
from processes import found_by, write

from collate_npu import CollateError, Segments
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.parallel import ContextParallel, query_rows

NEEDS = ("megatron", "nemo_automodel", "omegaconf")  # the environment that has Megatron-Bridge
OWN = "its own step shares the row and its labels out"

EOS = 2
SAMPLES = [[5, 9, 12, 77, 3], [40, 41, 42], [7, 11, 8, 3, 20, 31, 64, 12, 6]]
SMALL = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
    "kv_channels": 8, "vocab_size": 128, "seq_length": 64, "params_dtype": torch.float32, "bf16": False,
    "use_cpu_initialization": True, **UNFUSED,
}  # fmt: skip
HYBRID = {
    "linear_attention_freq": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "deterministic_mode": True, **DENSE,
    "moe_shared_expert_gate": False,
}  # fmt: skip


STATE = SimpleNamespace(
    timers=Timers(0, "minmax"),
    straggler_timer=StragglerDetector(),
    cfg=SimpleNamespace(
        dataset=SimpleNamespace(skip_getting_attention_mask_from_dataset=True),  # the default of its configs
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False),
    ),
)


class Tokenizer:
    eos_id = EOS

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def padded(rows: list[list[int]], multiple: int) -> dict[str, Any]:
    """The first process indexes the file for both."""
    path = Path(sys.argv[1]).with_name(f"rows{rows[0][0]}-{len(rows)}.jsonl")
    lines = [{"input": str(row[0]), "output": " ".join(map(str, row[1:]))} for row in rows]
    made = path.with_suffix(f".{os.getpid()}")  # whole before the other rank reads it
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made.replace(path)
    settings = {"prompt_template": "{input} {output}", "label_key": "output", "truncation_field": "input"}
    settings |= {"pad_seq_length_to_mult": multiple, "max_seq_length": 64, "answer_only_loss": False}
    data = GPTSFTDataset(str(path), Tokenizer(), **settings)
    return data.collate_fn([data[n] for n in range(len(rows))])


def packed(rows: list[list[int]], multiple: int, pad_to: int = 4) -> dict[str, Any]:
    """As its packing script writes them: each sequence padded to `multiple`, and one token more that labels take."""
    held = [row + [EOS] * (1 + -len(row) % multiple) for row in rows]
    starts = [sum(map(len, held[:n])) for n in range(len(held))]
    learned = [float(n < len(row)) for row, one in zip(rows, held) for n in range(len(one))]
    path = Path(mkdtemp(), "packed.npy")
    np.save(path, [{"input_ids": [token for row in held for token in row], "seq_start_id": starts, "loss_mask": learned}])
    settings = {"pad_seq_to_mult": multiple, "pad_seq_length_to_mult": pad_to, "prompt_template": "{text} {answer}"}
    data = GPTSFTPackedDataset(str(path), Tokenizer(), max_seq_length=64, **settings)
    return data.collate_fn([data[0]])


@pytest.mark.parametrize(("multiple", "pad_to"), [(1, 24), (4, 16)])
def test_packed_rows(monkeypatch, multiple, pad_to):
    """The dataset's row, with a mask of one number, what `forward_step` reads of it, and the object that its models get."""
    batch = packed(SAMPLES, multiple, pad_to)
    assert batch["attention_mask"].tolist() == [1]
    with pytest.raises(CollateError, match="attention_mask"):
        segments_from_batch(batch, padding_free=True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **settings: self)
    read = gpt_step.get_batch_from_iterator(iter([batch]), is_first_pp_stage=True, is_last_pp_stage=True)
    read = {key: value for key, value in read.items() if value is not None}
    params = get_packed_seq_params({key: value for key, value in read.items() if "seqlens" in key or key == "max_seqlen"})
    given = {"input_ids": read["tokens"], "position_ids": read["position_ids"], "packed_seq_params": params}
    for each in (read, given):
        assert segments_from_batch(each, padding_free=True).lengths == (tuple(map(len, SAMPLES)),)


def test_its_cells(tmp_path):
    found = found_by("test_megatron_bridge", tmp_path, ranks=2)[0]
    for cells in found.values():
        cells["context parallel"]["ours"] = OWN
    stack = Stack("Megatron-Bridge", ("megatron-bridge", "megatron-core"), "peers_nemo")
    stack.tell_jobs(found, line="gpt_batch(read, model) in a step of your own")


def partitioned(offsets: Any, total: int, size: int, rank: int) -> Any:
    """Transformer Engine's `thd_get_partitioned_indices`: of each sequence chunks r and 2 * size - 1 - r.

    Its binary search (common/fused_attn/context_parallel.cu) never compares the last offset, here the -1 that fills."""
    return query_rows(total, ContextParallel(size, rank).for_documents(), offsets[offsets >= 0])


def model_of(family: str) -> Any:
    kind, more = (Qwen3NextModelProvider, HYBRID) if family == "qwen3_next" else (Qwen3ModelProvider, {})
    provider = kind(**{**SMALL, **more, "context_parallel_size": parallel_state.get_context_parallel_world_size()})
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    model = provider.provide(pre_process=True, post_process=True)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            lasting = "A_log" in name or "dt_bias" in name
            weight.uniform_(-1.5, -0.5, generator=draw) if lasting else weight.normal_(0.0, 0.2, generator=draw)
    return model


def step(model: Any, batch: dict[str, Any], *, ours: bool = False) -> tuple[Any, Any]:
    """The loss of each token of this rank and the gradient: by its `forward_step`, or with our inputs and its own labels."""
    model.zero_grad()
    if ours:
        keys = ("cu_seqlens", "cu_seqlens_argmin", "position_ids")
        read = {"input_ids": batch["tokens"], **{key: batch[key] for key in keys if "cu_seqlens" in batch}}
        if "cu_seqlens" not in batch:
            lengths = [n - 1 for n in batch["token_count"]]
            read["attention_mask"] = Segments.from_lengths(lengths, batch["tokens"].shape[1]).keep
        inputs, _ = gpt_batch(read, model, padding_free="cu_seqlens" in batch)
        out = model(**inputs, labels=batch["labels"])
        (out * batch["loss_mask"]).sum().backward()
    else:
        out, loss_of = gpt_step.forward_step(STATE, iter([batch]), model)
        loss_of(out)[0].backward()
    return out.detach(), gradients_of(model)


def truth(family: str) -> Any:
    rows, total, model = [], {}, model_of(family)
    for row in SAMPLES:
        out, gradient = step(model, padded([row], 1))
        rows.append(out[0, : len(row)])
        total = {name: total.get(name, 0) + grad for name, grad in gradient.items()}
    return rows, total


def together(family: str, make: Any, ours: bool) -> Any:
    """The same of all samples in one batch."""
    ranks = parallel_state.get_context_parallel_world_size()
    assert not ours or ranks == 1, OWN
    batch = make(SAMPLES, 2 * ranks if ranks > 1 else 1)
    out, gradient = step(model_of(family), batch, ours=ours)
    bounds = batch["cu_seqlens"][0, : int(batch["cu_seqlens_argmin"][0])] if "cu_seqlens" in batch else None
    return gathered(out, list(map(len, SAMPLES)), bounds), summed(gradient)


def layouts(family: str, ranks: int) -> dict[str, Any]:
    return {"padded right": [padded], "packed": [packed]} if ranks == 1 else {"context parallel": [padded, packed]}


def main() -> dict[str, Any]:
    import transformer_engine_torch

    start(TEDotProductAttention)
    torch.Tensor.cuda = lambda self, **settings: self
    transformer_engine_torch.thd_get_partitioned_indices = partitioned
    return cells_on_ranks(("qwen3", "qwen3_next"), layouts, truth, together)


if __name__ == "__main__":
    write(main())
