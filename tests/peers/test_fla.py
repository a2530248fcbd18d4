"""fla's released kernels on our arguments, alone, under transformers, and on two ranks: each sequence as by itself.

The Triton kernels run on a CPU in Triton's interpreter: their real code, forward and backward, without a card's rounding,
races and memory. So do those for Ascend, in a run of their own (0.5.2's: 0.6.0's call `extract_slice`, which only
triton-ascend has). The interpreter takes a second for a few chunks of one head: shapes are the smallest that have a
sequence of several chunks beside one that ends inside a chunk. Legend: T tokens, H heads, K head size, D channels, W taps.
"""

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from rotation import NIGHTLY, some

pytest.importorskip("fla_interpreted", reason="fla and triton are what is tested")
import fla_interpreted
from cells import gradient_error
from fla.modules.convolution import causal_conv1d
from fla.ops.cp import build_cp_context
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.utils import index
from fla_interpreted import ASCEND, LAUNCHED
from recurrent_oracle import causal_conv1d_fn, reference_causal_conv1d, reference_gated_delta_rule

from collate_npu import CollateError, ContextParallel, PaddingCollator, Segments, adapt, gather_sequence, split_batch
from collate_npu.consumers import tiny_models
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.releases import installed, numbers
from collate_npu.testing import tiny_model

K, V, D, W = 16, 16, 8, 4
PACKINGS = {
    "flat": Segments.from_lengths([[3, 70]]),
    "tail": Segments.from_lengths([[16, 1, 17, 2]], width=40),
    "padding between": Segments.from_ids([[0, 0, 1, 1, 1, 0, 2, 2, 2, 2, 3, 0]]),
    "rows padded left": Segments.from_lengths([[5], [17, 1], [33]], side="left"),
}


def drawn(seed, *shapes):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw) for shape in shapes]


def rule_inputs(T, decays=()):
    q, k, v, g, beta = drawn(0, (1, T, 1, K), (1, T, 1, K), (1, T, 1, V), (1, T, 1, *decays), (1, T, 1))
    inputs = q, torch.nn.functional.normalize(k, dim=-1), v, -g.sigmoid() / (1 + 4 * len(decays)), beta.sigmoid()
    return [x.requires_grad_() for x in inputs]


def conv_inputs(T):
    return [x.requires_grad_() for x in drawn(0, (1, T, D), (D, W), (D,))]


def convolve(x, weight, bias=None, **boundary):
    out = causal_conv1d(x, weight, bias, activation="silu", backend="triton", **boundary)
    return out if isinstance(out, tuple) else (out,)


def apart(mine, theirs, inputs):
    """The largest difference, of the outputs or of any gradient; infinite where one is not a number."""
    (weights,) = drawn(1, mine.shape)
    grads = (torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (mine, theirs))
    return largest([(mine, theirs), *zip(*grads)])


def largest(pairs):
    return max(float((x - y).detach().abs().max().nan_to_num(nan=torch.inf)) for x, y in pairs)


# --- kernels


RULE = "fla", rule_inputs, chunk_gated_delta_rule, reference_gated_delta_rule
KDA = "fla", lambda T: rule_inputs(T, decays=(K,)), chunk_kda, naive_recurrent_kda
CONVOLUTION = "fla_conv", conv_inputs, convolve, lambda *x: (reference_causal_conv1d(*x, "silu"),)
FOR_ASCEND = {
    "fla": {"chunk_gated_delta_rule_fwd_kernel_h_blockdim64_npu", "chunk_bwd_kernel_dqkwg_npu"},
    "fla_conv": {"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_dx_kernel"},
}
CALLS = ["flat", *some([name for name in PACKINGS if name != "flat"], 1)]
"""A packing, and one more with each seed."""


@pytest.mark.parametrize(
    ("called", "packing"), [*((each, packing) for each in (RULE, CONVOLUTION) for packing in CALLS), (KDA, "tail")]
)
def test_a_kernel_on_our_arguments_computes_each_sequence_as_alone(called, packing):
    kernel, inputs_of, theirs, reference = called
    kwargs = gated_delta_kwargs(PACKINGS[packing], kernel=kernel)
    ends = kwargs["cu_seqlens"].tolist()
    inputs = inputs_of(ends[-1])
    LAUNCHED.clear()
    parts = [[x[:, a:b] if x.ndim > 2 else x for x in inputs] for a, b in pairwise(ends)]
    alone = torch.cat([reference(*each)[0] for each in parts], 1)
    assert apart(alone, theirs(*inputs, **kwargs)[0], inputs) < 1e-5
    assert apart(alone, reference(*inputs)[0], inputs) > 1e-2
    assert called is KDA or not ASCEND or FOR_ASCEND[kernel] <= LAUNCHED, LAUNCHED


