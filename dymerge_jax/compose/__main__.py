"""`python -m dymerge_jax.compose merge|search`: flags to arguments; no logic of its own."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.peft_adapter import collect_adapters
from dymerge_jax.compose.merge import merge_adapters
from dymerge_jax.compose.merge_maths import METHODS, MergeConfig

_MERGE_EXAMPLES = """examples (adapters of the demo):
  python -m dymerge_jax.compose merge --method cat --out signed_reverse \\
    --adapters sign=dymerge_jax/demo/adapters/sign reverse=dymerge_jax/demo/adapters/reverse --weights 1 1
  python -m dymerge_jax.compose merge --method ties --density 0.5 --out soup --adapters a b c --weights 0.5 0.5 -0.2

cat equals serving the mix; svd is the closest adapter of a smaller rank; what the other methods do, and where they
differ from PEFT's, is in dymerge_jax/compose/merge_maths.py.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dymerge_jax.compose", description="Makes adapters and mixes of adapters, offline."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_merge(commands)
    return parser


def _add_merge(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "merge",
        help="make one PEFT adapter of several",
        description="Merges adapters of one base model into a new PEFT adapter, in the memory of one projection.",
        epilog=_MERGE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--method", choices=METHODS, required=True, help="how to merge (no default)")
    _add_adapters(parser)
    parser.add_argument(
        "--weights", nargs="+", type=float, required=True, metavar="W",
        help="weight of each adapter, in their order; any finite numbers, which multiply the adapters' own scalings",
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the new adapter's folder; must not exist")
    parser.add_argument("--rank", type=int, metavar="R", help="svd only: rank of the result (default: the largest)")
    parser.add_argument(
        "--density", type=float, metavar="D",
        help="ties, dare_* and magnitude_prune only, and needed there: share of the numbers to keep, above 0, to 1",
    )  # fmt: skip
    parser.add_argument(
        "--majority-sign", choices=("total", "frequency"),
        help="ties and dare_ties only: elect signs by the sum of the numbers or by their count (default: total)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of what dare_* drop (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="of the stored weights (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_merge)


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapters", nargs="+", required=True, metavar="NAME=FOLDER",
        help="PEFT adapters; a folder alone is named after itself, a folder of adapters stands for all of them by name",
    )  # fmt: skip


def _merge(options: argparse.Namespace) -> None:
    config = MergeConfig(options.method, options.rank, options.density, options.majority_sign, options.seed)
    adapters = collect_adapters(options.adapters)
    merged = merge_adapters(
        adapters, options.weights, Path(options.out), config, dtype=options.dtype, progress=not options.quiet
    )
    print(
        f"{merged.path}: {options.method} of {len(adapters)} adapters, rank {merged.rank}, {merged.num_projections} "
        f"projections, {options.dtype}, {merged.num_bytes / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
