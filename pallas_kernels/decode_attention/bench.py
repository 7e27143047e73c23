"""Times a decode step's attention over all layers: one kernel a layer beside rotation, scatter, attention and merge.

    python -m pallas_kernels.decode_attention.bench --heads 8b --batches 1 32 64 --contexts 256 2048 --out decode.json
    python -m pallas_kernels.decode_attention.bench --heads 8b --batches 32 --contexts 256 --sweep

Layers run in a row in one program, as in a step, each with a cache of its own; a small fusion in between makes each
wait for the one before (row "links": the fusions alone, to be subtracted). The bound is the time to read the live keys
and values once at the speed at which this device copies a large array, measured in the same run. Small caches stay in
the L2 cache from one repeat to the next, which in a step the weights would displace: times below the bound are of that.
One layer's output is compared with the float32 reference, its cache with the scatter's, before anything is timed.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.bench_report import run_facts
from pallas_kernels.decode_attention import pallas_triton, reference
from pallas_kernels.decode_attention.config import KernelConfig, kernel_config
from pallas_kernels.decode_attention.shapes import HEADS, DecodeInputs, Heads
from pallas_kernels.paged_attention import pallas_triton as paged_triton
from pallas_kernels.paged_attention import portable
from pallas_kernels.paged_attention.bench import copy_bytes_per_s

type Attend = Callable[..., tuple[Array, Array]]

_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One implementation on one batch; times in seconds per layer.

    Attributes:
      heads: name in `HEADS`.
      batch: sequences.
      context: tokens of each sequence, the new one included.
      num_partials: partial sums of qkv; 0 for qkv itself.
      implementation: name of the implementation, and what a sweep changed of its configuration.
      median_s: median over the repeats.
      p90_s: 90th percentile over the repeats.
      bound_s: time to read the live cache once at the copy speed of the device.
      error: norm of the difference to the float32 reference over the reference's norm.
      cache_error: the same for the cache's new tokens, against the scatter in the cache's dtype.
    """

    heads: str
    batch: int
    context: int
    num_partials: int
    implementation: str
    median_s: float
    p90_s: float
    bound_s: float
    error: float
    cache_error: float


def main() -> None:
    args = _parse_args()
    device = jax.devices()[0]
    bytes_per_s = copy_bytes_per_s()
    print(
        f"device {device.device_kind}, jax {jax.__version__}, dtype {args.dtype}, heads {args.heads}, "
        f"{args.layers} layers, block table of {args.table_tokens} tokens, copy {bytes_per_s / 1e9:.0f} GB/s, "
        f"warm-up 1, repeats {args.repeats}; times are per layer"
    )
    print(
        f"{'batch':>5}{'context':>9}  {'implementation':<44}{'median us':>10}{'p90 us':>9}{'bound us':>9}{'error':>9}"
    )
    measurements = []
    for batch, context in itertools.product(args.batches, args.contexts):
        for measurement in measure_batch(args, batch, context, bytes_per_s):
            measurements.append(measurement)
            print(_as_row(measurement), flush=True)
    if args.out:
        report = {
            **run_facts("pallas_kernels.decode_attention.bench"),
            "dtype": args.dtype,
            "layers": args.layers,
            "table_tokens": args.table_tokens,
            "repeats": args.repeats,
            "copy_bytes_per_s": bytes_per_s,
            "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def _parse_args() -> argparse.Namespace:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", choices=HEADS, default="8b" if on_gpu else "tiny")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 64] if on_gpu else [2])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048] if on_gpu else [40])
    parser.add_argument("--layers", type=int, default=32 if on_gpu else 2)
    parser.add_argument("--partials", type=int, default=0, help="give qkv as so many float32 partial sums")
    parser.add_argument(
        "--table-tokens", type=int, default=4096 if on_gpu else 64, help="tokens that a row of the block table can hold"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="also time other configurations of the one kernel")
    parser.add_argument("--out", type=pathlib.Path, help="also write the results to this JSON file")
    return parser.parse_args()


def measure_batch(args: argparse.Namespace, batch: int, context: int, bytes_per_s: float) -> Iterator[Measurement]:
    """Checks and times all implementations on one batch."""
    heads = HEADS[args.heads]
    inputs = device_inputs(batch, context, heads, args.dtype, args.table_tokens, args.partials)
    live_bytes = 2 * batch * (context - 1) * heads.num_kv_heads * heads.head_dim * jnp.dtype(args.dtype).itemsize
    expected, _ = _float32_reference(inputs)
    _, scattered = jax.jit(reference.decode_attention)(*inputs.arguments)
    for name, attend in _implementations(args, heads, batch):
        try:
            out, kv = jax.jit(attend)(*inputs.arguments)
        except jax.errors.JaxRuntimeError as error:  # a sweep also tries what needs more shared memory than there is
            print(f"{batch:>5}{context:>9}  {name:<44} does not run: {str(error).splitlines()[0][:100]}")
            continue
        errors = (0.0, 0.0) if name == "links" else (float(_error(out, expected)), float(_error(kv, scattered)))
        del out, kv
        times = time_layers(attend, inputs, args.layers, args.repeats)
        yield Measurement(
            heads=args.heads,
            batch=batch,
            context=context,
            num_partials=args.partials,
            implementation=name,
            median_s=float(np.median(times)),
            p90_s=float(np.quantile(times, 0.9)),
            bound_s=live_bytes / bytes_per_s,
            error=errors[0],
            cache_error=errors[1],
        )


