"""Layers of transformers, of Megatron and its kin, and of other training stacks: rows, and rules of theirs alone.

Behind them stands every operator by its name, and the names of `gated_delta_kwargs` and of consumers for some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise

import numpy as np
from torch import Tensor

from collate_npu import releases
from collate_npu.arrays import whole_number
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.kernels import Breach
from collate_npu.kernels.gated_delta.kernels import KERNEL_ROWS, NPU_ROWS, returning
from collate_npu.kernels.gated_delta.operator_call import FIELDS, Call, Operator, words

# --- transformers


def _layer(call: Call) -> Iterator[Breach]:
    """By release and installed kernels."""
    numbered, version = "seq_idx" in call.arguments, call.release("transformers")
    given = [name for name in (call.where, "seq_idx" * numbered) if name]
    if given and call.before(releases.BOUNDARIES_READ):
        says = f"transformers {version} reads no boundaries in its Gated DeltaNet layers; {releases.BOUNDARIES_READ} does."
        remedy = "Upgrade, or pass padded rows with a 2D mask."
        yield call.breach("release", ", ".join(given), "given", says, remedy, silent=True)
        return
    if call.packed and len(given) == 1:
        leaks = "convolution" if call.where else "rule"
        says = f"The rule reads cu_seq_lens_q and the convolution seq_idx: here the {leaks} runs from sequence to sequence."
        remedy = "Pass both: gated_delta_kwargs(segments, kernel='transformers')."
        yield call.breach("pair", given[0], "alone", says, remedy, silent=True)
    for package, name in (("fla", call.where), ("causal_conv1d", "seq_idx" * numbered)):
        if name and call.release(package) is None and call.before(releases.MISSING_KERNEL_RAISES):
            says = f"Without {package} a torch function stands in; transformers {version} drops boundaries in silence."
            remedy = f"Install {package} and name its release in versions, or pass padded rows with a 2D mask."
            yield call.breach("package", name, f"{package} is not there", says, remedy, silent=True)
    yield from _positions(call)
    yield from returning(call)
    yield from _agree(call)


def _positions(call: Call) -> Iterator[Breach]:
    """Positions that begin again say that rows are packed, and no recurrent layer reads them."""
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    if call.segments is not None or call.where or not isinstance(positions, Tensor):
        return
    if positions.ndim == 2 and not positions.is_meta:
        real = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == positions.shape else positions.cpu() > -1
        if bool(((positions.cpu()[:, 1:] == 0) & real[:, 1:] & real[:, :-1]).any()):
            says = "They begin again inside a row: it is packed, and recurrent layers read no positions."
            yield call.breach("positions-alone", "position_ids", shape_of(positions), says, silent=True)


def _agree(call: Call) -> Iterator[Breach]:
    """Numbers and offsets of one row; with the Segments at hand each is compared with them."""
    ids_BT = call.numbers_BT
    if call.segments is not None or not call.where or ids_BT.shape[0] != 1 or call.offsets[-1] != call.T:
        return
    begins = np.flatnonzero(ids_BT[0, 1:] != ids_BT[0, :-1]) + 1
    inner = np.unique([n for n in call.offsets if 0 < n < call.T])
    if not np.array_equal(begins, inner):
        says = f"Its numbers change at {begins[:8].tolist()}, and {call.where} begins sequences at {inner[:8].tolist()}."
        yield call.breach("disagree", "seq_idx", f"{len(begins) + 1} runs", says, silent=True)


# --- Megatron and its kin


def _fields(call: Call) -> Iterator[Breach]:
    """`PackedSeqParams`: its padded and actual offsets, its totals."""
    total = whole_number("total_tokens", call.arguments.get("total_tokens", call.T))
    if call.where and total != call.T:
        says = f"The row has {call.T} tokens; sequence numbers are cut off or added without a word."
        yield call.breach("total", "total_tokens", str(total), says, "Pass the width of the row.", silent=True)
    yield from _actual_offsets(call)


def _actual_offsets(call: Call) -> Iterator[Breach]:
    if call.where != "cu_seqlens_q_padded" or "cu_seqlens_q" not in call.arguments:
        return
    actual, _ = call.row("cu_seqlens_q")
    real = [end - start for start, end in pairwise(actual)]
    fits = len(real) == len(call.lengths) and all(0 <= r <= n for r, n in zip(real, call.lengths)) and actual[:1] == (0,)
    if actual != call.given and not fits:
        says = f"Actual offsets fit into the padded ones, {list(call.given[:8])}, sequence by sequence."
        remedy = "Take both from pad_documents(batch, cp)."
        yield call.breach("padded-actual", "cu_seqlens_q", str(list(actual[:12])), says, remedy, silent=True)


def _mindspeed(call: Call) -> Iterator[Breach]:
    """MindSpeed's own rule."""
    if call.where and call.is_set("initial_state") and not call.before(releases.MINDSPEED_TRITON_RULE):
        got = f"mindspeed {call.release('mindspeed')}"
        says = "With an initial state the rule falls back to one in torch, which is given no boundaries."
        yield call.breach("state-fallback", "initial_state", got, says, "Leave it out.", silent=True)
    yield from _fields(call)


def _mindspeed_llm(call: Call) -> Iterator[Breach]:
    """MindSpeed-LLM's layers: what says where a sequence begins is not used there."""
    fsdp2 = call.operator.name.endswith("fsdp2")
    given = call.where or "packed_seq_params" in call.arguments or any(name in call.arguments for name in FIELDS)
    if given and not (fsdp2 and not call.packed and call.B == 1):
        says = "The convolution is given no boundary." if fsdp2 else "packed_seq_params is taken and never used."
        remedy = "Pass rows padded on the right, one sequence a row."
        yield call.breach("boundaries-unused", call.where or "packed_seq_params", "given", says, remedy, silent=True)


