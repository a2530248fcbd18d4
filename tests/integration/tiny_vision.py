"""Tiny random vision-language models of Qwen's line, and samples with an image for them, made by hand."""

import inspect

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu.consumers.tiny_models import make_honest

VOCAB, PAD = 120, 119
IMAGE, VIDEO, START, END = 101, 102, 103, 104
PATCH = 3 * 2 * 4 * 4
"""channels * temporal patch * patch * patch: the numbers in one row of pixel_values."""

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": PAD, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
GDN = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32,
}  # fmt: skip
VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 1, "num_heads": 2}
VISION |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32}
VISION_QWEN25 = VISION | {"window_size": 16}
VISION_QWEN3 = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
MODELS = {
    "qwen2_5_vl": (TEXT, VISION_QWEN25 | {"fullatt_block_indexes": [0]}, [2, 3, 3]),
    "qwen3_vl": (TEXT, VISION_QWEN3, [2, 3, 3]),
    "qwen3_5": (TEXT | GDN, VISION_QWEN3, [2, 1, 1]),
}


def vision_model(model_type):
    """Its weights scaled until a wrong mask or position moves the logits, its pad row not zero."""
    text, vision, section = MODELS[model_type]
    key = "rope_parameters" if "rope_parameters" in vars(CONFIG_MAPPING[model_type]().text_config) else "rope_scaling"
    default = getattr(CONFIG_MAPPING[model_type]().text_config, key) or {"rope_type": "default"}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    text = text | {key: {**default, "mrope_section": section}}
    config = CONFIG_MAPPING[model_type](text_config=text, vision_config=vision, pad_token_id=PAD, **ids)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().eval()
        make_honest(model, 5.0)
    return model


def sample(length, *, seed, image=(4, 4), at=3):
    """`length` tokens of text, and before the token `at` an image of so many patches; None: text alone."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (length,), generator=generator).tolist()
    kinds = [0] * length
    if image is None:
        return {"input_ids": ids, "mm_token_type_ids": kinds}
    height, width = image
    tokens = height * width // 4
    ids[at:at] = [START, *[IMAGE] * tokens, END]
    kinds[at:at] = [0, *[1] * tokens, 0]
    pixels = torch.randn(height * width, PATCH, generator=generator)
    grid = torch.tensor([[1, height, width]])
    return {"input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": pixels, "image_grid_thw": grid}


def axes(model, feature):
    """The positions [3, L] a template computes for one sample: the model's own rope index."""
    tokens = {key: torch.as_tensor(feature[key])[None] for key in ("input_ids", "mm_token_type_ids")}
    given = tokens | {"image_grid_thw": feature.get("image_grid_thw")}
    rope_index = model.model.get_rope_index
    kept = {key: value for key, value in given.items() if key in inspect.signature(rope_index).parameters}
    return rope_index(**kept)[0][:, 0]


def taken(model, batch):
    """What this release's forward has a name for (`mm_token_type_ids` is one of 5.x)."""
    names = inspect.signature(model.forward).parameters
    return {key: value for key, value in batch.items() if key in names or key != "mm_token_type_ids"}
