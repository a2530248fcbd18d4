"""What a user of ms-swift types: a tiny random Qwen3-Next with its tokenizer, a jsonl, and the two command lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from processes import QUIET, free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLUGIN = str(ROOT / "collate_npu/integrations/swift/plugin.py")
RECORDER = str(HERE / "swift_recorder.py")

MODEL = ("--model_type", "qwen3_next", "--template", "chatml", "--torch_dtype", "float32", "--tuner_type", "full")
DATA = ("--load_from_cache_file", "false", "--max_length", "256", "--check_model", "false", "--logging_steps", "1")
TRANSFORMERS = (
    *MODEL, *DATA, "--max_steps", "1", "--gradient_accumulation_steps", "1", "--per_device_train_batch_size", "3",
    "--dataloader_num_workers", "2", "--use_logits_to_keep", "false", "--save_strategy", "no", "--report_to", "none",
)  # fmt: skip
_OFF = ("bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "apply_rope_fusion",
        "moe_permute_fusion", "cross_entropy_loss_fusion", "fp16", "bf16", "use_distributed_optimizer")  # fmt: skip
MEGATRON = (
    *MODEL, *DATA, "--micro_batch_size", "3", "--train_iters", "2", "--padding_free", "false", "--eval_iters", "0",
    "--ddp_backend", "gloo", "--use_cpu_initialization", "true", "--recompute_granularity", "none", "--clip_grad", "0",
    "--report_to", "print", "--no_save_optim", "true", "--no_save_rng", "true", "--masked_softmax_fusion", "false",
    "--megatron_extra_kwargs", '{"deterministic_mode": true, "persist_layer_norm": false}',
    *(word for name in _OFF for word in (f"--{name}", "false")),
)  # fmt: skip
"""No fusion, no half precision, Megatron's own rule of Gated DeltaNet in torch: what a CPU can run."""


def save_model(folder: Path) -> str:
    """A checkpoint as it lies on a hub: weights, tokenizer, and `full_attention_interval`, which mcore-bridge reads."""
    from collate_npu.testing import byte_tokenizer, tiny_model

    tokenizer = byte_tokenizer(pad_is_eos=False)
    tiny_model("qwen3_next", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"full_attention_interval": 2}))
    return str(folder)


def save_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(number: int = 6) -> list[dict[str, Any]]:
    """Samples of different lengths."""
    said = [("q" * (3 + 5 * (i % 4)), "a b c"[: 1 + i % 5]) for i in range(number)]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]


def run(command: str, *words: str, record: Path, ranks: int = 0, **env: str) -> tuple[int, str, list[dict[str, Any]]]:
    """`swift sft ...` or `megatron sft ...` through the console entry: exit code, output, and each rank's JSON."""
    record.mkdir(exist_ok=True)
    path = [str(ROOT), *([str(HERE), str(HERE / "swift_site")] if command == "megatron" else [])]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "SWIFT_RECORD": str(record)}
    given |= {**QUIET, **env}
    if ranks:
        given |= {"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(free_port())}
    entry = Path(sys.executable).with_name(command)
    argv = [str(entry), "sft", *words, "--output_dir", str(record / "out")]
    done = subprocess.run(argv, env=given, cwd=record, capture_output=True, text=True, timeout=400)
    said = [json.loads(file.read_text()) for file in sorted(record.glob("rank*.json"))]
    return done.returncode, done.stdout + done.stderr, said
