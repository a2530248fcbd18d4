"""ms-swift's own trainer on flat rows of its transformers backend: a step of it, and each sample alone."""

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from swift.template.templates.qwen import Qwen3_5Template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from swift_world import samples, template
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, __version__

LENGTHS = (7, 3, 5)


class ForText(Qwen3_5Template):
    """Of text: it sends offsets. sdpa, unlike the flash attention that ms-swift asks for, reads positions in their place."""

    def _get_position_ids(self, row: dict[str, Any]) -> dict[str, Tensor]:
        return {"position_ids": torch.arange(torch.as_tensor(row["input_ids"]).numel()).expand(4, 1, -1)}

    def _data_collator(self, batch: Any, *, padding_to: Any = None) -> dict[str, Any]:
        out: dict[str, Any] = super()._data_collator(batch, padding_to=padding_to)
        return {**out, "position_ids": out["text_position_ids"]}


def packing(family: str) -> Any:
    """Its template for this family, in the mode that packs."""
    made = template(transformers=family, padding_free=True)
    if family == "qwen3_5_text":
        made.__class__, made.transformers_version = ForText, Version(__version__)
        made.transformers_5_3 = made.transformers_5_9 = True
        made._requires_mm_token_type_ids = False
    return made


class _Kept(TrainerCallback):  # type: ignore[misc]
    gradients: Tensor

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self.gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def trained(model: Any, **given: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    """Logits of each sample, loss and gradient of a step on one flat row of all of them."""
    model.model_meta = SimpleNamespace(is_multimodal=False, template="chatml", model_arch=None)
    model.model_info = SimpleNamespace(is_moe_model=False, torch_dtype=torch.float32)
    seen, kept = [], _Kept()
    hook = model.register_forward_hook(
        lambda module, args, out: seen.append((out["logits"].detach()[0], out["loss"].detach()))
    )
    with tempfile.TemporaryDirectory() as folder:
        args = Seq2SeqTrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=len(LENGTHS), learning_rate=0.0, max_grad_norm=0.0,
            use_cpu=True, report_to="none", save_strategy="no", check_model=False, remove_unused_columns=False,
            train_dataloader_shuffle=False, **{"use_logits_to_keep": False, "dataloader_num_workers": 0, **given},
        )  # fmt: skip
        rows, made = samples(*LENGTHS), packing(model.config.model_type)
        trainer = Seq2SeqTrainer(model=model, args=args, template=made, train_dataset=rows)
        trainer.add_callback(kept)
        trainer.train()
    hook.remove()
    model.eval()
    return list(seen[0][0].split(list(LENGTHS))), seen[0][1], kept.gradients


def alone(model: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    """The same of each sample by itself."""
    model.zero_grad()
    logits = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in samples(*LENGTHS)]
    labels = torch.cat([torch.tensor(row["labels"][1:]) for row in samples(*LENGTHS)])
    loss = cross_entropy(torch.cat([each[:-1] for each in logits]), labels)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return [each.detach() for each in logits], loss.detach(), gradients


def apart(found: Any, wanted: Any) -> float:
    """Of all logits, the loss, and the gradient by its largest value."""
    logits = max(float((x - y).abs().max()) for x, y in zip(found[0], wanted[0]))
    gradient = float((found[2] - wanted[2]).abs().max() / wanted[2].abs().max())
    return max(logits, float((found[1] - wanted[1]).abs()), gradient)
