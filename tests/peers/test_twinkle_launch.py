"""The launch script of the guide: its words parsed by twinkle's CLI, its program run on twinkle's own signatures."""

from unittest import mock

import pytest
import twinkle
from launches import CARDS, JOBS, check_sizes, words_of
from twinkle import DeviceMesh, dataloader, dataset, model as models
from twinkle.cli import CLI

from collate_npu.integrations import twinkle as ours

NEEDS = ("twinkle", "megatron", "mcore_bridge")


@pytest.mark.parametrize("job", JOBS)
def test_twinkle_knows_every_word_and_call(job, tmp_path, monkeypatch):
    words, _ = words_of("twinkle.sh", "torchrun", job, tmp_path)
    assert words[:5] == ["--nproc_per_node", str(CARDS), "--no-python", "python", "-c"]
    program, given = words[5], words[6:]
    args = CLI.from_args(given, env_file=tmp_path / "none")
    assert args.extra == {}, "words that twinkle does not know"
    infra = args.infra
    check_sizes(job, infra.tp_size, infra.pp_size or 1, infra.cp_size or 1, infra.dp_size, infra.ep_size or 1)
    assert (infra.sequence_parallel, args["model_id"], args["dataset_id"]) == (True, "MODEL", "DATASET")

    fakes = {
        (models, "MegatronModel"): mock.create_autospec(models.MegatronModel),
        (dataset, "Dataset"): mock.create_autospec(dataset.Dataset),
        (dataloader, "DataLoader"): mock.create_autospec(dataloader.DataLoader),
        (twinkle, "initialize"): mock.create_autospec(twinkle.initialize),
        (ours, "install"): mock.create_autospec(ours.install),
    }
    fakes[dataloader, "DataLoader"].return_value.__len__.return_value = 3
    fakes[dataloader, "DataLoader"].return_value.__iter__.return_value = iter(["a batch", "another"])
    for (module, name), fake in fakes.items():
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr("sys.argv", ["-c", *given])
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "twinkle.sh", "exec"), {})
    mesh = fakes[twinkle, "initialize"].call_args.kwargs["global_device_mesh"]
    assert isinstance(mesh, DeviceMesh)
    assert (mesh.world_size, mesh.sequence_parallel, mesh.ep_size or 1) == (CARDS, True, infra.ep_size or 1)
    model = fakes[models, "MegatronModel"].return_value
    fakes[ours, "install"].assert_called_once_with(model)
    assert model.forward_backward.call_args_list[-1] == mock.call(inputs="another", micro_batch_size=1)
    assert model.clip_grad_and_step.call_count == 2


def test_a_word_that_is_not_twinkles_would_be_seen(tmp_path):
    assert CLI.from_args(["--tensor_size", "4"], env_file=tmp_path / "none").extra == {"tensor_size": 4}
