"""`check_gated_delta_contract` takes what a kernel computes rightly, and nothing else; every rule says its name."""

import contextlib
import itertools
from typing import Any, get_args

import numpy as np
import pytest
import torch
from contract_cases import BOTH, CALLS, CU, FULL, HOST, MAIN, OK, PACKED, REJECT, SILENT, cu

from collate_npu import CollateError, ContextParallel, Segments, releases
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.check import call_breaches, knows
from collate_npu.kernels.gated_delta import Kernel, check_gated_delta_contract, gated_delta_breaches, gated_delta_kwargs
from collate_npu.kernels.gated_delta.operator_call import Call
from collate_npu.kernels.gated_delta.operators import KERNELS, OPERATORS, operator_named
from collate_npu.parallel.layout import Layout
from collate_npu.parallel.recurrent import check_recurrent_split

ONE = {"kernel": "fla", "B": 1, "T": 73}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.operator}-{call.expected}")
def test_what_is_known_of_a_call_holds(call: Any) -> None:
    found = gated_delta_breaches(call.kwargs, **call.says)
    silent = [breach.silent for breach in found]
    verdicts = {OK: not found, REJECT: not all(silent), SILENT: bool(found) and all(silent)}
    told = [each for each in found if each.rule == call.expected and call.tells in f"{each.where}: {each.got}. {each.says}"]
    assert verdicts.get(call.expected, call.silent in (None, *(each.silent for each in told)) and bool(told))
    with pytest.raises(UnsupportedFormError) if found else contextlib.nullcontext() as error:
        check_gated_delta_contract(call.kwargs, **call.says)
    looks = {each.says.partition(" They look like ")[2].rstrip(".") for each in found}
    assert looks | {""} == {call.looks, ""}
    for breach in found:
        assert all(text in str(error.value) for text in (breach.rule, breach.says, breach.remedy, breach.source))
    if call.right is not None:
        check_gated_delta_contract(call.right, **call.mended)


def test_every_trap_operator_and_rule_is_in_the_table(rules_of) -> None:
    """Trap 23 is a masked convolution, for inference alone. Each rule is broken by a call through the entry."""
    assert {call.trap for call in CALLS} == set(range(25)) - {23}
    assert {operator_named(call.operator).name for call in CALLS} == OPERATORS.keys()
    says = [{key: value for key, value in call.says.items() if key != "kernel"} for call in CALLS]
    found = (call_breaches(call.operator, call.kwargs, **said) for call, said in zip(CALLS, says))
    assert {breach.rule for each in found for breach in each} == rules_of("gated_delta")


OFTEN_SILENT = """
    alone backward bias context-unread copy count differs-from-segments disagree
    empty falling first history hole last length mask-and-offsets mask-dropped mask-form mask-rank
    mask-shape mask-unread mask-values numbers-return offsets-alone package padded-actual pair positions-alone ranks
    release rows scale shape short-state sizes-differ state-fallback table tokens total unread"""
OFTEN_LOUD = """
    backward chunk-size container empty falling first last rows shape states table unread"""


def test_each_rule_says_whether_the_kernel_does() -> None:
    found = {(breach.rule, breach.silent) for call in CALLS for breach in gated_delta_breaches(call.kwargs, **call.says)}
    assert sorted(rule for rule, silent in found if silent) == OFTEN_SILENT.split()
    assert sorted(rule for rule, silent in found if not silent) == OFTEN_LOUD.split()


def test_each_operator_is_found_by_its_name_and_by_that_of_its_kernel() -> None:
    for name, row in OPERATORS.items():
        assert knows(name)
        assert operator_named(name) is row
        module, _, function = name.partition(".")
        assert "(" in name or not function or operator_named(f"{module}.some.module.{function}") is row
    assert {*get_args(Kernel)} <= KERNELS.keys() | OPERATORS.keys()
    assert operator_named("fla_npu.npu_chunk_local_cumsum").name == "fla_npu.chunk_local_cumsum"
    assert not knows("fla.something_else")


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("lengths", [[8, 24], [32], [4, 8, 4]])
def test_one_rule_says_who_may_share_a_row(layout: Any, lengths: list[int]) -> None:
    """`check_recurrent_split` and no other: of packed rows zigzag is of the whole row, which no layer puts right."""
    place, segments = ContextParallel(2, 0, layout=layout), Segments.from_lengths([lengths])
    for kernel, scheme in (("fla", "head_exchange"), ("fla_cp", "state_passing"), ("megatron", "head_exchange_zigzag")):
        kwargs = gated_delta_kwargs(segments, kernel=kernel)
        says = {"kernel": kernel, "B": 1, "T": sum(lengths), "versions": MAIN, "segments": segments}
        try:
            check_recurrent_split(place, scheme, segments, padding_free=True)
        except CollateError:
            rules = ["ranks"]
        else:
            rules = []
        assert [each.rule for each in gated_delta_breaches(kwargs, **says, context_parallel=place)] == rules
        if kernel == "megatron" and len(lengths) > 1:
            assert bool(rules) == (layout not in ("document_zigzag", "document_ulysses_ring"))


OWN = {"scale": 0.5}
"""What the remedies of some operators say besides."""


