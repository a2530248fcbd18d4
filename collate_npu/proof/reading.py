"""Reading: what a layer makes of the masks it received, and why that is not what the batch says.

A layer is judged by whom its real tokens attend, so a mask of any form, dtype and polarity is compared with one truth,
and what it says of padding does not matter. Costs O(S * S) for one row at a time where a layer reads a dense mask.
Legend: B rows, S width, Q query rows of this rank, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.consumer import Case
from collate_npu.consumers.families import also_told, why_state_runs_on
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.models import RECURRENT_KIND, consumer_of, has_two_sides, text_config, unwrap, windows
from collate_npu.kernels.check import call_breaches
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.forms import mask_mod
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel, query_rows, split_tensor
from collate_npu.proof.received import MASK, Received
from collate_npu.proof.told import Told, by_offsets, segments_told, why_differs
from collate_npu.segments import Segments

_OTHER_TOKENS = "a 2D mask of other tokens than this batch's"


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The truth of one batch on one model, as this rank's layers should be told it."""

    model: Any
    case: Case
    cp: ContextParallel | None = None

    def why_wrong(self, received: Received) -> str:
        """Why this layer computes something else than the batch says; "" where it does not."""
        own = f"{received.name.rpartition('.')[2]} {type(received.reader).__name__}".lower()
        if self.case.recurrent and RECURRENT_KIND.search(own):
            return self._why_recurrent_wrong(received)
        return self._why_attention_wrong(received)

    @cached_property
    def reader(self) -> str:
        """Who reads: "transformers", or the kernels of a Megatron module (`kernel_of`)."""
        return kernel_of(unwrap(self.model)) if consumer_of(self.model) == "megatron" else "transformers"

    @cached_property
    def local_keep(self) -> Tensor:
        keep = self.case.segments.keep
        return keep if self.cp is None else split_tensor(keep, self.cp)

    def asks(self, received: Received) -> bool:
        """Does this layer work on the tokens of this batch? A vision tower's does not, nor does cross attention."""
        B, S = self.local_keep.shape
        its_rows = received.hidden[:2] == (B, S) if self.reader == "transformers" else received.hidden[1:2] == (B,)
        decodes = "decoder" in received.name and has_two_sides(unwrap(self.model))
        return its_rows and not decodes and not received.crosses and not self._is_unread(received.told.get(MASK))

    def _is_unread(self, given: Any) -> bool:
        """Is it a dense mask of True and False to attention of a layer's own? It may mean either (mpt's True blocks)."""
        if not isinstance(given, Tensor) or given.ndim < 3 or self.reader != "transformers":
            return False
        return not given.is_floating_point() and self.case.model.attn_implementation != "sdpa"

    def _is_keep(self, given: Tensor) -> bool:
        return torch.equal(given.cpu() != 0, self.local_keep)

    # --- recurrent layers

    def _why_recurrent_wrong(self, received: Received) -> str:
        if (keep := _keep_of(received)) is not None:
            return "" if self._is_keep(keep) else _OTHER_TOKENS
        if not (self.case.padding_free or self.case.segments.packed):
            return "no 2D mask, and padding stands before real tokens" if self.case.inside else ""
        # a scan reads `cu_seq_lens_q`, a convolution `seq_idx`, Megatron's layers one object
        if not ("packed_seq_params" in received.offsets or {"cu_seq_lens_q", "seq_idx"} <= received.offsets):
            return f"{received}, and the row holds several sequences"
        if why := self._why_offsets_wrong(received):
            return why
        if not type(received.reader).forward.__module__.startswith("transformers."):
            return ""  # who puts layers of his own in the place of transformers' knows his kernels
        if untold := {*also_told(self.case)} - received.offsets:
            return f"{received}, and its kernel reads {', '.join(untold)}"
        read = {key: value for key, value in received.told.items() if key not in also_told(self.case)}
        told = call_breaches("transformers", read, segments=self.case.segments) if self.cp is None else ()
        return f"{received}: {told[0]}" if told else why_state_runs_on(self.case)

    def _why_offsets_wrong(self, received: Received) -> str:
        """Offsets of the whole row, whoever holds them; under context parallelism they are shared out otherwise."""
        held = {**received.told, **getattr(received.told.get("packed_seq_params"), "__dict__", {})}
        first = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seq_lens_q")
        names = [name for name in first if held.get(name) is not None][: self.cp is None]
        total = self.case.segments.array.size
        for name in (*names, *(name for name in also_told(self.case) if name in received.told)):
            told = Told("offsets", "rule", (1, total), *by_offsets(segments_told(held, name), total), name)
            if why := why_differs(told, self.case.segments):
                return f"{name} {told}: {why}"
        return ""

    # --- attention

    def _why_attention_wrong(self, received: Received) -> str:
        flash = self.reader != "transformers" or "flash" in self.case.model.attn_implementation
        if self.case.padding_free and flash and {"cu_seq_lens_q", "packed_seq_params"} & received.offsets:
            return self._why_offsets_wrong(received)
        for b in range(len(self.case.segments.ids)):
            allowed_QK = self._allowed(received.told.get(MASK), b)
            if isinstance(allowed_QK, str):
                return allowed_QK
            if why := self._why_row_wrong(b, allowed_QK):
                return f"{received}: {why}"
        return ""

    def _allowed(self, given: Any, b: int) -> Tensor | str:
        """`[Q, K]`: whom row b attends, or why that cannot be read."""
        causal, attn = self.case.pattern.causal, self.case.model.attn_implementation
        if self.reader in ("transformer_engine", "transformer_engine_npu", "mindspeed"):  # causal, whatever mask is given
            return self._without_mask(causal=True)
        if given is None:
            bare = self.reader == "transformers" and attn in ("eager", "flex_attention")
            return self._without_mask(causal=causal and not bare)
        if hasattr(given, "mask_mod"):
            return evaluated(given, b)
        if given.ndim == 2:
            return self._without_mask(causal=causal) & self.case.segments.keep[b] if self._is_keep(given) else _OTHER_TOKENS
        row = row_of(given, b)
        if self.reader != "transformers":
            return ~row
        if row.is_floating_point():
            attends = row > torch.finfo(row.dtype).min / 2
            return attends if len(row) > 1 else attends & self._without_mask(causal=causal)  # the layer adds the triangle
        if row.dtype != torch.bool:
            return f"a dense mask of {str(row.dtype).removeprefix('torch.')}, which {attn} adds to the scores as numbers"
        return row

    def _without_mask(self, *, causal: bool) -> Tensor:
        past_QK = self._places[:, None] >= torch.arange(self.case.segments.shape[1])
        return past_QK if causal else torch.ones_like(past_QK)

    def _why_row_wrong(self, b: int, allowed_QK: Tensor) -> str:
        within = self._within_every_window
        return why_row_wrong(self.case.segments, self.case.pattern, b, self._places, allowed_QK, within)

    @cached_property
    def _places(self) -> Tensor:
        """`[Q]`: where the queries of this rank stand in the row."""
        S = self.case.segments.shape[1]
        return torch.arange(S) if self.cp is None else query_rows(S, self.cp)

    def _within_every_window(self, places_Q: Tensor) -> Tensor:
        """`[Q, K]`: what a layer must attend whether it has one of the model's windows or not."""
        config, S = self.case.model.config, self.case.segments.shape[1]
        sizes = () if config is None else windows(config)
        chunked = config is not None and getattr(text_config(config), "attention_chunk_size", None)
        back_QK = (places_Q[:, None] - torch.arange(S)).abs()
        return back_QK < (1 if chunked else min(sizes, default=S))