def test_offsets_are_new_at_each_call():
    """fla keeps its tables by the identity of the offsets (utils/_decorators.py)."""
    one, other = (gated_delta_kwargs(PACKINGS["flat"], kernel="fla")["cu_seqlens"] for _ in range(2))
    assert one is not other


def test_the_table_of_fla_npu_is_flas_own():
    for lengths in ([3, 70], [64, 1, 65, 2, 8]):
        kwargs = gated_delta_kwargs(Segments.from_lengths([lengths]), kernel="fla_npu")
        held = torch.tensor(kwargs["cu_seqlens"])
        assert index.prepare_chunk_indices(held, 64).flatten().tolist() == [*kwargs["chunk_indices"]]


# --- transformers' hybrids, whose dispatch finds the rules. causal-conv1d is CUDA: our reference, or else torch's

PAD = 256
IDS = [[5, 9, 2, 77, 3, 8], [40, 41, 42, 43, 44, 41, 200, 31, 64]]
RULES = dict.fromkeys(("qwen3_next", "qwen3_5_text"), "torch_chunk_gated_delta_rule")
RULES["kimi_linear"] = "chunk_kimi_delta_attention"
"""Family -> transformers' name for its rule."""
BESIDE = some([*RULES] if NIGHTLY else [*RULES][:2], 1)  # kernels of kimi_linear take a minute


@pytest.fixture
def built(monkeypatch):
    """`built(family)`: a tiny model, of one linear layer with a head, for the interpreter's sake."""
    small = dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 1)
    small |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}

    def build(family):
        more = {"mlp_layer_types": ["dense", "sparse"]} if family == "kimi_linear" else {}
        monkeypatch.setitem(tiny_models._FAMILY, family, small | more)
        return tiny_model(family, vocab_size=PAD + 1)

    return build


