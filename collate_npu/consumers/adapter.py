"""Adapters: between the dataloader and the model, the masks of a batch found, checked, routed and split.

Costs O(B * S) for a batch that carries `attention_mask_2d` or a 2D mask; a 4D mask beside it is checked in one pass over
its bytes, a 4D mask alone is proved (several passes). Legend: B batch, S width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collate_npu.collate.features import VISION_KEYS
from collate_npu.consumers.models import config_of, layer_masks, needs_mask_2d, text_config
from collate_npu.consumers.route import Route, check_consumer, route
from collate_npu.errors import AmbiguousMaskError, CollateError, UnsupportedFormError, explain
from collate_npu.masks.derive import agree, derive_segments, key_segments
from collate_npu.masks.forms import MAX_MASK_BYTES, Polarity, block_mask, dense
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import MASK_2D_SCOPE, ContextParallel, cu_seqlens_of, query_rows, split_batch
from collate_npu.segments import Segments

KEEP_KEY = "attention_mask_2d"
OFFSET_KEYS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What is known of the model before any batch."""

    needs_2d: bool | None
    attn_implementation: str
    aux_loss: bool
    model_type: str
    config: Any


class BatchAdapter:
    """Makes any batch right for one model stack: `adapter(batch)` returns a new plain dict.

    `model` is a module or a config, `model_type` a name from transformers' registry; one of them tells whether layers
    need the 2D mask (`needs_mask_2d=True` says so for a model that neither describes). `consumer` names what reads the
    batch (`CONSUMERS`). `attention_mask_2d` stays in the batch exactly when that consumer reads it and `padding_free` is
    False. `polarity` declares what True means in 4D masks that arrive; undeclared, it is proved. With `context_parallel`
    the batch is split last, and of a 4D mask only this rank's rows are ever built.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        model_type: str | None = None,
        needs_mask_2d: bool | None = None,
        consumer: str = "megatron",
        padding_free: bool = False,
        pattern: str | Pattern = "causal",
        polarity: Polarity | None = None,
        attn_implementation: str | None = None,
        context_parallel: ContextParallel | None = None,
        max_mask_bytes: int = MAX_MASK_BYTES,
    ) -> None:
        check_consumer(consumer)
        self.consumer = consumer
        self.padding_free = padding_free
        self.pattern = Pattern.of(pattern)
        self.polarity = polarity
        self.context_parallel = _scoped(context_parallel, consumer)
        self.max_mask_bytes = max_mask_bytes
        self._settings = _settings(model, model_type, needs_mask_2d, attn_implementation)
        if consumer == "transformers" and context_parallel is not None and self._settings.needs_2d:
            rule = "A transformers model runs its recurrent layers on this rank's shard alone, out of order, in silence."
            remedy = "Use Megatron's context parallelism, or a model without recurrent layers."
            raise UnsupportedFormError(explain("context_parallel", f"size {context_parallel.size}", rule, remedy))
        if self._settings.needs_2d is None and consumer != "transformers" and not padding_free:
            rule = "Whether attention_mask_2d stays depends on the model's layers."
            raise CollateError(explain("BatchAdapter", "no model", rule, "Pass model=, model_type= or needs_mask_2d=."))

    @classmethod
    def from_args(cls, args: Any, **settings: Any) -> BatchAdapter:
        """From an argument namespace as ms-swift's and Megatron-LM's: reads the names both use, `settings` win.

        `model_info.config` (ms-swift's own), else `model_type` (looked up in transformers' registry); `padding_free`,
        `context_parallel_size`, `tensor_model_parallel_size` with `sequence_parallel`, `cp_partition_mode`, and
        `attention_backend`: only "local" kernels read dense masks (ms-swift 4.6.0 megatron arguments). The rank under
        context parallelism is Megatron's; pass `context_parallel=` where it is not initialised.
        """
        named: dict[str, Any] = {"padding_free": bool(getattr(args, "padding_free", False))}
        if (backend := getattr(args, "attention_backend", None)) is not None:
            local = getattr(backend, "name", backend) == "local"  # an enum in Megatron's own arguments
            named["consumer"] = "megatron" if local else "transformer_engine"
        if not {"model", "model_type", "needs_mask_2d"} & set(settings):
            config = getattr(getattr(args, "model_info", None), "config", None)
            named |= {"model": config} if config is not None else {"model_type": getattr(args, "model_type", None)}
        if "context_parallel" not in settings and (getattr(args, "context_parallel_size", 1) or 1) > 1:
            shared = bool(getattr(args, "sequence_parallel", False))
            cp = ContextParallel.from_megatron(
                layout=getattr(args, "cp_partition_mode", None) or "zigzag",
                tensor_parallel=getattr(args, "tensor_model_parallel_size", 1) if shared else 1,
            )
            settings["context_parallel"] = cp.for_documents() if named["padding_free"] else cp
        return cls(**{**named, **settings})

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch the model takes. Raises `CollateError` where its padding is unknown, or has no right form here."""
        return self.prepare(batch)[0]

    def prepare(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Segments]:
        """The batch, and the whole unsplit truth for pooling and metrics (`last_token`, `unpad`, `repad`)."""
        segments = find_segments(batch, polarity=self.polarity, pattern=self.pattern, padding_free=self.padding_free)
        return self.apply(batch, segments), segments

    def apply(self, batch: Mapping[str, Any], segments: Segments, *, padding_free: bool | None = None) -> dict[str, Any]:
        """The batch for a truth that is already known (a collator's): routed and split, nothing derived."""
        out = dict(batch)
        self._set_masks(out, self.route(segments, padding_free=padding_free), segments, _device(batch))
        if self.consumer == "transformers":
            out.pop("seq_lens", None)
        if "position_ids" not in out and not VISION_KEYS & set(out) and not _counts_up(segments):
            out["position_ids"] = segments.position_ids.to(_device(batch))
        if self.context_parallel is not None:
            out |= split_batch(
                {k: v for k, v in out.items() if not _is_dense(k, v)}, self.context_parallel, segments=segments
            )
        return out

    def route(self, segments: Segments, *, padding_free: bool | None = None) -> Route:
        """What happens to the masks of such a batch, and why; `padding_free` of one batch overrides the adapter's."""
        settings = self._settings
        padding_free = self.padding_free if padding_free is None else padding_free
        if settings.needs_2d is None and not padding_free and (segments.packed or self.pattern.kind != "causal"):
            rule = "Beside recurrent layers such a batch needs another form, or has none, and no model was named."
            raise CollateError(explain("BatchAdapter", "no model", rule, "Pass model=, model_type= or needs_mask_2d=."))
        return route(
            self.consumer,
            segments,
            pattern=self.pattern,
            needs_2d=settings.needs_2d is not False if padding_free else bool(settings.needs_2d),
            padding_free=padding_free,
            attn_implementation=settings.attn_implementation,
            aux_loss=settings.aux_loss,
            model_type=settings.model_type,
        )

    def _set_masks(self, out: dict[str, Any], chosen: Route, segments: Segments, device: torch.device) -> None:
        out.pop(KEEP_KEY, None)
        out["attention_mask"] = None
        if chosen.form == "block_mask":
            key = "attention_masks" if self.consumer == "torchtitan" else "attention_mask"
            if key == "attention_masks":
                del out["attention_mask"]
            out[key] = self._block_mask(segments, device)
        elif chosen.form == "keep_2d":
            # transformers' own tokenizers emit int64, and code downstream subtracts and counts it; verl wants bool.
            dtype = torch.int64 if self.consumer == "transformers" else torch.bool
            out["attention_mask"] = segments.keep.to(device, dtype)
        elif chosen.form == "mapping":
            out["attention_mask"] = self._mapping(segments, device)
        elif chosen.form != "none":
            out["attention_mask"] = self._dense(segments, chosen.form, device)
        if chosen.mask_2d:
            out[KEEP_KEY] = segments.keep.to(device)

    def _dense(self, segments: Segments, form: Any, device: torch.device) -> Tensor:
        cp = self.context_parallel
        offsets = cu_seqlens_of({}, segments) if cp is not None and cp.documents else None
        rows = None if cp is None else query_rows(segments.shape[1], cp, offsets)
        return dense(
            segments,
            polarity=form,
            pattern=self.pattern,
            rows=rows,
            device=device,
            max_mask_bytes=self.max_mask_bytes,
        )

    def _block_mask(self, segments: Segments, device: torch.device) -> Any:
        if self.context_parallel is not None:
            rule = "A BlockMask is cut by torchtitan's and torch's own context parallelism."
            raise UnsupportedFormError(explain("attention_masks", "a split", rule, "Leave context_parallel out here."))
        return block_mask(segments, pattern=self.pattern, device=device)

    def _mapping(self, segments: Segments, device: torch.device) -> dict[str, Tensor]:
        attention: Polarity = "bias" if self._settings.attn_implementation == "eager" else "keep"
        if self._settings.config is None:
            rule = "A mapping has one mask for each kind of layer, which the config lists."
            raise UnsupportedFormError(explain("attention_mask", "no config", rule, "Pass model=."))
        kinds = layer_masks(self._settings.config)
        full = self._dense(segments, attention, device)
        return {key: full if kind == "attention" else segments.keep.to(device) for key, kind in kinds.items()}


