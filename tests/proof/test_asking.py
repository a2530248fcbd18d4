"""Every form in which a stack may answer is read, and what is no log-probabilities is refused in words."""

import numpy as np
import pytest
import torch
from scoring import toy

from collate_npu import CollateError
from collate_npu.proof.conformance import ways_of

SAMPLES = [[3, 4, 5], [6], [7, 8]]
RIGHT = [[-1.0, -2.0], [], [-3.0]]


def answer(given, samples=SAMPLES):
    return next(iter(ways_of(lambda asked: given, None).values()))("ragged", samples)


FORMS = {
    "lists": RIGHT,
    "tuples": tuple(map(tuple, RIGHT)),
    "tensors": [torch.tensor(x, dtype=torch.bfloat16, requires_grad=True) for x in RIGHT],
    "arrays": [np.array(x, np.float16) for x in RIGHT],
    "mixed": [torch.tensor(RIGHT[0]), np.array([]), RIGHT[2]],
    "a generator": (x for x in RIGHT),
    "scalars": [[torch.tensor(x) for x in row] for row in RIGHT],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_answers_are_read(form):
    found = answer(FORMS[form])
    assert [x.tolist() for x in found] == RIGHT
    assert {x.dtype for x in found} == {torch.float64}


def test_a_tensor_of_rows_is_read():
    assert [x.tolist() for x in answer(-torch.ones(2, 3), [[3, 4, 5, 6]] * 2)] == [[-1.0] * 3] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "run, batch 'ragged': got a NoneType.*Return a list"),
        ({"logprobs": RIGHT}, "got a dict"),
        ("text", "got a str"),
        (torch.tensor(1.0), "got a Tensor"),
        (RIGHT[:2], "got 2 answers to 3 samples"),
        (
            [[-1.0] * 3, [-1.0], [-1.0, -1.0]],
            r"(?s)3 bad rows.*row 0: got float64 \[3\], not \[2\].*without the first token",
        ),
        ([[None, -1.0, -2.0], [None], [None, -3.0]], "sample 0: got None at place 0.*without the first token"),
        ([torch.zeros(3, 9), torch.zeros(1, 9), torch.zeros(2, 9)], r"float32 \[3, 9\], not \[2\]"),
        ([["a", "b"], [], ["c"]], "sample 0: got values of type"),
        ([[0.5, 0.2], [], [0.1]], r"(?s)row 0: got values up to 0.5.*row 2.*at most 0"),
        ([[-5.0, 4.0], [], [-1.0]], "(?s)1 bad row.*row 0: got values up to 4"),
    ],
)
def test_what_is_no_log_probabilities_is_refused(given, said):
    with pytest.raises(CollateError, match=said):
        answer(given)


def test_a_little_above_zero_is_rounding():
    for first in ([0.5, -2.0], [0.0, 0.0]):
        assert answer([first, [], [-1.0]])[0].tolist() == first


def test_lengths_in_another_order_and_what_is_no_number_are_left_to_be_judged():
    assert [len(x) for x in answer(RIGHT[::-1])] == [1, 0, 2]
    assert answer([[float("nan"), -1.0], [], [-1.0]])[0].isnan().any()


def test_an_error_in_run_names_the_layout_and_the_samples():
    def run(samples, layout):
        samples[0].clear()  # of its own
        raise RuntimeError("no memory left")

    ways = ways_of(run, ["cp2"])
    with pytest.raises(
        CollateError, match=r"run, layout 'cp2', batch 'two': got RuntimeError: no memory.*\[3, 1, 2\] tok"
    ) as e:
        ways["cp2"]("two", SAMPLES)
    assert isinstance(e.value.__cause__, RuntimeError)
    assert len(SAMPLES[0]) == 3


@pytest.mark.parametrize("layouts", ["left", [], [1], 3])
def test_layouts_are_names(layouts):
    with pytest.raises(CollateError, match="layouts are names"):
        ways_of(lambda samples, layout: toy(samples), layouts)


def test_run_is_a_function_of_any_kind():
    assert [*ways_of(toy, None)] == ["as it is"]
    assert [*ways_of(lambda samples, *, layout="left": None, None)] == ["left", "right"]
    with pytest.raises(CollateError, match=r"run: got a int.*Pass a function"):
        ways_of(3, None)


class Asked:
    def __call__(self, samples):
        return samples


def test_a_class_is_no_function_and_what_has_no_signature_takes_no_layout():
    with pytest.raises(CollateError, match="the class Asked"):
        ways_of(Asked, None)
    assert [*ways_of(max, None)] == [*ways_of(Asked(), None)]
