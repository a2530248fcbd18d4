"""Files of batches and of masks, read without running anything they hold."""

import numpy as np
import pytest
import torch

from collate_npu import CollateError, Segments
from collate_npu.masks import dense
from collate_npu.tools.files import LOADERS, batch_of_file, mask_of_file

TRUTH = Segments.from_lengths([3, 5], side="left")
BATCH = {"input_ids": TRUTH.ids, "attention_mask_2d": TRUTH.keep, "attention_mask": dense(TRUTH)}


def saved(tmp_path, ending, held):
    path, tensors = tmp_path / f"held{ending}", held if isinstance(held, dict) else {"mask": held}
    if ending in (".pt", ".pth"):
        torch.save(held, path)
    elif ending == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    elif ending == ".npz":
        np.savez(path, **{key: value.numpy() for key, value in tensors.items()})
    else:
        np.save(path, held.numpy())
    return path


@pytest.mark.parametrize("ending", LOADERS)
def test_a_saved_mask_is_the_mask_and_a_saved_batch_is_the_batch(tmp_path, ending):
    assert torch.equal(mask_of_file(saved(tmp_path, ending, dense(TRUTH))), dense(TRUTH))
    if ending != ".npy":
        path = saved(tmp_path, ending, BATCH)
        held = batch_of_file(path)
        assert held.keys() == BATCH.keys()
        assert all(torch.equal(held[key], value) for key, value in BATCH.items())
        assert torch.equal(mask_of_file(path), BATCH["attention_mask"])


class Anything:
    """What a file must not build."""


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("x.pkl", lambda path: path.write_bytes(b""), "Such files end with"),
        ("x.pt", lambda path: path.write_bytes(b"no"), r"torch\.save\("),
        ("x.pt", lambda path: torch.save({"a": Anything()}, path), "without running anything"),
        ("x.pt", lambda path: torch.save([1], path), "a dict of tensors"),
        ("x.npz", lambda path: path.write_bytes(b"no"), r"torch\.save\("),
        ("x.npz", lambda path: np.savez(path, a=np.array([{}], dtype=object)), "allow_pickle=False"),
        ("x.pt", lambda path: None, "no such file"),
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
