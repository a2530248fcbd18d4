"""Reading: what a layer makes of the masks it received, and why that is not what the batch says.

A layer is judged by whom its real tokens attend, so a mask of any form, dtype and polarity is compared with one truth,
and what it says of padding does not matter. Costs O(S * S) for one row at a time where a layer reads a dense mask.

Legend: B rows, S width, Q query rows of this rank, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from collate_npu.consumers.consumer import Case
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.models import RECURRENT_KIND, consumer_of, text_config, unwrap, windows
from collate_npu.consumers.transformers import why_state_runs_on
from collate_npu.integrations.delivery.received import Received
from collate_npu.masks.forms import mask_mod
from collate_npu.parallel import ContextParallel, query_rows, split_tensor

Meaning = Literal["causal", "everything"]
Allowed = Callable[[int], Tensor]
"""`allowed(row)`: bool `[Q, K]`, whom this layer's queries attend."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The truth of one batch on one model, as this rank's layers should be told it."""

    model: Any
    case: Case
    cp: ContextParallel | None = None

    def why_wrong(self, name: str, received: Received) -> str:
        """Why this layer computes something else than the batch says; "" where it does not."""
        if self._is_recurrent(name, received):
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
        if received.crosses:
            return False
        B, S = self.local_keep.shape
        shape = received.hidden[:2] if self.reader == "transformers" else received.hidden[1:2]
        return shape == ((B, S) if self.reader == "transformers" else (B,))

    def _is_recurrent(self, name: str, received: Received) -> bool:
        own = f"{name.rpartition('.')[2]} {type(received.module).__name__}".lower()
        return bool(self.case.recurrent and RECURRENT_KIND.search(own))

    # --- recurrent layers

    def _why_recurrent_wrong(self, received: Received) -> str:
        keep = self._keep_of(received)
        if keep is not None:
            return "" if torch.equal(keep.cpu() != 0, self.local_keep) else "a 2D mask of other tokens than this batch's"
        if self.case.padding_free or self.case.segments.packed:
            told, own = self._told_offsets(received), type(received.module).forward.__module__.startswith("transformers.")
            if told and own:  # who puts layers of his own in the place of transformers' knows his kernels
                return why_state_runs_on(self.case)
            return "" if told else f"{received}, and the row holds several sequences"
        return "no 2D mask, and padding stands before real tokens" if self.case.inside else ""

    def _keep_of(self, received: Received) -> Tensor | None:
        """The 2D mask this layer is masked by. Megatron's own GatedDeltaNet reads none (core/ssm/gated_delta_net.py), and
        transformers' layers none under another name; mcore-bridge's get theirs from the layer around (`mcore_bridge`)."""
        bases = [base.__module__.partition(".")[0] for base in type(received.module).__mro__]
        keep, given = received.keep, received.attention_mask
        if bases[0] in ("megatron", "transformers"):
            keep = None
        if keep is None and bases[0] == "mcore_bridge" and isinstance(given, Tensor) and given.ndim == 4:
            return ~given[:, 0].all(dim=1) if "transformers" in bases else None  # gpts/qwen3_next.py:58-66 of 1.6.5
        if keep is None and bases[0] != "megatron" and isinstance(given, Tensor) and given.ndim == 2:
            keep = given
        return keep

    def _told_offsets(self, received: Received) -> bool:
        """A scan reads `cu_seq_lens_q`, a convolution `seq_idx`; Megatron's layers one object."""
        return "packed_seq_params" in received.offsets or {"cu_seq_lens_q", "seq_idx"} <= set(received.offsets)

    # --- attention

    def _why_attention_wrong(self, received: Received) -> str:
        if self.case.padding_free and self._reads_offsets(received):
            return ""
        allowed = self._allowed(received)
        if isinstance(allowed, str):
            return allowed
        wrong = [why for b in range(len(self.case.segments.ids)) if (why := self._why_row_wrong(b, allowed(b)))]
        return f"{received}: {wrong[0]}" if wrong else ""

    def _allowed(self, received: Received) -> Allowed | str:
        """Whom it attends, or why it cannot be read."""
        given = received.attention_mask
        if self.reader in ("transformer_engine", "mindspeed"):  # causal, whatever mask is given
            return self._without("causal")
        if given is None:
            bare = self.reader == "transformers" and self.case.model.attn_implementation in ("eager", "flex_attention")
            return self._without("everything" if bare or not self.case.pattern.causal else "causal")
        if hasattr(given, "mask_mod"):
            return lambda b: _evaluated(given, b)
        if given.ndim == 2:
            if not torch.equal(given.cpu() != 0, self.local_keep):
                return "a 2D mask of other tokens than this batch's"
            return self._without("causal" if self.case.pattern.causal else "everything", keep=self.case.segments.keep)
        return self._of_dense(given)

    def _of_dense(self, given: Tensor) -> Allowed | str:
        if self.reader != "transformers":
            return lambda b: ~_row(given, b)
        if given.is_floating_point():
            return lambda b: _row(given, b) > torch.finfo(given.dtype).min / 2
        if given.dtype != torch.bool or self.case.model.attn_implementation == "eager":
            name = str(given.dtype).removeprefix("torch.")
            return f"a dense mask of {name}, which {self.case.model.attn_implementation} adds to the scores as numbers"
        return lambda b: _row(given, b)

    def _without(self, meaning: Meaning, keep: Tensor | None = None) -> Allowed:
        """What is attended without a dense mask; `keep` is a 2D one that the kernel reads beside."""
        S = self.case.segments.shape[1]
        past_QK = self._places[:, None] >= torch.arange(S) if meaning == "causal" else torch.ones(1, S, dtype=torch.bool)
        whole_QK = past_QK.expand(len(self._places), S)
        return lambda b: whole_QK if keep is None else whole_QK & keep[b]

    def _why_row_wrong(self, b: int, allowed_QK: Tensor) -> str:
        """Real queries must attend what the pattern says of their own sequence, and nothing else."""
        ids_K = self.case.segments.ids[b]
        places_Q = self._places[ids_K[self._places] != 0]
        if allowed_QK.shape != (len(self._places), len(ids_K)):
            return f"row {b} has {list(allowed_QK.shape)} queries and keys, not {[len(self._places), len(ids_K)]}"
        allowed_QK = allowed_QK.cpu()[ids_K[self._places] != 0]
        for keys_QK, whom in ((ids_K == 0, "padding"), (ids_K[places_Q, None] != ids_K, "another sequence")):
            if bool((allowed_QK & keys_QK).any()):
                return f"row {b} attends {whom}"
        expected_QK = self._predicate(torch.tensor(b), torch.tensor(0), places_Q[:, None], torch.arange(len(ids_K)))
        if bool((allowed_QK & ~expected_QK).any()):
            return f"row {b} attends more than {self.case.pattern} attention does"
        missing_QK = expected_QK & ~allowed_QK & self._within_every_window(places_Q)
        return f"row {b} does not attend all of its sequence" if bool(missing_QK.any()) else ""

    @cached_property
    def _places(self) -> Tensor:
        """`[Q]`: where the queries of this rank stand in the row."""
        S = self.case.segments.shape[1]
        return torch.arange(S) if self.cp is None else query_rows(S, self.cp)

    @cached_property
    def _predicate(self) -> Any:
        return mask_mod(self.case.segments, pattern=self.case.pattern)

    def _within_every_window(self, places_Q: Tensor) -> Tensor:
        """`[Q, K]`: what a layer must attend whether it has one of the model's windows or not."""
        config, S = self.case.model.config, self.case.segments.shape[1]
        sizes = () if config is None else windows(config)
        chunked = config is not None and getattr(text_config(config), "attention_chunk_size", None)
        back_QK = (places_Q[:, None] - torch.arange(S)).abs()
        return back_QK < (1 if chunked else min(sizes, default=S))

    def _reads_offsets(self, received: Received) -> bool:
        by_flash = self.reader != "transformers" or "flash" in self.case.model.attn_implementation
        return by_flash and bool({"cu_seq_lens_q", "packed_seq_params"} & set(received.offsets))


def _row(given: Tensor, b: int) -> Tensor:
    """`[Q, K]` of one row; a mask shared by rows or heads is spread, and heads that differ are all asked."""
    row = given[min(b, len(given) - 1)] if given.ndim > 2 else given
    return row if row.ndim == 2 else row.any(dim=0) if row.dtype == torch.bool else row.amax(dim=0)


def _evaluated(block_mask: Any, b: int) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    Q, K = block_mask.shape[-2:]

    def of_row(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        attends: Tensor = block_mask.mask_mod(batch + b, head, query, key)
        return attends

    evaluated: Tensor = create_mask(of_row, 1, 1, Q, K, device=str(block_mask.kv_num_blocks.device))[0, 0]
    return evaluated
