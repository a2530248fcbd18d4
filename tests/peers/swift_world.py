"""ms-swift 4.6.0 on a CPU: real template, arguments, trainers, a step of its own trainer on a flat row; an NPU and
ranks that are only set by name."""

import dataclasses
import functools
import sys
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import te_stub  # noqa: F401  (before megatron, mcore_bridge and swift.megatron)
import torch
from mcore_bridge.model import MultimodalGPTModel, get_mcore_model_type, get_model_meta
from mcore_bridge.model.gpts.qwen3_next import Qwen3NextGatedDeltaNet
from mcore_bridge.model.modules import TransformerLayer
from packaging.version import Version
from swift.megatron.arguments import MegatronSftArguments
from swift.megatron.trainers import MegatronTrainer, base, utils as trainer_utils
from swift.megatron.utils import get_padding_to
from swift.template import TEMPLATE_MAPPING
from swift.template.base import Template
from swift.template.templates.qwen import Qwen3_5Template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, __version__

from collate_npu import Segments
from collate_npu.masks import dense
from collate_npu.testing import byte_tokenizer, tiny_config

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
NEEDS_2D = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
MULTIMODAL = frozenset({"qwen3_5", "qwen3_5_moe"})
VOCABULARY = 258
PAD = 257
LENGTHS = (7, 3, 5)
LOCAL = {"attention_backend": "local", "masked_softmax_fusion": False}
"""The kernels that read a dense mask."""
KINDS = ("template", "2d", "4d masked", "4d keep", "4d additive", "2d beside 4d")


@functools.cache
def config(model_type: str) -> Any:
    return tiny_config(model_type, vocab_size=VOCABULARY)


@functools.cache
def _defaults() -> dict[str, Any]:
    """Every field of ms-swift's own dataclass, so that a renamed one shows."""
    fields = dataclasses.fields(MegatronSftArguments)
    return {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}


def arguments(model_type: str, *, cp: int = 1, **changed: Any) -> SimpleNamespace:
    """ms-swift's namespace as it is after its own `__post_init__`, without a checkpoint on disk."""
    from megatron.core.transformer.enums import AttnBackend

    unknown = set(changed) - set(_defaults()) - {"use_flash_attn"}
    assert not unknown, f"not a field of MegatronSftArguments: {unknown}"
    values = _defaults() | {"padding_free": False, "task_type": "causal_lm", "context_parallel_size": cp} | changed
    args = SimpleNamespace(**values)
    args.attention_backend = AttnBackend[args.attention_backend]
    if args.attention_backend.name != "local":
        args.use_flash_attn = True  # set by the pipeline where MindSpeed is installed (pipelines/train/sft.py:46-49)
    args.fp8, args.fp4 = args.fp8_format, args.fp4_format
    args.model_type, args.is_multimodal = model_type, model_type in MULTIMODAL
    args.model_info = SimpleNamespace(
        config=config(model_type), model_type=model_type, is_moe_model=model_type not in ("qwen3", "qwen3_5")
    )
    args.megatron_model_meta = get_model_meta(get_mcore_model_type(model_type))
    return args


def template(*, cp: int = 1, padding_free: bool = False, transformers: str = "", side: str = "right") -> Template:
    """The real template class on a byte tokenizer, in the mode Megatron's pipeline puts it, or for a transformers model."""
    tokenizer = byte_tokenizer(pad_is_eos=False)
    hf_config = config(transformers) if transformers else SimpleNamespace(problem_type=None)
    tokenizer.model_info = SimpleNamespace(config=hf_config, task_type="causal_lm", max_model_len=512, model_dir=".")
    tokenizer.model_meta = SimpleNamespace(is_multimodal=False, template="chatml")
    given = {"sequence_parallel_size": cp, "padding_free": padding_free, "padding_side": side}
    built = Template(tokenizer, TEMPLATE_MAPPING["chatml"], **given)
    built.set_mode("train")
    built.use_megatron = not transformers
    return built


