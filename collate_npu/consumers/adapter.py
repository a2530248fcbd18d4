"""Adapter: it reads a batch before the model, chooses the form that the model reads, writes it, and splits it over ranks.

Costs O(B * S) for a batch with `attention_mask_2d` or a 2D mask; a 4D mask is read in a few passes over its bytes.
Legend: B batch, S width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from collate_npu.consumers.by_sequence import runs_by_sequence
from collate_npu.consumers.device_copy import move_batch
from collate_npu.consumers.labels_and_positions import KEY, TEXT_KEY, check_labels, label_places, labels_for, positions_for
from collate_npu.consumers.mask_choice import Case, Choice, Consumer, ConsumerName, Model, consumer_named
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.model_traits import (
    LabelRule,
    config_of,
    consumer_of,
    known_config,
    recurrent_heads,
    unwrap,
    warn_if_left,
)
from collate_npu.consumers.probe import probed
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, Key, check_keys, of_kind, with_role
from collate_npu.masks.batch_reader import agreed, check_known
from collate_npu.masks.forms import MAX_MASK_BYTES, offsets_of, open_empty_rows, write_block_mask, write_dense
from collate_npu.masks.mask_values import Polarity
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.masks.sources import Sources, check_ahead, physical_offsets
from collate_npu.parallel import ContextParallel, check_recurrent_split, cu_seqlens_of, query_rows, ranks_agree
from collate_npu.parallel.agreement import uncompiled
from collate_npu.parallel.split import share_out
from collate_npu.segments import Segments, ready
from collate_npu.validation import check_model, checked

_FLAT_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""The keys of a flat row that kernels of a transformers model read."""


class KnownBatches:
    """Holds, for proof, the Segments of the batch that an adapted model runs in each thread and, while somebody watches, of
    the last eight batches. A batch at the model may not tell its padding: a mask is left out where None is exact."""

    def __init__(self) -> None:
        self.running: dict[int, Segments] = {}
        """By thread."""
        self.watchers = 0
        """How many watch: without one nothing is kept."""
        self._last: deque[tuple[Tensor, Segments]] = deque(maxlen=8)

    def watch(self, change: Literal[1, -1]) -> None:
        """Count one watcher more or less."""
        self.watchers += change
        if not self.watchers:
            self._last.clear()

    def keep(self, batch: Mapping[str, Any], segments: Segments) -> None:
        """Keep the Segments of a batch."""
        if isinstance(ids := batch.get("input_ids"), Tensor):
            self._last.append((ids.detach().cpu().clone(), segments))

    def find(self, ids: Tensor) -> Segments | None:
        """Return the Segments of the last batch that has these tokens; None for tokens of no batch."""
        same = (each for held, each in reversed(self._last) if held.shape == ids.shape and (held == ids.cpu()).all())
        return next(same, None)


KNOWN_BATCHES = KnownBatches()


