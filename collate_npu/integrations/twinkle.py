"""twinkle-kit 0.5.1: InputProcessors whose stages keep padding and the 2D mask.

Five stages of twinkle's InputProcessor lose padding (processor/base.py). It builds its 4D mask from lengths alone
(:488-499), pads to tp or to 2 * cp but never to both (:296-299), passes on no key outside its list (:659-677), drops every
4D mask (:454-466) and splits no mask (:394). `install` puts `Stages` in their places; in a processor that is set
afterwards, when its first batch comes. Costs one copy of each padded key. Legend: B rows, S width, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_choice import consumer_named
from collate_npu.consumers.megatron import kernel_of, refuse_unread_padding
from collate_npu.consumers.mindspeed import kernel_of_settings
from collate_npu.consumers.model_traits import config_of, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, a_type, explain
from collate_npu.integrations import patching
from collate_npu.integrations.megatron.mcore_bridge import pass_through_forward, router_padding
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, TOKENS, Key
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.parallel import ContextParallel, pad_documents, split_batch
from collate_npu.releases import say_outside
from collate_npu.segments import Segments

_Row = dict[str, Any]
Stage = Callable[..., list[_Row]]

_TRUTH = ("attention_mask", KEEP_KEY, SEGMENT_KEY)
"""The keys that `_segments` reads. The batch carries `segment_ids` in their place."""
_DOCUMENTS: Mapping[str, Key] = {**KEYS, "position_ids": replace(KEYS["position_ids"], fill=-1)}  # twinkle's own fill


@dataclass(frozen=True)
class Stages:
    """Our stages of one processor. Each takes and returns a list, like twinkle's."""

    processor: Any
    model: Any
    needs_mask_2d: bool | None

    def by_name(self) -> dict[str, Stage]:
        """Return our stages by the names of twinkle's. Raises if it is unknown whether the model needs the mask."""
        if self.processor.framework != "transformers":
            self.adapter("megatron", ContextParallel(1, 0))
        stages = (self.pad_cp, self.align_routed_experts, self.to_transformers_dict, self.drop_causal_4d_mask, self.split_cp)
        return {stage.__name__: stage for stage in stages}

    def adapter(self, consumer: str, cp: ContextParallel) -> BatchAdapter:
        """Return the adapter of twinkle's first model chunk, for one consumer and one rank's place."""
        model, reader = next(iter(chunks_of(self.model)), None), consumer_named(consumer)
        return BatchAdapter(model, needs_mask_2d=self.needs_mask_2d, consumer=reader, context_parallel=cp)

    @property
    def cp(self) -> ContextParallel:
        """The ranks that share a row. tp counts without `sequence_parallel` too, which the bridge turns on for MoE."""
        mesh = self.processor.device_mesh
        if mesh is None or self.processor.framework == "transformers":
            return ContextParallel(1, 0)
        size = mesh.cp_world_size or 1
        if size > 1 and mesh.cp_rank is None:
            rule = f"{size} ranks share each row, and the mesh does not know which this one is."
            raise CollateError(explain("device_mesh", "cp_rank None", rule, "Start with torchrun, or twinkle.initialize."))
        return ContextParallel(size, mesh.cp_rank if size > 1 else 0, tensor_parallel=mesh.tp_world_size or 1)

    def pad_cp(self, rows: list[_Row], micro_batch_size: int | None = None, **kwargs: Any) -> list[_Row]:
        """Pad every row to its final width, on the processor's side, with its mask; twinkle's collate then only stacks."""
        rows = self.processor.align_routed_experts(rows)
        if self.processor.padding_free or self.processor._any_packing(rows):
            return [self._documents(row) for row in rows]
        if self.processor.framework == "transformers":
            return [_with_2d_mask(row) for row in rows]
        together = micro_batch_size if micro_batch_size and kwargs.get("variable_seq_lengths") else len(rows)
        groups = [rows[i : i + together] for i in range(0, len(rows), together)]
        return [self._padded(row, max(x["input_ids"].shape[-1] for x in group)) for group in groups for row in group]

    def align_routed_experts(self, rows: list[_Row], **_: Any) -> list[_Row]:
        """Return the rows: `pad_cp` has aligned their experts already."""
        return rows

    def to_transformers_dict(self, batches: list[_Row], **kwargs: Any) -> list[_Row]:
        """Return twinkle's keys, and the ids of the sequences."""
        pairs = zip(batches, self.processor.to_transformers_dict(batches, **kwargs))
        return [{**out, **{key: given[key] for key in (SEGMENT_KEY,) if key in given}} for given, out in pairs]

    def drop_causal_4d_mask(self, batches: list[_Row], attention_mask_type: str | None = None, **_: Any) -> list[_Row]:
        """Return this rank's tokens with the mask that the kernels read: None, or this rank's rows of the 4D mask."""
        from twinkle import Platform

        if self.processor.framework == "transformers":
            return batches
        npu, cp = Platform.device_prefix() == "npu", self.cp
        settings = SimpleNamespace(attention_mask_type=attention_mask_type, context_parallel_size=cp.size)
        adapter = self.adapter(kernel_of_settings(settings) if npu else "megatron", cp)
        return [self._with_masks(batch, adapter, cp, npu) for batch in batches]

    def split_cp(self, batches: list[_Row], **_: Any) -> list[_Row]:
        """Return the batches: `drop_causal_4d_mask` has split them already."""
        return batches

    def _with_masks(self, batch: _Row, adapter: BatchAdapter, cp: ContextParallel, npu: bool) -> _Row:
        if SEGMENT_KEY not in batch:  # a flat row: twinkle counted its offsets, padding included, after `_documents`
            flat = {**batch, "attention_mask": None}
            offsets = batch["packed_seq_params"].cu_seqlens_q
            return split_batch(flat, cp.for_documents(), cu_seqlens=offsets) if cp.size > 1 else flat
        out, segments = adapter.with_segments(batch)
        chunks = chunks_of(self.model)  # now: twinkle wraps them when it first trains, and adds adapters
        refuse_unread(chunks, segments, attention=not npu)  # MindSpeed's kernels are the adapter's consumer there
        kinds = {type(chunk): None for chunk in chunks if hasattr(chunk, "forward")}
        if not kinds:
            return out
        extras, config = {KEEP_KEY: out.pop(KEEP_KEY)} if KEEP_KEY in out else {}, config_of(chunks[0])
        if out["attention_mask"] is None and getattr(config, "num_moe_experts", None):
            shared = bool(getattr(config, "sequence_parallel", False)) and cp.tensor_parallel > 1
            extras["padding_mask"] = router_padding(batch[SEGMENT_KEY] == 0, cp, shared=shared)
        inputs = [pass_through_forward(kind, out, extras) for kind in kinds]  # raises if a kind of chunk does not take them
        return {key: value for each in inputs for key, value in each.items()}

    def _token_keys(self, row: _Row) -> list[str]:
        names = set(self.processor.padding_map) - set(self.processor.VLM_CONCAT_FIELDS) - {"length"}
        return [key for key in row if key in names and isinstance(row[key], Tensor)]

    def _padded(self, row: _Row, longest: int) -> _Row:
        out = {key: value for key, value in row.items() if key not in _TRUTH}
        out[SEGMENT_KEY] = _segments(row).ids.to(row["input_ids"].device)
        missing = -(-longest // self.cp.multiple) * self.cp.multiple - row["input_ids"].shape[-1]
        sides = (missing, 0) if self.processor.padding_side == "left" else (0, missing)
        for key in [*self._token_keys(out), SEGMENT_KEY]:
            after = out[key].ndim - 1 - _dim(key, out[key])
            out[key] = pad(out[key], (0, 0) * after + sides, value=self.processor.padding_map.get(key, 0))
        return out

    def _documents(self, row: _Row) -> _Row:
        """Return the flat row's real tokens, each document padded to 2 * cp and the row to tp * 2 * cp."""
        segments, positions = _document_segments(row), row.get("position_ids")
        where = segments.indices.to(row["input_ids"].device)
        keys = [key for key in self._token_keys(row) if key not in _TRUTH]
        tokens = {key: row[key].index_select(_dim(key, row[key]), where) for key in keys}
        if positions is not None and len(positions) == 1:  # a document begins where they are 0, for twinkle as for us
            tokens["position_ids"] = segments.position_ids[:, segments.indices].to(positions)
        padded, _ = pad_documents(tokens, self.cp, segments=Segments.from_lengths(segments.lengths), keys=_DOCUMENTS)
        return {key: padded.get(key, value) for key, value in row.items() if key not in _TRUTH}


def _with_2d_mask(row: _Row) -> _Row:
    """Return the row with its 2D mask under `attention_mask`: twinkle passes no other to a transformers model."""
    if not any(key in row for key in _TRUTH):
        return row
    segments = _segments(row)
    if segments.packed:
        rule = "twinkle tells the sequences of a row apart by positions, and only with padding_free."
        remedy = "Pass set_processor(..., padding_free=True)."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))
    rest = {key: value for key, value in row.items() if key not in _TRUTH}
    return {**rest, "attention_mask": segments.keep.to(row["input_ids"].device, torch.long)}


