"""`swift sft` and `megatron sft`, typed as their users type them: what arrives in the processes they start.

The console entries start everything: the trainer's process, torchrun's ranks, the dataloader's workers. A second plugin file
(`swift_recorder`) writes what each layer received there, and runs each sample again alone in the same process.
`megatron sft` runs with a CPU for CUDA and layers that compute in the place of Transformer Engine's (`megatron_on_cpu`).
"""

import pytest
from swift_launch import MEGATRON, PLUGIN, RECORDER, TRANSFORMERS, chats, run, save_model, save_rows

NEEDS = ("swift", "mcore_bridge", "megatron", "matplotlib")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    model, rows = save_model(folder / "model"), save_rows(folder / "train.jsonl", chats())
    return folder, ("--model", model, "--dataset", rows)


def rows_of(lengths, width, side="right"):
    real = [[1] * n for n in lengths]
    return [(row + [0] * (width - len(row))) if side == "right" else ([0] * (width - len(row)) + row) for row in real]


def masks(step, ending):
    """What the layers of one kind received."""
    found = [mask for name, mask in step["layers"].items() if name.endswith(ending)]
    assert found
    return found


# --- the transformers backend


def test_swift_sft_trains_each_sample_as_alone(here):
    """Its own 2D mask is right, on either side (test_swift_transformers); our plugin changes nothing of it."""
    folder, data = here
    words = (*TRANSFORMERS, *data, "--padding_side", "left", "--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run("swift", *words, record=folder / "swift")
    assert code == 0, said[-3000:]
    ((step,),) = [process["steps"] for process in ran]
    width = max(step["lengths"])
    assert step["mask"] == {"dtype": "int64", "shape": [3, width], "rows": rows_of(step["lengths"], width, "left")}
    assert masks(step, "GatedDeltaNet") == [step["mask"], step["mask"]]
    assert [mask["shape"] for mask in masks(step, "Attention")] == [[3, 1, width, width]]
    assert step["ours"], "the plugin has run"
    assert step["error"] < 2e-5
    assert step["alone_loss"] == pytest.approx(step["loss"], rel=1e-5)
    assert step["blind"] > 0.5  # told nothing, the same model is wrong


# --- Megatron


@pytest.mark.long
def test_megatron_sft_on_two_ranks_gives_none_and_the_routers_their_padding(here):
    """ms-swift's defaults: flash attention, Megatron's own Gated DeltaNet; two workers a rank."""
    folder, data = here
    words = (*MEGATRON, *data, "--global_batch_size", "6", "--dataloader_num_workers", "2", "--train_iters", "1")
    words += ("--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run("megatron", *words, record=folder / "two", ranks=2, COLLATE_NPU_GUARD="1")
    assert code == 0, said[-3000:]
    assert said.count(" got what the batch says: ") == 2
    assert len(ran) == 2
    for process in ran:
        (step,) = process["steps"]
        width, keep = max(step["lengths"]), rows_of(step["lengths"], max(step["lengths"]))
        assert step["trainer"] == "MegatronTrainer"
        assert "attention_mask" not in step["sent"]  # by the worker
        assert step["sent"]["attention_mask_2d"] == {"dtype": "bool", "shape": [3, width], "rows": keep}
        assert set(masks(step, "GatedDeltaNet") + masks(step, "SelfAttention")) == {None}
        padding = [[1 - real for real in row] for row in keep]
        assert [seen["rows"] for seen in step["routers"].values()] == [padding] * 3
        assert step["error"] < 2e-5
    assert ran[0]["steps"][0]["lengths"] != ran[1]["steps"][0]["lengths"]
