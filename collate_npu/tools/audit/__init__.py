"""Audit: does a padded batch, or a flat row, give the same numbers as each sample alone?

`from collate_npu.tools.audit import audit` is the audit in Python, and a collator of your own goes in as `handovers=`; for
a test suite there is `collate_npu.testing.assert_padding_invariant`. Both names are imported when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collate_npu.tools.audit.case import Finding as Finding
    from collate_npu.tools.audit.case import audit as audit

__all__ = ["Finding", "audit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from collate_npu.tools.audit import case

    return getattr(case, name)
