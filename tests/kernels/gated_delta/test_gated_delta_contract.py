"""`check_gated_delta_contract` takes what a kernel computes rightly, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from contract_cases import CASES, OK, REJECT, SILENT, Case

from collate_npu import UnsupportedFormError
from collate_npu.kernels.gated_delta import check_gated_delta_contract, gated_delta_breaches


def name_of(case: Case) -> str:
    return f"{case.operator}-{case.T}-{case.verdict}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_known_of_a_call_holds(case: Case) -> None:
    settings = {"B": 1} | case.says
    found = gated_delta_breaches(case.kwargs, kernel=case.operator, T=case.T, **settings)
    if case.verdict == OK:
        assert found == ()
        return
    with pytest.raises(UnsupportedFormError) as error:
        check_gated_delta_contract(case.kwargs, kernel=case.operator, T=case.T, **settings)
    for breach in found:
        assert all(text in str(error.value) for text in (breach.rule, breach.says, breach.remedy, breach.source))
    assert case.verdict != REJECT or not all(breach.silent for breach in found), "the operator itself refuses this"
    assert case.verdict != SILENT or all(breach.silent for breach in found), "the operator says nothing"


def test_the_cases_are_all_there() -> None:
    assert Counter(case.verdict for case in CASES) == {OK: 44, REJECT: 58, SILENT: 42}
