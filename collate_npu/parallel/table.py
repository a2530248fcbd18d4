"""The table: what happens to each key of a batch when its rows are shared out among ranks.

`KEY_TABLE` is a plain mapping, extended by passing another: `split_batch(batch, cp, table={**KEY_TABLE, "labels":
REPLICATE})` for a sequence classifier whose labels are `[B, C]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from collate_npu.parallel.layout import Scope

Action = Literal["split", "replicate", "rows", "scope"]
Fill = float | Literal["next", "last"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rank gets of one key. None stays None and what is no tensor is replicated, whatever the rule."""

    action: Action
    """`split`: its tokens along `dim`. `replicate`: everything. `rows`: of a dense mask its query rows, keys whole.
    `scope`: its tokens or everything, as `ContextParallel.mask_2d` says."""
    dim: int = 1
    fill: Fill = 0
    """What `pad_documents` puts at padding: a number, one more than the token before, or the same as it."""
    why: str = ""


TOKENS = Rule("split", why="one entry a token")
REPLICATE = Rule("replicate", why="not along the sequence, or read whole")
_LABELS = Rule("split", fill=-100, why="one label a token: shift_labels() first, where the model would shift them")
_POSITIONS = Rule("split", -1, "next", "[B, S], or [3, B, S] with mRoPE: tokens are the last dimension")
_OFFSETS = Rule("replicate", why="they speak of the whole row; ring kernels divide them themselves (TE thd)")
_VISION = Rule("replicate", why="patches and grids go through the vision tower before tokens are shared out")

KEY_TABLE: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("input_ids", "tokens", "inputs_embeds", "token_type_ids", "mm_token_type_ids"), TOKENS),
        **dict.fromkeys(("loss_scale", "loss_mask", "completion_mask", "routed_experts", "visual_pos_masks"), TOKENS),
        **dict.fromkeys(("labels", "shift_labels"), _LABELS),
        **dict.fromkeys(("position_ids", "text_position_ids"), _POSITIONS),
        "attention_mask_2d": Rule("scope", why="a recurrent layer sees its shard, or gathers the row: MASK_2D_SCOPE"),
        "seq_idx": Rule("scope", fill="last", why="read by the same layers as attention_mask_2d"),
        "attention_mask": Rule("rows", -2, why="this rank's queries against every key; a 2D one as mask_2d says"),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_padded"), _OFFSETS),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), _OFFSETS),
        **dict.fromkeys(("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_kv"), _OFFSETS),
        **dict.fromkeys(("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"), _VISION),
        **dict.fromkeys(("second_per_grid_ts", "image_sizes", "pixel_attention_mask", "image_flags"), _VISION),
        **dict.fromkeys(("input_features", "feature_attention_mask", "audio_feature_lengths"), _VISION),
        **dict.fromkeys(("lengths", "seq_lens", "num_samples", "num_items_in_batch"), REPLICATE),
    }
)


@dataclass(frozen=True, slots=True)
class Scoped:
    """How much of the 2D mask a consumer reads, and the source that says so."""

    scope: Scope
    why: str


_BY_ALL_TO_ALL = "GatedDeltaNet trades heads for tokens and sees the whole row in order"

MASK_2D_SCOPE: Mapping[str, Scoped] = MappingProxyType(
    {
        "megatron": Scoped("global", f"{_BY_ALL_TO_ALL} (megatron-core 0.19 ssm/gated_delta_net, tensor_a2a_cp2hp)"),
        "mcore_bridge": Scoped("global", f"{_BY_ALL_TO_ALL} (mcore_bridge 1.6.5 model/modules/gated_delta_net.py:273)"),
        "mindspeed": Scoped("local", "splits every key but attention_mask (context_parallel/get_batch_utils.py:89-137)"),
        "transformers": Scoped("local", "a buffer of the context, split (transformers 5.23 trainer.py:2466-2469)"),
        "swift_sp": Scoped("global", "padded, kept whole (ms-swift 4.6.0 sequence_parallel/sequence_parallel.py:605-618)"),
        "twinkle_sp": Scoped("global", "its GDN patch cuts the whole mask itself (twinkle linear_attention_sp.py:42-53)"),
        "verl": Scoped("local", "its GDN multiplies the shard by the mask (verl models/transformers/qwen3_5.py:205)"),
        "verl_bshd": Scoped("local", "split beside the ids (verl 0.9.1 models/mcore/util.py:743-748)"),
    }
)
