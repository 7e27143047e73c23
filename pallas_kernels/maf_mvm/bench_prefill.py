"""Times maf_mvm in a step that reads prompts: block sizes beside each other, and the expand that ends in SwiGLU.

    python -m pallas_kernels.maf_mvm.bench_prefill --num-tokens 8192
    python -m pallas_kernels.maf_mvm.bench_prefill --num-tokens 512 --prompts 1 --decode-rows 30 --out prefill.json

Prompts with three adapters each share the step, beside decode rows with three each; of 128 adapters, each request takes
the next three. The bound is the bytes of x, the base and the result over the speed at which the device copies a large
array. A step runs each group once a layer, on top of the GEMMs. What is timed is a program of several calls, whose last
result is checked against the float32 reference first; on a GPU, the profiler tells the shrink's and the expand's times.
"""

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.bench_report import kernel_durations_us, run_facts
from pallas_kernels.gpu import max_shared_bytes
from pallas_kernels.maf_mvm import ProjectionSlots, pallas_triton, reference, swiglu, token_tile_size
from pallas_kernels.maf_mvm.config import MIN_DOT_SIZE, KernelConfig, pick_config
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import Segments, build_segments

_NUM_SLOTS, _SLOT_RANK, _MIX_SIZE = 128, 8, 3
NUM_CALLS = 8  # in one program, each with a layer of its own
_TRACED_RUNS = 3
LARGEST_ERROR = 2e-2  # in bfloat16, relative to the norm