@checked
class BatchAdapter:
    """Makes any batch right for one model stack: `adapter(batch)` returns a new plain dict.

    * `model`: the module that gets the batch; or its config, or a `Model` of another adapter, together with `consumer`.
    * `model_type`: a name of transformers' registry. Alone it stands for a Megatron trainer such as ms-swift's.
    * `needs_mask_2d`: True if the model has recurrent layers, if you pass neither of these two.
    * `consumer`: who reads the batch, if you pass no module: a name, or a `Consumer`.
    * `padding_free`: True if each batch is one flat row; then the batch has no `attention_mask_2d`.
    * `pattern`: what attention sees, also in the masks that arrive. None: plain causal, or the model's own window.
    * `polarity`: what True means in an `attention_mask` that arrives. None: the mask must prove it, otherwise it is refused.
    * `attn_implementation`: "sdpa", "eager", ... if you pass no module.
    * `context_parallel`: this rank's place. The batch is split last; of a 4D mask only this rank's rows are built.
    * `keys`: rules for keys of your own: `{**KEYS, "reward": TOKENS}`.
    * `max_mask_bytes`: the most bytes that a 4D mask may take; a larger one raises an error.
    * `labels_shifted`: True if each label stands with the token that predicts it. None: the model, or else the tokens, tell.
    * `device`: where the batch goes in one copy; positions and a 4D mask are made there. None: it stays where it is.

    The labels of padding, and the first label of each sequence, become -100. A transformers model that is no causal language
    model, no backbone of one and no head on one gets every batch as it came: a warning says so.

    >>> adapter = BatchAdapter(needs_mask_2d=True, consumer="megatron")
    >>> keep = torch.tensor([[False, False, True], [True, True, True]])
    >>> batch = {"input_ids": torch.tensor([[0, 0, 7], [4, 5, 6]]), "attention_mask_2d": keep}
    >>> {key: list(value.shape) for key, value in adapter(batch).items()}
    {'input_ids': [2, 3], 'position_ids': [2, 3], 'attention_mask': [2, 1, 3, 3], 'attention_mask_2d': [2, 3]}
    >>> adapter.with_segments(batch)[1]
    Segments(B=2, S=3, lengths=[1, 3], padding='left')
    """

    def __init__(
        self,
        model: Any = None,
        *,
        model_type: str | None = None,
        needs_mask_2d: bool | None = None,
        consumer: ConsumerName | Consumer | None = None,
        padding_free: bool = False,
        pattern: str | Pattern | None = None,
        polarity: Polarity | None = None,
        attn_implementation: str | None = None,
        context_parallel: ContextParallel | None = None,
        keys: Mapping[str, Key] = KEYS,
        max_mask_bytes: int = MAX_MASK_BYTES,
        labels_shifted: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if model is not None and not isinstance(model, Model):
            check_model(model, config=True)
        self.consumer = consumer_named(consumer or _reader(model, model_type))
        self.padding_free = padding_free
        self.polarity: Polarity | None = polarity
        self.context_parallel = context_parallel
        self.keys = check_keys(keys)
        self.max_mask_bytes = max_mask_bytes
        shifts = self.consumer.counts_positions  # a transformers model shifts labels itself
        self.shifted = False if labels_shifted is None and shifts else labels_shifted
        self.device = None if device is None else torch.device(device)
        self.declared = None if pattern is None else Pattern.of(pattern)
        """The pattern that the caller declared; None: the model's own at each call."""
        self.pattern = self.declared or CAUSAL
        self.left = self._out_of_scope(model, model_type)
        """Why every batch is left as it came; "" for a model in scope."""
        how: dict[str, Any] = {"needs_2d": needs_mask_2d, "attn_implementation": attn_implementation}
        self.model = model if isinstance(model, Model) else self._known(model, model_type, how)
        """What is known of the model: found once, here."""
        self.shares = runs_by_sequence(model, shared=True)
        """True if `adapt` runs the rows of this model that ranks share."""
        self._check()

    def _out_of_scope(self, model: Any, model_type: str | None) -> str:
        """Return why this model is out of scope, and warn of it; "" for one in scope, or that another stack runs."""
        if not self.consumer.counts_positions or isinstance(model, Model) or (model is None and model_type is None):
            return ""
        return warn_if_left(known_config(SimpleNamespace(model_type=model_type)) if model is None else model)

    def _known(self, model: Any, model_type: str | None, how: dict[str, Any]) -> Model:
        """Return what is known of this model before any batch, from its code, its config and a probe."""
        if not self.left:
            known = Model.of(model, model_type=model_type, **how)
            if not self.consumer.counts_positions or not known.model_type:
                return known
            known = probed(known, model if consumer_of(model) == "transformers" else known_config(known.named), BatchAdapter)
            if not (reason := known.leaks.get("scope")):
                return known
            self.left = warn_if_left(known_config(known.named), reason)  # a model of it shows it
        return Model(config=None if model is None else config_of(model), needs_mask_2d=False)

    def _check(self) -> None:
        if self.model.needs_mask_2d is None and self.consumer.keeps_mask_2d == "recurrent" and not self.padding_free:
            raise _no_model("Whether attention_mask_2d stays depends on the model's layers.")
        size, rule = 1 if self.context_parallel is None else self.context_parallel.size, ""
        if self.left:
            rule, remedy = f"Batches of this model are left as they came: {self.left}.", "Leave context_parallel out."
        elif not self.consumer.splits_rows:
            rule = f"Consumer {self.consumer.name!r} reads whole rows: its ranks cannot share out a dense mask."
            remedy = "Leave context_parallel out, or use a consumer that needs no mask, with right padding."
        elif self.model.needs_mask_2d and not (self.consumer.shares_recurrent or self.shares):
            rule = f"A rank's recurrent layers need the state of the tokens before its part, and {self.consumer.not_shared}."
            remedy = "A transformers model: call adapt(model, sequence_group=group) first. Else give each rank whole rows."
        if rule and size > 1:
            raise UnsupportedFormError(explain("context_parallel", f"size {size}", rule, remedy))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch that the model takes. Raises `CollateError` where its padding is unknown or no form is right."""
        return self._as_it_came(batch) if self.is_left(batch) else self._run(batch)[0]

    def with_segments(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Segments]:
        """Return the batch, and the `Segments` of its whole, unsplit rows for metrics (`last_token`, `unpad`)."""
        if self.is_left(batch):
            return self._as_it_came(batch), ready(self.read(Sources.of_tensors(batch), self.polarity, self.padding_free))
        out, segments = self._run(batch)
        return out, ready(segments)

    def is_left(self, batch: Any) -> bool:
        """Return True if this batch is left as it came: its model is out of scope, or the call is not causal."""
        return bool(self.left) or (isinstance(batch, Mapping) and batch.get("is_causal") is False)

    def _as_it_came(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch that is out of scope, on the device of this adapter."""
        return dict(batch) if self.device is None else move_batch(batch, self.device)

    def _run(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Segments]:
        """Return what `hand_over` makes of this batch, and keep its Segments while somebody watches."""
        if self.context_parallel is None:
            out, segments = self.hand_over(Sources.of_tensors(batch), padding_free=self.padding_free)
        else:
            out, segments = self._run_in_agreement(batch)
        if KNOWN_BATCHES.watchers:
            KNOWN_BATCHES.keep(out, segments)
        return out, segments

    @uncompiled
    def _run_in_agreement(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Segments]:
        with ranks_agree(self.context_parallel, call="split"):
            return self.hand_over(Sources.of_tensors(batch), padding_free=self.padding_free)

    def hand_over(
        self, sources: Sources, *, padding_free: bool, segments: Segments | None = None, holes: bool | None = None
    ) -> tuple[dict[str, Any], Segments]:
        """Return any batch in the model's form, with labels that a loss may learn from, and its `segments`, read if None."""
        segments = segments or self.read(sources, self.polarity, padding_free)
        cut: Any = sources.get("labels")
        if (places := label_places(sources, segments)) is not None:  # each label stands with its token meanwhile
            whole: Tensor = cut.new_full(segments.shape, -100)
            whole[:, places] = cut[:, 1:]
            sources = sources | {"labels": whole}
        check_labels(sources, segments, self.model.labels)
        holes = not self.model.by_sequence if holes is None else holes
        labels = labels_for(sources, segments, self.label_rule, self.shifted, holes=holes)
        out = self.write(sources | labels if labels else sources, segments, padding_free)
        return out if places is None else out | {"labels": torch.cat([cut[:, :1], out["labels"][:, places]], 1)}, segments

    def read(self, sources: Sources, polarity: Polarity | None, padding_free: bool) -> Segments:
        """Return the Segments of such a batch. A dense mask in it has the declared pattern, or one of this model's own."""
        own = self.model.own_patterns.values() if self.consumer.counts_positions and not self.left else ()
        settings: dict[str, Any] = {"polarity": polarity, "pattern": self.declared, "padding_free": padding_free}
        return agreed(sources, own=own, labels=not self.left, **settings)

    @property
    def label_rule(self) -> LabelRule:
        """Return what the head does with labels. Where its class does not show it, the declared pattern decides."""
        return self.model.labels or ("places" if self.pattern.name == "bidirectional" else "next")

    def write(
        self,
        batch: Mapping[str, Any],
        segments: Segments,
        padding_free: bool | None = None,
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """Return the batch in the model's form, for Segments that are known already. The batch must not contradict them.

        >>> adapter, ids = BatchAdapter(needs_mask_2d=True, consumer="verl"), torch.tensor([[0, 0, 7], [4, 5, 6]])
        >>> adapter.write({"input_ids": ids}, Segments.from_lengths([1, 3], side="left"))["attention_mask"].tolist()
        [[False, False, True], [True, True, True]]
        """
        if isinstance(batch, Sources):  # read, so it agrees with its Segments
            sources = batch
        elif self.is_left(batch):
            return self._as_it_came(batch)
        else:
            sources = Sources.of_tensors(batch)
            check_known(sources, segments)
        case = self._case(segments, padding_free, sources)
        device = device or next((x.device for x in sources.values() if isinstance(x, Tensor)), torch.device("cpu"))
        out = {key: value for key, value in sources.items() if key not in (KEEP_KEY, SEGMENT_KEY, KEY, TEXT_KEY)}
        made_on = self.device if self.context_parallel is None else None  # ranks compare their shares on the host
        positions = positions_for(self.consumer, case, sources, made_on)
        if positions is not None:
            out[KEY] = positions if self.device else positions.to(device)
        pad_token_id = case.model.text.pad_token_id if case.model.pooling else None
        if pad_token_id is not None and isinstance(out.get("input_ids"), Tensor):  # else padding counts
            out["input_ids"] = out["input_ids"].masked_fill(~segments.keep.to(device), pad_token_id)
        if case.apart and segments.packed:
            out[SEGMENT_KEY] = segments.ids.to(device)
        if self.consumer.reads_offsets(case) and not case.apart and any(out.get(key) is None for key in _FLAT_KEYS):
            out |= {key: value for key, value in _offsets(sources, case, device).items() if out.get(key) is None}
        if self.consumer.counts_positions:
            _drop_unread(out, alone=case.apart or (case.padding_free and case.recurrent))
        chosen = self.consumer.choose(case)
        if chosen.form == "none" and case.padding_free and not case.pattern.causal:
            check_ahead(sources, segments, reads_both=not self.consumer.counts_positions)
        out.pop("attention_mask", None)
        mask = out[self.consumer.key] = self._mask(chosen, case, device)
        if chosen.keeps_mask_2d:
            out[KEEP_KEY] = segments.keep.to(device)
        if self.shifted and self.consumer.counts_positions and isinstance(sources.get("labels"), Tensor):
            out.setdefault("shift_labels", sources["labels"].clone())  # which transformers' losses do not move again
        if (cp := self.context_parallel) is not None:
            if self.consumer.shares_recurrent and self.model.needs_mask_2d:
                check_recurrent_split(cp, segments, padding_free=case.padding_free, heads=recurrent_heads(self.model.config))
            built = self.consumer.key if getattr(mask, "ndim", 0) == 4 else None  # for this rank's queries alone
            parts = {key: value for key, value in out.items() if key != built}
            out |= share_out(parts, cp, segments=segments, keys=self.keys)
        return out if self.device is None else move_batch(out, self.device)

    def choose(self, segments: Segments, *, padding_free: bool | None = None) -> Choice:
        """Return the form of the masks of such a batch, and why; `padding_free` of one batch overrides the adapter's.

        >>> BatchAdapter(needs_mask_2d=True, consumer="megatron").choose(Segments.from_lengths([1, 3], side="left"))
        Choice(form='masked', keeps_mask_2d=True, why='padding stands on the left, so real tokens would attend it')
        """
        if self.left:
            return Choice(form="keep_2d", keeps_mask_2d=False, why=f"the batch is left as it came: {self.left}")
        return self.consumer.choose(self._case(segments, padding_free))

    def _case(self, segments: Segments, padding_free: bool | None, call: Mapping[str, Any] = MappingProxyType({})) -> Case:
        flat = self.padding_free if padding_free is None else padding_free
        if self.consumer.counts_positions and segments.spans:  # padding before or between tokens: a padded row, no flat one
            flat = flat and not (segments.spans[0][1] or segments.hole_rows)
        if flat and self.consumer.counts_positions and not (self.model.needs_mask_2d or segments.packed):
            causal = self.pattern.causal and not (self.model.leaks and self.declared is None)
            flat = causal or not segments.num_padding  # to a model that may look ahead, one with padding is a padded row
        known: dict[str, Any] = {"model": self.model, "pattern": self.pattern, "context_parallel": self.context_parallel}
        apart = self.model.by_sequence and (self.context_parallel is None or self.shares)
        case = Case(segments=segments, padding_free=flat, call=call, apart=apart, **known)
        if self.model.needs_mask_2d is None and not flat and not case.plain:
            raise _no_model("The form of this batch depends on whether the model has recurrent layers.")
        return case

    def _mask(self, chosen: Choice, case: Case, device: torch.device) -> Any:
        segments, form = case.segments, chosen.form
        if form == "none":
            return None
        if form == "keep_2d":
            return segments.keep.to(device, self.consumer.keep_dtype)
        if form == "block_mask":
            if self.context_parallel is not None:
                rule = "torchtitan's and torch's own context parallelism split a BlockMask themselves."
                raise UnsupportedFormError(explain(self.consumer.key, "a split", rule, "Leave context_parallel out here."))
            return self._attends(segments, "block_mask", case.pattern, device)
        if form == "mapping":
            reader = self.model.attn_implementation
            form = "bias" if reader == "eager" else "block_mask" if reader == "flex_attention" else "keep"
        patterns = self.consumer.patterns(case).items()
        masks = {kind: self._attends(segments, form, pattern, device) for kind, pattern in patterns}
        return masks if chosen.form == "mapping" else masks[""]

    def _attends(self, segments: Segments, form: Any, pattern: Pattern, device: torch.device) -> Any:
        """Return a BlockMask, or the dense mask of this rank's queries."""
        place, most, cp = self.device or device, self.max_mask_bytes, self.context_parallel
        if form == "block_mask":
            return write_block_mask(segments, pattern, place, max_mask_bytes=most)
        offsets = cu_seqlens_of({}, segments) if cp is not None and cp.documents else None
        rows = None if cp is None else query_rows(segments.shape[1], cp, offsets)
        mask = write_dense(segments, form, pattern, rows=rows, device=place, max_mask_bytes=most)
        return open_empty_rows(mask) if self.consumer.opens_empty_rows else mask


def _reader(model: Any, model_type: str | None) -> str:
    """Return the consumer that the model's own classes name."""
    read = consumer_of(model) if model is not None or model_type is None else "megatron"
    if read is None:
        rule = "No model is given." if model is None else "A config does not say which stack reads the batch."
        remedy = "Pass consumer= ('transformers', 'megatron', ...), or the model itself."
        raise CollateError(explain("consumer", "None", rule, remedy, more="consumer"))
    return kernel_of(unwrap(model)) if read == "megatron" and model is not None else read


def _no_model(rule: str) -> CollateError:
    remedy = "Pass model=, model_type= or needs_mask_2d=."
    return CollateError(explain("BatchAdapter", "no model", rule, remedy, more="consumer"))


def _drop_unread(out: dict[str, Any], *, alone: bool) -> None:
    """Remove the keys that a transformers model must not hand to its kernels. It hands them `cu_seq_lens_q` as `cu_seqlens`,
    and a second one is a TypeError (5.23 models/qwen3_next/modeling_qwen3_next.py:752). With `alone`, the row has one
    sequence: it needs no offsets, and recurrent layers without kernels raise at them (integrations/hub_kernels.py:1033)."""
    others = with_role(out, "offsets", "padded_offsets") if out.get("cu_seq_lens_q") is not None else ()
    unread = of_kind(out, "offsets") if alone else [key for key in others if not key.startswith("cu_seq_lens")]
    foreign = ("flash_attn_kwargs", "_packed_seq_ids", "qkv_format")  # NeMo's
    for key in ("seq_lens", "seq_lens_padded", "input_lengths", *foreign, *unread):
        out.pop(key, None)


def _offsets(sources: Sources, case: Case, device: torch.device) -> dict[str, Any]:
    offsets = offsets_of(case.segments, physical_offsets(sources, case.segments))
    return {key: offsets[key].to(device) if isinstance(offsets[key], Tensor) else offsets[key] for key in _FLAT_KEYS}
