"""`collate-npu` and `python -m collate_npu`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say which extra it needs; `env` runs without any."""
    try:
        from collate_npu.tools.cli import app
        from collate_npu.tools.cli.console import print_in_any_encoding
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # not installed, or broken
        sys.exit(_without_typer(sys.argv[1:], error))
    print_in_any_encoding()
    app()


def _without_typer(args: list[str], error: Exception) -> int:
    if args[:1] == ["env"] and not {*args[1:]} - {"--json"}:
        from collate_npu.tools.env.markdown import written

        print(written(as_json="--json" in args))
        return 0
    needs = "the command line needs: pip install 'collate-npu[audit]' (`python -m collate_npu env` needs nothing)"
    missing = (
        f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"
    )
    print(f"collate-npu: {missing}; {needs}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
