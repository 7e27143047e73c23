"""Shrink and expand as two Pallas kernels in the Triton lowering; in interpret mode on a CPU.

Both walk the sorted segments of a tile of tokens. The shrink leaves v[token, rank row] = weight * scale * (x A^T), rank
rows packed in segment order, projection after projection; the expand adds v B to the base. Every program owns its part
of the output and sums in a fixed order, so there are no atomics and the same input gives the same bits. A and B of all
layers are read in place: rows of the flat [layers * slots * ..., features] view, never a slice of it.
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

from pallas_kernels.maf_mvm.config import KernelConfig, pick_config
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments

# Whole arrays, indexed by the kernels themselves.
_IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)


def maf_mvm(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    config: KernelConfig | None = None,
) -> Float[Array, "num_tokens out_features"]:
    """Shrink, then expand onto the base. `config` overrides the block sizes that the shapes would pick.

    Raises:
      NotImplementedError: If the kernels do not support the shapes.
    """
    picked = pick_config(
        num_tiles=segments.num_tiles,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        in_features=x.shape[1],
        widths=slots.widths,
        dtype_bytes=x.dtype.itemsize,
    )
    interpret = jax.default_backend() == "cpu"
    return _shrink_expand(x, slots, segments, base, layer, config=config or picked, interpret=interpret)


# An inner jit with the layer as an argument: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _shrink_expand(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
    interpret: bool,
) -> Float[Array, "num_tokens out_features"]:
    with jax.named_scope("shrink"):
        v = _shrink(x, slots, segments, layer, config=config, interpret=interpret)
    with jax.named_scope("expand"):
        return _expand(v, slots, segments, base, layer, out_dtype=x.dtype, config=config, interpret=interpret)


def _shrink(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
    interpret: bool,
) -> Float[Array, "splits padded_tokens packed_rows"]:
    in_features = x.shape[1]
    padded_rows = config.padded_rows(slots.num_slots * slots.slot_rank)
    padded_tokens = segments.num_tiles * segments.tile_size
    kernel = functools.partial(
        _shrink_kernel,
        config=config,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        num_projections=slots.num_projections,
        slot_rank=slots.slot_rank,
        padded_rows=padded_rows,
    )
    num_blocks = slots.num_projections * padded_rows // config.shrink_rows
    return pl.pallas_call(
        kernel,
        # The last axis varies fastest over the program ids.
        grid=(segments.num_tiles, num_blocks, config.shrink_splits),
        in_specs=[_IN_PLACE] * 7,
        out_specs=_IN_PLACE,
        out_shape=jax.ShapeDtypeStruct(
            (config.shrink_splits, padded_tokens, slots.num_projections * padded_rows), x.dtype
        ),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.shrink_stages),
        interpret=interpret,
        name="maf_mvm_shrink",
    )(
        layer[None],
        segments.slot_ids,
        segments.num_segments,
        segments.weights,
        slots.scale,
        x,
        slots.a.reshape(-1, in_features),
    )


def _shrink_kernel(
    layer_ref: Any,  # [1]
    slot_ids_ref: Any,  # [num_tiles, num_slots]
    num_segments_ref: Any,  # [num_tiles]
    weights_ref: Any,  # [num_tokens, num_gates, num_slots]
    scale_ref: Any,  # [num_layers, num_slots, num_projections]
    x_ref: Any,  # [num_tokens, in_features]
    a_ref: Any,  # [num_layers * num_slots * num_projections * slot_rank, in_features]
    v_ref: Any,  # [splits, num_tiles * tile_size, num_projections * padded_rows]
    *,
    config: KernelConfig,
    tile_size: int,
    num_slots: int,
    num_projections: int,
    slot_rank: int,
    padded_rows: int,
) -> None:
    tile, block, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    blocks_per_projection = padded_rows // config.shrink_rows
    projection = lax.div(block, blocks_per_projection)
    first_row = lax.rem(block, blocks_per_projection) * config.shrink_rows
    num_rows = num_segments_ref[tile] * slot_rank

    @pl.when(first_row < num_rows)
    def _() -> None:
        num_tokens, in_features = x_ref.shape
        layer = layer_ref[0]
        rows = first_row + _iota(config.shrink_rows)
        slots, is_live = _slots_of_rows(slot_ids_ref, tile, rows, num_rows, slot_rank, num_slots)
        a_rows = ((layer * num_slots + slots) * num_projections + projection) * slot_rank + lax.rem(rows, slot_rank)
        padded_tokens = tile * tile_size + _iota(tile_size)
        tokens = jnp.minimum(padded_tokens, num_tokens - 1)  # padding repeats the last token: no mask on loads

        gate = jnp.minimum(projection, weights_ref.shape[1] - 1)
        weights = plt.load(weights_ref.at[tokens[:, None], gate, slots[None, :]])
        scale = plt.load(scale_ref.at[layer, slots, projection])

        chunk = in_features // config.shrink_splits
        step = config.shrink_columns * config.shrink_unroll
        a_mask = jnp.broadcast_to(is_live[:, None], (config.shrink_rows, config.shrink_columns))

        def accumulate(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            results = []
            for unrolled, total in enumerate(sums):
                first = split * chunk + i * step + unrolled * config.shrink_columns
                columns = first + _iota(config.shrink_columns)
                a = plt.load(
                    a_ref.at[a_rows[:, None], columns[None, :]],
                    mask=a_mask,
                    other=0.0,
                    eviction_policy="evict_first",
                )
                tile_x = plt.load(x_ref.at[tokens[:, None], columns[None, :]], eviction_policy="evict_last")
                results.append(total + _dot(tile_x, a.T))
            return tuple(results)

        zeros = jnp.zeros((tile_size, config.shrink_rows), jnp.float32)
        sums = lax.fori_loop(0, chunk // step, accumulate, (zeros,) * config.shrink_unroll)
        u = functools.reduce(jnp.add, sums)
        # A select, not a product with 0: the token's own x may be infinite, and the scale of a dead row NaN.
        is_pair = jnp.logical_and(weights != 0, is_live[None, :])
        v = jnp.where(is_pair, (weights * scale[None, :]) * u, 0.0).astype(v_ref.dtype)
        # Dead rows are written too: a store with a mask along the rows would not be vectorized.
        plt.store(v_ref.at[split, padded_tokens[:, None], (projection * padded_rows + rows)[None, :]], v)


def _expand(
    v: Float[Array, "splits padded_tokens packed_rows"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    out_dtype: jnp.dtype,
    config: KernelConfig,
    interpret: bool,
) -> Float[Array, "num_tokens out_features"]:
    out_features = base.shape[1]
    kernel = functools.partial(
        _expand_kernel,
        config=config,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        widths=slots.widths,
    )
    return pl.pallas_call(
        kernel,
        grid=(segments.num_tiles, out_features // config.expand_columns),
        in_specs=[_IN_PLACE] * 6,
        out_specs=_IN_PLACE,
        out_shape=jax.ShapeDtypeStruct(base.shape, out_dtype),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.expand_stages),
        interpret=interpret,
        name="maf_mvm_expand",
    )(layer[None], segments.slot_ids, segments.num_segments, v, slots.b.reshape(-1, out_features), base)


def _expand_kernel(
    layer_ref: Any,  # [1]
    slot_ids_ref: Any,  # [num_tiles, num_slots]
    num_segments_ref: Any,  # [num_tiles]
    v_ref: Any,  # [splits, num_tiles * tile_size, num_projections * padded_rows]
    b_ref: Any,  # [num_layers * num_slots * slot_rank, out_features]
    base_ref: Any,  # [num_tokens, out_features]
    y_ref: Any,  # [num_tokens, out_features]
    *,
    config: KernelConfig,
    tile_size: int,
    num_slots: int,
    slot_rank: int,
    widths: tuple[int, ...],
) -> None:
    tile, block = pl.program_id(0), pl.program_id(1)
    num_splits, _, packed_rows = v_ref.shape
    num_tokens, _ = base_ref.shape
    padded_rows = packed_rows // len(widths)
    num_rows = num_segments_ref[tile] * slot_rank
    first_row_of_layer = layer_ref[0] * (num_slots * slot_rank)
    columns = block * config.expand_columns + _iota(config.expand_columns)
    projection = jnp.int32(0)
    for start in itertools.accumulate(widths[:-1]):
        projection += (block * config.expand_columns >= start).astype(jnp.int32)
    padded_tokens = tile * tile_size + _iota(tile_size)
    tokens = jnp.minimum(padded_tokens, num_tokens - 1)

    def rows_of_step(i: Array | int) -> Array:
        return i * config.expand_rows + _iota(config.expand_rows)

    def load_b_rows(i: Array | int) -> Array:
        rows = rows_of_step(i)
        slots, is_live = _slots_of_rows(slot_ids_ref, tile, rows, num_rows, slot_rank, num_slots)
        return jnp.where(is_live, first_row_of_layer + slots * slot_rank + lax.rem(rows, slot_rank), -1)

    def load_b(b_rows: Array) -> Array:
        mask = jnp.broadcast_to((b_rows >= 0)[:, None], (config.expand_rows, config.expand_columns))
        return plt.load(
            b_ref.at[b_rows[:, None], columns[None, :]], mask=mask, other=0.0, eviction_policy="evict_first"
        )

    def load_v(i: Array) -> Array:
        rows = rows_of_step(i)
        packed = (projection * padded_rows + rows)[None, :]
        parts = [plt.load(v_ref.at[jnp.int32(split), padded_tokens[:, None], packed]) for split in range(num_splits)]
        v = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
        # Rows past the last segment were never written. Loaded without a mask, which would vary along the rows.
        return jnp.where((rows < num_rows)[None, :], v, 0.0).astype(v_ref.dtype)

    def accumulate(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # B one step and its row numbers two steps ahead: the chain row number, B, dot is bound by latency.
        delta, b, next_b_rows = carry
        next_b = load_b(next_b_rows)
        next_b_rows = load_b_rows(i + 2)
        return delta + _dot(load_v(i), b), next_b, next_b_rows

    num_steps = lax.div(num_rows + (config.expand_rows - 1), config.expand_rows)
    zeros = jnp.zeros((tile_size, config.expand_columns), jnp.float32)
    delta, _, _ = lax.fori_loop(0, num_steps, accumulate, (zeros, load_b(load_b_rows(0)), load_b_rows(1)))
    base = plt.load(base_ref.at[tokens[:, None], columns[None, :]]).astype(jnp.float32)
    # A token without pairs keeps the very bits of its base: -0.0 + 0.0 would be 0.0.
    y = jnp.where(delta == 0, base, base + delta).astype(y_ref.dtype)
    is_token = jnp.broadcast_to((padded_tokens < num_tokens)[:, None], y.shape)
    y_index = y_ref.at[padded_tokens[:, None], columns[None, :]]
    if num_tokens % tile_size:
        plt.store(y_index, y, mask=is_token)
    else:
        plt.store(y_index, y)


def _slots_of_rows(
    slot_ids_ref: Any, tile: Array, rows: Array, num_rows: Array, slot_rank: int, num_slots: int
) -> tuple[Array, Array]:
    """Slot of each packed rank row of a tile, and whether the row belongs to a segment at all."""
    segment = jnp.minimum(lax.div(rows, slot_rank), num_slots - 1)
    return plt.load(slot_ids_ref.at[tile, segment]), rows < num_rows


def _iota(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def _dot(a: Array, b: Array) -> Array:
    # For float32 the default would be TF32, which keeps 10 bits of the mantissa.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
