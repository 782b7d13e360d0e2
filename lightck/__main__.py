"""The ``lightck`` command, and ``python -m lightck``. An import error is printed as one line, without a traceback."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line and exit the process."""
    try:
        from lightck.cli import main
    except ImportError as error:  # such as click; errors of the native library come later, and cli/base.py prints them
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    main(prog_name="lightck")


if __name__ == "__main__":
    run()
