"""MindSpeed, and TransformerEngineNPU beside it: each release is handed what its attention can compute, or nothing.

`Layer` is what one attention layer of a release hands to `npu_fusion_attention`, from its source; every call is computed by
the operator's oracle. The releases' own source gave the same calls when it was run.
"""

from types import FunctionType, SimpleNamespace

import pytest
import torch
from attention_oracle import reference_fusion_attention
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from collate_npu import BatchAdapter, ContextParallel, Pattern, Segments
from collate_npu.consumers import mindspeed
from collate_npu.consumers.mask_choice import Case, Model, consumer_named
from collate_npu.consumers.megatron import kernel_of, kernel_of_args, npu_engine
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.kernels.fusion_attention import triangle
from collate_npu.masks import dense
from collate_npu.masks.forms import open_empty_rows

# Whose attention stands in TransformerEngine's place: "local" in 2.3.0 (transformer_engine_basic.py:23-25), "own" in 26.0.0,
# 26.1.0 and 0.14 to 0.16 (te/.../dot_product_attention.py:655-682), "separate" in 0.17 and 0.18 (README.md:113-118).
FOLDERS = {"own": "te/pytorch/attention/dot_product_attention", "local": "te/pytorch/module", "separate": "core"}
HEADS, D = 2, 8
RIGHT, LEFT = Segments.from_lengths([3, 8], 8), Segments.from_lengths([3, 8], 8, side="left")
PACKED, FLAT, LONG = Segments.from_lengths([[3, 5], [4]]), Segments.from_lengths([[3, 5]]), Segments.from_lengths([2048])
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])


class Layer:
    """One attention layer with one rank a row: its arguments for the operator, batch after batch."""

    def __init__(self, te: str, settings: SimpleNamespace) -> None:
        self.own = te == "own" and settings.transformer_impl != "local"
        self.settings, self.sparse_mode = settings, 0  # --sparse-mode, fusion_attention_v1_feature.py:35-39

    def kwargs(self, masked, segments, *, flat=False):
        settings = self.settings
        if masked is None:  # generate_mask/adaptor.py:26-31
            self.sparse_mode, masked = 2, triangle() if settings.use_flash_attn else self._square()
        own = {"causal": 2, "general": 1}[settings.attention_mask_type]  # backend.py:12-28
        mode = own if self.own else self.sparse_mode
        tokens = {"pre_tockens": 65536, "next_tockens": 0, "inner_precise": 0}  # backend.py:90-106
        ends = [0, *torch.tensor(segments.lengths[0]).cumsum(0).tolist()] if flat else None  # backend.py:76-81
        lists = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        return tokens | lists | {"input_layout": "TND" if flat else "SBH", "atten_mask": masked, "sparse_mode": mode}

    def _square(self):  # generate_mask.py:21-39
        assert self.settings.width, "Please set micro_batch_size or set use_flash_attn=True in config."
        return dense(Segments.from_lengths([self.settings.width] * 2), polarity="masked")


def settings_of(kind="causal", flash=True, impl="transformer_engine", cp=1, width=8):
    told = {"attention_mask_type": kind, "use_flash_attn": flash, "transformer_impl": impl}
    return SimpleNamespace(**told, context_parallel_size=cp, width=width)


def off(layer, masked, segments, flat=False):
    """The largest error of a real token, by the operator's reference. Raises where the card refuses the call."""
    B, S = segments.shape
    q, k, v = (torch.randn(B, HEADS, S, D, generator=torch.Generator().manual_seed(n)) for n in range(3))
    lay = (lambda x: x[0].transpose(0, 1)) if flat else (lambda x: x.permute(2, 0, 1, 3).flatten(2))
    kwargs = layer.kwargs(masked, segments, flat=flat)
    out = reference_fusion_attention(lay(q), lay(k), lay(v), HEADS, kwargs.pop("input_layout"), scale=D**-0.5, **kwargs)[0]
    out = out[None] if flat else out.unflatten(-1, (HEADS, D)).transpose(0, 1)
    right = scaled_dot_product_attention(q, k, v, attn_mask=dense(segments)).transpose(1, 2)
    return float((out[segments.keep] - right[segments.keep]).abs().max())


# --- what we hand over: right, or refused, whatever came before


@pytest.mark.parametrize("te", FOLDERS)
@pytest.mark.parametrize("kind", ["causal", "general"])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_every_batch_is_right_or_refused(te, kind, flash, impl):
    settings = settings_of(kind, flash, impl)
    if te == "own" and impl == "transformer_engine" and not flash and kind == "causal":
        pytest.skip("the card refuses every mask, or MindSpeed raises")
    consumer = mindspeed.kernel_of_settings(settings, te=te)
    adapter, layer, answers = BatchAdapter(needs_mask_2d=False, consumer=consumer), Layer(te, settings), []
    for segments in (RIGHT, LEFT, PACKED, RIGHT, LEFT, LONG):
        try:
            masked = adapter.write({"input_ids": segments.ids}, segments)["attention_mask"]
        except UnsupportedFormError:
            answers.append("refused")
            continue
        answers.append("none" if masked is None else "dense")
        if impl == "local" and not flash:
            assert masked is not None, "MindSpeed would make one of seq_length, whatever the width"
        elif te != "separate" or impl == "local":
            assert off(layer, masked, segments) < 1e-5
        else:
            assert masked is None, "its kernels are TransformerEngine's"
    at_most_none = ["none", "refused", "refused", "none", "refused", "none"]
    assert answers == (["dense"] * 6 if consumer == "mindspeed_dense" else at_most_none)


