"""Audit: does a padded batch, or a flat row, give the same numbers as each sample alone?

`from collate_npu.tools.audit import audit` is the audit in Python; for a collator of your own, and a test suite, there is
`collate_npu.testing.assert_padding_invariant`.
"""

from collate_npu.tools.audit.case import Finding, audit

__all__ = ["Finding", "audit"]
