"""`swift sft` and `megatron sft`, typed as their users type them: what arrives in the processes they start.

The console entries start everything: the trainer's process, torchrun's ranks, the dataloader's workers. A second plugin file
(`swift_recorder`) writes what each layer received there, and runs each sample again alone in the same process.
`megatron sft` runs with a CPU for CUDA and layers that compute in the place of Transformer Engine's (`megatron_on_cpu`).
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]
for _name in ("swift", "mcore_bridge", "matplotlib"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"{_name} is not installed", allow_module_level=True)

from swift_launch import MEGATRON, PLUGIN, RECORDER, TRANSFORMERS, chats, run, save_model, save_rows  # noqa: E402

FLAT = str(Path(__file__).with_name("swift_flat_recorder.py"))
ON_CPU = '{"deterministic_mode": false, "persist_layer_norm": false}'


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
    found = [seen["attention_mask"] for name, seen in step["layers"].items() if name.endswith(ending)]
    assert found
    return found


# --- the transformers backend


@pytest.mark.parametrize(
    ("ranks", "side", "plugins"), [(0, "left", ()), (2, "right", (PLUGIN,))], ids=["1, alone", "2, ours"]
)
def test_swift_sft_trains_each_sample_as_alone(here, ranks, side, plugins):
    """Its own 2D mask is right, on either side; our plugin changes nothing of it."""
    folder, data = here
    words = (*TRANSFORMERS, *data, "--padding_side", side, "--external_plugins", *plugins, RECORDER)
    code, said, ran = run("swift", *words, record=folder / f"swift_{ranks}", ranks=ranks)
    assert code == 0, said[-3000:]
    assert len(ran) == max(ranks, 1)
    for process in ran:
        (step,) = process["steps"]
        width = max(step["lengths"])
        assert step["mask"] == {"dtype": "int64", "shape": [3, width], "rows": rows_of(step["lengths"], width, side)}
        assert masks(step, "GatedDeltaNet") == [step["mask"], step["mask"]]
        assert [mask["shape"] for mask in masks(step, "Attention")] == [[3, 1, width, width]]
        assert step["error"] < 2e-5
        assert ranks or step["alone_loss"] == pytest.approx(step["loss"], rel=1e-5)
        if side == "left":
            assert step["blind"] > 0.5  # told nothing, the same model is wrong


def test_upstream_sequence_parallelism_on_a_recurrent_model_is_wrong_in_silence(here):
    folder, data = here
    words = (*TRANSFORMERS, *data, "--sequence_parallel_size", "2", "--external_plugins", RECORDER)
    code, said, ran = run("swift", *words, record=folder / "sp", ranks=2, SWIFT_RANKS_SHARE_A_ROW="1")
    assert code == 0, said[-3000:]
    assert all(step["error"] > 0.5 * step["size"] for process in ran for step in process["steps"])


def test_with_our_plugin_sequence_parallelism_on_a_recurrent_model_stops_with_a_remedy(here):
    folder, data = here
    words = (*TRANSFORMERS, *data, "--sequence_parallel_size", "2", "--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run("swift", *words, record=folder / "sp_refused", ranks=2, SWIFT_RANKS_SHARE_A_ROW="1")
    assert code != 0
    assert not ran
    assert "sequence_parallel_size: got 2. Each rank runs the recurrent layers of qwen3_next on its part of a row" in said
    assert "Set sequence_parallel_size=1" in said


# --- Megatron


def test_megatron_sft_on_an_npu_hands_both_masks_to_the_layers_that_read_them(here):
    """`USE_MCORE_GDN=0`, local kernels; beside the trainer's own batches a left-padded one goes the same way."""
    folder, data = here
    words = (*MEGATRON, *data, "--attention_backend", "local", "--global_batch_size", "3", "--dataloader_num_workers", "1")
    words += ("--external_plugins", PLUGIN, RECORDER)
    env = {"USE_MCORE_GDN": "0", "SWIFT_NPU": "1", "SWIFT_LEFT": "1", "COLLATE_NPU_GUARD": "1"}
    code, said, ran = run("megatron", *words, record=folder / "npu", ranks=1, **env)
    assert code == 0, said[-3000:]
    assert said.count("collate_npu: every layer got what the batch says: ") == 1
    assert len(ran[0]["steps"]) == 2
    for step in ran[0]["steps"]:
        width, keep = max(step["lengths"]), rows_of(step["lengths"], max(step["lengths"]))
        assert (step["trainer"], step["model"]) == ("MegatronTrainer", "GPTModel")
        assert "attention_mask" not in step["sent"]  # by the worker
        assert step["sent"]["attention_mask_2d"] == {"dtype": "bool", "shape": [3, width], "rows": keep}
        assert {tuple(mask["shape"]) for mask in masks(step, "SelfAttention")} == {(3, 1, width, width)}
        assert [state["rows"] for state in step["states"]] == [keep, keep]
        assert step["error"] < 2e-5
        assert step["left_error"] < 2e-5
        assert step["left_blind"] > 0.5


def test_megatron_sft_on_two_ranks_gives_none_and_the_routers_their_padding(here):
    """ms-swift's defaults: flash attention, Megatron's own Gated DeltaNet; two workers a rank."""
    folder, data = here
    words = (*MEGATRON, *data, "--global_batch_size", "6", "--dataloader_num_workers", "2", "--train_iters", "1")
    words += ("--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run("megatron", *words, record=folder / "two", ranks=2, COLLATE_NPU_GUARD="1")
    assert code == 0, said[-3000:]
    assert said.count("collate_npu: every layer got what the batch says: ") == 2
    assert len(ran) == 2
    for process in ran:
        (step,) = process["steps"]
        keep = rows_of(step["lengths"], max(step["lengths"]))
        assert "attention_mask" not in step["sent"]
        assert set(masks(step, "GatedDeltaNet") + masks(step, "SelfAttention")) == {None}
        padding = [[1 - real for real in row] for row in keep]
        assert [seen["padding_mask"]["rows"] for seen in step["routers"].values()] == [padding] * 3
        assert step["error"] < 2e-5
    assert ran[0]["steps"][0]["lengths"] != ran[1]["steps"][0]["lengths"]


def test_megatron_sft_with_padding_free_hands_the_recurrent_layers_offsets_of_the_whole_row(here):
    """Its default, with Megatron's own Gated DeltaNet; fla's kernels are the references (`swift_flat_recorder`)."""
    folder, data = here
    words = [*MEGATRON, *data, "--global_batch_size", "3", "--external_plugins", PLUGIN, FLAT]
    for name, value in (("padding_free", "true"), ("train_iters", "1"), ("megatron_extra_kwargs", ON_CPU)):
        words[words.index(f"--{name}") + 1] = value
    code, said, ran = run("megatron", *words, record=folder / "flat", ranks=1, COLLATE_NPU_GUARD="1")
    assert code == 0, said[-3000:]
    assert said.count("collate_npu: every layer got what the batch says: packed_seq_params to ") == 1
    (step,) = ran[0]["steps"]
    offsets, width = step["reached"]
    assert offsets[-1] == width == step["width"]
    assert [b - a for a, b in pairwise(offsets)] == step["lengths"]
    assert max(step["errors"]) < 2e-5