def find_segments(
    batch: Mapping[str, Any],
    *,
    polarity: Polarity | None = None,
    pattern: str | Pattern | None = None,
    padding_free: bool = False,
) -> Segments:
    """The truth of a batch, from whatever it carries: `attention_mask_2d`, `attention_mask` of any rank, offsets, positions.

    All sources are checked against each other. A batch that carries none of them raises: no mask may mean no padding, or
    that the mask was lost (positions that count up once say nothing of padding). With `padding_free` a single flat row is
    real throughout.
    """
    B, S = _shape(batch)
    carried, keep = batch.get("attention_mask"), batch.get(KEEP_KEY)
    if padding_free and B != 1:
        rule = "padding_free means one flat row [1, T]; this batch is padded."
        raise CollateError(explain("input_ids", f"{B} rows", rule, "Collate with padding_free=True, or set it to False."))
    if isinstance(keep, Tensor):
        return _checked(_split(key_segments(keep), batch), carried, polarity, _declared(pattern))
    if isinstance(carried, Tensor):
        if carried.ndim == 2 and tuple(carried.shape) == (B, S):
            return _split(key_segments(carried), batch)
        found = derive_segments(carried, polarity=polarity, batch_size=B, pattern=_declared(pattern))
        return found if found.packed else _split(found, batch)
    flat = _flat_segments(batch, S) if B == 1 else None
    if flat is None and padding_free:
        return Segments.from_lengths([S])
    if flat is None or not (padding_free or flat.packed or any(key in batch for key in OFFSET_KEYS)):
        rule = "No key says which tokens are padding: no mask may mean no padding, or a mask that was lost."
        remedy = "Carry attention_mask_2d from the collator (PaddingCollator and wrap_collator emit it)."
        raise AmbiguousMaskError(explain("batch", f"keys {', '.join(map(str, batch))}", rule, remedy))
    return flat


