"""Times every implementation of paged_attention on the named shapes, next to the reference and a bound by bytes.

    python -m pallas_kernels.paged_attention.bench --shapes 8b_decode_32x2048 8b_mixed_512 --out attention.json
    python -m pallas_kernels.paged_attention.bench --sweep --shapes 8b_prefill_4x2048+0 8b_prefill_16x512+0

The bound is the time to read the live keys and values once at the speed at which this device copies a large array,
measured in the same run. Each result is compared with the float32 reference before it is timed. With --sweep it is
block sizes of the Pallas kernels that are compared: of the Triton kernel each name says tokens a tile, tokens a chunk,
warps and stages, of the Mosaic kernel tokens a chunk and buffers. What an implementation does not support is said and
left out.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench_report import run_facts
from pallas_kernels.paged_attention import pallas_triton
from pallas_kernels.paged_attention.api import Implementation, paged_attention
from pallas_kernels.paged_attention.config import MOSAIC_TILE_SIZE, KernelConfig, MosaicConfig
from pallas_kernels.paged_attention.shapes import SHAPES, AttentionInputs, AttentionShape, query_tiles, random_inputs

# Calls in a row inside one program, each on the output of the one before: hides the dispatch from the host.
_CALLS_PER_REPEAT = 32

# (tokens a tile, tokens a chunk, warps, stages) of the prefill sweep: 64 to 256 query rows a program for four query
# heads to a KV head. On an H200 all keep the products in flight; only 32x64 w4 spills registers inside its loop.
SWEPT = (
    (16, 64, 4, 2),
    (16, 64, 4, 3),
    (16, 128, 4, 2),
    (32, 32, 4, 3),
    (32, 64, 4, 2),
    (32, 64, 8, 2),
    (32, 64, 8, 3),
    (32, 128, 8, 2),
    (32, 128, 8, 3),
    (64, 32, 8, 3),
    (64, 64, 8, 2),
    (64, 64, 8, 3),
)

SWEPT_MOSAIC = (MosaicConfig(128, 2), MosaicConfig(64, 3), MosaicConfig(64, 4))

_COPY_BYTES = {"gpu": 4 << 30, "cpu": 256 << 20}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One implementation on one shape; times in seconds per call.

    Attributes:
      shape: name in `SHAPES`.
      implementation: name of the implementation, or of its block sizes.
      median_s: median over the repeats.
      p90_s: 90th percentile over the repeats.
      bound_s: time to read the live cache once at the copy speed of the device.
      tflops: floating-point operations of the visible keys over the median, in 10^12 per second.
      error: norm of the difference to the float32 reference over the reference's norm.
    """

    shape: str
    implementation: str
    median_s: float
    p90_s: float
    bound_s: float
    tflops: float
    error: float


def main() -> None:
    args = _parse_args()
    device = jax.devices()[0]
    bytes_per_s = copy_bytes_per_s()
    print(
        f"device {device.device_kind}, jax {jax.__version__}, dtype {args.dtype}, copy {bytes_per_s / 1e9:.0f} GB/s, "
        f"warm-up 1, repeats {args.repeats} of {_CALLS_PER_REPEAT} calls"
    )
    print(
        f"{'shape':<24}{'implementation':<16}{'median us':>10}{'p90 us':>10}{'bound us':>10}{'TFLOP/s':>9}{'error':>10}"
    )
    measurements = []
    for name in args.shapes:
        measured = sweep_shape if args.sweep else measure_shape
        for measurement in measured(name, args.dtype, args.implementations, args.repeats, bytes_per_s):
            measurements.append(measurement)
            print(_as_row(measurement), flush=True)
    if args.out:
        report = {
            **run_facts("pallas_kernels.paged_attention.bench"),
            "dtype": args.dtype,
            "repeats": args.repeats,
            "calls_per_repeat": _CALLS_PER_REPEAT,
            "copy_bytes_per_s": bytes_per_s,
            "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def _parse_args() -> argparse.Namespace:
    on_gpu = jax.default_backend() == "gpu"
    family = "8b_" if on_gpu else "135m_"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if family in name])
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=get_args(Implementation),
        default=get_args(Implementation) if on_gpu else ["reference", "portable"],
    )
    parser.add_argument("--sweep", action="store_true", help="compare block sizes of the Pallas kernels instead")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="also write the results to this JSON file")
    return parser.parse_args()


