"""A process whose path holds packages that transformers takes for kernels; they compute with our references.

`python kernel_packages.py fla causal_conv1d` prints, as JSON, what two models make of a flat row with these installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

CONV = """
from collate_npu.testing.kernels import causal_conv1d_fn as reference
calls = []
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    calls.append(("causal_conv1d_fn", {"seq_idx": seq_idx}))
    assert seq_idx is None or (str(seq_idx.dtype), seq_idx.is_contiguous()) == ("torch.int32", True)
    return reference(x, weight, bias, seq_idx=seq_idx, activation=activation)
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    raise NotImplementedError
"""
"""causal-conv1d 1.6.1 causal_conv1d_interface.py."""
RULE = """
from collate_npu.kernels.gated_delta import reference_gated_delta_rule as reference
calls = []
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **kwargs):
    calls.append(("chunk_gated_delta_rule", {"cu_seqlens": cu_seqlens, **kwargs}))
    return reference(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
def fused_recurrent_gated_delta_rule(*args, **kwargs):
    raise NotImplementedError
"""
"""flash-linear-attention 0.5.2 ops/gated_delta_rule/chunk.py."""
FILES = {"causal_conv1d": ("causal_conv1d/__init__.py", CONV), "fla": ("fla/ops/gated_delta_rule/__init__.py", RULE)}


def install(folder, packages):
    for name in packages:
        path, code = folder / FILES[name][0], FILES[name][1]
        path.parent.mkdir(parents=True)
        for above in list(path.parents)[1:-1]:
            if folder in above.parents:
                (above / "__init__.py").touch()
        path.write_text(code)
    sys.path.insert(0, str(folder))


def seen(name):
    import torch
    from test_packed_hybrids import FORGOTTEN, ROWS, alone, built, errors, ours, samples, without

    from collate_npu import BatchAdapter, UnsupportedFormError

    model, features = built(name), samples(ROWS["short"])
    adapter = BatchAdapter(model, padding_free=True)
    found = {"unread": adapter.model.boundaries_unread, "refused": ""}
    try:
        found["ours"] = max(errors(model, ours(model)(features), alone(model, features)))
    except UnsupportedFormError as error:
        found["refused"] = str(error)
    adapter.model = replace(adapter.model, boundaries_unread="")
    flat = {"input_ids": torch.cat([torch.tensor([each["input_ids"]]) for each in features], 1)}
    batch = adapter(flat | {"seq_lens": torch.tensor(ROWS["short"])})
    calls = [call for kernel in FILES if kernel in sys.modules for call in module(kernel).calls]
    found["called"] = sorted({kernel for kernel, _ in calls})
    found["got"] = sorted({key for _, given in calls for key, value in given.items() if value is not None})
    for what, keys in ({"both": ()} | FORGOTTEN).items():
        try:
            found[what] = errors(model, without(batch, *keys), alone(model, features))[0]
        except ValueError as error:
            found[what] = str(error)
    return found


def module(kernel):
    return sys.modules["fla.ops.gated_delta_rule" if kernel == "fla" else kernel]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder), sys.argv[1:])
        print(json.dumps({name: seen(name) for name in ("qwen3_next", "qwen3_5_text")}))
