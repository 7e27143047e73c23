"""Times every implementation of maf_mvm on the named shapes, beside the time that moving its bytes takes at least.

    python -m pallas_kernels.maf_mvm.bench --shape llama-3-8b --batch 32 --out maf_mvm.json

One timed call runs the op once for each layer, each layer's output being the next one's base, so that A and B come from
memory as they do in a model; times are per op. Outputs are checked against the reference in the same run.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.maf_mvm.api import Implementation, ProjectionSlots, maf_mvm
from pallas_kernels.maf_mvm.config import token_tile_size
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import Segments, build_segments

# The reference converts all slots to float32; on a large model it would time the memory allocator.
_LARGEST_REFERENCE = 2**26


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report; times in microseconds per op.

    Attributes:
      floor_us: bytes that must move, at the bandwidth that a copy reaches on this device.
      max_error: largest |difference| from the reference in float32, on outputs of order 1.
    """

    shape: str
    group: str
    mixes: str
    num_tokens: int
    active_slots: int
    implementation: str
    median_us: float
    p90_us: float
    floor_us: float
    max_error: float


def main() -> None:
    args = _parse_args()
    dtype = jnp.dtype(args.dtype)
    bandwidth = _copy_bandwidth()
    device = jax.devices()[0]
    print(f"device {device.device_kind}, jax {jax.__version__}, copy bandwidth {bandwidth / 1e9:.0f} GB/s, {dtype}")
    print(
        f"batch {args.batch}, {args.slots} slots of rank {args.rank}, {args.layers} layers a call, "
        f"2 warm-up calls, {args.repeats} repeats; times in us per op"
    )
    print(f"{'shape':14} {'group':8} {'mixes':9} {'active':>6} {'implementation':14} {'median':>9} {'p90':>9} ", end="")
    print(f"{'floor':>9} {'max error':>9}")
    results = [
        result
        for shape in args.shape
        for group in args.group
        for mixes in args.mixes
        for result in _bench_group(args, shape, group, mixes, dtype, bandwidth)
    ]
    if args.out:
        report = {
            "command": " ".join(["python -m pallas_kernels.maf_mvm.bench", *sys.argv[1:]]),
            "device": device.device_kind,
            "jax": jax.__version__,
            "dtype": str(dtype),
            "copy_gb_per_s": bandwidth / 1e9,
            "arguments": {key: value for key, value in vars(args).items() if key != "out"},
            "results": [dataclasses.asdict(result) for result in results],
        }
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(named_shapes()), default=["smollm2-135m"])
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--mixes", nargs="+", choices=["base", "one", "distinct", "zipf"], default=["distinct", "zipf"])
    parser.add_argument("--implementation", nargs="+", default=None, help="default: all that suit the device")
    parser.add_argument("--batch", type=int, default=32, help="tokens of the step")
    parser.add_argument("--mix-size", type=int, default=3, help="slots of each token")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8, help="rank rows of a slot")
    parser.add_argument("--layers", type=int, default=None, help="default: 8 on a CPU, 32 elsewhere")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=None, help="default: float32 on a CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", default=None, help="write the results to this JSON file")
    args = parser.parse_args()
    is_cpu = jax.default_backend() == "cpu"
    args.layers = args.layers or (8 if is_cpu else 32)
    args.dtype = args.dtype or ("float32" if is_cpu else "bfloat16")
    # On a CPU the kernel runs in interpret mode, which says nothing about its speed.
    args.implementation = args.implementation or ["dense", "loop", *([] if is_cpu else ["pallas_triton"])]
    return args


