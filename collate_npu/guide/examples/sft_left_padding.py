"""Fine-tune a hybrid model on rows padded left, with transformers' Trainer, and see that every number is right.

    python sft_left_padding.py                      # a tiny random Qwen3-Next, on a CPU or a card
    python sft_left_padding.py --model ./checkpoint # your own checkpoint and its tokenizer

`PaddingCollator` gives attention and the recurrent layers the mask that each of them reads, and ignores the first label of
every row, which would be predicted from padding. `DeliveryCallback` checks at the first step what each layer got, and stops
the run if it is wrong.

Prints one line of that check, the loss, and the largest difference between a batch and its sequences alone:

    logits: off by ..., gradient: off by ...

Exit code 1 if a difference is larger than rounding explains.
"""

import argparse
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from collate_npu import PaddingCollator
from collate_npu.integrations.transformers import DeliveryCallback
from collate_npu.testing import byte_tokenizer, tiny_model

TEXTS = [
    "A recurrent layer reads every token of its row, from the first to the last.",
    "Padding is no token.",
    "Left padding puts the last token of every row in the last column, as generation needs it.",
    "Two masks, one truth.",
]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradient of all parameters as one vector, and clear it."""
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return found


def compare(model: torch.nn.Module, batch: dict, rows: list) -> tuple[float, float]:
    """Return the largest difference of a logit, and the relative difference of the gradient, batch against rows alone."""
    model.eval()  # no dropout: the two runs must compute the same function
    targets = sum(len(row["labels"]) - 1 for row in rows)
    output = model(**batch)
    output.loss.backward()
    together, logit = gradient(model), 0.0
    for row, logits in zip(rows, output.logits):
        ids = torch.tensor([row["input_ids"]], device=logits.device)
        alone = model(input_ids=ids, labels=ids)
        # the loss of a row is a mean over its own targets, that of the batch over all of them
        (alone.loss * (ids.shape[1] - 1) / targets).backward()
        logit = max(logit, float((logits[-ids.shape[1] :] - alone.logits[0]).detach().abs().max()))
    apart = gradient(model)
    return logit, float((together - apart).norm() / apart.norm())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a checkpoint; by default a tiny random Qwen3-Next")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else byte_tokenizer()
    tokenizer.padding_side = "left"
    # weights in float32, computed in bfloat16 on a card: so rounding of the weights does not hide an error
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.float32) if args.model else tiny_model("qwen3_next", vocab_size=len(tokenizer))
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(TEXTS)["input_ids"]]

    collator = PaddingCollator(tokenizer, model=model)
    card = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None  # "cuda", "npu" or None
    bf16 = card is not None and torch.get_device_module(card).is_bf16_supported()
    with tempfile.TemporaryDirectory() as out:
        settings = {"max_steps": args.steps, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "bf16": bf16}
        quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(out, **settings, **quiet)
        callbacks = [DeliveryCallback(collator)]
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=callbacks)
        print(f"loss: {trainer.train().training_loss:.3f}")

    batch = {key: value.to(model.device) for key, value in collator(rows).items() if value is not None}
    logit, relative = compare(model, batch, rows)
    print(f"logits: off by {logit:.1e}, gradient: off by {relative:.1e}")
    # kernels on a card multiply float32 in TF32 or bfloat16; an error of a mask moves logits by 1, and the gradient by 0.1
    tolerance = 1e-4 if card is None else 2e-2
    return int(not max(logit, relative) < tolerance)


if __name__ == "__main__":
    sys.exit(main())