@dataclasses.dataclass(frozen=True)
class Timing:
    """One program.

    Attributes:
      group: its projections.
      what: block sizes, and whether the expand ends in SwiGLU.
      median_us, p10_us, p90_us: of a call, over the repeats.
      bound_us: what moving its bytes takes.
      error: of a call, relative to the norm of the float32 reference.
      kernels_us: median of each kernel's own time, by name; empty where the profiler knows none.
    """

    group: Group
    what: str
    median_us: float
    p10_us: float
    p90_us: float
    bound_us: float
    error: float
    kernels_us: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if a result was wrong."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.prompts < 1 or not 0 <= options.decode_rows <= options.num_tokens - options.prompts:
        parser.error(
            f"--decode-rows {options.decode_rows} and --prompts {options.prompts} make no step of --num-tokens "
            f"{options.num_tokens}; expected at least one prompt, of at least one token"
        )
    large = jnp.zeros(1 << (30 if jax.default_backend() == "gpu" else 20), jnp.bfloat16)
    copy_s, *_ = run_seconds(jax.jit(lambda x: [lax.optimization_barrier(x + 1)]), large, repeats=5)
    bytes_per_s = 4 * large.size / copy_s
    print(
        f"{jax.devices()[0].device_kind}, {options.shape}, bfloat16, {options.num_tokens} tokens of {options.prompts} "
        f"prompts and {options.decode_rows} decode rows, {_NUM_SLOTS} slots of {_SLOT_RANK} rank rows; copy "
        f"{bytes_per_s / 1e9:.0f} GB/s; us a call, median (p10 to p90) of {options.repeats}"
    )
    timings = []
    for group in GROUPS:
        for timing in measure(group, options, bytes_per_s):
            timings.append(timing)
            print(
                f"{f'{group} {timing.what}':<44}{timing.median_us:>9.1f} ({timing.p10_us:.1f} to {timing.p90_us:.1f})"
                f"  bound {timing.bound_us:.1f}  error {timing.error:.1e}",
                *(f" {name.removeprefix('maf_mvm_')} {us:.1f}" for name, us in timing.kernels_us.items()),
                flush=True,
            )
    if options.out is not None:
        result = {
            **run_facts("pallas_kernels.maf_mvm.bench_prefill", argv),
            "copy_gb_per_s": bytes_per_s / 1e9,
            "timings": [dataclasses.asdict(timing) for timing in timings],
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [f"{t.group} {t.what}: {t.error:.1e}" for t in timings if not t.error <= LARGEST_ERROR]
    if wrong:
        print(f"differ from the reference by more than {LARGEST_ERROR}: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong)


def measure(group: Group, options: argparse.Namespace, bytes_per_s: float) -> Iterator[Timing]:
    """What is timed.

    The first call of a program copies the base, which is not donated: an eighth of it a call is not the kernel's.
    """
    x, slots, segments, base = make_inputs(group, options)
    picked = pick_config(
        num_tiles=segments.num_tiles,
        tile_size=segments.tile_size,
        num_slots=_NUM_SLOTS,
        slot_rank=_SLOT_RANK,
        in_features=x.shape[1],
        widths=slots.widths,
        dtype_bytes=2,
        ends_in_swiglu=group == "gate_up",
        shared_bytes=max_shared_bytes(),
    )
    args = base, x, slots, segments
    layers = [jnp.int32(i) for i in range(NUM_CALLS)]
    apply = functools.partial(reference.maf_mvm, x.astype(jnp.float32), slots, segments)
    expected = functools.reduce(apply, layers, base.astype(jnp.float32))

    def timed(what: str, call: Callable[..., list[Array]], right: Array, num_numbers: int) -> Timing:
        compiled = jax.jit(call).lower(*args).compile()
        error = relative_error(compiled(*args)[-1], right)
        median, p10, p90 = (s / NUM_CALLS * 1e6 for s in run_seconds(compiled, *args, repeats=options.repeats))
        bound = 2 * num_numbers / bytes_per_s * 1e6
        return Timing(group, what, median, p10, p90, bound, error, _kernels_us(compiled, *args))

    for label, config in _configs(picked, x.shape[1]):
        run = functools.partial(pallas_triton.maf_mvm, config=config)

        def onto_base(
            base: Array, x: Array, slots: ProjectionSlots, segments: Segments, run: Callable[..., Array] = run
        ) -> list[Array]:
            return [functools.reduce(functools.partial(run, x, slots, segments), layers, base)]

        yield timed(label, onto_base, expected, x.size + 2 * base.size)
        if group != "gate_up":
            continue

        def fused(
            base: Array, x: Array, slots: ProjectionSlots, segments: Segments, run: Callable[..., Array] = run
        ) -> list[Array]:
            return [run(x, slots, segments, base, layer, ends_in_swiglu=True) for layer in layers]

        last = swiglu(apply(base.astype(jnp.float32), layers[-1]))
        yield timed(f"and swiglu {label}", fused, last, x.size + 3 * base.size // 2)
    if group == "gate_up":
        yield timed("swiglu alone, by XLA", swiglu_alone, swiglu(base.astype(jnp.float32)), 3 * base.size // 2)


def swiglu_alone(base: Array, *_: Any) -> list[Array]:
    """As many kernels as calls: without the barrier, one would read the base once for all."""
    results = []
    for _call in range(NUM_CALLS):
        results.append(swiglu(base))
        base, results[-1] = lax.optimization_barrier((base, results[-1]))
    return results


def _configs(picked: KernelConfig, in_features: int) -> Iterator[tuple[str, KernelConfig]]:
    """The picked block sizes, and others with one of them changed."""
    yield "picked", picked
    num_blocks = picked.padded_rows(_NUM_SLOTS * _SLOT_RANK) // picked.shrink_rows
    choices = {
        "shrink_programs": (num_blocks, max(num_blocks // 2, 1)),
        "shrink_splits": (1, 2, 4),
        "shrink_columns": (64, 128),
        "shrink_unroll": (1, 2),
        "expand_rows": (32, 64, 128),
        "expand_columns": (picked.expand_columns // 2,),
        "expand_stages": (1, 3),
        "num_warps": (4, 8),
    }
    for name, values in choices.items():
        for value in values:
            config = dataclasses.replace(picked, **{name: value})
            step = config.shrink_columns * config.shrink_unroll * config.shrink_splits
            if config != picked and in_features % step == 0 and config.expand_columns >= MIN_DOT_SIZE:
                yield f"{name} {value}", config


def make_inputs(group: Group, options: argparse.Namespace) -> tuple[Array, ProjectionSlots, Segments, Array]:
    """x, slots, segments and base of a step, for as many layers as a program has calls."""
    in_features, widths = named_shapes()[options.shape].group(group)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        # Repeated numbers: a gigabyte is made in a second.
        return jnp.asarray(np.resize(rng.standard_normal(1_000_003, np.float32) * 0.02, shape), jnp.bfloat16)

    slots = ProjectionSlots(
        a=normal(NUM_CALLS, _NUM_SLOTS, len(widths) * _SLOT_RANK, in_features),
        b=normal(NUM_CALLS, _NUM_SLOTS, _SLOT_RANK, sum(widths)),
        # What is added must be of the base's size, or the check would not see it.
        scale=jnp.full((NUM_CALLS, _NUM_SLOTS, len(widths)), 16 * 64 / in_features**0.5, jnp.float32),
        widths=widths,
    )
    rows = np.arange(options.num_tokens)
    requests = [rows[i : i + 1] for i in range(options.decode_rows)]
    requests += np.array_split(rows[options.decode_rows :], options.prompts)
    weights = np.zeros((options.num_tokens, 1, _NUM_SLOTS), np.float32)
    for request, tokens in enumerate(requests):
        weights[np.ix_(tokens, [0], (request * _MIX_SIZE + np.arange(_MIX_SIZE)) % _NUM_SLOTS)] = 0.5
    segments = jax.jit(build_segments, static_argnames="tile_size")(
        jnp.asarray(weights), tile_size=token_tile_size(options.num_tokens)
    )
    return normal(options.num_tokens, in_features), slots, segments, normal(options.num_tokens, sum(widths))


def relative_error(actual: Array, right: Array) -> float:
    """Of the difference, relative to the norm."""
    return float(jnp.linalg.norm(actual.astype(jnp.float32) - right) / jnp.linalg.norm(right))


def run_seconds(call: Callable[..., Any], *args: Any, repeats: int) -> tuple[float, float, float]:
    """Median, p10 and p90 of a run, after one that is not counted."""
    jax.block_until_ready(call(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(time.perf_counter() - start)
    median, p10, p90 = np.percentile(times, (50, 10, 90))
    return float(median), float(p10), float(p90)


def _kernels_us(call: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Median time of each kernel of maf_mvm in a run, from a profiler's trace."""
    if jax.default_backend() != "gpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED_RUNS):
                jax.block_until_ready(call(*args))
        durations = kernel_durations_us(Path(folder))
    return {name: float(np.median(us)) for name, us in durations.items() if name.startswith("maf_mvm_")}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=named_shapes(), default="llama-3-8b", help="(default: %(default)s)")
    add("--num-tokens", type=int, default=8192, metavar="N", help="of the step (default: %(default)s)")
    add("--prompts", type=int, default=4, metavar="N", help="that share the step (default: %(default)s)")
    add("--decode-rows", type=int, default=0, metavar="N", help="the first tokens of the step (default: %(default)s)")
    add("--repeats", type=int, default=10, metavar="N", help="(default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON file to write (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