def _bench_group(
    args: argparse.Namespace, shape: str, group: Group, mixes: str, dtype: Any, bandwidth: float
) -> list[Result]:
    in_features, widths = named_shapes()[shape].group(group)
    slots = _random_slots(args, in_features, widths, dtype)
    segments, num_active = _random_segments(args, mixes)
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (args.batch, in_features), dtype)
    base = jax.random.normal(keys[1], (args.batch, sum(widths)), dtype)
    floor_us = _bytes_moved(slots, num_active, x, base) / bandwidth * 1e6
    expected = _reference(x, slots, segments, base)
    implementations = [*args.implementation]
    if slots.a[0].size + slots.b[0].size < _LARGEST_REFERENCE:
        implementations = ["reference", *implementations]

    results = []
    for name in implementations:
        one_layer = maf_mvm(x, slots, segments, base, layer=0, implementation=name)
        error = float(jnp.abs(one_layer.astype(jnp.float32) - expected).max())
        times = _time(jax.jit(_all_layers(name)), args.repeats, x, slots, segments, base)
        per_op = sorted(t / args.layers * 1e6 for t in times)
        median, p90 = statistics.median(per_op), per_op[int(0.9 * (len(per_op) - 1))]
        results.append(Result(shape, group, mixes, args.batch, num_active, name, median, p90, floor_us, error))
        print(f"{shape:14} {group:8} {mixes:9} {num_active:6} {name:14} {median:9.1f} {p90:9.1f} ", end="")
        print(f"{floor_us:9.1f} {error:9.1e}", flush=True)
    return results


def _all_layers(implementation: Implementation) -> Callable[..., Array]:
    def chain(x: Array, slots: ProjectionSlots, segments: Segments, base: Array) -> Array:
        for layer in range(slots.num_layers):
            base = maf_mvm(x, slots, segments, base, layer=layer, implementation=implementation)
        return base

    return chain


def _reference(x: Array, slots: ProjectionSlots, segments: Segments, base: Array) -> Float[Array, "num_tokens out"]:
    """The reference on the same values in float32, one layer."""
    first = dataclasses.replace(
        slots, a=slots.a[:1].astype(jnp.float32), b=slots.b[:1].astype(jnp.float32), scale=slots.scale[:1]
    )
    x, base = x.astype(jnp.float32), base.astype(jnp.float32)
    return maf_mvm(x, first, segments, base, layer=0, implementation="reference")


def _random_slots(args: argparse.Namespace, in_features: int, widths: tuple[int, ...], dtype: Any) -> ProjectionSlots:
    keys = jax.random.split(jax.random.key(0))
    rows, out_features = len(widths) * args.rank, sum(widths)
    a = jax.random.normal(keys[0], (args.layers, args.slots, rows, in_features), dtype)
    b = jax.random.normal(keys[1], (args.layers, args.slots, args.rank, out_features), dtype)
    return ProjectionSlots(
        a=a * jnp.asarray(in_features**-0.5, dtype),
        b=b * jnp.asarray(args.rank**-0.5, dtype),
        scale=jnp.ones((args.layers, args.slots, len(widths))),
        widths=widths,
    )


def _random_segments(args: argparse.Namespace, mixes: str) -> tuple[Segments, int]:
    """Segments of the step and how many slots it uses.

    base: no pairs; one: all tokens use slot 0; distinct: token t uses the next `mix_size` slots, round about; zipf:
    `mix_size` slots each with popularity 1/rank.
    """
    rng = random.Random(0)
    popularity = [1 / (i + 1) for i in range(args.slots)]
    rows = [[0.0] * args.slots for _ in range(args.batch)]
    for t, row in enumerate(rows):
        used: list[int] = []
        match mixes:
            case "one":
                used = [0]
            case "distinct":
                used = [(t * args.mix_size + i) % args.slots for i in range(args.mix_size)]
            case "zipf":
                used = rng.choices(range(args.slots), popularity, k=args.mix_size)
        for slot in used:
            row[slot] = rng.uniform(0.2, 0.5)
    num_active = sum(any(column) for column in zip(*rows, strict=True))
    weights = jnp.asarray(rows, jnp.float32)[:, None]
    return build_segments(weights, tile_size=token_tile_size(args.batch)), num_active


def _bytes_moved(slots: ProjectionSlots, num_active: int, x: Array, base: Array) -> int:
    """A and B of the active slots and x once in, the base once in and once out."""
    per_slot = (slots.a[0, 0].size + slots.b[0, 0].size) * slots.a.dtype.itemsize
    return num_active * per_slot + x.nbytes + 2 * base.nbytes


def _copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    size = 2**27 if jax.default_backend() == "cpu" else 2**30
    array = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / statistics.median(_time(jax.jit(lambda array: array + 1), 5, array))


def _time(fn: Callable[..., Array], repeats: int, *args: Any) -> list[float]:
    """Seconds of each of `repeats` calls, after two warm-up calls."""
    seconds = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
