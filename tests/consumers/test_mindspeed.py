"""MindSpeed: each release is handed what its attention can compute, or nothing at all.

`Layer` is what one attention layer of a release hands to `npu_fusion_attention`, from its source; every call is checked
by the operator's contract and computed by its CPU reference. The releases' own source gave the same calls when it was run.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from collate_npu import BatchAdapter, ContextParallel, Pattern, Segments, UnsupportedFormError, dense
from collate_npu.consumers import mindspeed
from collate_npu.consumers.consumer import Model, route
from collate_npu.consumers.megatron import kernel_of, kernel_of_args
from collate_npu.kernels.fusion_attention import contract_breaches, reference_fusion_attention, triangle
from collate_npu.masks.forms import open_empty_rows

RELEASES = {
    # whose attention stands in TransformerEngine's place, and where the release says so
    "2.3.0_core_r0.12.1": ("local", "features_manager/megatron_basic/transformer_engine_basic.py:23-25"),
    "26.0.0_core_r0.12.1": ("own", "te/pytorch/attention/dot_product_attention/dot_product_attention.py:627-647"),
    "26.1.0_core_r0.12.1": ("own", "te/pytorch/attention/dot_product_attention/dot_product_attention.py:627-647"),
    "core_r0.14.0": ("own", "te/pytorch/attention/dot_product_attention/dot_product_attention.py:655-675"),
    "core_r0.15.3": ("own", "te/pytorch/attention/dot_product_attention/dot_product_attention.py:656-676"),
    "core_r0.16.0": ("own", "te/pytorch/attention/dot_product_attention/dot_product_attention.py:662-682"),
    "core_r0.17.0": ("separate", "README.md:113-118"),
    "core_r0.18.0": ("separate", "README.md:113-118"),
}
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
        mode = (
            {"causal": 2, "general": 1}[settings.attention_mask_type] if self.own else self.sparse_mode
        )  # backend.py:12-28
        tokens = {"pre_tockens": 65536, "next_tockens": 0, "inner_precise": 0}  # backend.py:90-106
        ends = [0, *torch.tensor(segments.lengths[0]).cumsum(0).tolist()] if flat else None  # backend.py:76-81
        lists = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        return tokens | lists | {"input_layout": "TND" if flat else "SBH", "atten_mask": masked, "sparse_mode": mode}

    def _square(self):  # generate_mask.py:21-39
        assert self.settings.width, "Please set micro_batch_size or set use_flash_attn=True in config."
        return dense(Segments.from_lengths([self.settings.width] * 2), polarity="masked")


def settings_of(kind="causal", flash=True, impl="transformer_engine", cp=1, width=8):
    return SimpleNamespace(
        attention_mask_type=kind, use_flash_attn=flash, transformer_impl=impl, context_parallel_size=cp, width=width
    )


def rules(layer, masked, segments, flat=False):
    kwargs = layer.kwargs(masked, segments, flat=flat)
    return [breach.rule for breach in contract_breaches(kwargs, N=HEADS, Nkv=HEADS, D=D, segments=segments)]


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


# --- the table, as the releases' own source answered


@pytest.mark.parametrize(
    ("te", "kind", "flash", "none", "dense_left", "packed", "long"),
    [
        ("own", "causal", True, [], ["compressed-shape"], [], []),
        ("own", "causal", False, ["compressed-shape"], ["compressed-shape"], ["mask-shape"], ["mask-shape"]),
        ("own", "general", True, ["mask-shape"], [], ["mask-shape"], ["compressed-as-dense"]),
        ("local", "causal", True, [], [], [], []),
        ("local", "general", True, [], [], [], []),
    ],
)
def test_what_a_mask_becomes(te, kind, flash, none, dense_left, packed, long):
    def fresh():
        return Layer(te, settings_of(kind, flash))

    assert rules(fresh(), None, RIGHT) == none
    assert rules(fresh(), open_empty_rows(dense(LEFT, polarity="masked")), LEFT) == dense_left
    assert rules(fresh(), None, FLAT, flat=True) == packed
    assert rules(fresh(), None, LONG) == long


def test_after_a_none_local_attention_takes_no_dense_mask_any_more():
    layer = Layer("local", settings_of())
    masked = open_empty_rows(dense(LEFT, polarity="masked"))
    assert rules(layer, masked, LEFT) == []
    assert rules(layer, None, RIGHT) == []
    assert rules(layer, masked, LEFT) == ["compressed-shape"]


def test_a_padding_query_that_sees_nothing_is_no_use_to_the_kernel():
    assert rules(Layer("own", settings_of("general")), dense(LEFT, polarity="masked"), LEFT) == ["empty-row"]


# --- what we hand over: right, or refused, whatever came before


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", ["causal", "general"])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_every_batch_is_right_or_refused(release, kind, flash, impl):
    te, settings = RELEASES[release][0], settings_of(kind, flash, impl)
    if te == "own" and impl == "transformer_engine" and not flash and kind == "causal":
        with pytest.raises(UnsupportedFormError, match="Set use_flash_attn=True"):
            mindspeed.kernel_of_settings(settings, te=te)
        return
    consumer = mindspeed.kernel_of_settings(settings, te=te)
    adapter, layer, answers = BatchAdapter(needs_mask_2d=False, consumer=consumer), Layer(te, settings), []
    for segments in (RIGHT, LEFT, PACKED, RIGHT, LEFT, LONG):
        try:
            masked = adapter.render({"input_ids": segments.ids}, segments)["attention_mask"]
        except UnsupportedFormError:
            answers.append("refused")
            continue
        answers.append("none" if masked is None else "dense")
        if impl == "local" and not flash:
            assert masked is not None, "MindSpeed would make one of seq_length, whatever the width"
        elif te != "separate" or impl == "local":
            assert rules(layer, masked, segments) == []
            assert off(layer, masked, segments) < 1e-5
        else:
            assert masked is None, "its kernels are TransformerEngine's"
    at_most_none = ["none", "refused", "refused", "none", "refused", "none"]
    assert answers == (["dense"] * 6 if consumer == "mindspeed_dense" else at_most_none)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", ["causal", "general"])
def test_flat_rows(release, kind):
    te = RELEASES[release][0]
    settings = settings_of(kind)
    adapter = BatchAdapter(needs_mask_2d=False, consumer=mindspeed.kernel_of_settings(settings, te=te), padding_free=True)
    if (te, kind) == ("own", "general"):
        with pytest.raises(UnsupportedFormError, match="attention_mask_type=causal and use_flash_attn for flat rows"):
            adapter.route(FLAT)
        return
    assert adapter.route(FLAT).form == "none"
    if te != "separate":
        assert off(Layer(te, settings), None, FLAT, flat=True) < 1e-5


def test_the_remedies_work():
    left = {"input_ids": LEFT.ids, "attention_mask_2d": LEFT.keep}
    with pytest.raises(UnsupportedFormError, match="under attention_mask_type=general"):
        BatchAdapter(HYBRID, consumer="mindspeed")(left)
    general = settings_of("general")
    out = BatchAdapter(HYBRID, consumer=mindspeed.kernel_of_settings(general, te="own"))(left)
    assert off(Layer("own", general), out["attention_mask"], LEFT) < 1e-5
    assert torch.equal(out["attention_mask_2d"], LEFT.keep)


@pytest.mark.parametrize("te", FOLDERS)
def test_context_parallelism_takes_no_mask(te):
    """0.16.0: ring_context_parallel.py:474-497 in mode 3, general get_batch_utils.py:180-203."""
    assert mindspeed.kernel_of_settings(settings_of(cp=2), te=te) == "mindspeed"
    with pytest.raises(UnsupportedFormError, match="Set attention_mask_type=causal"):
        mindspeed.kernel_of_settings(settings_of("general", cp=2), te=te)
    with pytest.raises(UnsupportedFormError, match="Leave context_parallel out"):
        BatchAdapter(HYBRID, consumer="mindspeed_dense", context_parallel=ContextParallel(2, 0))
    assert BatchAdapter(HYBRID, consumer="mindspeed_dense", context_parallel=ContextParallel(1, 0))


@pytest.mark.parametrize("consumer", ["mindspeed", "mindspeed_dense"])
def test_a_window_that_is_dropped_is_refused(consumer):
    model = Model(config=SimpleNamespace(window_size=(3, 0)), needs_mask_2d=False)
    with pytest.raises(UnsupportedFormError, match=r"drops Megatron's window_size .* \(3, 0\)"):
        route(consumer, Segments.from_lengths([5]), model=model)
    assert route(consumer, Segments.from_lengths([4]), model=model)
    assert route(consumer, RIGHT, model=Model(config=SimpleNamespace(window_size=(-1, 0)), needs_mask_2d=False))
    assert route("mindspeed_dense", RIGHT, model=model, pattern=Pattern.sliding(4)).form == "masked"


# --- which release, which attention


@pytest.fixture
def install(tmp_path, monkeypatch):
    def release(te):
        (tmp_path / "mindspeed" / FOLDERS[te]).mkdir(parents=True)
        (tmp_path / "mindspeed" / "__init__.py").write_text("raise ImportError('looking must not import it')")
        monkeypatch.syspath_prepend(str(tmp_path))

    return release


@pytest.mark.parametrize("te", FOLDERS)
def test_the_release_is_told_by_its_files(install, te):
    assert not mindspeed.installed()
    install(te)
    assert mindspeed.installed()
    assert mindspeed.transformer_engine() == te
    general = {"own": "mindspeed_dense", "local": "mindspeed", "separate": "mindspeed"}[te]
    swift = SimpleNamespace(attention_backend=SimpleNamespace(name="flash"), context_parallel_size=1)
    assert kernel_of_args(swift) == "mindspeed"
    swift.attention_mask_type = "general"
    assert kernel_of_args(swift) == general
    assert BatchAdapter.from_args(swift, needs_mask_2d=True).consumer.name == general
    swift.attention_backend.name = "local"
    assert kernel_of_args(swift) == "mindspeed"
    assert kernel_of_args(SimpleNamespace(**vars(swift), use_flash_attn=False)) == "mindspeed_dense"


def test_without_mindspeed_nothing_changes():
    assert kernel_of_args(SimpleNamespace(attention_backend="flash", attention_mask_type="general")) == "transformer_engine"


def attention(name, home, defined_in=None):
    """A layer whose forward is a function of the module `home`, though its name may say another (functools.wraps)."""
    forward = FunctionType((lambda self: None).__code__, {"__name__": home})
    forward.__module__ = defined_in or home
    return type(name, (nn.Module,), {"forward": forward, "__module__": defined_in or home})()


TE_HOME = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"
LOCAL_HOME = "mindspeed.core.transformer.flash_attention.generate_mask.adaptor"
RING_HOME = "mindspeed.core.context_parallel.dot_product_attention"
MEGATRON_HOME = "megatron.core.transformer.dot_product_attention"


@pytest.mark.parametrize(
    ("layer", "settings", "consumer"),
    [
        (attention("TEDotProductAttention", TE_HOME), settings_of(), "mindspeed"),
        (attention("MindSpeedTEDotProductAttention", TE_HOME), settings_of("general"), "mindspeed_dense"),
        (attention("DotProductAttention", LOCAL_HOME, MEGATRON_HOME), settings_of("general"), "mindspeed"),
        (attention("DotProductAttention", LOCAL_HOME, MEGATRON_HOME), settings_of(flash=False), "mindspeed_dense"),
        (attention("MindSpeedCPDotProductAttention", RING_HOME), settings_of(cp=2), "mindspeed"),
        (attention("DotProductAttention", MEGATRON_HOME), settings_of(), "megatron"),
        (
            attention("TEDotProductAttention", "megatron.core.extensions.transformer_engine"),
            settings_of(),
            "transformer_engine",
        ),
    ],
)
def test_a_model_tells_it(layer, settings, consumer):
    model = nn.Sequential(nn.Linear(1, 1), layer)
    model.config = settings
    assert kernel_of(model) == consumer
