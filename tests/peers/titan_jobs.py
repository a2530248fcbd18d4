"""A user's job for torchtitan's trainer: our collator in the dataloader, and a trainer that compares with samples alone.

Every step is another layout of the rows. What the layers received, the loss and the gradients are written to `TITAN_OUT`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import titan_cpu  # noqa: F401
import titan_kernels
import torch
import torch.distributed as dist
from datasets import Dataset
from titan_families import LAYERS, config_of
from titan_kernels import TEXT_ALONE, alone
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel
from torchtitan.trainer import Trainer

from collate_npu import PaddingCollator
from collate_npu.integrations import torchtitan

WIDTH, VOCABULARY = 256, 2048
LAYOUTS = {  # per row: (tokens, of a sequence or of padding)
    "right": [[(200, 1), (56, 0)], [(130, 1), (126, 0)]],
    "left": [[(159, 0), (97, 1)], [(56, 0), (200, 1)]],
    "packed": [[(60, 1), (9, 0), (50, 2), (90, 3), (47, 0)], [(30, 0), (100, 1), (126, 2)]],
    "full": [[(60, 1), (50, 2), (146, 3)], [(100, 1), (156, 2)]],
    "holes": [[(60, 1), (9, 0), (50, 1), (90, 2), (47, 0)], [(30, 0), (100, 1), (26, 0), (100, 1)]],
}


def rows(steps: list[str]) -> list[dict[str, Any]]:
    """Two rows a step; no token id comes twice in them, so that a rank's tokens tell their places."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for step in steps:
        ids = (torch.randperm(2047, generator=generator)[: 2 * WIDTH] + 1).view(2, WIDTH).tolist()
        for row, layout in zip(ids, LAYOUTS[step.split(":")[0]]):
            segments = [number for length, number in layout for _ in range(length)]
            row = [token if number else 0 for token, number in zip(row, segments)]
            made.append({"input_ids": row, "labels": list(row), "attention_mask": segments})
            if step == "full:own":
                made[-1]["after"] = 1  # the token behind each document, which is a label alone
    return made


