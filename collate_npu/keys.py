"""Keys: what each key of a feature or a batch is, in one row: its kind, what padding holds, which dimension is tokens, what
a rank gets of it, and its role where it says something about padding or packing.

`KEYS` is a plain dict, never written to. Pass a longer one for keys of your own: `keys={**KEYS, "my_weights": TOKENS}`.
Nothing in the library lists keys anywhere else. Legend: B rows, S width, L tokens of a sample, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from collate_npu.errors import CollateError, a_type, explain, not_one_of

KeyKind = Literal["tokens", "positions", "vision", "sample", "truth", "offsets"]
Fill = float | Literal["pad", "pad_type", "ignored", "next", "last"]
Share = Literal["split", "replicate", "rows"]
Role = Literal[
    "tokens", "mask", "keep", "segment_ids", "lengths", "offsets", "padded_offsets", "longest", "sequence_index", "labels",
    "tail", "padded_lengths",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """How one key is collated, read and split: the collator, the adapter and every integration read this row.

    >>> KEYS["labels"].fill, KEYS["labels"].share, KEYS["pixel_values"].kind
    ('ignored', 'split', 'vision')
    >>> keys = {**KEYS, "reward": TOKENS, "seed": SAMPLE, "weights": Key(kind="tokens", fill=1.0)}
    >>> from collate_npu import PaddingCollator
    >>> collator = PaddingCollator(pad_token_id=0, padding_side="left", keys=keys)
    >>> batch = collator([{"input_ids": [1, 2], "weights": [0.5, 2]}, {"input_ids": [3], "weights": [3]}])
    >>> batch["weights"].tolist()
    [[0.5, 2.0], [1.0, 3.0]]
    """

    kind: KeyKind
    """`tokens`: one value a token. `positions`: one a token, or several axes of them. `vision`: patches, grids, audio.
    `sample`: one value a sample. `truth`: says which tokens are real. `offsets`: of one flat row."""
    whole: bool = False
    """Ids, classes or flags: int64 in a batch, and a float there is a mistake, never a value to round."""
    fill: Fill = 0
    """What padding holds: a number, the pad id, the ignored label, one more than the token before, or what a real token
    beside it holds."""
    dim: int = 1
    """Which dimension of a batch's tensor is tokens."""
    unit: int = 0
    """Dimensions of one image's or clip's value. A sample's value of that rank is stacked, any other joined."""
    share: Share = "split"
    """What a rank gets under context parallelism. `split`: its tokens. `replicate`: everything. `rows`: of a dense mask its
    query rows, keys whole."""
    role: Role | None = None
    """What the key says about the shape, the padding or the packing of its batch; `BatchAdapter` reads keys by role."""
    or_sample: bool = False
    """May also be one number a sample: the label of a classifier, GRPO's advantage."""
    why: str = ""

    def __post_init__(self) -> None:
        for name, known in (("kind", get_args(KeyKind)), ("share", get_args(Share)), ("role", (*get_args(Role), None))):
            held = getattr(self, name)
            if not isinstance(held, str | None) or held not in known:
                raise not_one_of(f"Key.{name}", held, known)


TOKENS = Key(kind="tokens", why="one value a token")
"""For a key of your own with one value a token."""
SAMPLE = Key(kind="sample", share="replicate", why="one value a sample")
"""For a key of your own with one value a sample."""

_IDS = Key(kind="tokens", whole=True, fill="pad", role="tokens", why="one id a token")
_EXPERTS = Key(kind="tokens", fill="last", why="experts of a token differ: all 0 is fewer than Megatron's dispatcher counts")
"""`[B, S, layers, topk]`, replayed routing. Padding is routed like the token beside it: ids that exist, and differ. With
equal ones Megatron's dropless dispatcher counts tokens that are not there (megatron-core 0.16.1 token_dispatcher.py:522-524;
verl 0.9.1 router_replay_patch.py:357-371 counts anew; slime fill_routing_replay @2bebc09 pads with ids that go round)."""
LOSS_KEYS = (
    "response_mask", "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights", "rm_scores",
    "token_level_scores", "token_level_rewards", "log_probs", "ref_log_probs", "teacher_log_probs", "teacher_logprobs",
    "old_per_token_logps", "ref_per_token_logps",
)  # fmt: skip
"""Keys with one value a token that reinforcement-learning losses read (verl 0.9.1, slime, TRL 1.16)."""
_SHIFT = "shift_labels() before a split, where the model shifts them"
_POSITIONS = Key(kind="positions", whole=True, fill="next", dim=-1, why="[B, S], or [3, B, S] with mRoPE: tokens are last")
_KERNEL = "of the whole row; ring kernels divide them themselves (TransformerEngine thd)"
_OFFSETS = Key(kind="offsets", share="replicate", role="offsets", why=_KERNEL)
_PADDED = Key(kind="offsets", share="replicate", role="padded_offsets", why=_KERNEL)
_LONGEST = Key(kind="offsets", share="replicate", role="longest", why=_KERNEL)
_COUNT = Key(kind="offsets", share="replicate", why="follows from the offsets beside it (Megatron-Bridge, NeMo Automodel)")


def _vision(unit: int) -> Key:
    why = "patches and grids go through the vision tower before tokens are shared out"
    return Key(kind="vision", share="replicate", unit=unit, why=why)


class _Table(dict[str, Key]):
    """A dict that `help()` prints as `KEYS`: as a default argument its rows are 15,000 characters."""

    def __repr__(self) -> str:
        return "KEYS"


