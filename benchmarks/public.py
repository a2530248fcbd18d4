"""Every public function that takes a batch, and a way to call it: for `groups/growth.py`, and for tests of all of them.

`FREE` names what takes no batch; a test finds what is in neither list.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import collate_npu as top
from collate_npu import Segments, kernels, masks, outputs, parallel
from collate_npu.proof import watch

WRAPPED = top.wrap_collator(top.PaddingCollator(pad_token_id=0, attention_mask="2d"))
CP = top.ContextParallel(2, 0)
PADDED = top.BatchAdapter(needs_mask_2d=True, consumer="verl")
FLAT = top.BatchAdapter(needs_mask_2d=True, consumer="megatron", padding_free=True)


class ShortConvolution(nn.Module):
    """A layer that knows padding by the zeros in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 4, groups=4, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Model(nn.Module):
    """One such layer: proof of it costs what proof costs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear_attn = nn.Embedding(512, 4), ShortConvolution()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        x = self.embed(input_ids)
        return self.linear_attn(x if attention_mask is None else x * attention_mask[..., None])


def _ids(segments: Segments) -> Tensor:
    B, S = segments.shape
    return (torch.arange(B * S).view(B, S) % 509 + 1).masked_fill_(~segments.keep, 0)


def _samples(segments: Segments, held: Callable[[Tensor], Any]) -> list[dict[str, Any]]:
    return [{"input_ids": held(x), "labels": held(x)} for x in outputs.per_sequence(_ids(segments), segments)]


def _batch(segments: Segments) -> dict[str, Tensor]:
    truth = {"segment_ids": segments.ids} if segments.packed else {"attention_mask_2d": segments.keep}
    return {"input_ids": _ids(segments), "labels": _ids(segments).masked_fill_(~segments.keep, -100), **truth}


FORMS: dict[str, Callable[[Segments], Any]] = {
    "segments": lambda s: s,
    "ids": _ids,
    "keep": lambda s: s.keep,
    "offsets": lambda s: s.cu_seqlens_host,
    "hidden": lambda s: torch.ones(*s.shape, 4),
    "packed": lambda s: torch.ones(s.num_tokens, 4),
    "query": lambda s: torch.ones(*s.shape, 1, 16),
    "lists": lambda s: _samples(s, Tensor.tolist),
    "arrays": lambda s: _samples(s, lambda x: np.array(x)),
    "batch": _batch,
    "told": lambda s: {"input_ids": _ids(s), "attention_mask": s.keep.long()},
    "flat": lambda s: {"input_ids": _ids(s), "cu_seq_lens_q": s.cu_seqlens},
    "dense": lambda s: masks.dense(s, polarity="masked"),
    "model": lambda _: Model(),
    "text": lambda s: "é" * s.num_tokens,
    "named": lambda s: {"input_ids": torch.ones(2, 4, dtype=torch.long), "name": "x" * s.num_tokens},
}
"""In what forms functions take these Segments."""


def _said(segments: Segments) -> None:
    for name in dir(type(segments)):
        getattr(segments, name)


def _through(model: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model(**batch)


def _guarded(model: nn.Module, batch: dict[str, Tensor]) -> None:
    top.guard_first_batch(model)
    with redirect_stdout(None):
        _through(model, batch)


def _watched(model: nn.Module, batch: dict[str, Tensor]) -> None:
    with watch(say=False):
        _through(model, batch)


def _adapted(model: nn.Module, batch: dict[str, Tensor]) -> None:
    handle = top.adapt(model, consumer="verl", needs_mask_2d=True)
    _through(model, batch)
    handle.remove()


def _refused(text: str) -> str:
    try:
        masks.derive_segments({text: text}, polarity=text)  # type: ignore[arg-type]
    except top.CollateError as error:
        return str(error)
    raise AssertionError("taken")


@dataclass(frozen=True)
class Call:
    """A public function: what it is given, the axes, how the most of them grows with the width, and up to which size."""

    work: Callable[..., Any]
    takes: str
    axes: str = "rows width tokens"
    width: int = 1
    most: int = 2_000_000

    def made(self, segments: Segments) -> dict[str, Any]:
        """What it is given of these Segments."""
        return {name: FORMS[name](copy(segments)) for name in self.takes.split()}


DENSE: dict[str, Any] = {"axes": "rows width", "width": 2, "most": 16_000}
FEW: dict[str, Any] = {**DENSE, "most": 1_600}
CALLS = {
    "PaddingCollator": Call(top.PaddingCollator(pad_token_id=0), "lists"),
    "PaddingCollator, of arrays": Call(top.PaddingCollator(pad_token_id=0), "arrays"),
    "PaddingCollator, a flat row": Call(top.PaddingCollator(pad_token_id=0, padding_free=True), "lists", "tokens"),
    "wrap_collator": Call(
        top.wrap_collator(top.PaddingCollator(pad_token_id=0, attention_mask="2d")), "lists", "rows width"
    ),
    "BatchAdapter": Call(PADDED, "batch", "rows width"),
    "BatchAdapter, a flat row": Call(FLAT, "flat", "tokens"),
    "adapt": Call(_adapted, "model told", "rows width"),
    "check_delivery": Call(top.check_delivery, "model told", "rows width"),
    "guard_first_batch": Call(_guarded, "model told", "rows width"),
    "watch": Call(_watched, "model told", "rows width"),
    "describe": Call(top.describe, "batch"),
    "describe, a text": Call(top.describe, "named", "tokens"),
    "Segments": Call(lambda segments: _said(Segments(segments.array)), "segments"),
    "Segments.from_ids": Call(lambda segments: Segments.from_ids(segments.array), "segments"),
    "Segments.from_keep": Call(Segments.from_keep, "keep"),
    "Segments.from_lengths": Call(lambda segments: Segments.from_lengths(segments.lengths).array, "segments"),
    "Segments.from_cu_seqlens": Call(lambda offsets: Segments.from_cu_seqlens(offsets).array, "offsets"),
    "Segments.from_position_ids": Call(lambda s: Segments.from_position_ids(s.position_ids), "segments", "tokens"),
    "derive_segments": Call(top.derive_segments, "dense", **DENSE),
    "derive_segments, 2D": Call(top.derive_segments, "keep"),
    "derive_segments, a text it refuses": Call(_refused, "text", "tokens"),
    "segments_from_batch": Call(masks.segments_from_batch, "batch"),
    "dense": Call(masks.dense, "segments", **DENSE),
    "block_mask": Call(masks.block_mask, "segments", **FEW),
    "mask_mod": Call(masks.mask_mod, "segments"),
    "none_is_exact": Call(masks.none_is_exact, "segments"),
    "varlen": Call(masks.varlen, "segments"),
    "unpad": Call(outputs.unpad, "hidden segments"),
    "repad": Call(outputs.repad, "packed segments"),
    "last_token": Call(outputs.last_token, "hidden segments"),
    "per_sequence": Call(outputs.per_sequence, "hidden segments"),
    "to_nested": Call(outputs.to_nested, "hidden segments"),
    "shift_labels": Call(outputs.shift_labels, "ids segments"),
    "ignore_first_labels": Call(outputs.ignore_first_labels, "ids segments"),
    "split_batch": Call(lambda batch, s: parallel.split_batch(batch, CP, segments=s), "batch segments"),
    "split_tensor": Call(lambda x: parallel.split_tensor(x, CP), "hidden"),
    "gather_sequence": Call(lambda x, s: parallel.gather_sequence(x, top.ContextParallel(1, 0), s), "hidden segments"),
    "pad_documents": Call(partial(parallel.pad_documents, multiple=64), "flat", "tokens"),
    "cu_seqlens_of": Call(parallel.cu_seqlens_of, "flat", "tokens"),
    "token_runs": Call(
        lambda s: parallel.token_runs(s.shape[1], CP.for_documents(), s.cu_seqlens_host), "segments", "tokens"
    ),
    "query_rows": Call(lambda s: parallel.query_rows(s.shape[1], CP), "segments"),
    "check_recurrent_split": Call(lambda s: parallel.check_recurrent_split(CP, s), "segments", "rows width"),
    "choose_form": Call(kernels.choose_form, "segments"),
    "fusion_attention_kwargs": Call(kernels.fusion_attention_kwargs, "segments", "rows width"),
    "gated_delta_kwargs": Call(partial(kernels.gated_delta_kwargs, kernel="fla"), "segments"),
    "flat_offsets": Call(kernels.flat_offsets, "segments"),
    "zero_padding": Call(kernels.zero_padding, "hidden segments", "rows width"),
}
FREE = {
    "CollateError", "ContextParallel", "Pattern", "Verdict", "needs_mask_2d", "data_group",
    "gloo_group", "ranks_agree", "NpuForm", "Kernel", "prefix_triangle",
    "triangle", "Watch",
}  # fmt: skip
"""Public, and given no batch: settings, groups of ranks, constants, what others return; `Watch` is what `watch` gives."""
