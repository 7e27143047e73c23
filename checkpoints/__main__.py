"""`python -m checkpoints`: tools for files.

convert SRC DST                         any model format to an Orbax store
import-gated FOLDER --out SET           MoLA, LoRAMoE, MOELoRA or X-LoRA to what is served here
make-arrow NAME=FOLDER ... --out SET    a gated set of plain adapters, without training
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints.arrow import DEFAULT_TOP_K, make_arrow
from checkpoints.errors import CheckpointError
from checkpoints.formats import load_model
from checkpoints.gated_families import import_gated
from checkpoints.orbax_store import save_model
from checkpoints.peft_adapter import collect_adapters

_EXAMPLES = """examples:
  python -m checkpoints convert demo demo_store
  python -m checkpoints convert Llama-3.1-8B-Instruct llama_store --dtype bfloat16
  python -m dymerge_jax.serve --model llama_store
"""
_GATED_EXAMPLES = """examples:
  python -m checkpoints import-gated alpaca_mola --out medical-moe
  python -m checkpoints import-gated xlora_v1 --out xlora --experts 0=adapters/legal 1=adapters/french
  python -m checkpoints make-arrow legal=lora-v7 french=adapters/french --out arrow --top-k 2
  python -m dymerge_jax.serve --model Llama-3.1-8B-Instruct --gated-sets medical-moe --gated-sets arrow
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        lines = options.run(options)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _convert(options: argparse.Namespace) -> list[str]:
    source, target = options.source, Path(options.target)
    if target.exists():
        raise CheckpointError(f"{target} exists; give a folder that does not exist yet")
    model = load_model(source, dtype=options.dtype, progress=not options.quiet)
    if not options.quiet:
        print(f"writing {model.config.num_params:,} parameters as {model.dtype} to {target} ...", file=sys.stderr)
    save_model(target, model)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return [f"{target}: {model.config.num_params:,} parameters, {model.dtype}, {size / 1e6:.1f} MB on disk"]


def _import_gated(options: argparse.Namespace) -> list[str]:
    return import_gated(Path(options.source), Path(options.out), [_named_folder(spec) for spec in options.experts])


def _named_folder(spec: str) -> tuple[str, Path]:
    name, _, folder = spec.partition("=")
    if not name or not folder:
        raise CheckpointError(f"--experts has {spec!r}; NAME=FOLDER was expected")
    return name, Path(folder)


def _make_arrow(options: argparse.Namespace) -> list[str]:
    adapters = collect_adapters(options.adapters)
    return make_arrow(adapters, Path(options.out), top_k=options.top_k, temperature=options.temperature)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints",
        description="Tools for model, adapter and gated set files.",
        epilog=f"{_EXAMPLES}\n{_GATED_EXAMPLES.removeprefix('examples:')}",
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
    convert.add_argument("--quiet", action="store_true", help="no progress bar (default: one)")
    convert.set_defaults(run=_convert)
    _add_import_gated(commands)
    _add_make_arrow(commands)
    return parser


def _add_import_gated(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "import-gated",
        help="import a mixture of LoRA experts that another project trained: MoLA, LoRAMoE, MOELoRA, X-LoRA",
        description=(
            "Reads MoLA or LoRAMoE as MoE-PEFT saves them, MOELoRA as MOELoRA-peft does or X-LoRA as PEFT does, with\n"
            "the weights in adapter_model.safetensors (a pickle is refused with the command that converts it), and\n"
            "writes the experts as PEFT adapters; X-LoRA's are such adapters already and stay where they are. MoLA,\n"
            "LoRAMoE and X-LoRA become a gated set; MOELoRA, whose weights follow from a task's id, becomes adapters\n"
            "and a file of named mixes for --mixes. MixLoRA is refused, with the reason."
        ),
        epilog=_GATED_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("source", metavar="FOLDER", help="folder with adapter_config.json; it says the family")
    command.add_argument("--out", metavar="SET", required=True, help="folder to make; must not exist; names the set")
    command.add_argument(
        "--experts",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="X-LoRA: where experts are, by their names in adapter_config.json (default: as it says, relative to it)",
    )
    command.set_defaults(run=_import_gated)


def _add_make_arrow(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "make-arrow",
        help="make a gated set of plain LoRA adapters, without training (Arrow)",
        description=(
            "Makes a gated set whose gates are read off the adapters: in each projection an adapter's prototype is\n"
            "the top right singular vector of B A, and a token's weights are the softmax over the largest\n"
            "|prototype x|. "
            "The adapters stay where they are; the set refers to their folders."
        ),
        epilog=_GATED_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "adapters", nargs="+", metavar="SPEC", help="a PEFT LoRA folder, a folder of such folders, or NAME=FOLDER"
    )
    command.add_argument("--out", metavar="SET", required=True, help="folder to make; must not exist; names the set")
    command.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help=f"adapters that get a weight for a token, 1 to all (default: {DEFAULT_TOP_K}, or all if they are fewer)",
    )
    command.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="divides |prototype x|: above 1 evens the weights out (default: %(default)s)",
    )
    command.set_defaults(run=_make_arrow)


if __name__ == "__main__":
    sys.exit(main())
