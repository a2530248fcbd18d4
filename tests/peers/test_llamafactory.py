"""LLaMA-Factory 0.9.5: its trainers from YAML files, and its collators wrapped, on packed rows and with images."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from stand_ins import put_module

NEEDS = ("llamafactory",)

put_module("torchaudio")  # it has no wheel for this torch, and no sound is heard here

# ruff: noqa: E402
from cells import Stack, of_job
from llamafactory.data import collator as theirs
from processes import found_by
from rotation import part

from collate_npu import wrap_collator
from collate_npu.testing import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
RIGHT = 1e-5
CELLS = [
    f"sft {family} {how} {who}" for family in ("qwen3", "qwen3_next") for how in ("plain", "neat") for who in ("own", "ours")
]
JOBS = [*CELLS, *(f"{stage} qwen3_next plain ours" for stage in part(("dpo", "kto", "rm"), 1))]
JOBS += ["sft qwen3 flat ours", "sft qwen3_next flat ours", "sft qwen3_next lora ours"]  # PEFT last


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every job gave; one process, one training step each."""
    if version("transformers") > "5.6.1":
        pytest.skip("llamafactory 0.9.5 trains with transformers up to 5.6.0")
    folder = tmp_path_factory.mktemp("llamafactory")
    return found_by("llamafactory_work", folder, folder, *JOBS)[0]


def saw(runs, job):
    found = runs[job]
    print(job, f"{found['error']:.1e}", found["compared"], found["masks"], found["refused"][:120])
    return found


@pytest.mark.parametrize("job", [job for job in JOBS if "plain" in job or "lora" in job])
def test_padded_rows_are_right(runs, job):
    found = saw(runs, job)
    assert not found["refused"]
    assert found["compared"] >= 4
    assert found["error"] < RIGHT
    kinds = {"linear_attn": {"int64"}} if "qwen3_next" in job else {}
    masks = {kind: {form.split()[0] for form in found["masks"][kind]} for kind in found["masks"] if kind == "linear_attn"}
    assert masks == kinds


def test_neat_packing_runs_states_together_in_silence_and_is_refused(runs):
    own, ours = saw(runs, "sft qwen3_next neat own"), saw(runs, "sft qwen3_next neat ours")
    assert own["collator"] == ours["collator"] == "SFTDataCollatorWith4DAttentionMask"
    assert not own["refused"]
    assert "carries its state from one sequence of a row into the next" in ours["refused"]
    assert "Give each sequence its own row" in ours["refused"]  # neat_packing: false, which is `plain` above
    assert "its own row (padding_free=False)" in saw(runs, "sft qwen3_next flat ours")["refused"]


def test_neat_packing_of_attention_alone_is_right_in_one_flat_row(runs):
    found = saw(runs, "sft qwen3 flat ours")
    assert (found["refused"], found["compared"]) == ("", 4)
    assert found["error"] < RIGHT


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize(("layout", "setting"), [("padded right", "plain"), ("packed", "neat")])
def test_its_cells(runs, family, layout, setting):
    stack = Stack("LLaMA-Factory", ("llamafactory", "transformers"), "peers_llamafactory")
    own, ours = (of_job(saw(runs, f"sft {family} {setting} {who}")) for who in ("own", "ours"))
    stack.tell(family, layout, alone=own, ours=ours, line="wrap_collator(theirs, model=model)")


# --- the collators


def template(plugin=None):
    silent = SimpleNamespace(image_token=None, audio_token=None, get_mm_inputs=lambda *args: {})
    return SimpleNamespace(mm_plugin=plugin or silent)


def test_the_flat_row_of_neat_packing_on_flash_attention():
    """It drops the padding and the mask, and leaves positions alone: the offsets that kernels read are added."""
    ids = [[(31 * n + 7 * i) % 250 for i in range(length)] for n, length in ((1, 5), (2, 3))]
    row = {"input_ids": [*ids[0], *ids[1]] + [TOKENIZER.pad_token_id] * 8, "labels": [*ids[0], *ids[1]] + [-100] * 8}
    row |= {"attention_mask": [1] * 5 + [2] * 3 + [0] * 8, "position_ids": [*range(5), *range(3)] + [0] * 8}
    model = tiny_model("qwen3", vocab_size=len(TOKENIZER))
    given = {"tokenizer": TOKENIZER, "template": template(), "model": model, "pad_to_multiple_of": 8, "neat_packing": True}
    given |= {"block_diag_attn": True, "attn_implementation": "flash_attention_2", "compute_dtype": torch.float32}
    batch = wrap_collator(theirs.SFTDataCollatorWith4DAttentionMask(**given), model=model)([row])
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8]
    with torch.no_grad():
        logits = model(**batch).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([one])).logits[0] for one in ids])
    assert (logits[:8] - alone).abs().max() < 1e-4
