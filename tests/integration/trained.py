"""transformers' Trainer on a CPU, from its constructor: what it logs, and the gradient of its last step."""

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.0, "seed": 0}


class Gradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = gradient_of(model)


def trainer_of(model, collator, folder, data, made=Trainer, **settings):
    args = TrainingArguments(folder, **{**QUIET, **settings})
    return made(model, args, data_collator=collator, train_dataset=data, eval_dataset=data)


def gradient_of(model):
    return torch.cat([(p * 0 if p.grad is None else p.grad).detach().flatten() for p in model.parameters()])


def step_of(trainer):
    """The loss of one step as it is logged, and its gradient."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.add_callback(kept := Gradient())
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row), kept.found


def loss_of(logits, labels, smoothing):
    """Of one sample, summed over its targets."""
    targets, scores = labels[1:], logits[:-1].log_softmax(-1)
    kept = targets >= 0
    nll = -scores[kept].gather(1, targets[kept][:, None]).sum()
    return (1 - smoothing) * nll - smoothing * scores[kept].mean(1).sum()
