"""What a forward reads, on stand-ins for transformers' classes; the real families are in tests/integration."""

from types import SimpleNamespace

import pytest
from torch import nn

from collate_npu import CollateError
from collate_npu.consumers import model_traits
from collate_npu.consumers.mask_routing import Model
from collate_npu.consumers.model_traits import first_position, label_rule, looks_ahead, pooling, position_rule

pytest.importorskip("transformers")
Base = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils", "main_input_name": "input_ids"})


class Reads(Base):
    def forward(self, input_ids=None, position_ids=None): ...


class PassesOn(Base):
    def forward(self, input_ids=None, **kwargs): ...


class Sees(Base):
    def forward(self, pixel_values=None, position_ids=None): ...


class Ignores(Base):
    def forward(self, input_ids=None): ...


def model(outer, inner=None, **config):
    made = outer()
    if inner is not None:
        made.model = inner()
    made.config = SimpleNamespace(**{"model_type": "mine", "pad_token_id": 7} | config)
    return made


@pytest.fixture
def source(monkeypatch):
    def write(text):
        monkeypatch.setattr(model_traits, "_source", lambda module: text)

    return write


PADDING_IDX, AXES = "def create_position_ids_from_input_ids(", "if position_ids.ndim == 3 and position_ids.shape[0] == 4:"


@pytest.mark.parametrize(("outer", "inner", "text", "rule", "first"), [
    (Reads, None, "", "places", 0), (PassesOn, Reads, "", "places", 0), (PassesOn, None, "", "none", 0),
    (PassesOn, Sees, "", "none", 0), (Ignores, Reads, "", "none", 0),
    (Reads, None, PADDING_IDX, "padding_idx", 8), (Reads, None, AXES, "axes", 0)])  # fmt: skip
def test_positions_are_read_where_a_forward_names_them_and_counted_as_its_file_tells(
    outer, inner, text, rule, first, source
):
    source(text)
    assert position_rule(model(outer, inner)) == rule
    assert first_position(model(outer, inner)) == first
    assert first_position(model(Reads, model_type="mpnet")) == 2


def test_a_config_that_no_class_of_transformers_reads_asks_for_the_model():
    with pytest.raises(CollateError, match="Pass the model itself"):
        position_rule(SimpleNamespace(model_type="mine"))


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("", ()),
        *((told, ("images",)) for told in ("or_mask_function", "token_type_ids_mask_function", "block_sequence_ids")),
        ("torch.where(token_type_ids ==", ("types",)),
        ("token_type_ids[:, None, None, :]", ("images", "types")),
    ],
)
def test_masks_that_look_ahead_are_told_by_images_or_types(text, by, source):
    source(text)
    assert tuple(each for each in ("images", "types") if looks_ahead(model(Reads), each)) == by
    assert Model.of(model(Reads), needs_2d=False).looks_ahead == by


def test_a_module_of_transformers_is_asked_all_of_it_and_a_stranger_nothing(source):
    source("masking_utils position_ids.shape[0] == 4")
    made = model(Reads)
    made.is_causal = True
    read = Model.of(made, needs_2d=True)
    assert (read.positions, read.pattern) == ("axes", "causal")
    assert read.boundaries_unread is None  # the adapter asks
    stranger = nn.Linear(1, 1)
    assert "not transformers'" in Model.of(stranger, needs_2d=True).boundaries_unread
    assert Model.of(stranger, needs_2d=False) == Model(config=stranger, needs_mask_2d=False, dtype=stranger.weight.dtype)


class Pools(Base):
    def forward(self, input_ids=None):
        self.pooled = input_ids[:, 0]


class PoolsImages(Base):
    def forward(self, pixel_values=None):
        self.pooled = pixel_values[:, 0]


class PoolsElsewhere(nn.Module):
    forward = Pools.forward


def test_only_parts_of_transformers_that_read_ids_pool_tokens():
    found = {inner: pooling(model(PassesOn, inner)) for inner in (Pools, PoolsImages, PoolsElsewhere, Reads)}
    assert found == {Pools: "pooled", PoolsImages: "", PoolsElsewhere: "", Reads: ""}
    assert label_rule(model(Reads)) is None, "a config that says nothing of two sides is no decoder's"
    assert label_rule(model(Reads, is_encoder_decoder=True)) == "decoder"
