"""The real torch_npu wheel. Beside it the package works with CANN, without CANN, and with CANN and no card; its operator
takes our calls by name and type; and a pretended card, which holds tensors and computes nothing, is no pass.

That meta and FakeTensor take a call says its argument names and types are right; about masks it says nothing, for they
take a mask of any shape.
"""

import itertools
import os
import random
from types import SimpleNamespace

import cann_stub
import pytest
import torch
from attention_oracle import DEFAULTS, reference_fusion_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typed import typed

from benchmarks.operators import KERNELS, TRUTHS, of_kernel
from collate_npu import BatchAdapter, PaddingCollator, Pattern, Segments
from collate_npu.kernels import fusion_attention_kwargs
from collate_npu.proof.invariance import Reference
from collate_npu.testing import tiny_model
from collate_npu.tools.audit import Subject

# --- processes of their own

GONE, SWITCH = ".so: cannot open shared object file", "TORCH_DEVICE_BACKEND_AUTOLOAD"
ENV = "import runpy, sys; sys.argv = ['collate-npu', 'env']; runpy.run_module('collate_npu', run_name='__main__')"
RUNS_WITHOUT = """
import collate_npu, collate_npu.kernels.fusion_attention, sys
from collate_npu import Segments
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 5]))
assert kwargs["sparse_mode"] == 3
assert not [name for name in sys.modules if name.startswith("torch_npu")]
try:
    import torch_npu
except ImportError as error:
    print(error)
"""


def test_without_cann_the_package_works_and_only_torch_npu_does_not(without_cann):
    assert GONE in without_cann(RUNS_WITHOUT, **{SWITCH: "0"}), "is CANN installed after all?"


def test_without_cann_torch_itself_names_the_switch(without_cann):
    code = "try:\n    import torch\nexcept RuntimeError as error:\n    print(error)"
    assert f"{SWITCH}=0" in without_cann(code, **{SWITCH: "1"})


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_without_cann_the_report_of_env_explains_the_state(without_cann, autoload):
    """Also where torch loads torch_npu by itself, and `import torch` fails."""
    said = without_cann(ENV, **{SWITCH: autoload})
    assert [words in said for words in ("- npu: torch_npu does not load", GONE)] == [True, True]
    assert f"{SWITCH}=0 to work on the CPU, or source CANN's set_env.sh" in said


@pytest.mark.parametrize(
    ("devices", "said"), [("0", "- devices: cpu only"), ("2", "- devices: npu x 2 (Ascend910B1)\n- npu: torch_npu loads")]
)
def test_with_cann_env_names_the_devices_or_none(without_cann, stand_ins, devices, said):
    pretended = {cann_stub.DEVICES: devices} if devices != "0" else {}
    assert said in without_cann(ENV, LD_LIBRARY_PATH=str(stand_ins[0].parent), **{SWITCH: "1"}, **pretended)


# --- the operator's schema and its meta kernel

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 16
OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_v3")
LAYOUTS = ("BSND", "BNSD", "BSH", "SBH", "TND")
PATTERNS = ("causal", "bidirectional", Pattern.sliding(2), Pattern.chunked(2), Pattern.prefix([1, 2]))
BATCHES = [Segments.from_lengths([3, 5], side=side) for side in ("right", "left")]


def tensors(layout, batch, device):
    (B, S), heads = batch.shape, (HEADS, KEY_HEADS, KEY_HEADS)
    shapes = {
        "BSND": [(B, S, n, HEAD_DIM) for n in heads],
        "BNSD": [(B, n, S, HEAD_DIM) for n in heads],
        "BSH": [(B, S, n * HEAD_DIM) for n in heads],
        "SBH": [(S, B, n * HEAD_DIM) for n in heads],
        "TND": [(batch.num_tokens, n, HEAD_DIM) for n in heads],
    }
    return [torch.zeros(shape, device=device) for shape in shapes[layout]]


