"""Rules of a contract as its code names them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import collate_npu.kernels as room


@pytest.fixture
def rules_of() -> Callable[[str], set[str]]:
    """`rules_of("gated_delta")`: every rule that stands in the code of this folder."""

    def of(folder: str) -> set[str]:
        files = (Path(room.__file__).parent / folder).glob("*.py")
        return {rule for path in files for rule in re.findall(r'[bB]reach\(\s*"([\w-]+)"', path.read_text("utf-8"))}

    return of
