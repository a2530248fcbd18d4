"""`python titan_jobs.py OUT`: `python -m torchtitan.train` on a CPU, several times in the same two processes.

A user's job: our collator in the dataloader, and a trainer that after each step compares with samples alone. Every step is
another layout of the rows; how far loss and gradients are off is written to `TITAN_OUT`. First on both ranks, which RANK,
WORLD_SIZE and STORE tell, then once more in each of them alone. Beside OUT stands a JSON for each job.
torchtitan 0.3.0 is written against a torch after 2.13; the two functions that it calls and 2.13 lacks are made here.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import titan_kernels
import torch
import torch._utils
import torch.distributed as dist
from cells import gradient_error
from datasets import Dataset
from processes import free_port
from rotation import some
from stand_ins import answer
from titan_kernels import LAYERS, TEXT_ALONE, alone, config_of
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import IterableDataset, default_collate

torch._utils._get_available_device_type = lambda: "cpu"
answer(torch.cpu, get_device_name="CPU", get_device_properties=SimpleNamespace(total_memory=1 << 30, name="CPU"))
answer(torch.cpu, reset_peak_memory_stats=None, empty_cache=None, memory_stats={}, current_device=0)

from torchtitan.models.common import attention

attention.FlexAttention._compiled_flex_attn = staticmethod(titan_kernels.dense_flex_attention)
for _user in (attention, _attention):  # test_torchtitan compiles it, and compares
    _user._compiled_create_block_mask = create_block_mask  # type: ignore[attr-defined]

_divide_factors = _fsdp_collectives._get_gradient_divide_factors
# Gloo has no PREMUL_SUM.
_fsdp_collectives._get_gradient_divide_factors = lambda *args, **kwargs: _divide_factors(
    *args[:5], **{**kwargs, "force_sum_reduction_for_comms": True}
)

torch.distributed.set_timeout = lambda timeout, group: None  # torch 2.13 has none


def _step(step: Any) -> Any:
    """`step(arg_mbs=, kwarg_mbs=, target_mbs=)`: micro-batches as they are (pytorch pull request 188500)."""

    def pre_split(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "kwarg_mbs" not in kwargs:
            return step(self, *args, **kwargs)
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        given = [kwargs.pop(name) for name in ("arg_mbs", "kwarg_mbs", "target_mbs", "losses")]
        return self._step_microbatches(*given, **kwargs)

    return pre_split


schedules.PipelineScheduleSingle.step = _step(schedules.PipelineScheduleSingle.step)

import torchtitan.trainer
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel
from torchtitan.train import main
from torchtitan.trainer import Trainer

from collate_npu import PaddingCollator
from collate_npu.integrations import torchtitan as ours

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
            alone = [at == 0 or segments[at - 1] == n or n not in segments[:at] for at, n in enumerate(segments)]
            labels = [token if number and ok else -100 for token, number, ok in zip(row, segments, alone)]
            made.append({"input_ids": row, "labels": labels, "attention_mask": segments})
            made[-1] |= {"after": 1} if step == "full:own" else {}  # the token behind each document, a label alone
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
        """Layouts; `full:own` is collated by torchtitan, `packed:ptrr` shared out by that load balancer, `holes:ids` with
        segment_ids."""
        extra: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **given: Any) -> None:
        inner = PaddingCollator(pad_token_id=0, attention_mask="2d")

        def collate(pairs: list[tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], Tensor]:
            features, step = [features for features, _ in pairs], pairs[0][1]
            collator = ours.TitanCollator(inner, segment_ids="ids" in step, extra=config.extra)
            input_dict, labels = (own_batch if step.endswith(":own") else collator)(features)
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
        for each in self.model_parts:
            ours.masks_in_forward(each, LAYERS.get(config.model_spec.name), compiled=False)
        with torch.no_grad():  # small random models hide wrong masks
            for each in self.model_parts:
                for weight in each.parameters():
                    if weight.ndim > 1:
                        weight.mul_(2.5)

    def forward_backward_step(self, **given: Any) -> Tensor:
        loss = super().forward_backward_step(**given)
        self.loss = loss.detach().clone()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        if "ptrr" in self._step_name():
            self.config.parallelism.context_parallel_load_balancer = "ptrr"
        weights = self._whole(lambda weight: weight)
        super().train_step(data_iterator)
        gradients, ranks = self._whole(lambda weight: weight.grad), [None] * dist.get_world_size()
        dist.all_gather_object(ranks, max(self.loss.item(), 0))  # -1 on the stages before the last
        if dist.get_rank() == 0:
            loss, expected = alone(self.model_config, weights, self._rows())
            off = gradient_error([gradients[name] for name in expected], [*expected.values()])
            self.told.append({"step": self._step_name(), "error": max(off, abs(sum(ranks) - loss) / loss)})
            Path(os.environ["TITAN_OUT"]).write_text(json.dumps(self.told), encoding="utf-8")

    def _step_name(self) -> str:
        return self.config.dataloader.steps[self.step - 1]

    def _rows(self) -> list[dict[str, Any]]:
        return rows(self.config.dataloader.steps)[2 * self.step - 2 : 2 * self.step]

    def _whole(self, of: Any) -> dict[str, Tensor]:
        """A tensor of each weight, by name, from all shards and stages."""
        mine = {}
        for each in self.model_parts:
            for name, weight in each.named_parameters():
                if (tensor := of(weight)) is None:
                    continue  # the vision tower saw no image
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                mine[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().clone()
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, mine)
        return {name: tensor for stage in stages for name, tensor in stage.items()}


def config(name: str) -> Trainer.Config:
    if name == "qwen3_5":
        sys.modules.update(titan_kernels.fla_modules())
    titan_kernels.float32_experts(pytest.MonkeyPatch())
    config = qwen3_debugmodel()
    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry  # a config_registry wants torchvision
    config.model_spec = replace(registry("debugmodel"), model=config_of(name, vocabulary=VOCABULARY))
    for layer in config.model_spec.model.layers:
        if getattr(layer, "moe", None) is not None:
            layer.moe.load_balance_coeff = None  # experts that are seldom used would be preferred from the second step on
    extra = TEXT_ALONE if name == "qwen3_5" else {}
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Loader.Config(extra=extra)
    sizes = {"local_batch_size": 2, "seq_len": WIDTH, "steps": 3, "max_norm": 1e9}
    on_cpu = {"disable_cuda_graphs": True, "mixed_precision_param": "float32"}
    config.training = replace(config.training, **sizes, **on_cpu)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = False
    return Comparing.Config(**{field.name: getattr(config, field.name) for field in fields(config)})


qwen3, qwen3_5, llama3, deepseek_v3, gpt_oss = (
    partial(config, name) for name in ("qwen3", "qwen3_5", "llama3", "deepseek_v3", "gpt_oss")
)


FAMILIES = some(("llama3", "deepseek_v3", "gpt_oss"), 1)
TOGETHER = {
    "qwen3 shared": ("qwen3", ("left", "packed", "packed:ptrr", "full:own"), "context"),
    **{f"{family} shared": (family, ("left", "packed", "full:own"), "context") for family in FAMILIES},
    "qwen3_5 shared": ("qwen3_5", ("right", "left", "packed"), "pipeline"),
}
ALL = ("right", "left", "packed", "full:own", "packed:ids")
ALONE = (
    {"qwen3": ("qwen3", (*ALL, "holes:ids"), "")},  # a window would be counted in places
    {family: (family, ALL, "") for family in ("qwen3_5", *FAMILIES)},
)


def train(folder: Path, name: str, config: str, steps: tuple[str, ...], shared: str) -> None:
    """By the words a user types."""
    given = {"module": "titan_jobs", "config": config, "dataloader.steps": ",".join(steps), "training.steps": len(steps)}
    given["dump_folder"] = folder / f"outputs of {name}"
    if shared:
        given[f"parallelism.{shared}_parallel_degree"] = 2
    sys.argv[1:] = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    os.environ["TITAN_OUT"] = str(folder / f"{name}.json")
    torch.manual_seed(0)
    main()


if __name__ == "__main__":
    sys.modules["titan_jobs"] = sys.modules["__main__"]  # torchtitan imports it by this name
    out, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # rank 0 waits for the others at the end: here their exit codes tell
    torchtitan.trainer.time.sleep = lambda seconds: None
    store = dist.FileStore(os.environ["STORE"], size)
    for name, job in TOGETHER.items():
        if rank == 0:  # just before it is used: a port that is kept for later somebody else takes
            store.set(name, str(free_port()))
        os.environ["MASTER_PORT"] = store.get(name).decode()
        train(out.parent, name, *job)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    out.write_text("true")
    for name, job in ALONE[rank].items():
        os.environ["MASTER_PORT"] = str(free_port())
        train(out.parent, name, *job)
