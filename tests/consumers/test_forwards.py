"""What a forward reads, on stand-ins for transformers' classes; the real families are in tests/integration."""

from types import SimpleNamespace

import pytest
from torch import nn

from collate_npu import CollateError
from collate_npu.consumers import forwards
from collate_npu.consumers.forwards import first_position, position_rule, reads_dense_mask

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
    made.config = SimpleNamespace(model_type="mine", pad_token_id=7, **config)
    return made


@pytest.fixture
def source(monkeypatch):
    def write(text):
        monkeypatch.setattr(forwards, "_source", lambda module: text)

    return write


@pytest.mark.parametrize(
    ("outer", "inner", "rule"),
    [
        (Reads, None, "places"),
        (PassesOn, Reads, "places"),
        (PassesOn, None, "none"),
        (PassesOn, Sees, "none"),
        (Ignores, Reads, "none"),
    ],
)
def test_positions_are_read_where_a_forward_names_them_and_is_reached(outer, inner, rule, source):
    source("")
    assert position_rule(model(outer, inner)) == rule


@pytest.mark.parametrize(
    ("text", "rule", "first"),
    [
        ("", "places", 0),
        ("def create_position_ids_from_input_ids(", "padding_idx", 8),
        ("if position_ids.ndim == 3 and position_ids.shape[0] == 4:", "axes", 0),
    ],
)
def test_the_modeling_file_tells_how_positions_are_counted(text, rule, first, source):
    source(text)
    assert position_rule(model(Reads)) == rule
    assert first_position(model(Reads)) == first


def test_a_dense_mask_is_read_by_those_that_build_theirs_with_the_common_code(source):
    source("from ...masking_utils import create_causal_mask")
    assert reads_dense_mask(model(Reads))
    source("attention_mask.unsqueeze(1)")
    assert not reads_dense_mask(model(Reads))


def test_a_config_that_no_class_of_transformers_reads_asks_for_the_model():
    with pytest.raises(CollateError, match="Pass the model itself"):
        position_rule(SimpleNamespace(model_type="mine"))
