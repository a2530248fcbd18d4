"""`collate-npu` and `python -m collate_npu`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from collate_npu.tools.cli import app
        from collate_npu.tools.cli.console import print_in_any_encoding
    except ModuleNotFoundError as error:
        needs = "the command line needs: pip install 'collate-npu[audit]'"
        print(f"collate-npu: {error.name} is not installed; {needs}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    print_in_any_encoding()
    app()


if __name__ == "__main__":
    main()
