"""Run as a program in two processes: Megatron-Bridge's datasets, providers and `forward_step`, a row on one rank and shared.

The loss of each token and the gradient, against each sample in a batch of its own. Transformer Engine's layers and its
split of a packed row are stand-ins (`megatron_world`); nothing of Megatron-Bridge is.
"""

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import te_stub
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_world import DENSE, UNFUSED, TEDotProductAttention, groups, hardware, judged, layers, regroup, rotary_part
from stand_ins import stand_in

stand_in(modelopt=te_stub.VERSION)
from megatron.bridge.data.datasets.sft import GPTSFTDataset, GPTSFTPackedDataset  # noqa: E402
from megatron.bridge.models.qwen.qwen_provider import Qwen3ModelProvider, Qwen3NextModelProvider  # noqa: E402
from megatron.bridge.training import gpt_step  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.timers import Timers  # noqa: E402
from megatron.core.utils import StragglerDetector  # noqa: E402

from collate_npu import Segments  # noqa: E402
from collate_npu.integrations.megatron import gpt_batch  # noqa: E402
from collate_npu.parallel import ContextParallel, gather_sequence, token_rows  # noqa: E402

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


def partitioned(offsets: Any, total: int, size: int, rank: int) -> Any:
    """Transformer Engine's `thd_get_partitioned_indices`: of each sequence chunks r and 2 * size - 1 - r.

    Its binary search (common/fused_attn/context_parallel.cu) never compares the last offset, here the -1 that fills."""
    return token_rows(total, ContextParallel(size, rank).for_documents(), offsets[offsets >= 0])


def model_of(family: str) -> Any:
    kind, more = (Qwen3NextModelProvider, HYBRID) if family == "qwen3_next" else (Qwen3ModelProvider, {})
    provider = kind(**{**SMALL, **more, "context_parallel_size": parallel_state.get_context_parallel_world_size()})
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    torch.manual_seed(0)
    model = provider.provide(pre_process=True, post_process=True)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:
                p.uniform_(-1.5, -0.5, generator=draw)
            else:
                p.normal_(0.0, 0.2, generator=draw)
    return model


def padded(rows: list[list[int]], multiple: int) -> dict[str, Any]:
    """The first process indexes the file for both."""
    path = Path(sys.argv[1]).with_name(f"rows{rows[0][0]}-{len(rows)}.jsonl")
    lines = [{"input": str(row[0]), "output": " ".join(map(str, row[1:]))} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
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


def step(model: Any, batch: dict[str, Any], *, ours: bool = False) -> tuple[Any, Any]:
    """The loss of each token of this rank and the gradient: by its `forward_step`, or with our inputs and its own labels."""
    model.zero_grad()
    if ours:
        keys = ("cu_seqlens", "cu_seqlens_argmin", "position_ids")
        read = {"input_ids": batch["tokens"], **{key: batch[key] for key in keys if "cu_seqlens" in batch}}
        if "cu_seqlens" not in batch:
            read["attention_mask"] = Segments.from_lengths(
                [n - 1 for n in batch["token_count"]], batch["tokens"].shape[1]
            ).keep
        inputs, _ = gpt_batch(read, model, padding_free="cu_seqlens" in batch)
        out = model(**inputs, labels=batch["labels"])
        (out * batch["loss_mask"]).sum().backward()
    else:
        out, loss_of = gpt_step.forward_step(STATE, iter([batch]), model)
        loss_of(out)[0].backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def truth(family: str) -> Any:
    rows, total, model = [], {}, model_of(family)
    for row in SAMPLES:
        out, gradient = step(model, padded([row], 1))
        rows.append(out[0, : len(row)])
        total = {name: total.get(name, 0) + grad for name, grad in gradient.items()}
    return rows, total


def together(family: str, make: Any, ours: bool) -> Any:
    """The same of all samples in one batch, gathered."""
    cp = ContextParallel.from_megatron()
    model, batch = model_of(family), make(SAMPLES, 2 * cp.size if cp.size > 1 else 1)
    out, gradient = step(model, batch, ours=ours)
    for grad in gradient.values() if cp.size > 1 else ():
        dist.all_reduce(grad)
    flat = "cu_seqlens" in batch
    bounds = batch["cu_seqlens"][0, : int(batch["cu_seqlens_argmin"][0])] if flat else None
    whole = gather_sequence(out, cp.for_documents() if flat else cp, cu_seqlens=bounds)
    places = [(0, start) for start in bounds.tolist()] if flat else [(b, 0) for b in range(len(SAMPLES))]
    return [whole[b, start : start + len(row)] for (b, start), row in zip(places, SAMPLES)], gradient


def main() -> dict[str, Any]:
    import transformer_engine_torch
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    groups()
    hardware(setattr)
    layers(setattr, TEDotProductAttention)
    torch.Tensor.cuda = lambda self, **settings: self
    transformer_engine_torch.thd_get_partitioned_indices = partitioned
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = rotary_part
    found: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for ranks, family in ((1, "qwen3"), (1, "qwen3_next"), (2, "qwen3"), (2, "qwen3_next")):
        regroup(context_parallel_size=ranks)
        known[family] = known.get(family) or truth(family)
        for layout, make in (("padded right", padded), ("packed", packed)):
            name, who = (layout, ("alone", "ours")) if ranks == 1 else ("context parallel", ("alone",))
            for one in who:
                told = found.setdefault(f"{family} {name}", {}).setdefault(one, [])
                told.append(judged(partial(together, family, make, one == "ours"), known[family]))
    return found


if __name__ == "__main__":
    found = main()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")
