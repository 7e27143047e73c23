"""`python -m checkpoints convert SRC DST`: any model format to an Orbax store."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.formats import load_model
from checkpoints.orbax_store import save_model

_EXAMPLES = """examples:
  python -m checkpoints convert demo demo_store
  python -m checkpoints convert Llama-3.1-8B-Instruct llama_store --dtype bfloat16
  python -m dymerge_jax.serve --model llama_store
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    source, target = options.source, Path(options.target)
    try:
        if target.exists():
            raise CheckpointError(f"{target} exists; give a folder that does not exist yet")
        model = load_model(source, dtype=options.dtype, progress=not options.quiet)
        if not options.quiet:
            print(f"writing {model.config.num_params:,} parameters as {model.dtype} to {target} ...", file=sys.stderr)
        save_model(target, model)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{target}: {model.config.num_params:,} parameters, {model.dtype}, {size / 1e6:.1f} MB on disk")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints",
        description="Tools for model files.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    convert = commands.add_parser(
        "convert",
        help="write a model as an Orbax store, which starts faster and needs nothing of the source",
        description=(
            "Reads a model and writes it as an Orbax store: weights in the layout the engine computes with, config and "
            "tokenizer beside them. The whole model is held in memory once."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument(
        "source", metavar="SRC", help="'demo', a Hugging Face Llama directory, a .gguf file or an Orbax store"
    )
    convert.add_argument("target", metavar="DST", help="folder of the new store; must not exist")
    convert.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of the stored weights (default: the source's own; float16 becomes bfloat16, GGUF float32)",
    )
    convert.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


if __name__ == "__main__":
    sys.exit(main())