def _segments(row: _Row) -> Segments:
    """Return the Segments of one sample `[1, L]` before collation. A sample without masks has no padding."""
    names = {key for key, rule in KEYS.items() if rule.role is not None or rule.kind == "positions"}
    sources = {key: value for key, value in row.items() if isinstance(value, Tensor) and key in names}
    if (positions := sources.get("position_ids")) is not None and len(positions) > 1:
        sources["position_ids"] = positions[:, None]  # axes, not rows
    if not {"attention_mask", KEEP_KEY, SEGMENT_KEY} & set(sources):
        sources[KEEP_KEY] = torch.ones(1, row["input_ids"].shape[-1], dtype=torch.bool)
    return segments_from_batch(sources, polarity="keep")  # as twinkle's templates write it


def _document_segments(row: _Row) -> Segments:
    """Return the Segments of one sample, its documents as twinkle reads them: each begins where the first axis of positions
    is 0 (processor/base.py `_get_packed_seq_params`). Raises if a single axis does not count 0, 1, 2, ... in each."""
    segments, positions = _segments(row), row.get("position_ids")
    if segments.packed or positions is None:
        return segments
    by_axis = Segments.from_position_ids(positions).ids if len(positions) == 1 else (positions[:1] == 0).cumsum(-1).cpu() + 1
    return Segments.from_ids(by_axis * segments.keep)


