"""Times maf_mvm in a prefill step of the 8B shape: block sizes beside each other, and the expand that ends in SwiGLU.

    python -m pallas_kernels.maf_mvm.bench_prefill --num-tokens 8192

Four requests with three adapters each share the step. The bound is the bytes of x, the base and the result over the
speed at which the device copies a large array. A step runs each group 32 times, on top of the GEMMs.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.maf_mvm import ProjectionSlots, pallas_triton, swiglu, token_tile_size
from pallas_kernels.maf_mvm.config import KernelConfig, pick_config
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import Segments, build_segments

_NUM_SLOTS, _SLOT_RANK, _MIX_SIZE, _NUM_REQUESTS = 128, 8, 3, 4
_NUM_CALLS = 8  # in one program, each with a layer of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    large = jnp.zeros(1 << 30, jnp.bfloat16)
    bytes_per_s = 4 * large.size / _median_s(lambda x: [lax.optimization_barrier(x + 1)], large, repeats=5)
    print(f"device {jax.devices()[0].device_kind}, {args.num_tokens} tokens, copy {bytes_per_s / 1e9:.0f} GB/s")
    print(f"{'what':<52}{'us a call':>10}{'bound us':>10}")
    for group in GROUPS:
        for name, seconds, num_bytes in measure(group, args.num_tokens, args.repeats):
            print(f"{name:<52}{seconds * 1e6:>10.1f}{num_bytes / bytes_per_s * 1e6:>10.1f}", flush=True)


def measure(group: Group, num_tokens: int, repeats: int) -> Iterator[tuple[str, float, int]]:
    """What is timed, seconds a call, and the bytes that it must move.

    The first call of a program copies the base, which is not donated: an eighth of it a call is not the kernel's.
    """
    x, slots, segments, base = _inputs(group, num_tokens)
    picked = pick_config(
        num_tiles=segments.num_tiles,
        tile_size=segments.tile_size,
        num_slots=_NUM_SLOTS,
        slot_rank=_SLOT_RANK,
        in_features=x.shape[1],
        widths=slots.widths,
        dtype_bytes=2,
    )
    args = base, x, slots, segments
    for label, config in _configs(picked):

        def onto_base(
            base: Array, x: Array, slots: ProjectionSlots, segments: Segments, config: KernelConfig = config
        ) -> list[Array]:
            for i in range(_NUM_CALLS):
                base = pallas_triton.maf_mvm(x, slots, segments, base, jnp.int32(i), config=config)
            return [base]

        seconds = _median_s(onto_base, *args, repeats=repeats) / _NUM_CALLS
        yield f"{group} {label}", seconds, 2 * (x.size + 2 * base.size)
        if group != "gate_up":
            continue

        def fused(
            base: Array, x: Array, slots: ProjectionSlots, segments: Segments, config: KernelConfig = config
        ) -> list[Array]:
            run = functools.partial(pallas_triton.maf_mvm, config=config, ends_in_swiglu=True)
            return [run(x, slots, segments, base, jnp.int32(i)) for i in range(_NUM_CALLS)]

        seconds = _median_s(fused, *args, repeats=repeats) / _NUM_CALLS
        yield f"{group} and swiglu {label}", seconds, 2 * (x.size + 3 * base.size // 2)
    if group == "gate_up":
        seconds = _median_s(lambda base: [swiglu(base)], base, repeats=repeats)
        yield "swiglu alone, by XLA", seconds, 3 * base.size


def _configs(picked: KernelConfig) -> Iterator[tuple[str, KernelConfig]]:
    """The picked block sizes and one change each; "a program a block" is how every tile once ran."""
    yield "picked", picked
    num_blocks = picked.padded_rows(_NUM_SLOTS * _SLOT_RANK) // picked.shrink_rows
    yield "a program a block", dataclasses.replace(picked, shrink_group=1, shrink_programs=num_blocks)
    yield "two splits", dataclasses.replace(picked, shrink_splits=2)
    yield "64 columns", dataclasses.replace(picked, expand_columns=64)
    yield "no pipeline in the expand", dataclasses.replace(picked, expand_stages=1)
    yield "8 warps", dataclasses.replace(picked, num_warps=8)


def _inputs(group: Group, num_tokens: int) -> tuple[Array, ProjectionSlots, Segments, Array]:
    in_features, widths = named_shapes()["llama-3-8b"].group(group)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        # Repeated numbers: a gigabyte is made in a second.
        return jnp.asarray(np.resize(rng.standard_normal(1_000_003, np.float32) * 0.02, shape), jnp.bfloat16)

    slots = ProjectionSlots(
        a=normal(_NUM_CALLS, _NUM_SLOTS, len(widths) * _SLOT_RANK, in_features),
        b=normal(_NUM_CALLS, _NUM_SLOTS, _SLOT_RANK, sum(widths)),
        scale=jnp.ones((_NUM_CALLS, _NUM_SLOTS, len(widths)), jnp.float32),
        widths=widths,
    )
    weights = np.zeros((num_tokens, 1, _NUM_SLOTS), np.float32)
    for request, tokens in enumerate(np.array_split(np.arange(num_tokens), _NUM_REQUESTS)):
        weights[tokens, 0, request * _MIX_SIZE : (request + 1) * _MIX_SIZE] = 0.5
    segments = jax.jit(build_segments, static_argnames="tile_size")(
        jnp.asarray(weights), tile_size=token_tile_size(num_tokens)
    )
    return normal(num_tokens, in_features), slots, segments, normal(num_tokens, sum(widths))


def _median_s(call: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Seconds of one run of the compiled call."""
    compiled = jax.jit(call).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


if __name__ == "__main__":
    main()
