"""SkyRL 0.3.0: `HFModelWrapper`, which its workers build, with `adapt` on the model inside; and what cosmos-rl 0.4.7 hands
to a model (`test_recorded`): the padding of its rows stands in no key.

On a CPU with sdpa: flash-attn's padding functions are stand-ins, and `remove_microbatch_padding` runs without its kernel.
`python test_skyrl.py OUT.json FOLDER JOB...` is a rank of `sequence_parallel_size=2`; a job is "model attention layout
own|ours". What stands in for flash attention goes sequence by sequence; who is told what, and what ranks exchange, is
SkyRL's.
"""

# ruff: noqa: E402
import copy
import sys
import typing
from itertools import product
from unittest.mock import MagicMock

import pytest
import torch
import typing_extensions
from stand_ins import pad_input, put_module, unpad_input
from transformers.utils import import_utils

NEEDS = ("skyrl", "jaxtyping")

for number in (2, 3, 4):  # transformers looks for them before another stands there
    getattr(import_utils, f"is_flash_attn_{number}_available")()

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12
put_module("flash_attn")
put_module("flash_attn.bert_padding", pad_input=pad_input, unpad_input=unpad_input)

from cells import PAD, VOCAB, Stack, alone, gradient_error, of_job, samples, split_by
from processes import found_by, process_group, refusal, run_jobs
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from test_recorded import ROWS, remade

from collate_npu import adapt
from collate_npu.testing import tiny_model

STACK = Stack("SkyRL", ("skyrl", "transformers"), "peers_skyrl")
FAMILIES = ("qwen3_next", "qwen3_5_text", "lfm2", "qwen3")
LINE = "adapt(wrapper.model)"


def truth(family):
    return copy.deepcopy(tiny_model(family, vocab_size=VOCAB)).train()


def wrapped(family, *, packs=False, ours=False, **settings):
    settings |= {"use_flash_attention_2": packs, "remove_microbatch_padding": packs, "bf16": False}
    wrapper = HFModelWrapper(truth(family), **settings)
    if ours:
        adapt(wrapper.model)
    return wrapper


def answers(wrapper, rows, side):
    """`forward` gives log-probabilities of the last `num_actions` tokens of each row; asked for all but the first. Rows are
    padded on a side, or on both: prompts left and responses right (train/dataset/preprocess.py)."""
    longest = max(map(len, rows))
    width = longest + 2 * (longest // 4) * (side == "both")
    starts = [{"both": longest // 4 + n % 2, "left": width - len(row), "right": 0}[side] for n, row in enumerate(rows)]
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for n, (row, at) in enumerate(zip(rows, starts)):
        ids[n, at : at + len(row)], mask[n, at : at + len(row)] = torch.tensor(row), 1
    told = wrapper(ids, width - 1, mask)  # [B, S - 1]: place s says token s + 1
    return [row[at : at + len(one) - 1] for row, at, one in zip(told, starts, rows)]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_padded_left_and_responses_right(family, packs):
    """Log-probabilities and the gradient."""
    wrapper, model = wrapped(family, packs=packs, ours=True), truth(family)
    found, wanted = torch.cat(answers(wrapper, samples(), "both")), torch.cat(alone(model)(samples()))
    found.mean().neg().backward()
    wanted.mean().neg().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(wrapper.model.parameters(), model.parameters()) if q.grad is not None]
    assert max(float((found - wanted).detach().abs().max()), gradient_error(*zip(*pairs))) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded right", "padded left", "packed"])
def test_cells(family, layout):
    def run(ours):
        side = "right" if layout == "padded right" else "left"
        return lambda rows: answers(wrapped(family, packs=layout == "packed", ours=ours), rows, side)

    STACK.cell(family, layout, truth=alone(truth(family)), alone=run(False), ours=run(True), line=LINE)


FLASH = "flash_attention_2 packed"
PADDED = ("qwen3 flash_attention_2 padded ours", "qwen3 sdpa padded ours")


def test_cells_of_shared_rows(tmp_path):
    """SkyRL exchanges in flash attention alone (distributed/ulysses/monkey_patch.py:53-124), `adapt` in any mixer, rows with
    padding too."""
    jobs = [*(f"{family} {FLASH} {who}" for family, who in product(FAMILIES, ("own", "ours"))), *PADDED]
    (found,) = found_by("test_skyrl", tmp_path, tmp_path, *jobs, ranks=2)
    cells = {(family, "context parallel"): f"{family} {FLASH}" for family in FAMILIES}
    STACK.tell_both(*split_by(found, "own", "ours"), cells, line=f"{LINE}, sequence_parallel_size 2")
    assert [of_job(found[job])["verdict"] for job in PADDED] == ["right", "right"]


def test_cosmos_rl_hands_over_positions_and_no_mask():
    """What it imports beside torch is a stand-in."""
    while "cosmos_rl.policy.model.hf_models" not in sys.modules:
        try:
            import cosmos_rl.policy.model.hf_models
        except ModuleNotFoundError as error:
            put_module(error.name, MagicMock)
            for name in [name for name in sys.modules if name.startswith("cosmos_rl")]:
                del sys.modules[name]
    model, seen = truth("qwen3"), {}
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    policy = cosmos_rl.policy.model.hf_models.HFModel(model.config, model, type(model))
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in ROWS])
    policy(input_ids=ids, position_ids=torch.arange(width).expand(len(ROWS), -1))
    handed = {key: value for key, value in seen.items() if isinstance(value, torch.Tensor)}
    remade("cosmos-rl", handed, "run", refused="No key says which tokens are padding")


def flash_attention(query, key, value, mask=None, *args, position_ids=None, softmax_scale=None, **kwargs):
    """`[B, T, heads, size]`, causal, by the mask or by positions that begin again."""
    _, T, heads, _ = query.shape
    ids = (position_ids == 0).cumsum(-1) if mask is None else mask
    near = (ids[:, :, None] == ids[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near[:, None], scale=softmax_scale)
    return out.transpose(1, 2)


def run(folder, family, attention, layout, who):
    """As SkyRL's workers do it (workers/worker.py:143-151)."""
    from skyrl.backends.skyrl_train.distributed.ulysses import apply_monkey_patch, monkey_patch
    from skyrl.backends.skyrl_train.distributed.ulysses.utils import set_ulysses_sequence_parallel_group

    monkey_patch._flash_attention_forward = flash_attention
    set_ulysses_sequence_parallel_group(None)
    wanted = alone(truth(family))(samples())
    wrapper = wrapped(family, packs=layout == "packed", sequence_parallel_size=2)
    wrapper.model.config._attn_implementation = attention
    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    apply_monkey_patch(wrapper.model, ulysses_sp_size=2)
    if who == "ours":
        adapt(wrapper.model)
    found = []
    if refused := refusal(lambda: found.extend(answers(wrapper, samples(), "left"))):
        return {"refused": refused}
    return {"refused": "", "error": max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted))}


if __name__ == "__main__":
    process_group()
    run_jobs(run)