def _torchtitan(call: Call) -> Iterator[Breach]:
    if call.B > 1 and not call.where:
        says = "Rows are laid one behind the other, [1, B * L], and without boundaries states run from row to row."
        remedy = "Pass VarlenMetadata with host offsets over the folded row, or one row."
        yield call.breach("fold", "attention_masks", f"None with {call.B} rows", says, remedy, silent=True)


_GDN = Operator(
    "transformers.gdn_layer", "transformers 5.23 integrations/hub_kernels.py:1033-1050, masking_utils.py:1521-1529",
    kernel="transformers", offsets=("cu_seq_lens_q",), numbers="seq_idx",
    reads=words("cu_seq_lens_k attention_mask position_ids seq_lens"),
    checks=words("container rows unread"), own=(_layer,),
    empties="fla", masks="multiplied", shapes={"hidden_states": "BTD"},
)  # fmt: skip
_MEGATRON = Operator(
    "megatron_core.GatedDeltaNet",
    "Megatron-LM d98e8a6 ssm/gated_delta_net/common.py:469-618; 0.16.1 ssm/gated_delta_net.py:297",
    kernel="megatron", offsets=("cu_seqlens_q_padded", "cu_seqlens_q"),
    reads=words("cu_seqlens_kv cu_seqlens_kv_padded attention_mask qkv_format total_tokens"),
    checks=words("container rows last"), own=(_fields,),
    empties="fla", masks="ignored", ranks="head_exchange_zigzag",
)  # fmt: skip
STACKS: tuple[Operator, ...] = (
    _GDN,
    _MEGATRON,
    replace(
        _MEGATRON, name="mindspeed.GatedDeltaNet", form="offsets or ends", own=(_mindspeed,), empties="never",
        source="MindSpeed core_r0.16.0 ssm/gated_delta_net.py:592-665, ops/triton/utils.py:73-78; "
        "core_r0.17.0 ssm/npu_chunk_gated_delta_rule.py:300-355",
    ),
    Operator(
        "mindspeed_llm.qwen3_next", "MindSpeed-LLM c77308a qwen3_next_gated_deltanet_attention.py:51, 341-440",
        kernel="", offsets=(*_MEGATRON.offsets, "cu_seqlens", "actual_seq_len"), reads=_MEGATRON.reads,
        own=(_mindspeed_llm,), masks="multiplied",
    ),
    Operator(
        "mindspeed_llm.qwen3_next_fsdp2",
        "MindSpeed-LLM c77308a fsdp2 modeling_qwen3_next.py:409, 520, 842, 871-876", kernel="", offsets=("actual_seq_len",),
        form="ends", reads=words("attention_mask"), own=(_mindspeed_llm,), masks="multiplied", ranks="row_zigzag",
    ),
    Operator(
        "torchtitan.qwen3_5_gdn", "torchtitan 0.3.0 models/qwen3_5/model.py:112, 192-236, 398-483",
        offsets=("cu_seqlens", "cu_seq_q"), copies=("cu_seqlens_cpu", "cu_seq_q_host"),
        reads=words("attention_masks masks cu_seq_k"), checks=words("alone"), own=(_torchtitan,),
        empties="fla", folds=True, ranks="never",
    ),
)  # fmt: skip
"""Layers whose forward a user calls."""

# --- names

OPERATORS: dict[str, Operator] = {row.name: row for row in (*KERNEL_ROWS, *NPU_ROWS, *STACKS)}
KERNELS: dict[str, str] = {
    "transformers": "transformers.gdn_layer", "causal_conv1d": "causal_conv1d.causal_conv1d_fn",
    "fla": "fla.chunk_gated_delta_rule", "fla_conv": "fla.causal_conv1d", "fla_cp": "fla.build_cp_context",
    "fla_npu_cumsum": "fla_npu.chunk_local_cumsum", "fla_npu_flash": "fla_npu.flash_gated_delta_rule",
    "fla_npu_conv": "fla_npu.causal_conv1d", "fla_npu_recurrent": "fla_npu.recurrent_gated_delta_rule",
    "torch_npu": "torch_npu.npu_chunk_gated_delta_rule", "torchtitan": "torchtitan.qwen3_5_gdn",
    "megatron": "megatron_core.GatedDeltaNet", "mindspeed": "mindspeed.GatedDeltaNet",
    "mindspeed_llm": "mindspeed_llm.qwen3_next", "mindspeed_llm_fsdp2": "mindspeed_llm.qwen3_next_fsdp2",
}  # fmt: skip


def find_operator(name: str) -> Operator | None:
    """The row of this kernel, if there is one. Modules between package and name do not count, nor does `npu_` of fla_npu."""
    package, _, path = name.partition(".")
    package, last = "mamba" if package == "mamba_ssm" else package, path.rpartition(".")[2]
    tried = (name, f"{package}.{last.removeprefix('npu_' if package == 'fla_npu' else '')}", f"{package}.npu_{path}")
    found = (OPERATORS.get(KERNELS.get(each, each)) for each in tried)
    return next((row for row in found if row is not None), None)


def operator_named(kernel: str) -> Operator:
    """Raises `CollateError` with close matches for names that are not known."""
    if (row := find_operator(str(kernel))) is None:
        near = get_close_matches(str(kernel), [*KERNELS, *OPERATORS], 3, 0.5) or list(KERNELS)
        rule = "Kernels are those of gated_delta_kwargs, and the operators that kernels/gated_delta knows."
        raise CollateError(explain("kernel", repr(kernel), rule, f"Close to it: {', '.join(near)}."))
    return row
