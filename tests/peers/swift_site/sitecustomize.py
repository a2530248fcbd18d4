"""Runs first in every Python process that finds this folder; a trainer of `megatron ...` gets its stand-ins here."""

import sys

if any(arg.endswith(("_megatron/sft.py", "_megatron/rlhf.py")) for arg in sys.orig_argv) and "-m" not in sys.orig_argv:
    import megatron_on_cpu  # noqa: F401