@pytest.mark.parametrize("te", FOLDERS)
@pytest.mark.parametrize("kind", ["causal", "general"])
def test_flat_rows(te, kind):
    settings = settings_of(kind)
    adapter = BatchAdapter(needs_mask_2d=False, consumer=mindspeed.kernel_of_settings(settings, te=te), padding_free=True)
    if (te, kind) == ("own", "general"):
        with pytest.raises(UnsupportedFormError, match="attention_mask_type=causal and use_flash_attn for flat rows"):
            adapter.choose(FLAT)
        return
    assert adapter.choose(FLAT).form == "none"
    if te != "separate":
        assert off(Layer(te, settings), None, FLAT, flat=True) < 1e-5


@pytest.mark.parametrize("te", FOLDERS)
def test_context_parallelism_takes_no_mask(te):
    """0.16.0: ring_context_parallel.py:474-497 in mode 3, general get_batch_utils.py:180-203."""
    assert mindspeed.kernel_of_settings(settings_of(cp=2), te=te) == "mindspeed"
    for alone in (SimpleNamespace(attention_mask_type="general"), settings_of("general", cp=None)):
        assert mindspeed.kernel_of_settings(alone, te="own") == "mindspeed_dense"
    with pytest.raises(UnsupportedFormError, match="Set attention_mask_type=causal"):
        mindspeed.kernel_of_settings(settings_of("general", cp=2), te=te)
    with pytest.raises(UnsupportedFormError, match="Leave context_parallel out"):
        BatchAdapter(HYBRID, consumer="mindspeed_dense", context_parallel=ContextParallel(2, 0))
    assert BatchAdapter(HYBRID, consumer="mindspeed_dense", context_parallel=ContextParallel(1, 0))


@pytest.mark.parametrize("consumer", ["mindspeed", "mindspeed_dense"])
def test_a_window_that_is_dropped_is_refused(consumer):
    model = Model(config=SimpleNamespace(window_size=(3, 0)), needs_mask_2d=False)
    wide = [Model(config=SimpleNamespace(window_size=size), needs_mask_2d=False) for size in ((-1, 0), (), None, 1)]
    choose = consumer_named(consumer).choose
    with pytest.raises(UnsupportedFormError, match=r"drops Megatron's window_size .* \(3, 0\).*rows no longer than"):
        choose(Case(segments=Segments.from_lengths([5]), model=model))
    assert choose(Case(segments=Segments.from_lengths([4]), model=model))
    with pytest.raises(UnsupportedFormError, match=r"\(0, 0\)"):
        choose(Case(segments=RIGHT, model=Model(config=SimpleNamespace(window_size=(0, 0)), needs_mask_2d=False)))
    assert all(choose(Case(segments=RIGHT, model=each)) for each in wide)
    sliding = Case(segments=RIGHT, model=model, pattern=Pattern.sliding(4))
    assert consumer_named("mindspeed_dense").choose(sliding).form == "masked"


# --- which release, which attention


@pytest.fixture
def install(tmp_path, monkeypatch):
    def packages(*folders):
        for folder in folders:
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder.partition("/")[0] / "__init__.py").write_text("raise ImportError('looking must not import')")
        monkeypatch.syspath_prepend(str(tmp_path))

    return packages


@pytest.mark.parametrize("te", FOLDERS)
def test_the_release_is_told_by_its_files(install, te):
    assert not mindspeed.is_installed()
    without = SimpleNamespace(attention_backend="flash", attention_mask_type="general")
    assert kernel_of_args(without) == "transformer_engine"
    install(f"mindspeed/{FOLDERS[te]}")
    assert mindspeed.is_installed()
    assert mindspeed.transformer_engine() == te
    general = {"own": "mindspeed_dense", "local": "mindspeed", "separate": "mindspeed"}[te]
    swift = SimpleNamespace(attention_backend=SimpleNamespace(name="flash"), context_parallel_size=1)
    assert kernel_of_args(swift) == "mindspeed"
    swift.attention_mask_type = "general"
    assert kernel_of_args(swift) == general
    swift.attention_backend.name = "local"
    assert kernel_of_args(swift) == "mindspeed"
    assert kernel_of_args(SimpleNamespace(**vars(swift), use_flash_attn=False)) == "mindspeed_dense"


def attention(name, home, defined_in=None):
    """A layer whose forward is a function of the module `home`, though its name may say another (functools.wraps)."""
    forward = FunctionType((lambda self: None).__code__, {"__name__": home})
    forward.__module__ = defined_in or home
    return type(name, (nn.Module,), {"forward": forward, "__module__": defined_in or home})()


