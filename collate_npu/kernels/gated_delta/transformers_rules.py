"""Rules of the layers of transformers alone, and of those that mcore-bridge patches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.fla_rules import MAX_TAPS, numbered, returning
from collate_npu.kernels.gated_delta.operator_call import Call


def transformers(call: Call) -> Iterator[Breach]:
    """Rules of transformers' Gated DeltaNet layers, by release and installed kernels."""
    releases, numbered, version = call.releases, "seq_idx" in call.arguments, call.releases.text("transformers")
    given = [name for name in (call.where, "seq_idx" * numbered) if name]
    if given and releases.before("transformers", "5.10"):
        says = f"transformers {version} reads no boundaries in its Gated DeltaNet layers; 5.10 is the first read that does."
        yield call.breach(
            "release", ", ".join(given), "given", says, "Upgrade, or pass padded rows with a 2D mask.", silent=True
        )
        return
    if call.packed and len(given) == 1:
        leaks = "convolution" if call.where else "rule"
        says = f"The rule reads cu_seq_lens_q and the convolution seq_idx: here the {leaks} runs from sequence to sequence."
        remedy = "Pass both: gated_delta_kwargs(segments, kernel='transformers')."
        yield call.breach("pair", given[0], "alone", says, remedy, silent=True)
    for package, name in (("fla", call.where), ("causal_conv1d", "seq_idx" * numbered)):
        if name and not releases.has(package):
            old = releases.before("transformers", "5.20")
            says = f"Without {package} a torch function stands in, which knows no boundaries" + (
                f"; transformers {version} drops them in silence." if old else " (transformers raises)."
            )
            remedy = f"Install {package} and name its release in versions, or pass padded rows with a 2D mask."
            yield call.breach("package", name, f"{package} is not there", says, remedy, silent=old)
    yield from _positions(call)
    if given and not list(_numbers_rules(call)):
        yield from returning(call, MAX_TAPS)
        yield from _agree(call)


def _numbers_rules(call: Call) -> Iterator[bool]:
    given = call.get("seq_idx")
    if isinstance(given, Tensor) and tuple(given.shape) != (call.B, call.T):
        yield True


def _positions(call: Call) -> Iterator[Breach]:
    """Positions that begin again say that rows are packed, and no recurrent layer reads them."""
    positions = call.get("position_ids")
    if call.trusted or call.where or not isinstance(positions, Tensor) or positions.ndim != 2 or positions.is_meta:
        return
    mask = call.get("attention_mask")
    real = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == positions.shape else positions.cpu() > -1
    again = (positions.cpu()[:, 1:] == 0) & real[:, 1:] & real[:, :-1]
    if bool(again.any()):
        says = "They begin again inside a row: it is packed, and recurrent layers read no positions."
        yield call.breach("positions-alone", "position_ids", shape_of(positions), says, silent=True)


def _agree(call: Call) -> Iterator[Breach]:
    ids_BT = numbered(call)
    if call.trusted or not call.where or not ids_BT.size or call.offsets[-1] != ids_BT.shape[1] or call.B != 1:
        return  # with the Segments at hand each is compared with them
    begins = np.flatnonzero(ids_BT[0, 1:] != ids_BT[0, :-1]) + 1
    inner = np.unique([n for n in call.offsets if 0 < n < call.T])
    if not np.array_equal(begins, inner):
        says = f"Its numbers change at {begins[:8].tolist()}, and {call.where} begins sequences at {inner[:8].tolist()}."
        yield call.breach("disagree", "seq_idx", f"{len(begins) + 1} runs", says, silent=True)


def bridge_transformers(call: Call) -> Iterator[Breach]:
    """Rules of transformers' layer inside mcore-bridge (`USE_MCORE_GDN=0`)."""
    if call.packed and not call.releases.before("transformers", "5.15"):
        version = call.releases.text("transformers")
        says = f"With transformers {version} the convolution gets no boundary (its patch is for releases before 5.15)."
        remedy = "Use USE_MCORE_GDN=1, or transformers before 5.15."
        yield call.breach("release", call.where, "several sequences", says, remedy, silent=True)
    if call.packed and not call.releases.has("fla"):
        yield call.breach("package", call.where, "fla is not there", "Boundaries need fla.", "Install it.", silent=False)
