"""One Pallas launch a site (Triton lowering): shrink programs, then a skinny GEMM whose tail adds the adapters.

The first programs compute v = weight * scale * (x A^T), cut into jobs: a block of rank rows over a share of the input
features. Whoever ends a block's last job adds its shares up, in order, and counts the block as done. The other programs
stream the base weights, each for its block of columns and its share of the input features, and only then wait until all
blocks are done; the rank rows of v and B are the tail of their sum. So the adapters cost the bytes of A and B, a short
wait, and no launch of their own: a dependent launch costs 2 us, 128 times a step. Without segments there are no shrink
programs and the kernel is a plain GEMM.

The waiting programs rely on GPUs dispatching programs by ascending id: every shrink program is then on the chip, and
will end, before the first one that waits for it. (Letting the streaming programs do the jobs first costs 0.4 ms a step
of the 8B shape: the jobs then delay the stream.) There are no atomics on y and all sums have a fixed order, so the same
input gives the same bits.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import max_shared_bytes
from pallas_kernels.lora_linear.arrivals import ARRIVALS_PER_SITE
from pallas_kernels.lora_linear.config import MIN_DOT_SIZE, KernelConfig, Problem, pick_config
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments

# Whole arrays, indexed by the kernel itself.
_IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)


def lora_linear(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    layer: Int[Array, ""],
    site: Int[Array, ""],
    *,
    config: KernelConfig | None = None,
) -> tuple[Float[Array, "num_partials num_tokens out_features"], Int[Array, "num_sites cells"]]:
    """See `pallas_kernels.lora_linear.lora_linear`. `config` overrides the block sizes that the shapes would pick.

    Raises:
      NotImplementedError: If the kernel does not support the shapes or the dtype.
    """
    return _call(x, w, slots, segments, arrivals, layer, site, config=config, is_swiglu=False)


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    layer: Int[Array, ""],
    site: Int[Array, ""],
    *,
    config: KernelConfig | None = None,
) -> tuple[Float[Array, "num_tokens ffn"], Int[Array, "num_sites cells"]]:
    """See `pallas_kernels.lora_linear.lora_swiglu`. `config` must not split the input features.

    Raises:
      NotImplementedError: If the kernel does not support the shapes or the dtype.
    """
    y, arrivals = _call(x, w, slots, segments, arrivals, layer, site, config=config, is_swiglu=True)
    return y[0], arrivals


def _call(
    x: Array,
    w: Array,
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    layer: Int[Array, ""],
    site: Int[Array, ""],
    *,
    config: KernelConfig | None,
    is_swiglu: bool,
) -> tuple[Float[Array, "num_partials num_tokens out_features"], Int[Array, "num_sites cells"]]:
    picked = config or pick_config(
        _problem(x, slots, segments, is_swiglu=is_swiglu),
        has_adapters=segments is not None,
        shared_bytes=max_shared_bytes(),
    )
    if is_swiglu and picked.splits != 1:
        raise NotImplementedError(f"SwiGLU needs whole sums, but the configuration has {picked.splits} splits")
    interpret = jax.default_backend() == "cpu"
    if segments is None:
        return _launch_plain(x, w, config=picked, is_swiglu=is_swiglu, interpret=interpret), arrivals
    return _launch(
        x, w, slots, segments, arrivals, layer, site, config=picked, is_swiglu=is_swiglu, interpret=interpret
    )


def _problem(x: Array, slots: ProjectionSlots, segments: Segments | None, *, is_swiglu: bool) -> Problem:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype}; the kernel multiplies bfloat16 only; use 'separate'")
    if segments is not None and segments.num_tiles != 1:
        raise NotImplementedError(f"{x.shape[0]} tokens make {segments.num_tiles} tiles; one launch takes one tile")
    rank = slots.slot_rank
    if rank & (rank - 1):
        raise NotImplementedError(f"slot_rank {rank} is not supported; use a power of two such as 8 or 16")
    return Problem(
        num_tokens=_tile_size(x, segments),
        num_rows=_max_rows(slots, segments),
        in_features=x.shape[1],
        widths=slots.widths,
        is_swiglu=is_swiglu,
    )


def _max_rows(slots: ProjectionSlots, segments: Segments | None) -> int:
    """Rank rows of one projection that a step can have."""
    num_segments = slots.num_slots
    if segments is not None and segments.max_segments is not None:
        num_segments = min(segments.max_segments, num_segments)
    return num_segments * slots.slot_rank


def _tile_size(x: Array, segments: Segments | None) -> int:
    if segments is not None:
        return segments.tile_size
    return max(pl.next_power_of_2(x.shape[0]), MIN_DOT_SIZE)


@functools.partial(jax.jit, static_argnames=("config", "is_swiglu", "interpret"))
def _launch_plain(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features width"],
    *,
    config: KernelConfig,
    is_swiglu: bool,
    interpret: bool,
) -> Float[Array, "num_partials num_tokens out_features"]:
    """The same sums without adapters: the bits that a token without pairs gets beside others that have some."""
    out_features = w.shape[1] // 2 if is_swiglu else w.shape[1]
    return pl.pallas_call(
        functools.partial(_plain_kernel, config=config, is_swiglu=is_swiglu, tile_size=_tile_size(x, None)),
        grid=(out_features // config.columns * config.splits,),
        in_specs=[_IN_PLACE] * 2,
        out_specs=_IN_PLACE,
        out_shape=_out_shape(x, out_features, config),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="swiglu" if is_swiglu else "linear",
    )(x, w)


def _out_shape(x: Array, out_features: int, config: KernelConfig) -> jax.ShapeDtypeStruct:
    dtype = x.dtype if config.splits == 1 else jnp.float32
    return jax.ShapeDtypeStruct((config.splits, x.shape[0], out_features), dtype)


def _plain_kernel(
    x_ref: Any,  # [num_tokens, in_features]
    w_ref: Any,  # [in_features, width]
    y_ref: Any,  # [splits, num_tokens, out_features]
    *,
    config: KernelConfig,
    is_swiglu: bool,
    tile_size: int,
) -> None:
    block, split = _div_rem(pl.program_id(0), config.splits)
    starts = _column_starts(block, config, y_ref if is_swiglu else None)
    columns = [start + _iota(config.columns) for start in starts]
    sums = _base_product(x_ref, w_ref, columns, split, config, tile_size)
    _store(y_ref, split, columns[0], _activated(sums, x_ref.dtype), tile_size)


# An inner jit with layer and site as arguments: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames=("config", "is_swiglu", "interpret"))
def _launch(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features width"],
    slots: ProjectionSlots,
    segments: Segments,
    arrivals: Int[Array, "num_sites cells"],
    layer: Int[Array, ""],
    site: Int[Array, ""],
    *,
    config: KernelConfig,
    is_swiglu: bool,
    interpret: bool,
) -> tuple[Float[Array, "num_partials num_tokens out_features"], Int[Array, "num_sites cells"]]:
    in_features, width = w.shape
    out_features = width // 2 if is_swiglu else width
    packed_rows = slots.num_projections * config.padded_rows(_max_rows(slots, segments))
    num_blocks = packed_rows // config.shrink_rows
    if num_blocks >= ARRIVALS_PER_SITE:
        raise NotImplementedError(
            f"{slots.num_slots} slots of rank {slots.slot_rank} make {num_blocks} blocks of rank rows, but one launch "
            f"counts fewer than {ARRIVALS_PER_SITE}; use 'separate'"
        )
    num_shrink = min(num_blocks * config.shrink_splits, config.shrink_programs)
    num_main = out_features // config.columns * config.splits
    operands = (
        layer[None],
        site[None],
        segments.slot_ids,
        segments.num_segments,
        segments.weights,
        slots.scale,
        x,
        w,
        slots.a.reshape(-1, in_features),
        slots.b.reshape(-1, width),
        arrivals,
    )
    y, _, _, arrivals = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            is_swiglu=is_swiglu,
            tile_size=segments.tile_size,
            num_slots=slots.num_slots,
            slot_rank=slots.slot_rank,
            max_rows=_max_rows(slots, segments),
            widths=slots.widths,
            num_shrink=num_shrink,
            is_interpreted=interpret,
        ),
        grid=(num_shrink + num_main,),
        in_specs=[_IN_PLACE] * len(operands),
        out_specs=[_IN_PLACE] * 4,
        out_shape=[
            _out_shape(x, out_features, config),
            jax.ShapeDtypeStruct((segments.tile_size, packed_rows), x.dtype),
            jax.ShapeDtypeStruct(
                (num_blocks, config.shrink_splits, segments.tile_size, config.shrink_rows), jnp.float32
            ),
            jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype),
        ],
        input_output_aliases={len(operands) - 1: 3},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="lora_swiglu" if is_swiglu else "lora_linear",
    )(*operands)
    return y, arrivals


def _kernel(
    layer_ref: Any,  # [1]
    site_ref: Any,  # [1]
    slot_ids_ref: Any,  # [1, num_slots]
    num_segments_ref: Any,  # [1]
    weights_ref: Any,  # [num_tokens, num_gates, num_slots]
    scale_ref: Any,  # [num_layers, num_slots, num_projections]
    x_ref: Any,  # [num_tokens, in_features]
    w_ref: Any,  # [in_features, width]
    a_ref: Any,  # [num_layers * num_slots * num_projections * slot_rank, in_features]
    b_ref: Any,  # [num_layers * num_slots * slot_rank, width]
    _: Any,  # arrivals, as they come in
    y_ref: Any,  # [splits, num_tokens, out_features]
    v_ref: Any,  # [tile_size, num_projections * padded_rows]
    u_ref: Any,  # [num_blocks, shrink_splits, tile_size, shrink_rows] float32, shares of x A^T
    arrivals_ref: Any,  # [num_sites, cells]: blocks that are done, then, by block, programs that have arrived
    *,
    config: KernelConfig,
    is_swiglu: bool,
    tile_size: int,
    num_slots: int,
    slot_rank: int,
    max_rows: int,
    widths: tuple[int, ...],
    num_shrink: int,
    is_interpreted: bool,
) -> None:
    program = pl.program_id(0)
    layer, site = layer_ref[0], site_ref[0]
    num_rows = jnp.minimum(num_segments_ref[0] * slot_rank, max_rows)  # v has no room for more than was promised
    barrier = _no_barrier if is_interpreted else plt.debug_barrier
    # v is read in steps of tail_rows: the last step's rows past the last segment are zeros.
    blocks_per_projection = _cdiv(_cdiv(num_rows, config.tail_rows) * config.tail_rows, config.shrink_rows)
    num_blocks = len(widths) * blocks_per_projection

    @pl.when(program < num_shrink)
    def _shrink() -> None:
        def run_job(job: Array) -> None:
            block, split = _div_rem(job, config.shrink_splits)
            projection, row_block = lax.div(block, blocks_per_projection), lax.rem(block, blocks_per_projection)
            rows = row_block * config.shrink_rows + _iota(config.shrink_rows)
            slots, is_live = _slots_of_rows(slot_ids_ref, rows, num_rows, slot_rank, num_slots)
            a_rows = ((layer * num_slots + slots) * len(widths) + projection) * slot_rank + lax.rem(rows, slot_rank)
            tokens = jnp.minimum(_iota(tile_size), x_ref.shape[0] - 1)  # padding repeats the last token
            gate = jnp.minimum(projection, weights_ref.shape[1] - 1)
            weights = plt.load(weights_ref.at[tokens[:, None], gate, slots[None, :]])
            scale = plt.load(scale_ref.at[layer, slots, projection])
            u = _shrink_product(x_ref, a_ref, tokens, a_rows, is_live, split, config)

            def finish(u: Array) -> None:
                # A select, not a product with 0: the token's own x may be infinite, and the scale of a dead row NaN.
                is_pair = jnp.logical_and(weights != 0, is_live[None, :])
                v = jnp.where(is_pair, (weights * scale[None, :]) * u, 0.0).astype(v_ref.dtype)
                packed = projection * (v_ref.shape[1] // len(widths)) + rows
                plt.store(v_ref.at[_iota(tile_size)[:, None], packed[None, :]], v)
                barrier()  # all of the program's threads have stored before one of them counts it
                plt.atomic_add(arrivals_ref, (site, jnp.int32(0)), jnp.int32(1))

            share = _iota(tile_size)[:, None], _iota(config.shrink_rows)[None, :]
            plt.store(u_ref.at[(block, split, *share)], u)
            barrier()
            arrived = plt.atomic_add(arrivals_ref, (site, 1 + block), jnp.int32(1))

            @pl.when(arrived == config.shrink_splits - 1)
            def _last() -> None:
                barrier()
                shares = [plt.load(u_ref.at[(block, i, *share)]) for i in range(config.shrink_splits)]
                finish(functools.reduce(jnp.add, shares))

        def run(i: Array, _: None) -> None:
            job = program + i * num_shrink
            pl.when(job < num_blocks * config.shrink_splits)(functools.partial(run_job, job))

        # A static count: in interpret mode, loops without one cannot write to memory.
        max_jobs = v_ref.shape[1] // config.shrink_rows * config.shrink_splits
        lax.fori_loop(0, -(-max_jobs // num_shrink), run, None)

    @pl.when(program >= num_shrink)
    def _main() -> None:
        block, split = _div_rem(program - num_shrink, config.splits)
        starts = _column_starts(block, config, y_ref if is_swiglu else None)
        columns = [start + _iota(config.columns) for start in starts]
        sums = _base_product(x_ref, w_ref, columns, split, config, tile_size)

        if not is_interpreted:  # where programs run one after another
            _wait(arrivals_ref, site, num_blocks)
        edges = tuple(itertools.accumulate(widths[:-1]))
        first_rows = [
            sum((start >= edge).astype(jnp.int32) for edge in edges) * (v_ref.shape[1] // len(widths))
            for start in starts
        ]

        def accumulate(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            rows = (split + i * config.splits) * config.tail_rows + _iota(config.tail_rows)
            # Rows past the last segment meet zeros in v: any row that holds numbers will do, without a mask.
            slots, _ = _slots_of_rows(slot_ids_ref, jnp.minimum(rows, num_rows - 1), num_rows, slot_rank, num_slots)
            b_rows = (layer * num_slots + slots) * slot_rank + lax.rem(rows, slot_rank)
            results = []
            for first_row, block_columns, total in zip(first_rows, columns, sums, strict=True):
                b = plt.load(b_ref.at[b_rows[:, None], block_columns[None, :]], eviction_policy="evict_first")
                v = plt.load(v_ref.at[_iota(tile_size)[:, None], (first_row + rows)[None, :]])
                results.append(total + _dot(v, b))
            return tuple(results)

        # Blocks of rank rows are dealt to the splits in turn.
        num_steps = _cdiv(_cdiv(num_rows, config.tail_rows) - split, config.splits)
        sums = lax.fori_loop(0, num_steps, accumulate, sums)
        _store(y_ref, split, columns[0], _activated(sums, x_ref.dtype), tile_size)


def _column_starts(block: Array, config: KernelConfig, swiglu_ref: Any | None) -> tuple[Array, ...]:
    """First columns of W that a program streams: with SwiGLU, of its block of the gate and of the up projection."""
    start = block * config.columns
    return (start,) if swiglu_ref is None else (start, start + swiglu_ref.shape[2])


def _activated(sums: tuple[Array, ...], dtype: jnp.dtype) -> Array:
    """The sum, or silu(gate) * up of two sums rounded to `dtype` first."""
    if len(sums) == 1:
        return sums[0]
    gate, up = (total.astype(dtype).astype(jnp.float32) for total in sums)
    return gate / (1.0 + jnp.exp(-gate)) * up


def _shrink_product(
    x_ref: Any, a_ref: Any, tokens: Array, a_rows: Array, is_live: Array, split: Array, config: KernelConfig
) -> Array:
    """[tile_size, shrink_rows] of x A^T over one share of the input features; zero for rows that are not live."""
    chunk = x_ref.shape[1] // config.shrink_splits
    step = config.shrink_columns * config.shrink_unroll
    mask = jnp.broadcast_to(is_live[:, None], (config.shrink_rows, config.shrink_columns))

    def accumulate(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        results = []
        for unrolled, total in enumerate(sums):
            first = split * chunk + i * step + unrolled * config.shrink_columns
            columns = first + _iota(config.shrink_columns)
            a = plt.load(
                a_ref.at[a_rows[:, None], columns[None, :]], mask=mask, other=0.0, eviction_policy="evict_first"
            )
            x = plt.load(x_ref.at[tokens[:, None], columns[None, :]], eviction_policy="evict_last")
            results.append(total + _dot(x, a.T))
        return tuple(results)

    zeros = jnp.zeros((tokens.shape[0], config.shrink_rows), jnp.float32)
    sums = lax.fori_loop(0, chunk // step, accumulate, (zeros,) * config.shrink_unroll)
    return functools.reduce(jnp.add, sums)


def _base_product(
    x_ref: Any, w_ref: Any, columns: list[Array], split: Array, config: KernelConfig, tile_size: int
) -> tuple[Array, ...]:
    """x @ w for each block of columns, over one share of the input features."""
    chunk = x_ref.shape[1] // config.splits
    tokens = jnp.minimum(_iota(tile_size), x_ref.shape[0] - 1)

    def accumulate(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        rows = split * chunk + i * config.depth + _iota(config.depth)
        x = plt.load(x_ref.at[tokens[:, None], rows[None, :]], eviction_policy="evict_last")
        return tuple(
            total + _dot(x, plt.load(w_ref.at[rows[:, None], block[None, :]], eviction_policy="evict_first"))
            for total, block in zip(sums, columns, strict=True)
        )

    zeros = jnp.zeros((tokens.shape[0], config.columns), jnp.float32)
    return lax.fori_loop(0, chunk // config.depth, accumulate, (zeros,) * len(columns))


def _no_barrier() -> None:
    """In interpret mode a program is one thread."""


def _wait(arrivals_ref: Any, site: Array, target: Array) -> None:
    """Returns once `target` blocks of v are done, with what was stored visible."""

    def is_early(arrived: Array) -> Array:
        return arrived < target

    # Plain loads while it is early, as they disturb nobody; the atomic after them is what acquires.
    lax.while_loop(is_early, lambda _: plt.load(arrivals_ref.at[site, 0], volatile=True), jnp.int32(0))
    lax.while_loop(is_early, lambda _: plt.atomic_add(arrivals_ref, (site, jnp.int32(0)), jnp.int32(0)), jnp.int32(0))
    plt.debug_barrier()


def _store(y_ref: Any, split: Array, columns: Array, y: Array, tile_size: int) -> None:
    tokens = _iota(tile_size)
    index = y_ref.at[split, tokens[:, None], columns[None, :]]
    if y_ref.shape[1] == tile_size:
        plt.store(index, y.astype(y_ref.dtype))
    else:
        is_token = jnp.broadcast_to((tokens < y_ref.shape[1])[:, None], y.shape)
        plt.store(index, y.astype(y_ref.dtype), mask=is_token)


def _slots_of_rows(
    slot_ids_ref: Any, rows: Array, num_rows: Array, slot_rank: int, num_slots: int
) -> tuple[Array, Array]:
    """Slot of each packed rank row, and whether the row belongs to a segment at all."""
    segment = jnp.minimum(lax.div(rows, slot_rank), num_slots - 1)
    return plt.load(slot_ids_ref.at[0, segment]), rows < num_rows


def _div_rem(a: Array, b: int) -> tuple[Array, Array]:
    return lax.div(a, b), lax.rem(a, b)


def _cdiv(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), b)


def _iota(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