def samples(*lengths: int) -> list[dict[str, Any]]:
    ids = [[(7 * i + b) % 200 + 3 for i in range(length)] for b, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": [-100, *row[1:]], "length": len(row)} for row in ids]


def collate(args: Any, *lengths: int) -> dict[str, Any]:
    """What the trainer's own dataloader would be given."""
    made = template(cp=args.context_parallel_size, padding_free=args.padding_free)
    return made.data_collator(samples(*lengths), padding_to=get_padding_to(args))


def npu_there(there: bool, put: Any = setattr) -> None:
    """Wherever ms-swift, mcore-bridge or transformers ask for an NPU, but not what moves tensors to torch.npu."""
    import transformers.utils

    stacks = [module for name, module in sys.modules.items() if name.startswith(("swift.megatron", "mcore_bridge"))]
    for module in [transformers.utils, *stacks]:
        if "is_torch_npu_available" in vars(module):
            put(module, "is_torch_npu_available", lambda *args, **kwargs: there)


class World:
    """An NPU and context-parallel ranks that the peers believe in; set through pytest's monkeypatch."""

    def __init__(self, monkeypatch: Any) -> None:
        self._set = monkeypatch.setattr

    def npu(self, there: bool = True) -> None:
        npu_there(there, self._set)

    def rank(self, rank: int, size: int) -> None:
        from megatron.core import mpu

        self._set(mpu, "get_context_parallel_world_size", lambda: size)
        self._set(mpu, "get_context_parallel_rank", lambda: rank)


class Recorder(torch.nn.Module):
    """Stands where the model stands in `model(**batch)`."""

    vp_stage = None

    def forward(self, **batch: Any) -> Tensor:
        self.batch = batch
        return torch.zeros(1)


def reaches_model(args: Any, data: dict[str, Any]) -> dict[str, Any]:
    """What `MegatronTrainer.forward_step` hands to `model(**batch)`, extras out of the door they came through."""
    trainer, model = trainer_of(args), Recorder()
    trainer.forward_step(iter([dict(data)]), model)
    model.batch.update(model.batch.pop("extra_block_kwargs", None) or {})
    return model.batch


class OnNoDevice(MegatronTrainer):
    """ms-swift's trainer, constructed as it is, but for the model and the optimizer, which need a device."""

    def prepare_model(self) -> None:
        self.config, self.unwrapped_models, self.wrapped_models = None, [], []

    def get_optimizer_and_scheduler(self) -> tuple[None, None]:
        return None, None


def trainer_of(args: Any) -> Any:
    args.finetune, args.callbacks = True, []
    with mock.patch.object(base, "warmup_jit_function"):  # runs kernels
        return OnNoDevice(args, template(cp=args.context_parallel_size, padding_free=args.padding_free))


def pooling_trainer(args: Any) -> Any:
    """Its loss gives back what it pools, with the mask that `forward_step` found in its batch."""
    trainer = trainer_of(args)
    trainer.seq_cls_loss_func = lambda output, *, attention_mask, packed_seq_params, labels: trainer.get_last_tokens(
        output, packed_seq_params, attention_mask
    )
    return trainer


def prepare(args: Any, data: dict[str, Any]) -> dict[str, Any]:
    return trainer_utils.prepare_batch(args, dict(data))


def as_kind(args, kind, lengths=LENGTHS, side="right", width=None):
    """A batch as some collator sends it, and the truth of it."""
    if kind == "template":
        data = collate(args, *lengths)
        return data, Segments.from_lengths(lengths, data["input_ids"].shape[1])
    truth = Segments.from_lengths(lengths, width or -(-max(lengths) // 4) * 4, side)
    tokens = torch.tensor([token for row in samples(*lengths) for token in row["input_ids"]])
    ids = torch.full(truth.shape, PAD).masked_scatter(truth.keep, tokens)
    data = {"input_ids": ids, "labels": torch.where(truth.keep, ids, -100), "position_ids": truth.position_ids.clone()}
    polarity = {"4d keep": "keep", "4d additive": "bias"}.get(kind, "masked")
    if "4d" in kind:
        data["attention_mask"] = dense(truth, polarity=polarity)
    if kind == "2d":
        data["attention_mask"] = truth.keep.long()
    if kind == "2d beside 4d":
        data["attention_mask_2d"] = truth.keep.long()
    return data, truth


def held() -> list[Any]:
    """What stands where ours would be put."""
    watched: list[tuple[Any, str]] = [
        (Template, "_data_collator"),
        (trainer_utils, "prepare_batch"),
        (base, "prepare_batch"),
        (base.BaseMegatronTrainer, "get_last_tokens"),
        (MultimodalGPTModel, "forward"),
        (TransformerLayer, "forward"),
        (Qwen3NextGatedDeltaNet, "__init__"),
    ]
    return [getattr(owner, name) for owner, name in watched]


# --- flat rows of its transformers backend: a step of its own trainer, and each sample alone


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


def trained(model: Any) -> tuple[list[Tensor], Tensor, Tensor]:
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
            train_dataloader_shuffle=False, use_logits_to_keep=False, dataloader_num_workers=0,
        )  # fmt: skip
        rows, made = samples(*LENGTHS), packing(model.config.model_type)
        trainer = Seq2SeqTrainer(model=model, args=args, template=made, train_dataset=rows)
        trainer.add_callback(kept)
        trainer.train()
    hook.remove()
    model.eval()
    return list(seen[0][0].split(list(LENGTHS))), seen[0][1], kept.gradients


def alone(model: Any, rows: Any = tuple(samples(*LENGTHS))) -> tuple[list[Tensor], Tensor, Tensor]:  # noqa: B008
    """The same of each sample by itself."""
    model.zero_grad()
    logits = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in rows]
    labels = torch.cat([torch.tensor(row["labels"][1:]) for row in rows])
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
