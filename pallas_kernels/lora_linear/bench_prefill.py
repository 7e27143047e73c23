"""Times linear layers in steps that read prompts: the library's GEMM and what follows it beside the Mosaic kernel.

    python -m pallas_kernels.lora_linear.bench_prefill --num-tokens 2048 8192 --out prefill.json
    python -m pallas_kernels.lora_linear.bench_prefill --num-tokens 512 --prompts 1 --decode-rows 30 --group gate_up

Prompts with three adapters each share a step, beside decode rows with three each; and the same step without adapters.
A program is eight calls, each with weights and a layer of its own, as in a model. Programs take turns, as a GPU at its
power limit slows down while it warms up; the result of the last call is checked against the float32 reference first.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.bench_report import run_facts
from pallas_kernels.lora_linear import lora_linear, lora_swiglu, new_arrivals, reference
from pallas_kernels.lora_linear.pallas_mosaic_prefill import TILE_TOKENS
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.maf_mvm.bench_prefill import LARGEST_ERROR, NUM_CALLS, make_inputs, relative_error, run_seconds
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import Segments

_IMPLEMENTATIONS = ("separate", "pallas_mosaic")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One program.

    Attributes:
      num_tokens: of the step.
      group: its projections; gate_up ends in SwiGLU.
      mixes: "none" or "3 each".
      implementation: of lora_linear or lora_swiglu.
      median_us: of a call, over the turns; min_us and max_us likewise.
      tflops: of the base product.
      error: of the last call, relative to the norm of the float32 reference.
    """

    num_tokens: int
    group: Group
    mixes: str
    implementation: str
    median_us: float
    min_us: float
    max_us: float
    tflops: float
    error: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if a result was wrong."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for num_tokens in options.num_tokens:
        if num_tokens % TILE_TOKENS or not 1 <= options.prompts <= num_tokens - options.decode_rows:
            parser.error(
                f"--num-tokens {num_tokens} with --decode-rows {options.decode_rows} and --prompts {options.prompts}: "
                f"expected a multiple of {TILE_TOKENS}, and at least one prompt, of at least one token"
            )
    print(
        f"{jax.devices()[0].device_kind}, {options.shape}, bfloat16, {options.prompts} prompts, {options.decode_rows} "
        f"decode rows; us a call, median (min to max) of {options.turns} turns of {options.runs} runs of {NUM_CALLS}"
    )
    timings = []
    for num_tokens in options.num_tokens:
        for group in options.group:
            timings += measure(group, argparse.Namespace(**{**vars(options), "num_tokens": num_tokens}))
    if options.out is not None:
        result = {
            **run_facts("pallas_kernels.lora_linear.bench_prefill", argv),
            "timings": [dataclasses.asdict(timing) for timing in timings],
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [t for t in timings if not t.error <= LARGEST_ERROR]
    for t in wrong:
        print(f"{t} differs from the reference by more than {LARGEST_ERROR}", file=sys.stderr)
    return bool(wrong)


def measure(group: Group, options: argparse.Namespace) -> list[Timing]:
    """The programs of a step of `options.num_tokens` tokens, in turns."""
    x, slots, segments, _ = make_inputs(group, options)
    define = reference.lora_swiglu if group == "gate_up" else reference.lora_linear
    shape = x.shape[1], sum(slots.widths)
    keys = jax.random.split(jax.random.key(0), NUM_CALLS)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(x.shape[1] ** -0.5))
    weights = [make(key) for key in keys]
    programs, seconds, errors = {}, {}, {}
    for mixes, pairs in (("none", None), ("3 each", segments)):
        args = x, weights, slots, pairs
        right = define(x.astype(jnp.float32), weights[-1], slots, pairs, jnp.int32(NUM_CALLS - 1))
        for name in _IMPLEMENTATIONS:
            program = jax.jit(functools.partial(_calls, group, name)).lower(*args).compile()
            errors[mixes, name] = relative_error(program(*args)[-1], right)
            programs[mixes, name], seconds[mixes, name] = functools.partial(_run, program, args, options.runs), []
    for _ in range(options.turns):
        for key, run in programs.items():
            seconds[key].append(run_seconds(run, repeats=1)[0] / options.runs / NUM_CALLS)
    timings = []
    for (mixes, name), times in seconds.items():
        median, least, most = (s * 1e6 for s in (statistics.median(times), min(times), max(times)))
        tflops = 2 * x.shape[0] * shape[0] * shape[1] / median / 1e6
        timings.append(Timing(x.shape[0], group, mixes, name, median, least, most, tflops, errors[mixes, name]))
        print(
            f"{x.shape[0]:6d} tokens {group:8} adapters {mixes:7} {name:14} {median:9.1f} ({least:.1f} to {most:.1f})  "
            f"{tflops:.0f} TFLOP/s  error {errors[mixes, name]:.1e}",
            flush=True,
        )
    return timings


def _calls(
    group: Group,
    implementation: Any,
    x: Array,
    weights: list[Array],
    slots: ProjectionSlots,
    segments: Segments | None,
) -> list[Array]:
    op, arrivals = lora_swiglu if group == "gate_up" else lora_linear, new_arrivals(1)
    call = functools.partial(op, site=0, implementation=implementation)
    results = [call(x, w, slots, segments, arrivals, layer=layer)[0] for layer, w in enumerate(weights)]
    return [y.reshape(x.shape[0], -1) for y in results]


def _run(program: Callable[..., Any], args: tuple[Any, ...], runs: int) -> Any:
    """Several runs in a row; the host is ahead of the device."""
    result = None
    for _ in range(runs):
        result = program(*args)
    return result


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=named_shapes(), default="llama-3-8b", help="(default: %(default)s)")
    add("--num-tokens", type=int, nargs="+", default=[8192], metavar="N", help="of each step (default: 8192)")
    add("--group", choices=GROUPS, nargs="+", default=GROUPS, help="projections (default: all)")
    add("--prompts", type=int, default=4, metavar="N", help="that share a step (default: %(default)s)")
    add("--decode-rows", type=int, default=0, metavar="N", help="the first tokens of a step (default: %(default)s)")
    add("--runs", type=int, default=10, metavar="N", help="of a program in one turn (default: %(default)s)")
    add("--turns", type=int, default=5, metavar="N", help="of every program (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON file to write (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
