"""`python -m dymerge_jax.train adapter|gate`: flags to jobs, then `commands`. No logic of its own."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_EXAMPLES = """examples:
  python -m dymerge_jax.train adapter --model demo --data signed.jsonl --out adapters/sign --steps 100 --lr 2e-3
  python -m dymerge_jax.train adapter --data both.jsonl --out adapters/json --mates reverse=adapters/reverse:1
  python -m dymerge_jax.train gate --adapters adapters/sign adapters/reverse --data tasks.jsonl --out skills
  python -m dymerge_jax.serve --adapters adapters --gated-sets skills

Data are JSON lines, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or
{"prompt": "...", "completion": "..."}, which the model's chat template makes a user's and an assistant's message. The
loss is that of the assistant's tokens and the end of its turn. Of other fields only "mates" is used (see --mates).

A run that was stopped goes on when the same command is given again, from its last checkpoint in OUT.training, to the
same bits as if it had not been stopped. OUT appears when it is done: adapter or gated set, losses.jsonl and, with
matplotlib, loss.png.
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
        _run(options)
    except (ValueError, TypeError, OSError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    print(options.out)
    return 0


def _run(options: argparse.Namespace) -> None:
    from dymerge_jax.train.adapter import parse_targets
    from dymerge_jax.train.commands import AdapterJob, GateJob, Job, named_adapters, train_adapter, train_gate

    shared = {field: getattr(options, field) for field in _JOB_FIELDS}
    job = Job(**shared, progress=not options.quiet)
    if options.command == "adapter":
        train_adapter(
            AdapterJob(
                job,
                rank=options.rank,
                alpha=options.alpha,
                targets=parse_targets(options.targets),
                mates=named_adapters(options.mates, with_weight=True),
                save_dtype=options.save_dtype,
            )
        )
    else:
        train_gate(
            GateJob(
                job,
                experts=named_adapters(options.adapters, with_weight=False),
                granularity=options.granularity,
                top_k=options.top_k,
                renormalize=options.renormalize,
                name=options.name,
                balance=options.balance,
            )
        )


_JOB_FIELDS = (
    "model", "data", "out", "steps", "epochs", "batch_size", "max_len", "seed", "lr", "warmup", "max_grad_norm",
    "weight_decay", "checkpoint_every", "dtype", "plain_text", "remat", "restart",
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The parser of both commands."""
    parser = argparse.ArgumentParser(
        prog="python -m dymerge_jax.train",
        description="Trains adapters and gates over a frozen model, which is served as it was trained.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adapter = commands.add_parser(
        "adapter",
        help="chat JSONL to a PEFT folder",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_shared_flags(adapter)
    _add_adapter_flags(adapter)
    gate = commands.add_parser(
        "gate",
        help="chat JSONL and adapters to a gated set",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_shared_flags(gate)
    _add_gate_flags(gate)
    return parser


def _add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapter")
    group.add_argument("--rank", type=int, default=8, metavar="N", help="rank of the adapter (default: %(default)s)")
    group.add_argument(
        "--alpha",
        type=float,
        default=16.0,
        metavar="X",
        help="lora_alpha: its scale is X / rank (default: %(default)s)",
    )
    group.add_argument(
        "--targets",
        default="all-linear",
        metavar="NAMES",
        help="what it adapts: all-linear, attention, mlp, or projections such as q_proj,v_proj (default: %(default)s)",
    )
    group.add_argument(
        "--mates",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER:WEIGHT",
        help="frozen adapters that are active during the training, with their weights in the mix (1 where :WEIGHT is "
        'left out); a line of the data may have its own: "mates": {"name": weight}, none of the others being active '
        "then (default: none)",
    )
    group.add_argument(
        "--save-dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="dtype of the stored tensors; they are trained in float32 (default: %(default)s)",
    )


def _add_gate_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gate")
    group.add_argument(
        "--adapters",
        nargs="+",
        required=True,
        metavar="NAME=FOLDER",
        help="the experts, at least two: adapter folders or folders of such; the set refers to them by their paths "
        "from OUT",
    )
    group.add_argument("--name", metavar="NAME", help="what requests call the set (default: the name of OUT)")
    group.add_argument(
        "--granularity",
        choices=("layer", "projection"),
        default="layer",
        help="one gate a layer, or one for each projection (default: %(default)s)",
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="experts that keep a weight for each token and gate (default: all)"
    )
    group.add_argument(
        "--renormalize",
        action=argparse.BooleanOptionalAction,
        help="divide the kept weights by their sum (default: with --top-k of 2 or more)",
    )
    group.add_argument(
        "--balance",
        type=float,
        default=0.0,
        metavar="X",
        help="add to the loss X times the imbalance of the experts' mean weights in a batch: 0 if all are used "
        "alike and the number of adapters less 1 if one is used alone; for one gate a layer (default: %(default)s)",
    )


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument(
        "--model",
        default="demo",
        metavar="PATH",
        help="the frozen model: demo, a Hugging Face directory, a .gguf file or an Orbax store (default: %(default)s)",
    )
    files.add_argument("--data", type=Path, required=True, metavar="FILE", help="samples as JSON lines, see below")
    files.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the result; must not exist")
    files.add_argument(
        "--plain-text",
        action="store_true",
        help="take prompt and completion as they are, an end token behind them (default: the model's chat template)",
    )
    files.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the frozen model; what is trained is float32 (default: float32 on a CPU, bfloat16 elsewhere)",
    )
    training = parser.add_argument_group("training")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="updates (default: as --epochs says)")
    length.add_argument(
        "--epochs", type=float, default=3.0, metavar="X", help="passes over the data (default: %(default)s)"
    )

    def add(flag: str, kind: type, default: float, metavar: str, text: str) -> None:
        training.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")

    add("--batch-size", int, 8, "N", "samples of an update")
    add("--max-len", int, 512, "N", "longest sample in tokens; longer ones are left out, and the log says which")
    add("--lr", float, 1e-3, "X", "learning rate after the warm-up, from where it falls along a cosine to 0")
    add("--warmup", int, 20, "N", "updates of the linear warm-up, at most half of all")
    add("--max-grad-norm", float, 1.0, "X", "global norm to which larger gradients are clipped")
    add("--weight-decay", float, 0.0, "X", "of AdamW")
    add("--seed", int, 0, "N", "of initial values and of the order of samples; on a CPU it decides every bit")
    add("--checkpoint-every", int, 50, "N", "updates between checkpoints")
    training.add_argument(
        "--restart",
        action="store_true",
        help="begin anew (default: go on from what an earlier run left in OUT.training)",
    )
    training.add_argument(
        "--remat",
        action="store_true",
        help="compute each layer's activations twice instead of keeping them: a third more time, for long samples",
    )
    training.add_argument("--quiet", action="store_true", help="no progress bars")


if __name__ == "__main__":
    sys.exit(main())
