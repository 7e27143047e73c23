"""`python -m serving.bench [load|sweep|figures|simulate] ...`: the load benchmark is what it runs without a word."""

import importlib
import sys
from collections.abc import Sequence

_COMMANDS = ("load", "sweep", "figures", "simulate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the named benchmark."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = arguments.pop(0) if arguments and arguments[0] in _COMMANDS else "load"
    # Only what runs is imported: figures need no engine, and nothing but figures needs matplotlib.
    return importlib.import_module(f"serving.bench.{command}").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
