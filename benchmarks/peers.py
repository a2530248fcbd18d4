"""The real peers, built as their users build them, on a CPU. Nothing here copies or changes their code.

Each function returns what is called with a batch's input. One that cannot be built raises; `rival` then says why instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from inspect import unwrap
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Absent, Contestant, Work, first_line
from collate_npu.testing import byte_tokenizer

PACKAGES = (
    "torch", "numpy", "transformers", "trl", "ms-swift", "twinkle-kit", "verl", "megatron-core", "datasets", "pyarrow",
    "accelerate", "tokenizers", "ray", "torchdata", "webdataset", "megatron-energon", "mosaicml-streaming", "tensordict",
)  # fmt: skip


def versions() -> dict[str, str]:
    """What is installed; "absent" for what is not."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def rival(name: str, build: Callable[[], Work], **rest: Any) -> Contestant | Absent:
    """A contestant, or the reason why there is none."""
    try:
        return Contestant(name, build(), **rest)
    except Exception as error:
        return Absent(name, first_line(error))


@cache
def tokenizer(side: str) -> Any:
    return byte_tokenizer(pad_is_eos=False, padding_side=side)


# --- collators


def seq2seq(side: str) -> Work:
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(tokenizer(side))


def with_padding(side: str) -> Work:
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(tokenizer(side))


def language_modeling(side: str) -> Work:
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer(side), mlm=False)


def flattening() -> Work:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)


def trl(**settings: Any) -> Work:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(pad_token_id=tokenizer("right").pad_token_id, **settings)


def swift(side: str = "right", *, megatron: bool = False, ours: bool = False) -> Work:
    """ms-swift's template on a byte tokenizer; `megatron` adds its 4D mask, `ours` what our `install()` puts in."""
    from swift.template import TEMPLATE_MAPPING
    from swift.template.base import Template

    made = byte_tokenizer(pad_is_eos=False)
    made.model_info = SimpleNamespace(
        config=SimpleNamespace(problem_type=None), task_type="causal_lm", max_model_len=512, model_dir="."
    )
    made.model_meta = SimpleNamespace(is_multimodal=False, template="chatml")
    template = Template(made, TEMPLATE_MAPPING["chatml"], padding_side=side)
    template.set_mode("train")
    template.use_megatron = megatron
    if ours:
        from collate_npu.integrations import swift as integration

        integration.install(trainers=False)  # and stays
    else:
        template._data_collator = MethodType(unwrap(Template._data_collator), template)
    return template.data_collator


def twinkle(side: str) -> Work:
    """twinkle's processor for transformers models; it knows GPU, NPU and MPS alone, so the device's name is given."""
    from twinkle import Platform
    from twinkle.processor.base import InputProcessor

    Platform.get_local_device = staticmethod(lambda *_, **__: "cpu")
    Platform.device_prefix = staticmethod(lambda *_, **__: "cuda")
    return InputProcessor(padding_side=side)


# --- loaders


def streaming() -> Any:
    """mosaicml-streaming, which imports torchvision for images; there is no wheel of it for a CPU build of torch."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        if name not in sys.modules:
            stand_in: Any = ModuleType(name)
            stand_in.__spec__, stand_in.VisionDataset, stand_in.to_tensor = ModuleSpec(name, None), object, None
            sys.modules[name] = stand_in
    import streaming

    return streaming


def energon(folder: Path, batch: int, named: Work, collate: Work | None) -> Any:
    """Its loader over the webdataset of a folder; without a collator its task encoder stacks and pads."""
    from megatron.energon import Cooker, SampleDecoder, TaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    if not (folder / ".nv-meta").exists():
        tars = [path.name for path in folder.glob("*.tar")]
        WebdatasetPreparator.prepare_dataset(folder, tars, split_parts_ratio=[("train", 1.0)], workers=1)
        (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")

    class Encoder(TaskEncoder):  # type: ignore[misc]
        cookers = (Cooker(stateless(named)),)
        decoder = SampleDecoder()

        def batch(self, samples: Any) -> Any:
            return super().batch(samples) if collate is None else collate(samples)

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    whole = {"batch_size": batch, "shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}
    return get_loader(get_train_dataset(folder, worker_config=config, task_encoder=Encoder(), **whole))


# --- masks: from a bool 2D mask [B, S]


def transformers_mask() -> Work:
    """What a model of transformers calls in its forward, for SDPA: True attends."""
    from transformers import Qwen3Config
    from transformers.masking_utils import create_causal_mask

    config = Qwen3Config(num_hidden_layers=1)
    config._attn_implementation = "sdpa"

    def build(keep: Tensor) -> Tensor:
        embeds = torch.empty(*keep.shape, 1)
        positions = torch.arange(keep.shape[1])[None]
        given = {"past_key_values": None, "position_ids": positions}
        return create_causal_mask(config=config, inputs_embeds=embeds, attention_mask=keep, **given)

    return build


def verl_mask() -> Work:
    """verl's own for `npu_fusion_attention`: True is blocked."""
    from verl.models.mcore.util import _build_npu_attn_mask

    return _build_npu_attn_mask


def twinkle_mask() -> Work:
    """twinkle's own for Megatron, of one tensor a row: True is blocked."""
    from twinkle.processor.base import InputProcessor

    return InputProcessor._create_4d_attention_mask


# --- context parallelism


def megatron_split(size: int, rank: int) -> Work:
    """megatron-core's own; of the group it asks for its size and this rank alone, which a group without ranks answers."""
    from megatron.core.utils import get_batch_on_this_cp_rank
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    group = torch.distributed.new_group(range(size), backend="fake")
    return lambda batch: get_batch_on_this_cp_rank(batch, cp_group=group)


def leave_ranks() -> None:
    """What follows is one process again."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
