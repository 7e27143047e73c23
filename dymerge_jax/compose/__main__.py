"""`python -m dymerge_jax.compose merge|search`: flags to arguments, results to text and files."""

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.peft_adapter import collect_adapters, load_adapter
from dymerge_jax.compose.batched_loss import BatchedCrossEntropy
from dymerge_jax.compose.examples import read_examples
from dymerge_jax.compose.merge import merge_adapters
from dymerge_jax.compose.merge_maths import METHODS, MergeConfig
from dymerge_jax.compose.mix_file import add_mix, check_mix_name
from dymerge_jax.compose.search import SearchConfig, SearchResult, import_cma, search_weights
from dymerge_jax.library import Model, load

_MERGE_EXAMPLES = """examples (adapters of the demo):
  python -m dymerge_jax.compose merge --method cat --out signed_reverse \\
    --adapters sign=dymerge_jax/demo/adapters/sign reverse=dymerge_jax/demo/adapters/reverse --weights 1 1
  python -m dymerge_jax.compose merge --method ties --density 0.5 --out soup --adapters a b c --weights 0.5 0.5 -0.2

cat equals serving the mix; svd is the closest adapter of a smaller rank; what the other methods do, and where they
differ from PEFT's, is in dymerge_jax/compose/merge_maths.py.
"""

_SEARCH_EXAMPLES = """example:
  python -m dymerge_jax.compose search --model demo --adapters dymerge_jax/demo/adapters \\
    --examples examples.jsonl --name signed-reverse --out mixes.json
  python -m dymerge_jax.serve --mixes mixes.json

A line of the examples is {"prompt": "...", "completion": "..."}, taken as they are, or {"messages": [...]}, which goes
through the model's chat template and ends with the assistant's answer. 5 to 20 examples are enough for 20 adapters.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dymerge_jax.compose", description="Makes adapters and mixes of adapters, offline."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_merge(commands)
    _add_search(commands)
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


def _add_search(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "search",
        help="find the weights of a mix from a few examples",
        description=(
            "Searches, without gradients, the weights of adapters that answer a few examples best (LoraHub), and adds "
            "them as a named mix to a file for --mixes of the server. A population of mixes is evaluated as one batch."
        ),
        epilog=_SEARCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = SearchConfig()
    parser.add_argument(
        "--model", default="demo", metavar="PATH",
        help="'demo', a Hugging Face Llama directory, a .gguf file or an Orbax store (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the model (default: its own; float32 for the demo on a CPU)",
    )
    _add_adapters(parser)
    parser.add_argument("--examples", required=True, metavar="FILE", help="one JSON object a line, see below")
    parser.add_argument("--name", required=True, help="of the mix; requests give it as their model")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON file that the mix is added to, or a new one")
    parser.add_argument(
        "--population", type=int, default=defaults.population, help="mixes an iteration tries (default: %(default)s)"
    )
    parser.add_argument("--iterations", type=int, default=defaults.iterations, help="default: %(default)s")
    parser.add_argument(
        "--max-weight", type=float, default=defaults.max_weight,
        help="largest weight; the smallest is its negative (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--l1", type=float, default=defaults.l1,
        help="what the mean |weight| costs, in nats a token: larger gives fewer adapters (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of what is tried (default: %(default)s)")
    parser.add_argument(
        "--batch-mixes", type=_at_least_1, metavar="N",
        help="mixes evaluated at once (default: the population); 1 takes longer for the same result, to compare",
    )  # fmt: skip
    parser.add_argument(
        "--batch-tokens", type=_at_least_1, default=16384, metavar="N",
        help="most tokens of a batch, padding included: lower it if memory is short (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--slot-rank", type=_at_least_1, default=8, metavar="R",
        help="rank rows of a slot; an adapter of rank r takes ceil(r / R) of them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--report", metavar="FILE", help="write losses and times as JSON, too")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=_search)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is given; expected an integer of at least 1")
    return int(text)


def _search(options: argparse.Namespace) -> None:
    import_cma()  # before anything is loaded
    config = SearchConfig(options.population, options.iterations, options.max_weight, options.l1, options.seed)
    adapters, out = collect_adapters(options.adapters), Path(options.out)
    check_mix_name(out, options.name, [name for name, _ in adapters])
    model = _model_with(options, adapters)
    examples = read_examples(Path(options.examples), model.require_tokenizer(), max_len=model.config.max_position)
    batch_mixes = config.population if options.batch_mixes is None else options.batch_mixes
    cross_entropy = BatchedCrossEntropy(model, examples, batch_mixes=batch_mixes, max_tokens=options.batch_tokens)
    compile_start_s = time.perf_counter()
    cross_entropy(np.zeros((1, len(adapters)), np.float32))
    compile_s = time.perf_counter() - compile_start_s
    result = search_weights(model.adapter_names, cross_entropy, config, progress=not options.quiet)
    weights = {name: weight for name, weight in result.weights.items() if weight != 0}
    _print_result(result, compile_s)
    if weights:
        add_mix(out, options.name, weights)
        print(f"{out}: {options.name} = {json.dumps(weights, ensure_ascii=False)}")
    if options.report is not None:
        report = _report(options, config, result) | {
            "device": jax.devices()[0].device_kind,
            "dtype": str(model.split.dtype),
            "num_examples": len(examples),
            "batch_mixes": batch_mixes,
            "batch_rows": cross_entropy.num_rows,
            "row_len": cross_entropy.row_len,
            "compile_s": compile_s,
        }
        Path(options.report).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not weights:
        raise ValueError("no mix is better than the base model alone on these examples; no mix is written")


def _model_with(options: argparse.Namespace, adapters: Sequence[tuple[str, Path]]) -> Model:
    """The model with all adapters in a slot array of just their size."""
    base = load(
        options.model, adapters=(), dtype=options.dtype, adapter_slots=1, slot_rank=1, progress=not options.quiet
    )
    weights = {name: load_adapter(path, base.config) for name, path in adapters}
    num_slots = sum(w.num_slots(options.slot_rank) for w in weights.values())
    model = Model(base.split, base.tokenizer, adapter_slots=num_slots, slot_rank=options.slot_rank)
    for name, adapter in weights.items():
        model.add_adapter(name, adapter)
    return model


def _print_result(result: SearchResult, compile_s: float) -> None:
    print("cross entropy in nats a token of")
    for name, entropy in {**result.simple_mixes, "the mix that was found": result.cross_entropy}.items():
        print(f"  {name:28} {entropy:.4f}")
    print(
        f"loss with the L1 term: {result.start_loss:.4f} at the start ({result.start}), {result.loss:.4f} at the end\n"
        f"{result.num_mixes} mixes in {result.seconds:.1f} s, {1e3 * result.seconds / result.num_mixes:.1f} ms each; "
        f"compiled before in {compile_s:.1f} s"
    )


def _report(options: argparse.Namespace, config: SearchConfig, result: SearchResult) -> dict[str, Any]:
    return {
        "command": "python -m dymerge_jax.compose search",
        "settings": {name: value for name, value in vars(options).items() if name != "run"},
        **dataclasses.asdict(config),
        **dataclasses.asdict(result),
        "ms_per_mix": 1e3 * result.seconds / result.num_mixes,
    }


if __name__ == "__main__":
    sys.exit(main())
