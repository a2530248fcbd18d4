"""verl 0.9.1's FSDP engine, built by its `ActorRolloutRefWorker` on two ranks: log-probabilities, entropy and gradients.

Beside transformers 5.9.0, which its `cpu`, `vllm` and `sglang` extras pin. verl puts forwards of its own into qwen3_5 (with
a vision tower), whose recurrent layers then keep sequences apart without a kernel. On a CPU, with sdpa and recurrent layers
in torch; no card, no flash attention.
"""

import pytest
import torch
from cells import Stack
from processes import found_by, saved_model
from rotation import part
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from collate_npu.consumers.probe import make_honest
from collate_npu.testing import tiny_config

NEEDS = ("verl", "hydra")
pytestmark = pytest.mark.long("two ranks of FSDP")

STACK = Stack("verl FSDP", ("verl", "transformers"), "peers_misc")
FAMILIES = ("qwen3_next", "qwen3", "qwen3_5", *part(("qwen3_5_text", "lfm2"), 1))
SETTINGS = {
    "padded right": "actor_rollout_ref.model.use_remove_padding=false",
    "packed": "actor_rollout_ref.actor.strategy=fsdp",  # as it is configured without a word
    "context parallel": "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
}
FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"
LORA = "actor_rollout_ref.model.lora_rank=4,actor_rollout_ref.model.target_modules=[q_proj]"
LINE = "actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin"
WHO = ("alone", "ours")  # in this order: a plugin stays in its process
JOBS = [f"{family} {who} {words}" for who in WHO for family in FAMILIES for words in SETTINGS.values()]
JOBS += [f"qwen3_next ours {FSDP2}", f"qwen3_next ours {LORA}"]
JOBS.insert(0, f"qwen3_next alone {FSDP2}")
RIGHT, WRONG = 1e-5, 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("verl-fsdp")
    for family in FAMILIES:
        if family == "qwen3_5":
            model = AutoModelForImageTextToText.from_config(tiny_config(family, vocab_size=257))
            with torch.no_grad():
                make_honest(model, 5.0)
            model.save_pretrained(made / family)
        else:
            saved_model(made, family)
    return made


@pytest.fixture(scope="module")
def runs(folder):
    return found_by("verl_work", folder, folder, *JOBS, ranks=2)[0]


@pytest.mark.parametrize("words", [SETTINGS["packed"], FSDP2, LORA])
def test_with_the_plugin_a_hybrid_gets_padded_rows_and_each_sequence_is_as_alone(runs, words):
    found = runs[f"qwen3_next ours {words}"]
    print(found["seen"][0], *(found.get(key) for key in ("log_probs", "entropy", "gradient")))
    assert found["refused"] == ""
    assert found["seen"][0] == {"input_ids": [2, 7], "position_ids": [2, 7], "attention_mask": [2, 7]}
    assert max(found[key] for key in ("log_probs", "entropy", "gradient") if key in found) < RIGHT


@pytest.mark.parametrize("family", FAMILIES)
def test_only_plain_attention_keeps_its_flat_row(runs, family):
    """Without the plugin every model gets one, and the states of hybrids, or qwen3_5's attention, run on in silence."""
    own, ours = (runs[f"{family} {who} {SETTINGS['packed']}"] for who in WHO)
    assert own["seen"][0]["input_ids"] == [1, 11]
    assert (own["log_probs"] > WRONG and own["gradient"] > WRONG) == (family != "qwen3")
    assert ours["seen"][0]["input_ids"] == ([1, 11] if family == "qwen3" else [2, 7])
    assert max(ours[key] for key in ("log_probs", "entropy", "gradient")) < RIGHT


def test_fsdp2_without_the_plugin_is_as_wrong(runs):
    found = runs[f"qwen3_next alone {FSDP2}"]
    assert found["log_probs"] > WRONG
    assert found["gradient"] > WRONG


def test_shared_rows_are_refused_where_layers_would_lose_what_other_ranks_hold(runs):
    hybrid, plain = (runs[f"{family} ours {SETTINGS['context parallel']}"]["refused"] for family in ("qwen3_next", "qwen3"))
    assert "recurrent layers would run on one rank's shard" in hybrid
    assert "verl's Ulysses gathers the row inside flash attention alone" in plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded right", "padded left", "packed", "context parallel"])
def test_cells(runs, folder, family, layout):
    def truth(rows):
        cls = AutoModelForImageTextToText if family == "qwen3_5" else AutoModelForCausalLM
        model = cls.from_pretrained(folder / family, attn_implementation="sdpa").float()
        ids = torch.tensor(rows)
        with torch.no_grad():
            return [model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])]

    def told(who):
        if layout == "padded left":
            return "padding of prompts is taken out before the engine (workers/utils/padding.py left_right_2_no_padding)"

        def run(rows):
            found = runs[f"{family} {who} {SETTINGS[layout]}"]
            if found["refused"]:
                raise RuntimeError(found["refused"])
            return found["answers"]

        return run

    own, ours = STACK.cell(family, layout, truth=truth, alone=told("alone"), ours=told("ours"), line=LINE)
    print(own, ours)