def measure_shape(
    name: str, dtype: str, implementations: Sequence[Implementation], repeats: int, bytes_per_s: float
) -> Iterator[Measurement]:
    """Checks and times the implementations on one named shape."""
    shape = SHAPES[name]
    inputs = random_inputs(shape, dtype, np.random.default_rng(0))
    expected = np.asarray(_float32_reference(inputs))
    for implementation in implementations:

        def call(q: Array, inputs: AttentionInputs, implementation: Implementation = implementation) -> Array:
            return paged_attention(q, inputs.kv, inputs.block_tables, inputs.tiles, implementation=implementation)

        yield from _measure(name, shape, implementation, call, inputs, expected, repeats, bytes_per_s)


def sweep_shape(
    name: str, dtype: str, implementations: Sequence[Implementation], repeats: int, bytes_per_s: float
) -> Iterator[Measurement]:
    """Checks and times the block sizes of `SWEPT_MOSAIC` and `SWEPT`, and those that the shapes pick, on one shape."""
    shape = SHAPES[name]
    yield from measure_shape(name, dtype, ["pallas_triton"], repeats, bytes_per_s)
    inputs = random_inputs(shape, dtype, np.random.default_rng(0))
    expected = np.asarray(_float32_reference(inputs))

    def measure(label: str, tile_size: int, kernel: Callable[..., Array]) -> Iterator[Measurement]:
        tiled = dataclasses.replace(inputs, tiles=query_tiles(dataclasses.replace(shape, tile_size=tile_size)))

        def call(q: Array, inputs: AttentionInputs) -> Array:
            return kernel(q, inputs.kv, inputs.block_tables, inputs.tiles)

        return _measure(name, shape, label, call, tiled, expected, repeats, bytes_per_s)

    from pallas_kernels.paged_attention import pallas_mosaic  # its backend takes most of a second to import

    for config in SWEPT_MOSAIC:
        kernel = functools.partial(pallas_mosaic.paged_attention, config=config)
        yield from measure(f"mosaic {config.chunk_tokens} b{config.num_buffers}", MOSAIC_TILE_SIZE, kernel)
    for tile_size, chunk_tokens, num_warps, num_stages in SWEPT:
        config = KernelConfig(chunk_tokens, num_splits=1, num_warps=num_warps, num_stages=num_stages)
        kernel = functools.partial(pallas_triton.paged_attention, config=config)
        yield from measure(f"{tile_size}x{chunk_tokens} w{num_warps} s{num_stages}", tile_size, kernel)


def _measure(
    name: str,
    shape: AttentionShape,
    label: str,
    call: Callable[..., Array],
    inputs: AttentionInputs,
    expected: np.ndarray,
    repeats: int,
    bytes_per_s: float,
) -> Iterator[Measurement]:
    try:
        out = np.asarray(jax.jit(call)(inputs.q, inputs), np.float32)
    except NotImplementedError as refusal:
        print(f"{name:<24}{label:<16}{refusal}")
        return
    times = time_calls(call, inputs.q, inputs, repeats=repeats)
    median = float(np.median(times))
    yield Measurement(
        shape=name,
        implementation=label,
        median_s=median,
        p90_s=float(np.quantile(times, 0.9)),
        bound_s=shape.cache_bytes(inputs.kv.dtype) / bytes_per_s,
        tflops=shape.flops() / median / 1e12,
        error=float(np.linalg.norm(out - expected) / np.linalg.norm(expected)),
    )


@jax.jit
def _float32_reference(inputs: AttentionInputs) -> Array:
    q, kv = inputs.q.astype(jnp.float32), inputs.kv.astype(jnp.float32)
    return paged_attention(q, kv, inputs.block_tables, inputs.tiles, implementation="reference")


def time_calls(call: Callable[..., Array], x: Array, *constants: Any, repeats: int) -> list[float]:
    """Seconds per call of `call(x, *constants)`, whose result is the next call's x; one value a repeat."""

    def chain(x: Array, *constants: Any) -> Array:
        for _ in range(_CALLS_PER_REPEAT):
            x = call(x, *constants)
        return x

    compiled = jax.jit(chain).lower(x, *constants).compile()
    jax.block_until_ready(compiled(x, *constants))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x, *constants))
        times.append((time.perf_counter() - start) / _CALLS_PER_REPEAT)
    return times


def copy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second while adding 1 to a large array."""
    num_bytes = _COPY_BYTES["gpu" if jax.default_backend() == "gpu" else "cpu"]
    times = time_calls(lambda x: jax.lax.optimization_barrier(x + 1), jnp.zeros(num_bytes // 4, jnp.float32), repeats=5)
    return 2 * num_bytes / float(np.median(times))


def _as_row(m: Measurement) -> str:
    micros = "".join(f"{seconds * 1e6:>10.1f}" for seconds in (m.median_s, m.p90_s, m.bound_s))
    return f"{m.shape:<24}{m.implementation:<16}{micros}{m.tflops:>9.2f}{m.error:>10.1e}"


if __name__ == "__main__":
    main()