def why_row_wrong(
    segments: Segments,
    pattern: Pattern | None,
    b: int,
    places_Q: Tensor,
    allowed_QK: Tensor,
    within: Callable[[Tensor], Tensor] | None = None,
) -> str:
    """Real queries must attend what the pattern says of their own sequence, and nothing else; `within(places)` narrows
    what they must attend. Without a pattern only whose tokens they attend is judged."""
    ids_K = segments.ids[b]
    shape = len(places_Q), len(ids_K)
    if allowed_QK.shape != shape:
        return f"row {b} has {list(allowed_QK.shape)} queries and keys, not {[*shape]}"
    real_Q = ids_K[places_Q] != 0
    places_Q, allowed_QK = places_Q[real_Q], allowed_QK.cpu()[real_Q]
    for keys_QK, whom in ((ids_K == 0, "padding"), (ids_K[places_Q, None] != ids_K, "another sequence")):
        if bool((allowed_QK & keys_QK).any()):
            return f"row {b} attends {whom}"
    if pattern is None:
        return ""
    attends = mask_mod(segments, pattern=pattern)
    expected_QK = attends(torch.tensor(b), torch.tensor(0), places_Q[:, None], torch.arange(len(ids_K)))
    if bool((allowed_QK & ~expected_QK).any()):
        return f"row {b} attends more than {pattern} attention does"
    missing_QK = expected_QK & ~allowed_QK & (True if within is None else within(places_Q))
    return f"row {b} does not attend all of its sequence" if bool(missing_QK.any()) else ""


def _keep_of(received: Received) -> Tensor | None:
    """The 2D mask a recurrent layer is masked by. Megatron's own GatedDeltaNet reads none (core/ssm/gated_delta_net.py), and
    transformers' layers none under another name; mcore-bridge's get theirs from the layer around (`mcore_bridge`)."""
    bases = [base.__module__.partition(".")[0] for base in type(received.reader).__mro__]
    keep: Tensor | None = received.told.get(KEEP_KEY)
    if keep is not None and bases[0] not in ("megatron", "transformers"):
        return keep
    given = received.told.get(MASK)
    if not isinstance(given, Tensor) or bases[0] == "megatron":
        return None
    if bases[0] == "mcore_bridge" and given.ndim == 4:
        return ~given[:, 0].all(dim=1) if "transformers" in bases else None  # gpts/qwen3_next.py:58-66 of 1.6.5
    return given if given.ndim == 2 else None


def row_of(given: Tensor, b: int) -> Tensor:
    """`[Q, K]` of one row; a mask shared by rows or heads is spread, and heads that differ are all asked."""
    row = given[min(b, len(given) - 1)] if given.ndim > 2 else given
    return row if row.ndim == 2 else row.any(dim=0) if row.dtype == torch.bool else row.amax(dim=0)


def evaluated(block_mask: Any, b: int) -> Tensor:
    """`[Q, K]`: whom row b attends by a BlockMask's predicate."""
    (Q, K), device = block_mask.shape[-2:], block_mask.kv_num_blocks.device
    places_Q, places_K = (torch.arange(size, device=device) for size in (Q, K))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    attends: Tensor = block_mask.mask_mod(zero + b, zero, places_Q[:, None], places_K)
    return attends.expand(Q, K)
