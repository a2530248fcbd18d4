"""Outputs: the way back loses no real token, invents none, and lets gradients through."""

import oracle
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, Segments, last_token, repad, unpad
from collate_npu.outputs import ignore_first_labels, per_sequence, shift_labels, to_nested
from collate_npu.parallel import pad_documents


def output_of(segments, *trailing):
    """Every place has a value of its own."""
    B, S = segments.shape
    shape = (B, S, *trailing)
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def tokens_of(x, segments):
    """Real tokens sequence by sequence, by comparing ids."""
    return [x[b][segments.ids[b] == n] for b in range(segments.shape[0]) for n in range(1, int(segments.ids[b].max()) + 1)]


trailings = st.sampled_from([(), (1,), (3,), (2, 2)])


@given(strategies.segments(), trailings)
def test_unpad_takes_real_tokens_in_order(segments, trailing):
    x = output_of(segments, *trailing)
    assert torch.equal(unpad(x, segments), torch.cat([x[:0, 0], *tokens_of(x, segments)]))


@given(strategies.segments(), trailings, st.sampled_from([0, -1]))
def test_repad_is_the_inverse_of_unpad(segments, trailing, fill):
    x = output_of(segments, *trailing)
    y = unpad(x, segments)
    back = repad(y, segments, fill)
    assert torch.equal(unpad(back, segments), y)
    assert torch.equal(back[segments.keep], x[segments.keep])
    assert (back[~segments.keep] == fill).all()
    assert back.dtype == x.dtype


@given(strategies.segments(), trailings)
def test_per_sequence_gives_each_sequence(segments, trailing):
    x = output_of(segments, *trailing)
    found, expected = per_sequence(x, segments), tokens_of(x, segments)
    assert len(found) == len(expected) == segments.num_sequences
    assert all(map(torch.equal, found, expected))


@given(strategies.segments().filter(lambda segments: not segments.empty_rows), trailings)
def test_last_token_is_the_last_of_each_sequence(segments, trailing):
    x = output_of(segments, *trailing)
    assert torch.equal(last_token(x, segments), torch.stack([sequence[-1] for sequence in tokens_of(x, segments)]))


@given(strategies.segments().filter(lambda segments: segments.num_sequences))
def test_nested_holds_each_sequence(segments):
    x = output_of(segments, 2)
    nested = to_nested(x, segments)
    assert nested.is_nested
    assert all(map(torch.equal, nested.unbind(), tokens_of(x, segments)))


@given(strategies.segments())
def test_gradients_reach_real_tokens_alone(segments):
    x = output_of(segments, 2).requires_grad_()
    repad(unpad(x, segments), segments).sum().backward()
    assert torch.equal(x.grad, segments.keep[:, :, None].expand_as(x).to(x.dtype))


@pytest.mark.parametrize("verb", [unpad, last_token, per_sequence, to_nested])
def test_a_shard_is_not_the_output(verb):
    with pytest.raises(CollateError, match=r"output: got float32 \[2, 3, 8\].*\[2, 5\].*gather_sequence"):
        verb(torch.zeros(2, 3, 8), Segments.from_lengths([3, 5]))


def test_repad_takes_what_unpad_gave():
    with pytest.raises(CollateError, match=r"repad: got float32 \[7\].*8 real tokens"):
        repad(torch.zeros(7), Segments.from_lengths([3, 5]))

    with pytest.raises(CollateError, match="fill: got 1000"):
        repad(torch.zeros(8, dtype=torch.int8), Segments.from_lengths([3, 5]), fill=1000)


@pytest.mark.parametrize("x", [torch.ones(2, 5).to_sparse(), torch.nested.nested_tensor([torch.ones(5)] * 2)])
@pytest.mark.parametrize("verb", [unpad, repad, last_token, shift_labels, ignore_first_labels])
def test_neither_sparse_nor_nested_ones_are_taken(verb, x):
    with pytest.raises(CollateError):
        verb(x, Segments.from_lengths([3, 5]) if verb is not repad else Segments.from_lengths([1, 1]))


# --- labels


@given(strategies.segments(), st.integers(1, 4))
def test_shifted_labels_never_leave_their_sequence(segments, steps):
    labels = output_of(segments).long()
    expected = [oracle.shifted(*pair, steps) for pair in zip(labels.tolist(), segments.ids.tolist())]
    assert shift_labels(labels, segments, steps=steps).tolist() == expected


def test_labels_move_by_a_whole_number_of_steps():
    for steps in (0, 1.5, True):
        with pytest.raises(CollateError, match="a whole number"):
            shift_labels(torch.zeros(1, 3), steps=steps)


@pytest.mark.parametrize("verb", [shift_labels, ignore_first_labels])
@pytest.mark.parametrize("shape", [(2, 4), (2,), (2, 5, 1)])
def test_labels_of_another_shape(verb, shape):
    with pytest.raises(CollateError, match=r"labels: got int64 .*the batch is \[2, 5\].*Pad them with the tokens"):
        verb(torch.zeros(shape, dtype=torch.long), Segments.from_lengths([3, 5]))
    with pytest.raises(CollateError, match="ignore_index"):
        verb(torch.zeros(2, 5), Segments.from_lengths([3, 5]), ignore_index=-(1 << 63) - 1)
    with pytest.raises(CollateError, match="labels: got float8"):
        verb(torch.zeros(2, 5).to(torch.float8_e5m2), Segments.from_lengths([3, 5]))
    assert verb(torch.zeros(2, 5).half(), Segments.from_lengths([3, 5])).dtype == torch.float16


TOKENS, LABELS = Segments.from_lengths([3, 5]), torch.arange(10).view(2, 5)
HELD = [(torch.uint8, -100), (torch.bool, -100), (torch.bool, 2), (torch.int64, 0.5), (torch.uint8, 256), (torch.int8, 128),
        (torch.int32, float("nan")), (torch.int64, 2**63), (torch.int8, torch.tensor(300))]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value"), HELD, ids=str)
def test_padding_holds_no_value_that_the_dtype_has_not(dtype, value):
    """uint8 would make class 156 of -100, bool True, and whole numbers 0 of 0.5."""
    x = (LABELS % 2).to(dtype)
    with pytest.raises(CollateError, match=r"fill: got .*x.long"):
        repad(unpad(x, TOKENS), TOKENS, fill=value)
    if value == -100:
        row = {"input_ids": LABELS[:1], "labels": x[:1], "cu_seqlens": [0, 3, 5]}
        for call in (
            lambda: shift_labels(x),
            lambda: ignore_first_labels(x, TOKENS),
            lambda: pad_documents(row, multiple=4),
        ):
            with pytest.raises(CollateError, match="which has no such value"):
                call()
        assert (ignore_first_labels(x.long(), TOKENS)[~TOKENS.keep] == -100).all()  # the remedy
    for right in (1, torch.tensor(1)):
        assert (repad(unpad(x, TOKENS), TOKENS, fill=right)[~TOKENS.keep] == 1).all()