@pytest.mark.parametrize("name", OPERATORS)
def test_the_circle_of_remedies_ends(name: str) -> None:
    """What a remedy says to take is taken as a whole, and computed as it is meant; where nothing is, no remedy says so."""
    row, says = OPERATORS[name], {"kernel": name, "B": 1, "T": 8, "versions": FULL | MAIN | {"transformers": "5.12.0"}}
    segments = Segments.from_lengths([[3, 4]], width=8)
    right = gated_delta_kwargs(segments, kernel=row.kernel)
    for truth in (None, segments):
        found = gated_delta_breaches(right, **says, segments=truth, training=row.backward)
        own = {breach.where: OWN[breach.where] for breach in found}
        assert not gated_delta_breaches(right | own, **says, segments=truth, training=row.backward)
        wrong = gated_delta_breaches({"cu_seqlen": 1}, **says, segments=truth, training=row.backward)
        assert any(f"kernel={row.kernel!r}" in breach.remedy for breach in wrong)


# --- names, values, messages


@pytest.mark.parametrize(
    ("kwargs", "says", "message"),
    [
        ({}, {"kernel": "fla_con"}, r"'fla_con'.*Close to it: (?!.*megatron).*fla_conv"),
        ({}, {"kernel": ""}, r"Close to it:\s+\w"), ({}, {"training": "yes"}, "training"),
        ({}, {"T": 0}, "T"), ({}, {"B": 0}, "B"), ({}, {"T": 2.5}, "T"), ({}, {"chunk_size": "64"}, "chunk_size"),
        ({}, {"context_parallel": 2}, "context_parallel"), ({}, {"versions": "0.5.2"}, "versions"),
        ({}, {"versions": ["fla"]}, "versions"), ({}, {"versions": {"fla": "banana"}}, "versions"),
        ({}, {"versions": {"transformer": "5.23.0"}}, "Write 'transformers'"),
        ([("cu_seqlens", 3)], {}, "kwargs"),
    ],
)  # fmt: skip
def test_names_sizes_and_types_that_are_not_known_are_refused(kwargs: Any, says: dict[str, Any], message: str) -> None:
    for judge in (check_gated_delta_contract, gated_delta_breaches):
        with pytest.raises(CollateError, match=message):
            judge(kwargs, **ONE | says)


def test_the_message_names_tokens_and_releases() -> None:
    with pytest.raises(UnsupportedFormError) as error:
        check_gated_delta_contract(cu(0, 4, 73), segments=PACKED, **ONE)
    assert str(error.value) == (
        "fla:\n[differs-from-segments] cu_seqlens: got the token at (row, column) (0, 3) goes on from another sequence. "
        "The segments say otherwise. Take the boundaries from gated_delta_kwargs(segments, kernel='fla'). Or "
        "unpad() the batch and its tensors, or pass the segments that this call is for. (Segments)"
    )
    (breach,) = gated_delta_breaches(BOTH, **ONE | {"kernel": "transformers"}, versions={"transformers": "5.9.1"})
    assert "transformers 5.9.1" in breach.says
    (breach,) = gated_delta_breaches(cu(0, 3, 3, 73), **ONE, versions={"fla": "0.4.2"})
    assert "fla 0.4.2" in breach.says
    *_, breach = gated_delta_breaches({"seq_idx": torch.tensor([[0, 0, 1, 0, 0]])}, kernel="causal_conv1d", B=1, T=5)
    assert breach.got == "[0, 1, 0]"


def test_arguments_are_only_read() -> None:
    kwargs = gated_delta_kwargs(PACKED, kernel="fla", tables=True)
    before = {name: value.clone() for name, value in kwargs.items()}
    check_gated_delta_contract(kwargs, **ONE, segments=PACKED, context_parallel=ContextParallel(1, 0))
    assert kwargs.keys() == before.keys()
    assert all(torch.equal(kwargs[name], value) for name, value in before.items())


ODD: tuple[Any, ...] = (
    *("0 3 73", object(), 3, True, [[0], [3, 73]], [0, None, 73], np.array([0, 3, 73]), []),
    *(torch.tensor([0.0, 3.0, 73.0]), torch.tensor([True, False]), torch.zeros(3, dtype=torch.complex64)),
    *(torch.tensor([0, 3, 73]).to_sparse(), torch.empty(3, dtype=torch.int64, device="meta"), torch.tensor(3)),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    *(torch.zeros(73, 73, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 2**62])),
)
OTHERS = (
    "chunk_size layout qkv_format backend total_tokens num_samples activation_mode initial_state_mode cp_context dht "
    "q x weight initial_state"
)


@pytest.mark.parametrize("operator", [*OPERATORS])
def test_odd_values_are_read_or_refused_never_a_raw_error(operator: str) -> None:
    own = OPERATORS[operator]
    names = {*own.offsets, *own.copies, *own.tables, *own.reads, own.numbers, *own.shapes, *OTHERS.split()}
    right = HOST if own.host else {name: CU["cu_seqlens"].int() for name in own.offsets[:1]}
    for name, value in itertools.product(sorted(names - {""}), ODD):
        for kwargs, segments in (({name: value}, PACKED), (right | {name: value}, None), (right | {name: value}, PACKED)):
            with contextlib.suppress(CollateError):
                gated_delta_breaches(kwargs, **ONE | {"kernel": operator}, segments=segments, versions=FULL | MAIN)


@pytest.mark.parametrize("name", ["flash-linear-attention-npu", "flash-linear-attention-npu-a2"])
def test_the_release_of_fla_npu_is_read_by_the_names_it_ships_under(monkeypatch, name):
    monkeypatch.setattr(releases, "_FOUND", {})
    monkeypatch.setattr(releases, "_read", {name: "26.6.0"}.get)
    assert Call(operator_named("fla_npu"), {}, B=1, T=1).release("fla_npu") == "26.6.0"