def _declared(pattern: str | Pattern | None) -> Pattern | None:
    """Only chunks have to be declared: their masks look like packed rows."""
    pattern = Pattern.of(pattern or "causal")
    return pattern if pattern.kind == "chunked" else None


def _checked(truth: Segments, carried: Any, polarity: Polarity | None, declared: Pattern | None) -> Segments:
    """The 2D truth, with the sequences a 4D mask beside it shows; both must agree."""
    if not isinstance(carried, Tensor):
        return truth
    if carried.ndim == 2 and tuple(carried.shape) == truth.shape:
        agree(truth, {"attention_mask": derive_segments(carried, keep=truth.keep)})
        return truth
    check = partial(derive_segments, carried, polarity=polarity, keep=truth.keep, pattern=declared)
    found = check(prove=False)
    if found == truth or not found.packed:
        return truth
    return check()


def _flat_segments(batch: Mapping[str, Any], S: int) -> Segments | None:
    """Sequences of one flat row, from offsets or from positions that start again; mRoPE positions tell nothing."""
    for key in OFFSET_KEYS:
        if isinstance(offsets := batch.get(key), Tensor):
            lengths = batch.get("seq_lens")  # real lengths, where the offsets count an alignment tail as a sequence
            if lengths is not None:
                return Segments.from_lengths([lengths.tolist()], S)
            return Segments.from_cu_seqlens(offsets, S)
    positions = batch.get("position_ids")
    return Segments.from_position_ids(positions) if isinstance(positions, Tensor) and positions.ndim == 2 else None


