"""ms-swift 4.6.0: installing, in this process and in a spawned worker, and giving back; what its template and its
`prepare_batch` give with it, and what is wrong in silence without it."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mcore_bridge.model.modules import TransformerLayer
from swift.megatron.trainers import base, utils
from swift.template.base import Template
from swift.utils import import_external_file
from swift_world import LENGTHS, World, arguments, as_kind, collate, prepare, template
from torch.utils._python_dispatch import TorchDispatchMode

from collate_npu import CollateError, Segments
from collate_npu.integrations import swift, swift as guard
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.integrations.swift import flat_segments

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_install_reaches_functions_that_were_imported_by_name_and_uninstall_gives_them_back():
    original = utils.prepare_batch
    assert base.prepare_batch is original
    swift.install()
    swift.install()  # twice is once
    assert base.prepare_batch is utils.prepare_batch is not original
    assert inspect.unwrap(base.prepare_batch) is original
    swift.uninstall()
    assert base.prepare_batch is utils.prepare_batch is original
    swift.uninstall()


@pytest.mark.parametrize("there", [True, False], ids=["npu", "gpu"])
def test_python_objects_go_by_gloo_on_an_npu(world, monkeypatch, there):
    """The names of the metrics, at every step: `all_gather_object` over HCCL takes device memory in silence."""
    seen = []
    world.npu(there)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda values, value, group=None: seen.append(group))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(swift, "gloo_group", lambda group: f"gloo of {group}")
    swift.install()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    swift.uninstall()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    assert seen == ["gloo of dp and cp" if there else "dp and cp", "dp and cp"]


def test_your_own_install_of_mcore_bridge_survives_ours_and_the_other_way_round():
    theirs = TransformerLayer.forward
    for first, second in ((swift, mcore_bridge), (mcore_bridge, swift)):
        first.install()
        second.install()
        ours = TransformerLayer.forward
        assert inspect.unwrap(ours) is theirs
        swift.uninstall()
        assert TransformerLayer.forward is ours
        mcore_bridge.uninstall()
        assert TransformerLayer.forward is theirs


def test_as_external_plugins_file_it_installs_and_hides_no_package(tmp_path):
    original, path = utils.prepare_batch, list(sys.path)
    for _ in range(2):
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        assert utils.prepare_batch is not original
        assert sys.path == path  # with its folder first, `import transformers` would find this package's file
    swift.uninstall()


# --- what its template sends


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.elements = max(self.elements, out.numel())
        return out


def shipped_bytes(batch):
    return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("cp", [1, 2])
def test_no_worker_builds_or_ships_a_dense_mask(cp):
    args = arguments("qwen3_next", cp=cp)
    lengths = (512, 301, 17, 400)
    with Largest() as upstream:
        theirs = collate(args, *lengths)
    swift.install()
    try:
        with Largest() as wrapped:
            ours = collate(args, *lengths)
    finally:
        swift.uninstall()
    assert upstream.elements == 4 * 512 * 512
    assert wrapped.elements == 4 * 512
    assert shipped_bytes(theirs) == 4 * 512 * 512 + 4 * 4 * 512 * 8  # four int64 keys beside it
    assert shipped_bytes(ours) == 3 * 4 * 512 * 8 + 4 * 512  # three, and a 2D mask of bools
    assert theirs.keys() - ours.keys() == {"attention_mask"}
    for key in ours.keys() - {"attention_mask_2d"}:
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), key
    assert torch.equal(ours["attention_mask_2d"], ~theirs["attention_mask"][:, 0, -1])


@pytest.mark.parametrize("task", ["seq_cls", "embedding", "reranker"])
@pytest.mark.usefixtures("installed")
def test_other_tasks_templates_send_the_2d_mask_alone(task):
    made = template(task=task)
    rows = [{"input_ids": [5] * n, "labels": 1, "length": n} for n in LENGTHS]
    if task == "embedding":
        rows = [
            {f"{side}_{k}": v for side in ("anchor", "positive") for k, v in row.items() if k != "labels"} for row in rows
        ]
    if task == "reranker":
        rows = [{"input_ids": [row["input_ids"]], "labels": [1], "length": [row["length"]]} for row in rows]
    batch = made.data_collator(rows)
    assert "attention_mask" not in batch
    assert batch["attention_mask_2d"].sum(1).tolist() == [n for n in LENGTHS for _ in range(2 if task == "embedding" else 1)]


@pytest.mark.usefixtures("installed")
def test_tensors_of_a_template_of_your_own_keep_their_memory(monkeypatch):
    """Squares of bools too: only the mask that the template itself builds has none."""

    class Vision(Template):
        def _data_collator(self, batch, *, padding_to=None):
            mine = torch.ones((3, 4, 4), dtype=torch.bool)
            return {**super()._data_collator(batch, padding_to=padding_to), "mine": mine}

        def _data_collator_mm_data(self, batch):
            return {"pixel_values": torch.ones((3, 8, 8)), "seen": torch.ones((2, 7, 7), dtype=torch.bool)}

    made = template()
    monkeypatch.setattr(made, "__class__", Vision)
    rows = [{"input_ids": [5] * n, "labels": [5] * n, "length": n} for n in (7, 3)]
    batch = made.data_collator(rows)
    assert all(batch[key].device.type == "cpu" for key in ("mine", "pixel_values", "seen"))
    assert batch["pixel_values"].sum() == 192
    assert batch["attention_mask_2d"].sum(1).tolist() == [7, 3]


# --- the offsets of its flat rows


@pytest.mark.parametrize(
    ("ranks", "changed", "offsets"),
    [
        (1, {}, [0, 7, 10, 15]),
        (1, {"fp8_format": "e4m3"}, [0, 7, 10, 15, 16]),
        (1, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, [0, 7, 10, 15, 16]),
        (1, {"fp8_recipe": "mxfp8"}, [0, 7, 10, *range(15, 33)]),
        (2, {}, [0, 8, 12, 20]),
        (2, {"fp8_format": "e4m3"}, [0, 8, 12, 20, 24, 28, 32]),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, [0, 8, 12, 20]),
    ],
)
def test_the_offsets_are_physical_end_with_the_row_and_can_be_shared_out(monkeypatch, installed, ranks, changed, offsets):
    world = World(monkeypatch)
    world.npu(False)
    world.rank(0, ranks)
    args = arguments("qwen3_next", cp=ranks, padding_free=True, **changed)
    data = collate(args, *LENGTHS)
    width = data["input_ids"].shape[1]
    params = prepare(args, data)["packed_seq_params"]
    assert params.cu_seqlens_q.tolist() == offsets
    assert params.cu_seqlens_q.dtype == torch.int32
    assert offsets[-1] == width
    assert isinstance(params.max_seqlen_q, int)
    truth = flat_segments(data, params, ranks)
    assert truth.shape == (1, width)
    assert truth.sequence_lengths == LENGTHS
    assert [start for _, start, _ in truth.spans] == offsets[:3]


def test_upstream_positions_are_shorter_than_the_row_where_three_ranks_share_the_tokens_of_two(monkeypatch):
    """padding_to is 6 and the row 24, of which 20 have places: the last four have no position at all."""
    world = World(monkeypatch)
    world.npu(False)
    world.rank(0, 2)
    args = arguments("qwen3_next", cp=2, padding_free=True, tensor_model_parallel_size=3, sequence_parallel=True)
    data = collate(args, *LENGTHS, 6)
    params = prepare(args, data)["packed_seq_params"]
    assert data["input_ids"].shape[1] > params.cu_seqlens_q[-1]
    with pytest.raises(
        CollateError, match=r"packed_seq_params: got .*Set padding_free=False, or a tensor_model_parallel_size"
    ):
        flat_segments(data, params, 2)


ROW = {"input_ids": torch.ones(1, 16), "seq_lens": [7, 3, 5]}


class Params:
    def __init__(self, offsets, **others):
        self.cu_seqlens_q = self.cu_seqlens_kv = torch.tensor(offsets)
        self.cu_seqlens_q_padded = self.cu_seqlens_kv_padded = None
        vars(self).update(others)


@pytest.mark.parametrize(
    ("params", "ranks"),
    [
        (Params([0, 7, 10, 15]), 1),  # ends early
        (Params([7, 10, 16]), 1),  # ends
        (Params([1, 8, 11, 16]), 1),  # begins late
        (Params([0, 6, 10, 16]), 1),  # too short for the first
        (Params([0, 7, 16]), 1),  # two sequences for three
        (Params([0, 7, 10, 15, 15, 16]), 1),  # an empty one
        (Params([0, 7, 10, 16]), 2),  # not to be shared out
        (Params([0, 7, 10, 16], cu_seqlens_kv=torch.tensor([0, 7, 11, 16])), 1),
        (Params([0, 7, 10, 16], cu_seqlens_q_padded=torch.tensor([0, 8, 11, 16])), 1),
    ],
)
def test_offsets_that_do_not_fit_the_samples_are_refused(params, ranks):
    with pytest.raises(
        CollateError, match=r"packed_seq_params: got .*rise from 0 to the 16 tokens .*Set padding_free=False"
    ):
        flat_segments(ROW, params, ranks)


def test_and_those_that_fit_are_the_truth():
    assert flat_segments(ROW, Params([0, 7, 10, 16])) == Segments.from_lengths([LENGTHS], 16)


def test_the_guard_stops_at_the_first_batch_and_looks_once(capsys):
    """Two ranks of a row: the offsets are compared, the layers are not watched."""
    model, row = torch.nn.Linear(1, 1), {**ROW, "input_ids": torch.ones(1, 20)}
    args = SimpleNamespace(padding_free=True, context_parallel_size=2, cp_partition_mode="zigzag")
    trainer = SimpleNamespace(unwrapped_models=[model], args=args)
    for offsets, said in (([0, 7, 10, 20], None), ([0, 8, 12, 20], 1), ([0, 8, 12, 20], 0)):
        prepare_batch = lambda *_, offsets=offsets: {"packed_seq_params": Params(offsets)}  # noqa: E731
        if said is None:
            with pytest.raises(CollateError, match="packed_seq_params"):
                guard.guarded(None, prepare_batch, trainer, row)
            guard._GUARDED.clear()
        else:
            guard.guarded(None, prepare_batch, trainer, row)
            assert capsys.readouterr().out.count("the flat row are those of its 3 samples") == said


# --- without `install()`: a test that fails here says which silent defect upstream has fixed


def test_upstream_a_keep_mask_is_inverted_in_silence(world):
    world.npu()
    args = arguments("qwen3_5")
    data, truth = as_kind(args, "4d keep")
    derived = prepare(args, data)["attention_mask_2d"]
    assert not torch.equal(derived, truth.keep)
    assert derived.tolist() == [[False] + [True] * 7] * 3


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_moe"])
def test_upstream_both_masks_are_lost_and_routers_do_not_learn_the_padding(world, model_type):
    world.npu()
    args = arguments(model_type)
    batch = prepare(args, as_kind(args, "template")[0])
    assert batch["attention_mask"] is None
    assert not {"attention_mask_2d", "padding_mask", "extra_block_kwargs"} & set(batch)


@pytest.mark.parametrize(("backend", "side"), [("flash", "left"), ("local", "right")])
def test_upstream_a_dense_mask_is_dropped_in_silence(world, backend, side):
    """Local kernels are not recognised, because the backend is an enum."""
    world.npu()
    args = arguments("qwen3_5", attention_backend=backend, use_flash_attn=True)
    assert prepare(args, as_kind(args, "4d masked", side=side)[0])["attention_mask"] is None


# --- without ms-swift, mcore-bridge or megatron-core


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("swift", "mcore_bridge", "megatron", "transformer_engine", "trl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for name in ("swift", "megatron", "megatron.mcore_bridge", "verl", "twinkle", "trl"):
    __import__(f"collate_npu.integrations.{name}")
    assert "transformers" not in sys.modules, name
from collate_npu.integrations import swift
swift.uninstall()
swift.install()
"""


@pytest.mark.slow
def test_importing_an_integration_imports_no_trainer_and_installing_it_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'swift")
