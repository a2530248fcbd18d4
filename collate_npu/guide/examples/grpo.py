"""Train a hybrid model with TRL's GRPOTrainer behind `adapt`, and see that each completion is scored as if it were alone.

    python grpo.py                       # a tiny random Qwen3-Next, on a CPU or a card
    python grpo.py --model ./checkpoint  # your own checkpoint and its tokenizer

GRPO pads prompts left and completions right, in one row, and takes no collator. `adapt(trainer.model)` reads each batch on
its way into the model: it makes it right, or raises an error that says what to change. For Qwen3-Next TRL's own mask is
right, and `adapt` is the guard that it stays so; GPT-2, with its absolute positions, would be wrong without it.

Prints the rewards, and the largest difference of a completion's log-probability, in TRL's own forward against that
sequence alone:

    log-probabilities: off by ...

Exit code 1 if it is larger than rounding explains.
"""

import argparse
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from collate_npu import adapt
from collate_npu.testing import byte_tokenizer, tiny_model

PROMPTS = ["Count to three:", "Name a colour that is neither red nor blue, and say why you like it:", "Hello,"]


def reward(completions: list[str], **_: object) -> list[float]:
    """Return for each completion which part of it is letters and spaces."""
    return [sum(letter.isalpha() or letter == " " for letter in text) / max(len(text), 1) for text in completions]


class CheckedTrainer(GRPOTrainer):
    """GRPOTrainer that scores each sequence a second time, alone, and compares; your own training does not need it."""

    off = 0.0

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *more,
        **named,
    ) -> tuple:
        score = super()._get_per_token_logps_and_entropies
        scores = score(model, input_ids, attention_mask, logits_to_keep, *more, **named)
        for row, keep, together in zip(input_ids, attention_mask.bool(), scores[0].detach()):
            length = int(keep[-logits_to_keep:].sum())  # the completion stands at the left of its columns
            sequence = row[keep][None]
            with torch.no_grad():
                alone = score(model, sequence, torch.ones_like(sequence), length)[0][0]
            self.off = max(self.off, float((together[:length] - alone).abs().max()))
        return scores


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a checkpoint; by default a tiny random Qwen3-Next")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else byte_tokenizer()
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.float32) if args.model else tiny_model("qwen3_next", vocab_size=len(tokenizer))
    card = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None  # "cuda", "npu" or None
    bf16 = card is not None and torch.get_device_module(card).is_bf16_supported()
    with tempfile.TemporaryDirectory() as out:
        settings = {"max_steps": args.steps, "num_generations": 2, "per_device_train_batch_size": 4, "bf16": bf16}
        quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
        config = GRPOConfig(out, max_completion_length=16, beta=0.0, disable_dropout=True, **settings, **quiet)
        data = Dataset.from_dict({"prompt": PROMPTS})
        trainer = CheckedTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer)
        adapt(trainer.model)  # before train(); for trainer.ref_model too, where beta is not 0
        trainer.train()

    print("rewards:", [round(step["reward"], 3) for step in trainer.state.log_history if "reward" in step])
    print(f"log-probabilities: off by {trainer.off:.1e}")
    # in bfloat16 rounding alone moves a log-probability by up to 0.1; a wrong mask or position moves it by 1 and more
    return int(not trainer.off < (0.5 if bf16 else 1e-4))


if __name__ == "__main__":
    sys.exit(main())