def kwargs_of(name, batch, **settings):
    """`_v3` takes its lists as tensors on the host."""
    kwargs = fusion_attention_kwargs(batch, **settings)
    lists = {key: torch.tensor(kwargs[key]) for key in kwargs if key.startswith("actual_seq") and name.endswith("_v3")}
    return kwargs | lists


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("name", OPERATORS)
def test_our_argument_names_and_defaults_are_the_wheels(name):
    wheels = getattr(torch.ops.npu, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in wheels}
    assert list(defaults)[:5] == ["query", "key", "value", "head_num", "input_layout"]
    ours = {key: value for key, value in DEFAULTS.items() if key in defaults}
    assert ours == {key: value for key, value in defaults.items() if key not in ("query", "key", "value", "head_num")}
    assert DEFAULTS.keys() - defaults.keys() == (set() if name == OPERATORS[0] else {"dropout_mask", "seed", "offset"})


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(("name", "layout"), itertools.product(OPERATORS, LAYOUTS))
def test_meta_and_fake_tensors_take_every_argument_set(name, layout):
    operator = getattr(torch.ops.npu, name)
    for pattern, batch in itertools.product(PATTERNS, BATCHES):
        given = {"pattern": pattern, "layout": layout}
        ours = reference_fusion_attention(*tensors(layout, batch, "cpu"), HEADS, **kwargs_of(name, batch, **given))
        on_meta = kwargs_of(name, batch, **given, device="meta")
        found = [operator(*tensors(layout, batch, "meta"), HEADS, **on_meta)]
        # FakeTensorMode takes one device a call, and _v3 wants its lists on the host.
        device = "cpu" if name == OPERATORS[1] and layout == "TND" else "npu"
        placed = kwargs_of(name, batch, **given, device=device)
        with FakeTensorMode() as mode:
            faked = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in placed.items()}
            found.append(operator(*tensors(layout, batch, device), HEADS, **faked))
        for outputs in found:
            assert [each.shape for each in outputs[:4]] == [each.shape for each in ours[:4]]


def test_the_wheels_own_function_takes_our_calls(calls):
    """On the CPU, where the oracle stands behind the real operator's schema."""
    names = ("padded left", "window", "prefix", "packed rows", "chunks")
    truths = [truth for truth in TRUTHS if truth.name in names]
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == "torch_npu.npu_fusion_attention")
    found = list(of_kernel(kernel, kernel.function("npu"), device="cpu", dtype=torch.float32, truths=truths))
    assert {run.state for run in found} == {"right"}, found
    assert len(calls) == len(found) > 20
    assert {call.get("sparse_mode", 0) for call in calls} == {0, 3, 4, 6}


# --- a pretended card


@pytest.mark.usefixtures("torch_npu")
def test_the_audit_refuses_a_device_that_does_not_compute():
    """There zeros would be compared with numbers, and every case would pass: it is said at once, and nothing is called."""
    result = typed("audit", "--model", "qwen3_5_text", "--device", "npu")
    assert (result.exit_code, "One and one is not two there" in " ".join(result.output.split())) == (2, True), result.output


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text"])
def test_everything_the_audit_hands_the_model_is_where_the_model_is(model_type, monkeypatch):
    model, given = tiny_model(model_type, vocab_size=64).to("npu:0"), []

    def forward(**kwargs):
        given.append(kwargs)
        return SimpleNamespace(logits=torch.zeros(*kwargs["input_ids"].shape, 64).to("npu:0"))

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr("collate_npu.proof.measure.check_noise", lambda *_: None)  # what the stand-in computes is no number
    reference = Reference(
        model, [[{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3], [4, 5, 6, 7, 8])]], gradients=False
    )
    case = Subject(reference=reference, model=model, pad_token_id=60, about={"model": "", "attention": "sdpa"})
    for side in ("left", "right"):
        case.ours(side)
    assert any("attention_mask" in call for call in given)
    held = [*model.parameters(), *(x for x in tree_leaves(given) if isinstance(x, torch.Tensor))]
    assert {tensor.device for tensor in held} == {torch.device("npu:0")}


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed):
        draw = random.Random(seed)
        self.lengths = [draw.choice((1, 7, 300, 40_000 if n % 5 == 0 else 20)) for n in range(12)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, n):
        return {"input_ids": torch.arange(self.lengths[n]) + n + 1}


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_pinned_batches_are_those_that_were_collated(start):
    """Workers of another start: a forked one would inherit the card."""
    collate = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
    adapter = BatchAdapter(needs_mask_2d=True, consumer="verl", device="npu")
    for seed in range(10 if "COLLATE_NPU_NIGHTLY" in os.environ else 1):
        rows = Rows(seed)
        loader = DataLoader(rows, 4, num_workers=2, collate_fn=collate, pin_memory=True, multiprocessing_context=start)
        wanted = [collate([rows[n] for n in range(at, at + 4)]) for at in range(0, 12, 4)]
        for batch, own in zip(loader, wanted, strict=True):
            assert batch.keys() == own.keys()
            assert all(page.is_pinned() and torch.equal(page, own[key]) for key, page in batch.items())
            moved = adapter(batch)["input_ids"]
            assert (moved.device.type, torch.equal(moved.cpu(), own["input_ids"])) == ("npu", True)
