"""`python -m dymerge_jax.quality data|train|run`: flags to arguments. No logic of its own."""

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dymerge_jax.quality.inventory import RunConfig

_EXAMPLES = """examples:
  python -m dymerge_jax.quality data --skills reverse --num 800 --out reverse.jsonl
  python -m dymerge_jax.train adapter --data reverse.jsonl --out adapters/reverse --steps 100 --lr 2e-3
  python -m dymerge_jax.quality data --skills sign reverse --together --num 16 --out examples.jsonl
  python -m dymerge_jax.quality train --out trained --skills count bullets --no-gate --cotrained
  python -m dymerge_jax.quality run --out quality --pairs sign+reverse --skills
  python -m dymerge_jax.quality run --out quality --adapters trained/adapters
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("jax", "absl", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # only its tokenizers are used: it misses no torch
    from dymerge_jax.train.loop import TrainingError

    try:
        options.run(options)
    except (ValueError, TypeError, OSError, ImportError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; what is done stays, and the same command goes on", file=sys.stderr)
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m dymerge_jax.quality",
        description="Measures whether compositions of adapters work, on small skills that exact rules check.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_data(commands)
    _add_train(commands)
    _add_run(commands)
    return parser


def _add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("data", help="write questions of skills as JSON lines")
    parser.add_argument(
        "--skills", "--skill", nargs="+", required=True, metavar="NAME",
        help="what the questions ask for, in turns: of one skill to train an adapter, of several to train a gate",
    )  # fmt: skip
    parser.add_argument(
        "--together", action="store_true", help="every question asks for all the skills (default: for one of them)"
    )
    parser.add_argument("--num", type=int, default=800, metavar="N", help="questions in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw (default: %(default)s)")
    parser.add_argument(
        "--instructed", type=float, default=0.5, metavar="P",
        help="share of the prompts that say what is wanted, by a phrase of each skill (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--held-out", action="store_true", help="items are words that no training data hold (default: the other ones)"
    )
    parser.add_argument(
        "--prompts-only", action="store_true", help='write {"prompt": …}, for retrieval (default: {"messages": […]})'
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="must not exist")
    parser.set_defaults(run=_data)


def _data(options: argparse.Namespace) -> None:
    from dymerge_jax.quality.data import chat_line, draw_questions, prompt_line, write_lines
    from dymerge_jax.quality.skills import TEST_WORDS, TRAIN_WORDS

    words = TEST_WORDS if options.held_out else TRAIN_WORDS
    skills = [options.skills] if options.together else [[skill] for skill in options.skills]
    questions = draw_questions(skills, options.num, seed=options.seed, words=words, instructed=options.instructed)
    write_lines(options.out, map(prompt_line if options.prompts_only else chat_line, questions))
    print(options.out)


def _add_value(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], object],
    default: object,
    metavar: str,
    text: str,
) -> None:
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from dymerge_jax.quality.training import MATES, TrainingConfig

    defaults = TrainingConfig(Path())
    parser = commands.add_parser(
        "train",
        help="train an adapter for every skill, co-trained ones, and a gate",
        description="Trains an adapter for every skill, co-trained ones, and a gate over the adapters, by\n"
        "python -m dymerge_jax.train's own code in one process. What is in OUT already is left as it is.",
        epilog="co-trained adapters and their mates: "
        + "; ".join(f"{k} with {', '.join(v)}" for k, v in MATES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    add = functools.partial(_add_value, parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets adapters/, cotrained/, gated/")
    add("--model", str, defaults.model, "PATH", "demo, a Hugging Face directory, a .gguf file or an Orbax store")
    parser.add_argument(
        "--skills", nargs="+", default=defaults.skills, metavar="NAME",
        help=f"of the adapters (default: {' '.join(defaults.skills)})",
    )  # fmt: skip
    parser.add_argument(
        "--cotrained", nargs="*", metavar="NAME",
        help="skills of the co-trained adapters, see below (default: all that have a mate among --skills)",
    )  # fmt: skip
    parser.add_argument(
        "--gate", action=argparse.BooleanOptionalAction,
        help="train a gate over the adapters but echo (default: if there are two or more)",
    )  # fmt: skip
    add("--rank", int, defaults.rank, "N", "of the adapters")
    add("--alpha", float, defaults.alpha, "X", "lora_alpha: an adapter's scale is X / rank")
    add("--steps", int, defaults.steps, "N", "updates of an adapter")
    add("--lr", float, defaults.lr, "X", "highest learning rate of an adapter")
    add("--batch-size", int, defaults.batch_size, "N", "samples of an update")
    add("--gate-steps", int, defaults.gate_steps, "N", "updates of the gate")
    add("--gate-lr", float, defaults.gate_lr, "X", "highest learning rate of the gate")
    parser.add_argument("--gate-top-k", type=int, metavar="K", help="experts that keep a weight (default: all)")
    parser.add_argument(
        "--granularity", choices=("layer", "projection"), default=defaults.granularity,
        help="one gate a layer, or one for each projection (default: %(default)s)",
    )  # fmt: skip
    add("--balance", float, defaults.balance, "X", "weight of the gate's loss against the use of few experts")
    add("--instructed", float, defaults.instructed, "P", "share of an adapter's prompts that say what is wanted")
    add("--seed", int, defaults.seed, "N", "of data, initial values and order")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"),
        help="of the frozen model (default: float32 on a CPU, bfloat16 elsewhere)",
    )  # fmt: skip
    parser.add_argument(
        "--save-dtype", choices=("float32", "float16", "bfloat16"), default=defaults.save_dtype,
        help="of the stored adapters (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    from dymerge_jax.quality.skills import SHARED_SKILL
    from dymerge_jax.quality.training import MATES, TrainingConfig, train_all

    skills = tuple(options.skills)
    cotrained = options.cotrained
    if cotrained is None:
        cotrained = [skill for skill, mates in MATES.items() if skill in skills and set(mates) & set(skills)]
    has_gate = options.gate if options.gate is not None else len(set(skills) - {SHARED_SKILL}) >= 2
    names = (
        "out", "model", "rank", "alpha", "steps", "lr", "batch_size", "gate_steps", "gate_lr", "gate_top_k",
        "granularity", "balance", "instructed", "seed", "dtype", "save_dtype",
    )  # fmt: skip
    settings = {name: getattr(options, name) for name in names}
    config = TrainingConfig(
        skills=skills, cotrained=tuple(cotrained), has_gate=has_gate, progress=not options.quiet, **settings
    )
    for folder in train_all(config):
        print(folder)


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from dymerge_jax.quality import ways
    from dymerge_jax.quality.inventory import RunConfig

    defaults = RunConfig(Path())
    parser = commands.add_parser(
        "run",
        help="measure every way to compose the adapters",
        description="Asks questions of held-out words of every skill and pair, under every way to compose the\n"
        "adapters, and writes quality.md, quality.json and (with matplotlib) two pictures.\n\n" + (ways.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    add = functools.partial(_add_value, parser)
    parser.add_argument(
        "--adapters", type=Path, metavar="FOLDER",
        help="an adapter for each skill, named after it (default: the demo's)",
    )  # fmt: skip
    parser.add_argument(
        "--gated", type=Path, metavar="FOLDER",
        help="gated sets over them (default: the folder gated beside that of the adapters, if there is one)",
    )  # fmt: skip
    parser.add_argument(
        "--cotrained", type=Path, metavar="FOLDER",
        help="co-trained adapters (default: the folder cotrained beside that of the adapters, if there is one)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="must not exist")
    add("--model", str, defaults.model, "PATH", "demo, a Hugging Face directory, a .gguf file or an Orbax store")
    parser.add_argument(
        "--skills", nargs="*", metavar="NAME",
        help="single skills to measure; none for none (default: all that have an adapter)",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", nargs="*", metavar="A+B",
        help="pairs of skills to measure; none for none (default: the twelve that rules can check, of those --skills)",
    )  # fmt: skip
    parser.add_argument(
        "--ways", nargs="+", choices=ways.WAYS, metavar="WAY", help="see above (default: all that can be taken)"
    )
    parser.add_argument(
        "--prompts", nargs="+", choices=("neutral", "instructed"), default=defaults.prompts,
        help="whether they say what is wanted; both are measured apart (default: neutral instructed)",
    )  # fmt: skip
    add("--n", int, defaults.n, "N", "questions of each task and kind of prompts, the same for all ways")
    parser.add_argument(
        "--batch-size", type=int, metavar="N",
        help="answers generated together, of all ways and tasks mixed (default: 32 on a CPU, 256 elsewhere)",
    )  # fmt: skip
    add("--seed", int, defaults.seed, "N", "of the questions, the search and the merges")
    add("--density", float, defaults.density, "D", "share of the numbers that the merges that prune keep")
    add("--search-population", int, defaults.search.population, "N", "mixes that an iteration of the search tries")
    add("--search-iterations", int, defaults.search.iterations, "N", "iterations of the search")
    add("--search-l1", float, defaults.search.l1, "X", "what the mean |weight| costs, in nats a token")
    add("--search-examples", int, defaults.search_examples, "N", "answered questions that the search is given")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"),
        help="of the model (default: its own; for the demo float32 on a CPU, bfloat16 elsewhere)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="a smoke test, whose numbers mean nothing: 4 questions, a search of 1 iteration with 2 examples",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from checkpoints.writing import new_folder
    from dymerge_jax.quality.bench import run_benchmark
    from dymerge_jax.quality.report import write_report

    config = _run_config(options)
    with new_folder(options.out) as folder:
        tables = write_report(folder, config, run_benchmark(config))
    print(tables)
    print(options.out)


def _run_config(options: argparse.Namespace) -> "RunConfig":
    from dymerge_jax.compose.search import SearchConfig
    from dymerge_jax.demo import demo_adapters_folder
    from dymerge_jax.quality.inventory import RunConfig
    from dymerge_jax.quality.training import COTRAINED, GATED
    from dymerge_jax.quality.ways import parse_pair

    adapters: Path = options.adapters or demo_adapters_folder()
    beside = {name: adapters.resolve().parent / name for name in (GATED, COTRAINED)}
    found = {name: path for name, path in beside.items() if path.is_dir() and any(path.iterdir())}
    population, iterations = options.search_population, 1 if options.quick else options.search_iterations
    return RunConfig(
        adapters=adapters,
        gated=options.gated or found.get(GATED),
        cotrained=options.cotrained or found.get(COTRAINED),
        model=options.model,
        skills=None if options.skills is None else tuple(options.skills),
        pairs=None if options.pairs is None else tuple(map(parse_pair, options.pairs)),
        ways=None if options.ways is None else tuple(options.ways),
        prompts=tuple(options.prompts),
        n=min(options.n, 4) if options.quick else options.n,
        batch_size=options.batch_size,
        seed=options.seed,
        density=options.density,
        search=SearchConfig(population, iterations, l1=options.search_l1, seed=options.seed),
        search_examples=2 if options.quick else options.search_examples,
        dtype=options.dtype,
        progress=not options.quiet,
    )


if __name__ == "__main__":
    sys.exit(main())
