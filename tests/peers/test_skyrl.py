"""SkyRL 0.3.0: `HFModelWrapper`, which its workers build, with `adapt` on the model inside.

On a CPU with sdpa: flash-attn's padding functions are stand-ins, and `remove_microbatch_padding` runs without its kernel.
`python test_skyrl.py OUT.json FOLDER JOB...` is a rank of `sequence_parallel_size=2`; a job is "model attention layout
own|ours". What stands in for flash attention goes sequence by sequence; who is told what, and what ranks exchange, is
SkyRL's.
"""

# ruff: noqa: E402
import copy
import typing

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

from cells import PAD, VOCAB, Stack, alone, of_job, samples
from processes import found_by, process_group, refusal, run_jobs
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

from collate_npu import adapt
from collate_npu.testing import tiny_model

STACK = Stack("SkyRL", ("skyrl", "transformers"), "peers_skyrl")
FAMILIES = ("qwen3_next", "qwen3_5_text", "lfm2", "qwen3")
LINE = "adapt(wrapper.model)"
RIGHT, WRONG = 1e-5, 0.05


def truth(family):
    return copy.deepcopy(tiny_model(family, vocab_size=VOCAB)).train()


def wrapped(family, *, packs=False, ours=False, **settings):
    settings |= {"use_flash_attention_2": packs, "remove_microbatch_padding": packs, "bf16": False}
    wrapper = HFModelWrapper(truth(family), **settings)
    if ours:
        adapt(wrapper.model)
    return wrapper


def both_ends(rows, side):
    """Prompts padded left and responses right (train/dataset/preprocess.py), or whole rows on one side; where they start."""
    before = {"both": max(len(row) for row in rows) // 4, "left": 0, "right": 0}[side]
    width = max(map(len, rows)) + 2 * before
    ids, mask = torch.full((2, len(rows), width), PAD).unbind()
    mask, starts = torch.zeros_like(ids), []
    for n, row in enumerate(rows):
        at = {"both": before + n % 2, "left": width - len(row), "right": 0}[side]
        ids[n, at : at + len(row)], mask[n, at : at + len(row)] = torch.tensor(row), 1
        starts.append(at)
    return ids, mask, starts


def answers(wrapper, rows, side):
    """`forward` gives log-probabilities of the last `num_actions` tokens of each row; asked for all but the first."""
    ids, mask, starts = both_ends(rows, side)
    told = wrapper(ids, ids.shape[1] - 1, mask)  # [B, S - 1]: place s says token s + 1
    return [row[at : at + len(one) - 1] for row, at, one in zip(told, starts, rows)]


def off(wrapper, family, side):
    """The worst log-probability and the worst gradient, relative, against each sequence by itself."""
    rows = samples()
    found, model = answers(wrapper, rows, side), truth(family)
    wanted = alone(model)(rows)
    torch.cat(found).mean().neg().backward()
    torch.cat(wanted).mean().neg().backward()
    worst = max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted))
    pairs = [(p.grad, q.grad) for p, q in zip(wrapper.model.parameters(), model.parameters()) if q.grad is not None]
    return worst, max(float((p - q).norm() / q.norm()) for p, q in pairs if float(q.norm()) > 0)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_padded_left_and_responses_right(family, packs):
    """With its padding such rows are right by themselves, and with ours; without, sequences run on into each other."""
    own = off(wrapped(family, packs=packs), family, "both")
    assert min(own) > WRONG if packs else max(own) < RIGHT
    assert max(off(wrapped(family, packs=packs, ours=True), family, "both")) < RIGHT


FLASH = "flash_attention_2 packed"
SHARED = [f"{family} {FLASH}" for family in FAMILIES] + ["qwen3 flash_attention_2 padded", "qwen3 sdpa padded"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What two ranks gave that share each row."""
    jobs = [f"{job} {who}" for job in SHARED for who in ("own", "ours")]
    return found_by("test_skyrl", (folder := tmp_path_factory.mktemp("shared")), folder, *jobs, ranks=2)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_of_shared_rows(family, shared):
    """SkyRL exchanges in flash attention alone (distributed/ulysses/monkey_patch.py:53-124), `adapt` in any mixer."""
    own, ours = (of_job(shared[f"{family} {FLASH} {who}"]) for who in ("own", "ours"))
    STACK.tell(family, "context parallel", alone=own, ours=ours, line=f"{LINE}, sequence_parallel_size 2")


@pytest.mark.parametrize("job", SHARED[-2:])
def test_shared_rows_with_padding_are_right_on_any_attention(job, shared):
    own, ours = (of_job(shared[f"{job} {who}"])["verdict"] for who in ("own", "ours"))
    assert (own, ours) == ("wrong" if "sdpa" in job else "right", "right")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded right", "padded left", "packed"])
def test_cells(family, layout):
    def run(ours):
        side = "right" if layout == "padded right" else "left"
        return lambda rows: answers(wrapped(family, packs=layout == "packed", ours=ours), rows, side)

    STACK.cell(family, layout, truth=alone(truth(family)), alone=run(False), ours=run(True), line=LINE)


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