def device_inputs(
    batch: int, context: int, heads: Heads, dtype: DTypeLike, table_tokens: int, num_partials: int
) -> DecodeInputs:
    """Random inputs made on the device, all sequences of one length, blocks in random order."""
    blocks_per_seq = -(-context // _BLOCK_SIZE)
    keys = jax.random.split(jax.random.key(0), 3)
    order = jax.random.permutation(keys[0], batch * blocks_per_seq).astype(jnp.int32).reshape(batch, blocks_per_seq)
    width = max(table_tokens // _BLOCK_SIZE, blocks_per_seq)
    kv_shape = (batch * blocks_per_seq, 2, heads.num_kv_heads, _BLOCK_SIZE, heads.head_dim)
    leading = (num_partials,) if num_partials else ()
    qkv = jax.random.normal(keys[1], (*leading, batch, heads.qkv_width), jnp.float32)
    angles = jnp.full((batch, heads.head_dim // 2), float(context), jnp.float32)
    return DecodeInputs(
        qkv=qkv if num_partials else qkv.astype(dtype),
        kv=jax.random.normal(keys[2], kv_shape, dtype),
        block_tables=jnp.pad(order, ((0, 0), (0, width - blocks_per_seq))),
        positions=jnp.full((batch,), context - 1, jnp.int32),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
    )


def _implementations(args: argparse.Namespace, heads: Heads, batch: int) -> Iterator[tuple[str, Attend]]:
    on_gpu = jax.default_backend() == "gpu"
    attend = paged_triton.paged_attention if on_gpu else portable.paged_attention
    yield "links", lambda qkv, kv, *_: (qkv.reshape(-1, *qkv.shape[-2:])[0, :, : heads.q_width].astype(kv.dtype), kv)
    yield "one after another", functools.partial(reference.decode_attention, attend=attend)
    config = kernel_config(
        num_seqs=batch,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_context=args.table_tokens,
        dtype=args.dtype,
    )
    yield "one kernel", functools.partial(pallas_triton.decode_attention, config=config)
    for other in _neighbours(config) if args.sweep else ():
        changed = {k: v for k, v in dataclasses.asdict(other).items() if v != getattr(config, k)}
        name = "one kernel " + " ".join(f"{k}={v}" for k, v in changed.items())
        yield name, functools.partial(pallas_triton.decode_attention, config=other)


def _neighbours(config: KernelConfig) -> Iterator[KernelConfig]:
    """Configurations that differ in one or two fields."""
    tries = {
        "chunk_tokens": (32, 64, 128),
        "num_splits": (1, 2, 4, 8, 16, 32),
        "min_split_chunks": (1, 2, 4),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (2, 3, 4, 5),
        "launch_dependents": (True,),
    }
    for name, values in tries.items():
        for value in values:
            if value != getattr(config, name) and (name != "min_split_chunks" or config.num_splits > 1):
                yield dataclasses.replace(config, **{name: value})
    for num_warps, num_stages in ((2, 2), (2, 3), (8, 3)):
        yield dataclasses.replace(config, num_warps=num_warps, num_stages=num_stages)


@jax.jit
def _float32_reference(inputs: DecodeInputs) -> tuple[Array, Array]:
    rest = inputs.arguments[2:]
    return reference.decode_attention(inputs.qkv.astype(jnp.float32), inputs.kv.astype(jnp.float32), *rest)


@jax.jit
def _error(actual: Array, expected: Array) -> Array:
    difference = actual.astype(jnp.float32) - expected.astype(jnp.float32)
    return jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(expected.astype(jnp.float32).ravel())


def time_layers(attend: Attend, inputs: DecodeInputs, num_layers: int, repeats: int) -> list[float]:
    """Seconds per layer of `num_layers` in a row, each on what the one before gave; one value a repeat."""

    def layers(qkv: Array, caches: list[Array], *rest: Array) -> tuple[Array, list[Array]]:
        written = []
        for kv in caches:
            out, kv = attend(qkv, kv, *rest)
            written.append(kv)
            # A barrier, so that the next layer's rotation is not fused into this: a projection stands between them.
            qkv = jax.lax.optimization_barrier(_linked(qkv, out))
        return qkv, written

    caches = [jnp.copy(inputs.kv) for _ in range(num_layers)]
    rest = inputs.arguments[2:]
    compiled = jax.jit(layers, donate_argnums=1).lower(inputs.qkv, caches, *rest).compile()
    qkv, caches = compiled(inputs.qkv, caches, *rest)
    times = []
    for _ in range(repeats):
        jax.block_until_ready((qkv, caches))
        start = time.perf_counter()
        qkv, caches = compiled(inputs.qkv, caches, *rest)
        jax.block_until_ready(qkv)
        times.append((time.perf_counter() - start) / num_layers)
    return times


def _linked(qkv: Array, out: Array) -> Array:
    """qkv with a little of `out` in every element, so that the next layer waits for it: one small fusion."""
    return qkv + (out[:, :1] * jnp.asarray(1e-3, out.dtype)).astype(qkv.dtype).reshape(*(1,) * (qkv.ndim - 2), -1, 1)


def _as_row(m: Measurement) -> str:
    micros = "".join(
        f"{seconds * 1e6:>{width}.1f}" for seconds, width in ((m.median_s, 10), (m.p90_s, 9), (m.bound_s, 9))
    )
    return f"{m.batch:>5}{m.context:>9}  {m.implementation:<44}{micros}{m.error:>9.1e} (cache {m.cache_error:.1e})"


if __name__ == "__main__":
    main()