_ROWS: dict[str, Key] = {
    "input_ids": _IDS,
    "tokens": _IDS,
    "inputs_embeds": Key(kind="tokens", role="tokens", why="one vector a token"),
    "labels": Key(kind="tokens", whole=True, fill="ignored", role="labels", or_sample=True, why=_SHIFT),
    **dict.fromkeys(
        ("shift_labels", "shifted_labels"),
        Key(kind="tokens", whole=True, fill="ignored", why="labels already moved to the token before"),
    ),
    "token_type_ids": Key(kind="tokens", whole=True, fill="pad_type", why="one flag a token"),
    **dict.fromkeys(("mm_token_type_ids", "visual_pos_masks", *LOSS_KEYS), TOKENS),
    **dict.fromkeys(("advantages", "returns", "values"), Key(kind="tokens", or_sample=True, why="a token's, or a sample's")),
    **dict.fromkeys(("routed_experts", "rollout_routed_experts"), _EXPERTS),
    "teacher_ids": Key(kind="tokens", whole=True, fill="pad", why="a teacher's best ids of each token"),
    **dict.fromkeys(("loss_scale", "loss_mask", "completion_mask", "assistant_masks", "special_tokens_mask"), TOKENS),
    **dict.fromkeys(("position_ids", "text_position_ids"), _POSITIONS),
    "attention_mask": Key(
        kind="truth", whole=True, dim=-2, share="rows", role="mask", why="this rank's queries against every key"
    ),
    "attention_mask_2d": Key(kind="truth", whole=True, role="keep", why="True = real token"),
    "segment_ids": Key(kind="truth", whole=True, role="segment_ids", why="0 = padding, n = n-th sequence"),
    "_packed_seq_ids": Key(kind="truth", whole=True, role="segment_ids", why="also of NeMo Automodel"),
    "seq_lengths": Key(kind="truth", share="replicate", role="lengths", why="tokens of each sequence of a sample"),
    "seq_lens": Key(kind="offsets", share="replicate", role="lengths", why="real tokens, padding not counted"),
    "seq_lens_padded": Key(kind="offsets", share="replicate", role="padded_lengths", why="what each takes up"),
    "input_lengths": Key(kind="offsets", share="replicate", role="lengths", why="NeMo RL's: real tokens of each row"),
    "packed_seq_lengths": Key(kind="offsets", share="replicate", role="lengths", why="unsloth's: of one flat row"),
    "seq_idx": Key(kind="offsets", fill="last", role="sequence_index", why="read beside attention_mask_2d"),
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv"), _OFFSETS),
    **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_unpadded"), _OFFSETS),
    "max_seqlen_k": _LONGEST,
    "linear_attn_cu_seq_lens_q": _OFFSETS,  # VeOmni's
    **dict.fromkeys(("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), _PADDED),
    **dict.fromkeys(("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_kv"), _LONGEST),
    "num_padding": Key(kind="offsets", share="replicate", role="tail", why="xtuner's: places at the end of a flat row"),
    "tail_padding_length": Key(kind="offsets", share="replicate", role="tail", why="also of VeOmni"),
    "packed_seq_params": Key(kind="offsets", share="replicate", why="Megatron's object of the same offsets"),
    "flash_attn_kwargs": Key(kind="offsets", share="replicate", why="NeMo RL's object or dict of them"),
    **dict.fromkeys(("cu_seqlens_argmin", "cu_seqlens_unpadded_argmin", "packed_token_indices"), _COUNT),
    **dict.fromkeys(("pixel_values", "pixel_values_videos"), _vision(unit=3)),
    **dict.fromkeys(("image_grid_thw", "video_grid_thw", "image_sizes", "feature_attention_mask"), _vision(unit=1)),
    **dict.fromkeys(("pixel_attention_mask", "input_features"), _vision(unit=2)),
    **dict.fromkeys(("second_per_grid_ts", "audio_feature_lengths", "image_flags"), _vision(unit=0)),
    **dict.fromkeys(("lengths", "num_samples", "num_items_in_batch"), SAMPLE),
}
KEYS: Mapping[str, Key] = _Table(_ROWS)
"""Every key that the library knows, by its name."""

MASK_KEY = "attention_mask"
KEEP_KEY = "attention_mask_2d"
SEGMENT_KEY = "segment_ids"


def check_keys(keys: Mapping[str, Key]) -> Mapping[str, Key]:
    """Return the table. Raises `CollateError` for a value that is no `Key`."""
    for name, key in () if keys is KEYS else keys.items():
        if not isinstance(key, Key):
            rule, remedy = "It holds a Key for each name.", "Pass {**KEYS, name: TOKENS}, or SAMPLE, or a Key."
            raise CollateError(explain(f"keys[{name!r}]", a_type(key), rule, remedy))
    return keys


def _held(names: Iterable[str]) -> set[str]:
    """Return the names as a set. A TensorDict iterates over its rows, so its keys are read."""
    return set(names.keys() if isinstance(names, Mapping) else names)


def with_role(names: Iterable[str], *roles: Role) -> tuple[str, ...]:
    """Return those of `names` that have one of these roles, in the order of the table.

    >>> with_role(["labels", "cu_seqlens", "attention_mask_2d"], "keep", "offsets")
    ('attention_mask_2d', 'cu_seqlens')
    """
    held = _held(names)
    return tuple([name for name, key in KEYS.items() if name in held and key.role in roles])


def of_kind(names: Iterable[str], *kinds: KeyKind, keys: Mapping[str, Key] = KEYS) -> tuple[str, ...]:
    """Return those of `names` that are of one of these kinds, in the order of the table.

    >>> of_kind(["labels", "pixel_values", "seq_lengths"], "tokens", "truth")
    ('labels', 'seq_lengths')
    """
    held = _held(names)
    return tuple([name for name, key in keys.items() if name in held and key.kind in kinds])