TE_HOME = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"
LOCAL_HOME = "mindspeed.core.transformer.flash_attention.generate_mask.adaptor"
RING_HOME = "mindspeed.core.context_parallel.dot_product_attention"
MEGATRON_HOME, MEGATRON_TE = "megatron.core.transformer.dot_product_attention", "megatron.core.extensions.transformer_engine"


@pytest.mark.parametrize(
    ("layer", "settings", "consumer"),
    [
        (attention("TEDotProductAttention", TE_HOME), settings_of(), "mindspeed"),
        (attention("MindSpeedTEDotProductAttention", TE_HOME), settings_of("general"), "mindspeed_dense"),
        (attention("DotProductAttention", LOCAL_HOME, MEGATRON_HOME), settings_of("general"), "mindspeed"),
        (attention("DotProductAttention", LOCAL_HOME, MEGATRON_HOME), settings_of(flash=False), "mindspeed_dense"),
        (attention("MindSpeedCPDotProductAttention", RING_HOME), settings_of(cp=2), "mindspeed"),
        (attention("DotProductAttention", MEGATRON_HOME), settings_of(), "megatron"),
        (attention("TEDotProductAttention", MEGATRON_TE), settings_of(), "transformer_engine"),
    ],
)
def test_a_model_tells_it(layer, settings, consumer):
    model = nn.Sequential(nn.Linear(1, 1), layer)
    model.config = settings
    assert kernel_of(model) == consumer


NPU, ADAPTOR = "transformer_engine_npu", "megatron_adaptor"


@pytest.mark.parametrize("packages", [(), (NPU,), (ADAPTOR,), (ADAPTOR, NPU), (ADAPTOR, "mindspeed")])
def test_packages_tell_whose_attention_it_is(install, packages):
    flash = "mindspeed" if "mindspeed" in packages else NPU if packages else "transformer_engine"
    assert not npu_engine()
    install(*packages)
    assert npu_engine() is (flash == NPU)
    for either in ({"attention_backend": "flash", "masked_softmax_fusion": False}, {"attention_backend": "local"}):
        assert kernel_of_args(SimpleNamespace(**either)) == flash
    local = SimpleNamespace(attention_backend="local", masked_softmax_fusion=False, use_flash_attn=True)
    assert kernel_of_args(local) == ("megatron" if "mindspeed" not in packages else "mindspeed")
    for layer, kernel in (("DotProductAttention", "megatron"), ("TEDotProductAttention", flash)):
        model = nn.Sequential(type(layer, (nn.Module,), {})())
        model.config = SimpleNamespace(masked_softmax_fusion=False)
        assert kernel_of(model) == kernel or "mindspeed" in packages


# --- Qwen3-Next of MindSpeed-LLM: what is accepted is right in a model of such layers, and what is refused is wrong there

DENSE = SimpleNamespace(layer_types=["full_attention"])
ONE, HOLE, ROWS = Segments.from_lengths([[8]]), Segments([[1, 1, 0, 0, 1, 1]]), Segments.from_lengths([[3, 2], [5]])


@pytest.mark.parametrize("segments", [RIGHT, LEFT, HOLE, ROWS, FLAT, ONE])
@pytest.mark.parametrize("model", [HYBRID, DENSE])
def test_convolutions_and_scans_that_no_boundary_reaches_take_one_sequence_a_row(segments, model):
    """Attention is causal inside its offsets, all else runs on."""
    flat = segments in (FLAT, ONE)
    adapter = BatchAdapter(model, consumer="mindspeed_llm", padding_free=flat)
    if not (segments in (RIGHT, ONE) or (segments is FLAT and model is DENSE)):
        with pytest.raises(UnsupportedFormError, match=r"MindSpeed-LLM|several sequences"):
            adapter.choose(segments)
        return
    out = adapter.write({"input_ids": segments.ids, "attention_mask_2d": segments.keep}, segments)
    assert "attention_mask_2d" not in out
    assert out["attention_mask"] is None


def test_a_megatron_model_with_mindspeeds_attention_gets_what_that_reads():
    home = {"__name__": "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"}
    forward = FunctionType((lambda self: None).__code__, home)
    model = nn.Sequential(type("TEDotProductAttention", (nn.Module,), {"forward": forward})())
    model.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, use_flash_attn=True)

    def read(truth, kind):
        model.config.attention_mask_type = kind
        given = {"input_ids": truth.ids, "attention_mask_2d": truth.keep}
        return gpt_batch(given, model, context_parallel=ContextParallel(1, 0))[0]["attention_mask"]

    right, left = Segments.from_lengths([2, 4]), Segments.from_lengths([2, 4], side="left")
    assert torch.equal(read(right, "general"), dense(right, polarity="masked"))
    assert torch.equal(read(left, "general"), open_empty_rows(dense(left, polarity="masked")))
    assert read(right, "causal") is None
    with pytest.raises(UnsupportedFormError, match="compressed causal triangle"):
        read(left, "causal")
