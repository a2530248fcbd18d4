"""NeMo Automodel 0.7.0: `automodel config.yaml` on a CPU; what its collators and its THD conversion
hand on is read in tests/producers.

Automodel's own packing (`packed_sequence_size`) asks for FlashAttention; here the packs are made beforehand by the same
functions and collated by the same collators. `model.own` is Automodel's own implementation, on sdpa.
"""

import pytest
import torch
from cells import Stack, of_job, samples, verdict
from processes import found_by, saved_model
from rotation import part

from collate_npu import CollateError
from collate_npu.masks.batch_reader import segments_from_batch

NEEDS = ("nemo_automodel",)

STACK = Stack("NeMo Automodel", ("nemo-automodel", "transformers"), "peers_nemo")
LINE = "adapt(part) for each of recipe.model_parts"
FAMILIES = ["qwen3", "qwen3_next", *part(("qwen3_5_text", "gemma3_text"), 1)]
OWN = part(("qwen3_next.own", "qwen3_5_text.own", "qwen3_moe.own"), 1)
HYBRIDS = ("qwen3_next", "qwen3_5_text")
ADAPTED = "adapt(part, consumer='transformers') for each of recipe.model_parts"
SETTINGS = {"padded right": "right", "padded left": "left", "packed": "thd"}
MORE = [
    "qwen3_5_text.own packs",
    "qwen3_next.own packs",
    "qwen3_next neat",
    "qwen3 neat",
    "qwen3 aligned",
    "qwen3_next rows",
    "qwen3_next collator",
]
JOBS = [
    f"{job} {who}"
    for job in (*(f"{f} {s}" for f in (*FAMILIES, *OWN) for s in SETTINGS.values()), *MORE)
    for who in ("own", "ours")
]
LENGTHS = [len(ids) for ids in samples()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every job gave; one process, one training step each."""
    folder = tmp_path_factory.mktemp("automodel")
    return found_by("nemo_work", folder, folder, *JOBS)[0]


@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_its_cell(runs, family, layout):
    own, ours = (runs[f"{family} {SETTINGS[layout]} {who}"] for who in ("own", "ours"))
    print(family, layout, own, ours)
    name, line = family.replace(".own", ", Automodel's own"), ADAPTED if family in OWN else LINE
    STACK.tell(name, layout, alone=of_job(own), ours=of_job(ours), line=line)


@pytest.mark.long
def test_its_cells_of_context_parallel(tmp_path):
    """Two ranks: hybrids are refused before a step; attention gets as far as torch's ring, which a CPU has no kernel for."""
    jobs = [f"{family} cp own" for family in FAMILIES] + [f"{family} cp ours" for family in FAMILIES if family in HYBRIDS]
    for family in FAMILIES:
        saved_model(tmp_path, family)
    found = found_by("nemo_work", tmp_path, tmp_path, *jobs, ranks=2)[0]
    for family in FAMILIES:
        own = verdict(refused=found[f"{family} cp own"]["refused"])
        if family in HYBRIDS:
            assert "not supported for hybrid model" in own["why"]
            STACK.tell(family, "context parallel", alone=own, ours=of_job(found[f"{family} cp ours"]), line=LINE)
        else:
            assert "does not have a sharding strategy" in own["why"]
            why = verdict(not_run=own["why"])
            STACK.tell(family, "context parallel", alone=why, ours=why, line=LINE)


@pytest.mark.parametrize(("job", "own", "ours"), [
    ("qwen3 thd", "wrong", "right"),
    ("qwen3 aligned", "wrong", "right"),
    ("qwen3 neat", "right", "right"),
    ("qwen3_next rows", "right", "right"),
    ("qwen3_next collator", "right", "right"),
    ("qwen3_5_text.own packs", "wrong", "refused"),  # torch's rule and convolution read no boundaries
    ("qwen3_next.own packs", "refused", "refused"),
    ("qwen3_next neat", "wrong", "right"),  # Automodel#2147, before its own layers
    ("qwen3_next thd", "wrong", "right"),
])  # fmt: skip
def test_each_sequence_as_alone(runs, job, own, ours):
    found = {who: runs[f"{job} {who}"] for who in ("own", "ours")}
    assert [of_job(each)["verdict"] for each in found.values()] == [own, ours]
    assert all(each["compared"] == 4 for each in found.values() if not each["refused"])
    if ours == "refused":
        assert "packs" in job or "Give each sequence its own row" in found["ours"]["refused"]


# --- the batches


def row(ids):
    return {"input_ids": ids, "labels": [*ids[1:], -100]}


def test_rows_padded_by_the_tokenizer_or_not():
    """Without a mask the padding mask is a guess, `input_ids == pad`: nothing tells, and it is refused."""
    from nemo_automodel.components.datasets.utils import default_collater

    bare = default_collater([row(ids) for ids in samples()])
    with pytest.raises(CollateError, match="No key says which tokens are padding"):
        segments_from_batch(bare)
    told = default_collater([{**row(ids), "attention_mask": [1] * len(ids)} for ids in samples()])
    assert segments_from_batch(told).lengths == tuple((n,) for n in LENGTHS)
    assert torch.equal(told["padding_mask"], told["attention_mask"] == 0)
