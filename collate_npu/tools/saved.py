"""Saved: a batch or a mask from a file, read without running anything that the file holds.

A file opens to at most `MOST_BYTES`, or to its own size where that is more: 4 MiB of an archive can hold 4 GiB of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain
from collate_npu.masks.derive import MASK_KEY
from collate_npu.tools.refusals import check_file, said

MOST_BYTES = 1 << 30
RECIPE = (
    "Save it in your training loop: torch.save({k: v.cpu() for k, v in batch.items() if torch.is_tensor(v)}, 'batch.pt')."
)


def batch_of_file(path: Path) -> dict[str, Any]:
    """A saved batch: a dict of tensors (`.pt`, `.pth`), `.safetensors` or `.npz`."""
    held = _loaded(path)
    if isinstance(held, Mapping) and held and all(isinstance(key, str) for key in held):
        return dict(held)
    rule = "A saved batch is a dict of tensors by their keys."
    raise CollateError(explain(str(path), type(held).__name__, rule, f"{RECIPE} A mask alone goes to `show --mask`."))


def mask_of_file(path: Path) -> Tensor:
    """A saved mask: a tensor or an array alone, or `attention_mask`, or the only one, of several by name."""
    held = _loaded(path)
    if isinstance(held, Mapping):
        held = held.get(MASK_KEY, next(iter(held.values())) if len(held) == 1 else None)
    if isinstance(held, Tensor):
        return held
    rule = f"A mask is one tensor, or the entry {MASK_KEY} of several."
    raise CollateError(explain(str(path), type(held).__name__, rule, "Save the mask alone; a batch goes to --batch."))


def _loaded(path: Path) -> Any:
    check_file(path, [*LOADERS], RECIPE)
    try:
        _check_size(path, sum(each.file_size for each in ZipFile(path).infolist()) if is_zipfile(path) else 0)
        held = LOADERS[path.suffix](path)
        _check_size(path, sum(x.numel() * x.element_size() for x in _tensors(held)))
        return held
    except CollateError:
        raise
    except Exception as error:  # torch, numpy and safetensors raise whatever they meet in the bytes
        rule = "Files are read without running anything they hold, so they hold tensors, numbers and strings alone."
        raise CollateError(explain(str(path), said(error).partition(". ")[0], rule, RECIPE)) from None


def _check_size(path: Path, size: int) -> None:
    most = max(MOST_BYTES, path.stat().st_size)
    if size > most:
        rule = f"A file opens to at most {MOST_BYTES >> 20} MiB, or to its own size."
        remedy = "Save fewer rows, or attention_mask_2d without the 4D mask."
        raise CollateError(explain(str(path), f"{size / 2**20:.0f} MiB in {most >> 20}", rule, remedy))


def _tensors(held: Any) -> Iterator[Tensor]:
    """As many as their shapes say: one number can be expanded to any."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (Mapping, list, tuple)):
        for value in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(value)


def _arrays(path: Path) -> Any:
    held = np.load(path, allow_pickle=False)
    return torch.from_numpy(held) if isinstance(held, np.ndarray) else {key: torch.from_numpy(held[key]) for key in held}


_TORCH = partial(torch.load, map_location="cpu", weights_only=True)
LOADERS: dict[str, Callable[[Path], Any]] = {
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".safetensors": lambda path: import_module("safetensors.torch").load(path.read_bytes()),
    ".npz": _arrays,
    ".npy": _arrays,
}
