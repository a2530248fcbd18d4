"""What verl's forwards are driven with in the tests: jagged rows, and a vision model of its shape.

The wrapper around the language model is a stand-in (Megatron-Bridge's needs CUDA): like it, it takes whole rows and the
2D mask, or None, counts positions itself, and packs the rows by that mask where it is given packed parameters.
"""

from types import SimpleNamespace

import torch
from megatron_world import PAD
from torch import nn

LENGTHS = (7, 3, 1, 5)


def jagged(*lengths):
    rows = [torch.tensor([(5 * i + 3 * b) % 60 + 1 for i in range(n)]) for b, n in enumerate(lengths or LENGTHS)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def left_padded(values):
    """What the older forward takes: ids, a bool mask, positions, `[B, S]`."""
    rows = values.unbind()
    width = max(map(len, rows)) + 1
    keep = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    ids = torch.full(keep.shape, PAD).masked_scatter(keep, values.values())
    return ids, keep, (keep.cumsum(1) - 1).clamp(min=0)


class Vision(nn.Module):
    """Whole rows in, pixels added to the first real token of each, then the language model."""

    def __init__(self, language):
        super().__init__()
        self.language_model, self.config = language, language.config
        self.pre_process, self.post_process = language.pre_process, language.post_process

    def forward(self, input_ids, position_ids, attention_mask, packed_seq_params=None, pixel_values=None, **more):
        embedded = self.language_model.embedding(input_ids=input_ids, position_ids=None)  # [S, B, H]
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if pixel_values is not None:
            first = nn.functional.one_hot(keep.int().argmax(1), len(embedded)).T[..., None]
            embedded = embedded + first * pixel_values
        if packed_seq_params is not None:
            offsets = packed_seq_params.cu_seqlens_q_padded.tolist()
            rows = [nn.functional.pad(embedded[real.bool(), b].T, (0, end - start - int(real.sum()))).T
                    for b, (real, start, end) in enumerate(zip(keep, offsets, offsets[1:]))]  # fmt: skip
            embedded, attention_mask = torch.cat(rows)[:, None], None
        return self.language_model(
            input_ids=None, position_ids=None, attention_mask=attention_mask, decoder_input=embedded,
            packed_seq_params=packed_seq_params, **more,
        )  # fmt: skip


def config(vision=False):
    name = "Qwen3_5ForConditionalGeneration" if vision else "Qwen3ForCausalLM"
    return SimpleNamespace(architectures=[name], **({"vision_config": None} if vision else {}))


def alone(model, values, pixels=None):
    """The logits of each row when it is the whole batch."""
    rows = []
    for row, ids in enumerate(values.unbind()):
        more = {} if pixels is None else {"pixel_values": pixels[row : row + 1]}
        rows.append(model(input_ids=ids[None], position_ids=None, attention_mask=None, **more)[0])
    return rows


def error(output, expected):
    rows = output if isinstance(output, list) else output.unbind()
    assert [len(row) for row in rows] == [len(row) for row in expected]
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in zip(rows, expected) if len(theirs))