def _split(segments: Segments, batch: Mapping[str, Any]) -> Segments:
    """A 2D mask does not show where one sequence of a row ends and the next begins; offsets and positions do."""
    offsets = {key: batch[key] for key in OFFSET_KEYS if isinstance(batch.get(key), Tensor)}
    if offsets and segments.shape[0] == 1:
        flat = _flat_segments(batch, segments.shape[1])
        if flat is not None and torch.equal(flat.keep, segments.keep):
            return flat
        if flat is not None:
            agree(segments, {next(iter(offsets)): flat})
    return _split_by_positions(segments, batch.get("position_ids"))


def _split_by_positions(segments: Segments, position_ids: Any) -> Segments:
    """Where positions fall back, a new sequence begins."""
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) != segments.shape:
        return segments
    positions_T = position_ids.cpu().flatten()[segments.indices]
    starts_T = torch.ones_like(positions_T, dtype=torch.bool)
    starts_T[1:] = positions_T[1:] <= positions_T[:-1]
    ids = torch.zeros(segments.shape, dtype=torch.int64)
    ids.view(-1)[segments.indices] = starts_T.cumsum(0)
    return Segments.from_ids(ids)


def _scoped(cp: ContextParallel | None, consumer: str) -> ContextParallel | None:
    """How much of the 2D mask a rank gets, where the caller left that to the consumer."""
    if cp is None or cp.mask_2d is not None:
        return cp
    return replace(cp, mask_2d=MASK_2D_SCOPE[consumer].scope if consumer in MASK_2D_SCOPE else "local")


def _settings(model: Any, model_type: str | None, needs_2d: bool | None, attn_implementation: str | None) -> _Settings:
    config = None if model is None else config_of(model)
    text = None if config is None else text_config(config)
    if needs_2d is None and (model is not None or model_type is not None):
        needs_2d = needs_mask_2d(model if model is not None else model_type)
    found = attn_implementation or getattr(text, "_attn_implementation", None) or "sdpa"
    aux_loss = bool(getattr(text, "output_router_logits", False))
    name = getattr(text, "model_type", None) or model_type or ""
    return _Settings(needs_2d=needs_2d, attn_implementation=found, aux_loss=aux_loss, model_type=name, config=config)


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    for key in ("input_ids", "inputs_embeds", "tokens", KEEP_KEY):
        value = batch.get(key)
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[0], value.shape[1]
    rule = "A batch has input_ids [B, S], or inputs_embeds [B, S, H]."
    raise CollateError(explain("batch", f"keys {', '.join(map(str, batch))}", rule, "Collate the tokens too."))


def _counts_up(segments: Segments) -> bool:
    """Are the positions a model makes up itself, 0 1 2 ..., right for every real token?"""
    return segments.padding_side in ("none", "right") and not segments.packed


def _device(batch: Mapping[str, Any]) -> torch.device:
    return next((value.device for value in batch.values() if isinstance(value, Tensor)), torch.device("cpu"))


def _is_dense(key: str, value: Any) -> bool:
    return key == "attention_mask" and isinstance(value, Tensor) and value.ndim == 4
