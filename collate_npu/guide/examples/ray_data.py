"""Feed a hybrid model from Ray Data, collated by one line, and see that a batch equals its sequences alone.

    python ray_data.py                       # a local Ray of two workers, a tiny random Qwen3-Next, on a CPU or a card
    python ray_data.py --model ./checkpoint  # your own checkpoint and its tokenizer

Ray's workers tokenise. `iter_torch_batches(collate_fn=collator)` collates in the process that trains: `PaddingCollator`
takes Ray's columns as they are and emits a 2D mask. `BatchAdapter` gives each layer the mask that it reads.

Prints the loss of each step, and the largest difference of a logit between a batch and its sequences alone:

    logits: off by ...

Exit code 1 if it is larger than rounding explains.
"""

import argparse
import os
import sys

# read by Ray at its import: a Ray of this machine alone, that reports nothing to anybody
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}

import ray
import ray.data
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from collate_npu import BatchAdapter, PaddingCollator
from collate_npu.testing import byte_tokenizer, tiny_model

TEXTS = [
    "Ray reads and tokenises.",
    "The collator pads, in the process that trains.",
    "Short.",
    "Each layer of a hybrid model gets the mask that it reads, whichever loader brings the rows.",
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a checkpoint; by default a tiny random Qwen3-Next")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else byte_tokenizer()
    tokenizer.padding_side = "left"
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.float32) if args.model else tiny_model("qwen3_next", vocab_size=len(tokenizer))
    model = model.to(device).eval()  # no dropout: the logits are compared
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    bf16 = device.type != "cpu" and torch.get_device_module(device).is_bf16_supported()

    def tokenized(row: dict) -> dict:
        ids = tokenizer(row["text"])["input_ids"]
        return {"input_ids": ids, "labels": ids}

    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    texts = [{"text": TEXTS[n % len(TEXTS)]} for n in range(2 * args.steps)]
    dataset = ray.data.from_items(texts, override_num_blocks=2).map(tokenized)
    off = 0.0
    collator, adapter = PaddingCollator(tokenizer, attention_mask="2d"), BatchAdapter(model)
    for batch in dataset.iter_torch_batches(batch_size=2, collate_fn=collator):
        inputs, segments = adapter.with_segments(batch)
        inputs = {key: value.to(device) for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        with torch.no_grad():  # in float32: rounding of bfloat16 would hide an error
            together = model(**inputs).logits
            for ids, keep, logits in zip(inputs["input_ids"], segments.keep.to(device), together):
                alone = model(input_ids=ids[keep][None]).logits[0]
                off = max(off, float((logits[keep] - alone).abs().max()))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss: {loss:.3f}")
    ray.shutdown()
    print(f"logits: off by {off:.1e}")
    # kernels on a card multiply float32 in TF32; a wrong mask moves a logit by 1 and more
    return int(not off < (1e-4 if device.type == "cpu" else 2e-2))


if __name__ == "__main__":
    sys.exit(main())
