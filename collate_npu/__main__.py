"""`collate-npu` and `python -m collate_npu`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and "-m" in sys.orig_argv and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # `-m` puts the working directory there, and a platform.py of it is not what any import here means


def main() -> None:
    """Run the command line."""
    import io
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was found by then is still printed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that it cannot encode is written as its escape
            stream.reconfigure(errors="backslashreplace")
    try:
        from collate_npu.tools.cli import run_command_line

        sys.exit(run_command_line(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