def _dim(key: str, value: Tensor) -> int:
    """Return the dimension of tokens: the last of positions `[1, L]` or `[3, L]`, the second of all others `[1, L, ...]`."""
    return KEYS.get(key, TOKENS).dim % value.ndim


def chunks_of(model: Any) -> list[Any]:
    """Return each module that a batch passes, without DDP, Float16Module and PEFT around it; or a config; or nothing."""
    if hasattr(model, "_actors"):
        rule = "The modules of a model on Ray live in its workers, and its processors too."
        raise CollateError(explain("model", f"the handle of {a_type(model)}", rule, "Call install(model)."))
    holder = hasattr(model, "optimizer_group") or (hasattr(model, "model") and not hasattr(model, "forward"))
    held = model.model if holder else model
    held = list(held) if isinstance(held, (list, tuple)) or type(held).__name__ == "ModuleList" else [held]
    return [unwrap(chunk) for chunk in held if chunk is not None]


def refuse_unread(chunks: list[Any], segments: Segments, *, attention: bool = True) -> None:
    """Raise if padding reaches a layer (`attention=False`: a recurrent one) without a mask. A config tells its softmax."""
    modules = {chunk: [type(module).__name__ for module in chunk.modules()] for chunk in chunks if hasattr(chunk, "modules")}
    recurrent = any("GatedDeltaNet" in kinds for kinds in modules.values())
    attending = [chunk for chunk, kinds in modules.items() if any("DotProductAttention" in kind for kind in kinds)]
    kernels = [kernel_of(chunk) for chunk in attending or modules]
    if not modules and any(getattr(config_of(chunk), "masked_softmax_fusion", False) for chunk in chunks):
        kernels = ["transformer_engine"]
    for kernel in dict.fromkeys(kernels if attention else ["megatron"]):
        refuse_unread_padding(segments, kernel, recurrent=recurrent)


PACKAGE, TESTED = "twinkle-kit", "0.5.1"

_MODELS: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()
"""The models of this process whose processors get our stages, with their `needs_mask_2d`."""