def own_batch(features: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
    """What torchtitan's own text dataset makes of the same documents."""
    documents = []
    for row in features:
        ids, segments = torch.tensor(row["input_ids"]), torch.tensor(row["attention_mask"])
        documents += [{"text": " ".join(map(str, [*ids[segments == n].tolist(), 1]))} for n in segments.unique().tolist()]
    loaded = DatasetConfig(path="", loader=lambda _: Dataset.from_list(documents), sample_processor=lambda row: row["text"])
    text_datasets.DATASETS["rows"] = loaded
    words: Any = SimpleNamespace(encode=lambda text, **_: list(map(int, text.split())))
    batch: Any = default_collate(list(text_datasets.HuggingFaceTextDataset("rows", None, words, seq_len=WIDTH)))
    return batch[0], batch[1]


def without_us(features: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
    """A padded batch with the positions of its places, as a loader that knows no documents would make it."""
    ids, segments = (torch.tensor([row[key] for row in features]) for key in ("input_ids", "attention_mask"))
    labels = torch.where(segments > 0, ids, -100)
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return {"input": ids, "positions": torch.arange(WIDTH).expand_as(ids).contiguous()}, shifted


class Rows(IterableDataset):
    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def __iter__(self) -> Any:
        for n, row in enumerate(rows(self.steps)):
            yield row, self.steps[n // 2]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        steps: list[str] = field(default_factory=lambda: ["right", "left", "packed"])
        """Layouts; `left:theirs` is collated without us, `full:own` by torchtitan, `left:ptrr` shared out by that load
        balancer, `holes:ids` with segment_ids."""
        extra: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **given: Any) -> None:
        inner = PaddingCollator(pad_token_id=0, attention_mask="2d")

        def collate(pairs: list[tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], Tensor]:
            features, step = [features for features, _ in pairs], pairs[0][1]
            made = {"theirs": without_us, "own": own_batch}.get(step.partition(":")[2])
            ours = torchtitan.TitanCollator(inner, segment_ids="ids" in step, extra=config.extra)
            input_dict, labels = (made or ours)(features)
            return {**input_dict, **config.extra}, labels

        super().__init__(Rows(config.steps), dp_rank, dp_world_size, batch_size=local_batch_size, collate_fn=collate)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None  # the tokens are there already


class Comparing(Trainer):
    """The trainer; after each step it compares with every sample alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.told: list[dict[str, Any]] = []
        for part in self.model_parts:
            torchtitan.masks_in_forward(part, LAYERS.get(config.model_spec.name), compiled=False)
        with torch.no_grad():  # small random models hide wrong masks
            for part in self.model_parts:
                for weight in part.parameters():
                    if weight.ndim > 1:
                        weight.mul_(2.5)

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: Tensor) -> Any:
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        self.inputs.append(inputs)
        return inputs, labels, extra

    def forward_backward_step(self, **given: Any) -> Tensor:
        loss = super().forward_backward_step(**given)
        self.loss = loss.detach().clone()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        titan_kernels.RECEIVED.clear()
        titan_kernels.OFFSETS.clear()
        self.inputs: list[Tensor] = []
        if "ptrr" in self._step_name():
            self.config.parallelism.context_parallel_load_balancer = "ptrr"
        weights = self._whole(lambda weight: weight)
        super().train_step(data_iterator)
        masks, offsets = list(titan_kernels.RECEIVED), [offsets.tolist() for offsets in titan_kernels.OFFSETS]
        gradients = self._whole(lambda weight: weight.grad)
        mine = {
            "masks": [list(mask.shape) for mask in masks],
            "wrong places": sum(_wrong(mask, self.inputs, self._rows()) for mask in masks),
            "offsets": offsets,
            "loss": max(self.loss.item(), 0),  # -1 on the stages before the last
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if dist.get_rank() == 0:
            self._compare(weights, gradients, ranks)

    def _compare(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], ranks: list[dict[str, Any]]) -> None:
        loss, expected = alone(self.model_config, weights, self._rows())
        difference = sum(float((gradients[name] - expected[name]).square().sum()) for name in expected) ** 0.5
        told = {
            "step": self._step_name(),
            "loss error": abs(sum(rank["loss"] for rank in ranks) - loss) / loss,
            "gradient error": difference / sum(float(x.square().sum()) for x in expected.values()) ** 0.5,
            "ranks": ranks,
        }
        self.told.append(told)
        with open(os.environ["TITAN_OUT"], "w") as file:
            json.dump(self.told, file)

    def _step_name(self) -> str:
        return self.config.dataloader.steps[self.step - 1]

    def _rows(self) -> list[dict[str, Any]]:
        return rows(self.config.dataloader.steps)[2 * self.step - 2 : 2 * self.step]

    def _whole(self, of: Any) -> dict[str, Tensor]:
        """A tensor of each weight, by name, from all shards and stages."""
        mine = {}
        for part in self.model_parts:
            for name, weight in part.named_parameters():
                if (tensor := of(weight)) is None:
                    continue  # the vision tower saw no image
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                mine[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().clone()
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, mine)
        return {name: tensor for stage in stages for name, tensor in stage.items()}


def _wrong(received: Tensor, inputs: list[Tensor], batch: list[dict[str, Any]]) -> int:
    """Real queries that attend other keys than their own sequence up to themselves; the micro-batch that fits best."""
    return min(_wrong_of(received, tokens, batch) for tokens in inputs)


def _wrong_of(received: Tensor, tokens: Tensor, batch: list[dict[str, Any]]) -> int:
    keys = tokens
    if received.shape[2] != received.shape[1]:  # keys of all ranks, one after another
        ranks = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, tokens.contiguous())
        keys = torch.cat(ranks, 1)
    place = {t: (n, row["attention_mask"][n]) for row in batch for n, t in enumerate(row["input_ids"]) if t}
    wrong = 0
    for b in range(len(tokens)):
        at = torch.tensor([place.get(token, (-1, 0)) for token in tokens[b].tolist()])
        of = torch.tensor([place.get(token, (-1, 0)) for token in keys[b].tolist()])
        expected = (at[:, None, 1] == of[None, :, 1]) & (of[None, :, 0] <= at[:, None, 0])
        real = at[:, 1] > 0
        wrong += int((received[b] != expected)[real].sum())
    return wrong


def qwen3() -> Trainer.Config:
    config = qwen3_debugmodel()
    model = config.model_spec.model
    model.layers, model.enable_weight_tying = model.layers[:2], False  # tied weights take no pipeline
    model.tok_embeddings.param_init = {"weight": partial(nn.init.normal_, std=0.02)}
    return _small(config)


def qwen3_5() -> Trainer.Config:
    sys.modules.update(titan_kernels.fla_modules())
    from torchtitan.models.qwen3_5 import model_registry  # its config_registry wants torchvision

    config = qwen3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    model = config.model_spec.model
    model.layers = [model.layers[2], model.layers[3]]  # a recurrent one, one of full attention
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    return _small(config, **TEXT_ALONE)


def llama3() -> Trainer.Config:
    return _of_family("llama3")


def deepseek_v3() -> Trainer.Config:
    return _of_family("deepseek_v3")


def gpt_oss() -> Trainer.Config:
    return _of_family("gpt_oss")


def _of_family(name: str) -> Trainer.Config:
    titan_kernels.float32_experts(pytest.MonkeyPatch())
    config = qwen3_debugmodel()
    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
    config.model_spec = replace(registry("debugmodel"), model=config_of(name, vocabulary=VOCABULARY))
    for layer in config.model_spec.model.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None  # experts that are seldom used would be preferred from the second step on
    return _small(config)


def _small(config: Trainer.Config, **extra: Any) -> Trainer.Config:
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Loader.Config(extra=extra)
    sizes = {"local_batch_size": 2, "seq_len": WIDTH, "steps": 3, "max_norm": 1e9}
    on_cpu = {"disable_cuda_graphs": True, "mixed_precision_param": "float32"}
    config.training = replace(config.training, **sizes, **on_cpu)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = False
    return Comparing.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
