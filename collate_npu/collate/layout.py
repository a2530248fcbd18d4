"""Layout: settings of our own for how rows are laid out, which most leave as they are."""

from __future__ import annotations

from dataclasses import dataclass

from collate_npu.masks.forms import MAX_MASK_BYTES


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rows are laid out, beside what transformers' collators can be told.

    Three are for flat rows alone (`padding_free=True`). With widths that are fixed too, all batches have the same shapes, as
    graphs and compilers want. `sequence_multiple=4`, `max_sequences=4`, and the collator's `padding=(8, 16)`::

        1 1 1 0 2 2 0 0 0 0 0 0 0 0 0 0     cu_seqlens_padded 0 4 8 12 16     cu_seqlens 0 3 5 5 5

    >>> from collate_npu import PaddingCollator
    >>> layout = Layout(sequence_multiple=4, max_sequences=4)
    >>> collator = PaddingCollator(pad_token_id=0, padding_free=True, padding=(8, 16), layout=layout)
    >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> batch["cu_seqlens_padded"].tolist(), batch["cu_seqlens"].tolist()
    ([0, 4, 8, 12, 16], [0, 3, 5, 5, 5])
    """

    sequence_multiple: int | None = None
    """Pads each sequence behind its tokens, which is exact for causal layers, and the row to a multiple of it too."""
    max_sequences: int | None = None
    """Gives the offsets one length, N + 1, and `max_length_q/k` one value, the width. The rest of the row is one tail, cut
    into the sequences that are missing (`masks.places.with_tail`); a model known to have attention alone gets its last
    offset again instead."""
    separator_id: int = -100
    """The label of the first token of each sequence of a flat row."""
    allow_empty: bool = False
    """Rows without a real token, else an error."""
    labels_shifted: bool = False
    """The labels stand with the token that predicts them already."""
    max_mask_bytes: int = MAX_MASK_BYTES
    """What a dense mask may take."""