def install(target: Any, model: Any = None, *, needs_mask_2d: bool | None = None) -> None:
    """Let the batches of `target`, a model of twinkle's, carry the masks that its layers read. A second call does nothing.

    It reaches every processor of every adapter, and each worker if the model lives on Ray. On NPUs Python objects are
    gathered through Gloo. A batch is refused if the kernels of some pipeline chunk cannot read its padding, or if a
    forward does not take its masks (`attention_mask_2d`, on MoE models `padding_mask`).

    `target` may also be one `InputProcessor` of your own. Then `model` tells who reads its batches: twinkle's model, a
    module, a list of pipeline chunks, or a config. Raises `CollateError` if it is unknown whether layers read the 2D mask.

    >>> from collate_npu.integrations import twinkle  # doctest: +SKIP
    >>> twinkle.install(model)  # doctest: +SKIP
    """
    if hasattr(target, "process_pipeline"):
        _replace(target, model, needs_mask_2d)
    elif hasattr(target, "_actors"):
        _in_each_worker(target, install, needs_mask_2d=needs_mask_2d)
    elif hasattr(target, "optimizer_group"):
        _install_here(target, needs_mask_2d)
    else:
        rule = "A processor lives beside the model: twinkle's MegatronModel or TransformersModel holds it."
        remedy = "Pass that model, or one InputProcessor and the model that reads its batches: install(processor, model)."
        raise CollateError(explain("install", type(target).__name__, rule, remedy))


def uninstall(target: Any) -> None:
    """Put twinkle's own stages back in the places of ours. A stage that somebody else has put in stays."""
    if hasattr(target, "_actors") and not hasattr(target, "process_pipeline"):
        _in_each_worker(target, uninstall)
        return
    for processor in _processors(target):
        pipeline = processor.process_pipeline
        ours = [isinstance(getattr(stage, "__self__", None), Stages) for stage in pipeline]
        stages = zip(pipeline, ours)
        processor.process_pipeline = [getattr(processor, stage.__name__) if own else stage for stage, own in stages]
    if _MODELS.pop(target, ...) is not ... and not _MODELS:
        patching.release(PACKAGE)


def _install_here(model: Any, needs_mask_2d: bool | None) -> None:
    from twinkle import Platform
    from twinkle.processor import InputProcessor

    if any(type(chunk).__module__.startswith("mcore_bridge") for chunk in chunks_of(model)):
        from collate_npu.integrations.megatron import mcore_bridge

        mcore_bridge.install(holder=PACKAGE)
    for processor in _processors(model):
        _replace(processor, model, needs_mask_2d)
    _MODELS[model] = needs_mask_2d
    patching.patch(PACKAGE, InputProcessor, "__call__", _first_batch)
    if Platform.device_prefix() == "npu":
        patching.patch(PACKAGE, torch.distributed, "all_gather_object", patching.gather_by_gloo, everywhere="twinkle")


def _first_batch(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    for model, needs_mask_2d in list(_MODELS.items()):
        if any(each is processor for each in _processors(model)):
            _replace(processor, model, needs_mask_2d)
    return original(processor, *args, **kwargs)


def _in_each_worker(handle: Any, function: Callable[..., Any], **settings: Any) -> None:
    import ray

    ray.get([actor.__ray_call__.remote(function, **settings) for actor in handle._actors])


def _processors(target: Any) -> list[Any]:
    """Return the processors of every adapter of a model (model/optimizer_group.py:43), or the processor that is passed."""
    held = [target, *(getattr(group, "processor", None) for group in getattr(target, "optimizer_group", {}).values())]
    return [processor for processor in held if hasattr(processor, "process_pipeline")]


def _replace(processor: Any, model: Any, needs_mask_2d: bool | None) -> None:
    pipeline = processor.process_pipeline
    if any(isinstance(getattr(stage, "__self__", None), Stages) for stage in pipeline):
        return
    say_outside(PACKAGE, TESTED)
    ours = Stages(processor, model, needs_mask_2d).by_name()
    if missing := set(ours) - {stage.__name__ for stage in pipeline}:
        rule = f"The stages of {PACKAGE} {TESTED} are replaced by name."
        raise CollateError(explain("process_pipeline", f"no {sorted(missing)}", rule, f"Install {PACKAGE}=={TESTED}."))
    processor.process_pipeline = [ours.get(stage.__name__, stage) for stage in pipeline]
