"""Files of batches and of masks, read without running anything they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Segments, dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.parallel import ContextParallel
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.show.inputs import batch_of_file, batch_of_lengths, batch_of_rows, collator_of, mask_of_file

TRUTH = Segments.from_lengths([3, 5], side="left")
BATCH = {"input_ids": TRUTH.ids, "attention_mask_2d": TRUTH.keep, "attention_mask": dense(TRUTH)}


def saved(tmp_path, ending, held):
    path = tmp_path / f"held{ending}"
    if ending in (".pt", ".pth"):
        torch.save(held, path)
    elif ending == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(held if isinstance(held, dict) else {"mask": held}, path)
    elif isinstance(held, dict):
        np.savez(path, **{key: value.numpy() for key, value in held.items()})
    else:
        np.savez(path, mask=held.numpy()) if ending == ".npz" else np.save(path, held.numpy())
    return path


@pytest.mark.parametrize("ending", [".pt", ".pth", ".safetensors", ".npz"])
def test_a_saved_batch_is_the_batch(tmp_path, ending):
    held = batch_of_file(saved(tmp_path, ending, BATCH))
    assert held.keys() == BATCH.keys()
    assert segments_from_batch(held) == TRUTH


@pytest.mark.parametrize("ending", [".pt", ".npy", ".npz", ".safetensors"])
def test_a_saved_mask_is_the_mask(tmp_path, ending):
    assert torch.equal(mask_of_file(saved(tmp_path, ending, dense(TRUTH))), dense(TRUTH))


def test_the_mask_of_a_saved_batch(tmp_path):
    assert torch.equal(mask_of_file(saved(tmp_path, ".pt", BATCH)), BATCH["attention_mask"])


class Anything:
    """What a file must not build."""


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("x.pkl", lambda path: path.write_bytes(b""), "Files of tensors end with"),
        ("x.pt", lambda path: path.write_bytes(b"no"), "Save it with torch.save"),
        ("x.pt", lambda path: torch.save({"a": Anything()}, path), "without running anything"),
        ("x.pt", lambda path: torch.save([1], path), "a dict of tensors"),
        ("x.npz", lambda path: path.write_bytes(b"no"), "Save it with torch.save"),
        ("x.npz", lambda path: np.savez(path, a=np.array([{}], dtype=object)), "allow_pickle=False"),
        ("x.pt", lambda path: None, "No such file"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, name, write, said):
    write(tmp_path / name)
    with pytest.raises(CollateError, match=said) as error:
        batch_of_file(tmp_path / name)
    assert "\n" not in str(error.value)


def test_several_tensors_and_none_of_them_the_mask(tmp_path):
    with pytest.raises(CollateError, match="A mask is one tensor"):
        mask_of_file(saved(tmp_path, ".pt", {"a": torch.ones(1), "b": torch.ones(1)}))


def test_the_remedy_of_a_file_that_holds_objects_works(tmp_path):
    batch = {"input_ids": torch.ones(1, 2), "attention_mask": None}
    torch.save({key: value for key, value in batch.items()}, tmp_path / "batch.pt")  # noqa: C416
    assert batch_of_file(tmp_path / "batch.pt")["attention_mask"] is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cp", [None, ContextParallel(2, 0)])
def test_lengths(side, cp):
    batch = batch_of_lengths("3+2,6", collator_of(side=side, packed=False, context_parallel=cp))
    width = 6 if cp is None else 8
    assert segments_from_batch(batch) == Segments.from_lengths([[3, 2], [6]], width=width, side=side)


def test_lengths_of_a_flat_row_that_ranks_share_out():
    cp = ContextParallel(2, 0).for_documents()
    batch = batch_of_lengths("3,6", collator_of(side="right", packed=True, context_parallel=cp))
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 12]


@pytest.mark.parametrize("lengths", ["3,x", "", "3,,5"])
def test_lengths_that_are_none(lengths):
    with pytest.raises(CollateError, match=r"Write 3,5 or 3\+2,5"):
        batch_of_lengths(lengths, PaddingCollator(pad_token_id=0))


def test_no_square_is_built_that_is_too_large_to_be_looked_at(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.show.inputs.MOST_PLACES", 40)
    collate = collator_of(side="left", packed=False, context_parallel=None)
    assert batch_of_lengths("3,4", collate)["attention_mask"].ndim == 4
    assert batch_of_lengths("3,5", collate)["attention_mask"].ndim == 2


@pytest.mark.models
def test_lines_are_cut_and_every_token_is_a_label():
    pytest.importorskip("transformers")
    tokenizer = byte_tokenizer()
    collate = collator_of(side="right", packed=False, context_parallel=None, tokenizer=tokenizer)
    batch = batch_of_rows(["abcdef", "ab"], tokenizer, collate, max_length=4)
    assert batch["labels"].tolist() == [[97, 98, 99, 100], [97, 98, -100, -100]]
    with pytest.raises(CollateError, match="Name a file with text"):
        batch_of_rows([""], tokenizer, collate, max_length=4)