def learned(model, batches):
    """Logits `[T, V]` and the gradient of the sum of their losses."""
    model.zero_grad(set_to_none=True)
    outs = []
    for batch in batches:
        labels = batch["labels"]
        outs.append(model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits)
        loss = torch.nn.functional.cross_entropy(outs[-1][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
    return torch.cat([out[0] for out in outs]).detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.together("fla under transformers")
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", *([] if ASCEND else BESIDE)])
def test_a_flat_row_of_an_adapted_model_is_as_alone(family, built, monkeypatch):
    if family in RULES:
        package = ModuleType("causal_conv1d")
        package.__spec__ = ModuleSpec("causal_conv1d", None)
        package.causal_conv1d_fn, package.causal_conv1d_update = causal_conv1d_fn, None
        monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    model = built(family)
    fla_interpreted.count_in_triton()
    LAUNCHED.clear()
    alone = learned(model, [{name: torch.tensor([ids]) for name in ("input_ids", "labels")} for ids in IDS])
    with adapt(model) as adapted:
        assert adapted.way == "by sequence"
        samples = [{"input_ids": ids, "labels": ids} for ids in IDS]
        batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(samples)
        logits, gradient = learned(model, [batch])
    assert (logits - alone[0]).abs().max() < 1e-4
    assert gradient_error(gradient, alone[1]) < 1e-4
    assert (FOR_ASCEND["fla"] if ASCEND else {"chunk_gated_delta_rule_fwd_kernel_h_blockdim64"}) <= LAUNCHED, LAUNCHED
    with torch.no_grad():
        assert (model(input_ids=batch["input_ids"]).logits[0] - logits).abs().max() > 0.5


ON_HOST = """
import sys, torch
package = sys.modules["causal_conv1d"] = type(sys)("causal_conv1d")
exec("def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None): raise RuntimeError", vars(package))
from collate_npu import adapt
from collate_npu.testing import left_out, tiny_model
for name in sys.argv[1:]:
    model = tiny_model(name, vocab_size=64)
    print(name, name in left_out(), adapt(model).way)
model(input_ids=torch.tensor([[1]]), attention_mask=torch.ones(1, 1))  # raises: alone none runs here
"""


@pytest.mark.skipif(ASCEND, reason="the same code")
def test_a_model_on_the_cpu_is_probed_where_its_kernels_run_on_a_card_alone():
    env = os.environ | {"TRITON_INTERPRET": "0", "FLA_KERNELS": ""}
    ran = subprocess.run([sys.executable, "-c", ON_HOST, *RULES], env=env, capture_output=True, text=True, check=False)
    assert (ran.stdout.splitlines(), ran.returncode) == ([f"{name} False by sequence" for name in RULES], 1), ran.stderr


# --- fla's context parallelism on two Gloo ranks, with our split, our offsets and our way back; one process is the truth

NAMES = ("query", "key", "value", "g", "beta", "x")
SHARED = {
    "packed": Segments.from_lengths([[3, 70, 55]]),
    "tail": Segments.from_lengths([[9, 1, 20]], width=32),
    "one": Segments.from_lengths([48]),
}
"""A sequence lies over the ranks' border in each."""
LAYOUTS = ("contiguous", "zigzag")[: 1 + (numbers(installed("fla")) >= (0, 6))]


def whole_batch(T):
    inputs = [x.detach() for x in (*rule_inputs(T), *conv_inputs(T)[:2])]
    return dict(zip(NAMES, inputs)), inputs[-1].requires_grad_()


def ended(outs, inputs, taps):
    """Outputs, and the gradients of all inputs, of one scalar of both outputs."""
    sum((out * drawn(1, out.shape)[0]).sum() for out in outs).backward()
    return outs, {name: x.grad for name, x in inputs.items()} | {"taps": taps.grad}


def one_process(segments):
    batch, taps = whole_batch(segments.shape[1])
    inputs = {name: x.requires_grad_() for name, x in batch.items()}
    offsets = gated_delta_kwargs(segments, kernel="fla")["cu_seqlens"]
    rule, _ = reference_gated_delta_rule(*(inputs[name] for name in NAMES[:5]), cu_seqlens=offsets)
    return ended((rule, reference_causal_conv1d(inputs["x"], taps, None, "silu", cu_seqlens=offsets)), inputs, taps)


def on_both(segments, layout):
    """Gathered outputs, and the gradients of this rank's inputs gathered, of the weights summed."""
    cp = ContextParallel.from_group(dist.group.WORLD, layout=layout)
    batch, taps = whole_batch(segments.shape[1])
    inputs = {name: x.requires_grad_() for name, x in split_batch(batch, cp, segments=segments).items()}
    told = {"layout": layout} if layout == "zigzag" else {}
    offsets = gated_delta_kwargs(segments, kernel="fla_cp")["cu_seqlens"]
    context = build_cp_context(offsets, group=cp.group, conv1d_kernel_size=W, **told)
    rule, _ = chunk_gated_delta_rule(*(inputs[name] for name in NAMES[:5]), cp_context=context)
    out, *_ = convolve(inputs["x"], taps, cp_context=context)
    outs, grads = ended([gather_sequence(x, cp, segments) for x in (rule, out)], inputs, taps)
    dist.all_reduce(taps.grad)
    return outs, {name: x if name == "taps" else gather_sequence(x, cp, segments) for name, x in grads.items()}


def start() -> None:
    """What a rank of a CPU needs: fla's kernels in the interpreter, no question for a card, and Gloo's way to gather."""
    fla_interpreted.count_in_triton()
    for module in list(sys.modules.values()):  # 0.6.0 asks for a card
        if module.__name__.startswith("fla.ops.cp") and hasattr(module, "_check_cp_device"):
            module._check_cp_device = lambda device: None
    flat_gather = dist.all_gather_into_tensor
    # Gloo wants the sizes of the parts, NCCL only their number of elements
    dist.all_gather_into_tensor = lambda out, part, **said: flat_gather(out.view(-1, *part.shape[1:]), part, **said)


def on_rank():
    start()
    found = {}
    for name, segments in SHARED.items():
        outs, grads = one_process(segments)
        for layout in LAYOUTS:
            mine, theirs = on_both(segments, layout)
            found[f"{name}, {layout}"] = largest([*zip(mine, outs), *((x, grads[key]) for key, x in theirs.items())])
    try:
        odd, _ = whole_batch(73)
        split_batch(odd, ContextParallel.from_group(dist.group.WORLD, layout="contiguous"), segments=PACKINGS["flat"])
    except CollateError as refused:
        return found, str(refused)


@pytest.mark.together("fla on two ranks")
@pytest.mark.skipif(ASCEND, reason="the same code")
def test_our_split_and_offsets_are_exact_on_two_ranks(ranks):
    """Outputs, gradients of the inputs and of the weights; a row that does not divide is refused."""
    found, refused = ranks(2)("test_fla.on_rank", seconds=400)[1]
    assert len(found) == len(SHARED) * len(LAYOUTS)
    assert max(found.values()) < 2e-5, found
    assert "73" in refused
