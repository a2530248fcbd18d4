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
from swift.megatron.pipelines.train.rlhf import MegatronRLHF
from swift.megatron.pipelines.train.sft import MegatronSft
from test_swift_sft import MEGATRON, save_rows

from collate_npu.integrations import swift

_BUILT: dict[str, Any] = {}


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


def measure(model: str, folder: str, kind: str) -> dict[str, Any]:
    """How far each number that a loss reports of a batch is from its mean over the samples alone, and how far the samples
    are apart. Every batch runs forward before the last one's loss is taken, and then the first one's."""
    trainer, samples = build(kind, model, folder)
    swift.install()
    try:
        batches = [[samples[0], samples[1]], [samples[2]]]
        steps = [step(trainer, rows) for rows in batches]
        found = [reported(*each) for each in steps[::-1]][::-1]
        alone = [torch.stack([reported(*step(trainer, [row])) for row in rows]) for rows in batches]
    finally:
        swift.uninstall()
    told = {"trainer": type(trainer).__name__, "widths": [int(output.shape[1]) for output, _ in steps]}
    told["error"] = max(float((x - rows.mean(0)).abs().max() / (1 + rows.abs().max())) for x, rows in zip(found, alone))
    return told | {"apart": float(torch.cat(alone).std(0).max())}


def reported(output: Any, loss: Any) -> torch.Tensor:
    return torch.stack([torch.as_tensor(value).double().reshape(()) for _, value in sorted(loss(output)[1].items())])
