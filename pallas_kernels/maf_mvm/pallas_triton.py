"""Shrink and expand as two Pallas kernels in the Triton lowering; in interpret mode on a CPU.

Both walk the sorted segments of a tile of tokens. The shrink leaves v[token, rank row] = weight * scale * (x A^T), rank
rows packed in segment order, projection after projection; the expand adds v B to the base. Every program owns its part
of the output and sums in a fixed order, so there are no atomics and the same input gives the same bits. A and B of all
layers are read in place: rows of the flat [layers * slots * ..., features] view, never a slice of it. The expand writes
onto its base where the dtypes allow it, so that a tile without segments moves no bytes; or it ends in silu(gate) * up
and writes half as much.
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
    ends_in_swiglu: bool = False,
) -> Float[Array, "num_tokens width"]:
    """Shrink, then expand onto the base.

    Args:
      x, slots, segments, base, layer: see `pallas_kernels.maf_mvm.maf_mvm`.
      config: overrides the block sizes that the shapes would pick.
      ends_in_swiglu: return what `pallas_kernels.maf_mvm.maf_swiglu` does instead.

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
        shared_bytes=max_shared_bytes(),
        ends_in_swiglu=ends_in_swiglu,
    )
    interpret = jax.default_backend() == "cpu"
    return _shrink_expand(
        x, slots, segments, base, layer, config=config or picked, ends_in_swiglu=ends_in_swiglu, interpret=interpret
    )


# An inner jit with the layer as an argument: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames=("config", "ends_in_swiglu", "interpret"))
def _shrink_expand(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
    ends_in_swiglu: bool,
    interpret: bool,
) -> Float[Array, "num_tokens width"]:
    with jax.named_scope("shrink"):
        v = shrink(x, slots, segments, layer, config=config, interpret=interpret)
    with jax.named_scope("expand"):
        expand = _expand_swiglu if ends_in_swiglu else _expand
        return expand(v, slots, segments, base, layer, out_dtype=x.dtype, config=config, interpret=interpret)


def shrink(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
    interpret: bool,
    written_rows: int = 1,
) -> Float[Array, "splits padded_tokens packed_rows"]:
    """weight * scale * (x A^T) of every pair, in partial sums: the first of the two kernels.

    Args:
      x, slots, segments, layer: see `pallas_kernels.maf_mvm.maf_mvm`.
      config: block sizes.
      interpret: run the kernel's operations one by one.
      written_rows: write whole multiples of so many rank rows, zeros past a tile's last segment.

    Returns:
      [splits, num_tiles * tile_size, num_projections * padded_rows] in the dtype of x, rank rows of a tile in the order
      of its segments. Past the last block of them, and `written_rows`, nothing is written.
    """
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
        written_rows=written_rows,
    )
    num_groups = slots.num_projections // config.shrink_group
    return pl.pallas_call(
        kernel,
        # The last axis varies fastest over the program ids.
        grid=(segments.num_tiles, num_groups * config.shrink_programs, config.shrink_splits),
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
    written_rows: int,
) -> None:
    tile, split = pl.program_id(0), pl.program_id(2)
    group = lax.div(pl.program_id(1), config.shrink_programs)
    first_block = lax.rem(pl.program_id(1), config.shrink_programs)
    projections = [group * config.shrink_group + i for i in range(config.shrink_group)]
    num_rows = num_segments_ref[tile] * slot_rank
    num_written = pl.cdiv(num_rows, written_rows) * written_rows
    num_tokens, in_features = x_ref.shape
    layer = layer_ref[0]
    padded_tokens = tile * tile_size + _iota(tile_size)
    tokens = jnp.minimum(padded_tokens, num_tokens - 1)  # padding repeats the last token: no mask on loads
    chunk = in_features // config.shrink_splits
    step = config.shrink_columns * config.shrink_unroll
    # One tile shares its x and streams A; many tiles share A and stream x.
    policies = "evict_last", "evict_first"
    x_policy, a_policy = policies if num_segments_ref.shape[0] == 1 else reversed(policies)

    def shrink_block(block: Array) -> None:
        rows = block * config.shrink_rows + _iota(config.shrink_rows)
        slots, is_live = _slots_of_rows(slot_ids_ref, tile, rows, num_rows, slot_rank, num_slots)
        a_rows = [
            ((layer * num_slots + slots) * num_projections + projection) * slot_rank + lax.rem(rows, slot_rank)
            for projection in projections
        ]
        a_mask = jnp.broadcast_to(is_live[:, None], (config.shrink_rows, config.shrink_columns))

        def accumulate(i: Array, sums: tuple[tuple[Array, ...], ...]) -> tuple[tuple[Array, ...], ...]:
            results = []
            for unrolled, totals in enumerate(sums):
                first = split * chunk + i * step + unrolled * config.shrink_columns
                columns = first + _iota(config.shrink_columns)
                tile_x = plt.load(x_ref.at[tokens[:, None], columns[None, :]], eviction_policy=x_policy)
                factors = [
                    plt.load(a_ref.at[r[:, None], columns[None, :]], mask=a_mask, other=0.0, eviction_policy=a_policy)
                    for r in a_rows
                ]
                results.append(tuple(t + _dot(tile_x, a.T) for t, a in zip(totals, factors, strict=True)))
            return tuple(results)

        zeros = (jnp.zeros((tile_size, config.shrink_rows), jnp.float32),) * config.shrink_group
        sums = lax.fori_loop(0, chunk // step, accumulate, (zeros,) * config.shrink_unroll)
        for projection, *parts in zip(projections, *sums, strict=True):
            u = functools.reduce(jnp.add, parts)
            gate = jnp.minimum(projection, weights_ref.shape[1] - 1)
            weights = plt.load(weights_ref.at[tokens[:, None], gate, slots[None, :]])
            scale = plt.load(scale_ref.at[layer, slots, projection])
            # A select, not a product with 0: the token's own x may be infinite, and the scale of a dead row NaN.
            is_pair = jnp.logical_and(weights != 0, is_live[None, :])
            v = jnp.where(is_pair, (weights * scale[None, :]) * u, 0.0).astype(v_ref.dtype)
            # Dead rows are written too: a store with a mask along the rows would not be vectorized.
            plt.store(v_ref.at[split, padded_tokens[:, None], (projection * padded_rows + rows)[None, :]], v)

    if config.shrink_programs * config.shrink_rows >= padded_rows:
        pl.when(first_block * config.shrink_rows < num_written)(lambda: shrink_block(first_block))
    else:
        num_blocks = pl.cdiv(num_written, config.shrink_rows)
        passes = pl.cdiv(jnp.maximum(num_blocks - first_block, 0), config.shrink_programs)
        lax.fori_loop(0, passes, lambda i, _: shrink_block(first_block + i * config.shrink_programs), None)


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
    is_in_place = base.dtype == out_dtype
    kernel = functools.partial(
        _expand_kernel,
        config=config,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        widths=slots.widths,
        is_in_place=is_in_place,
    )
    return pl.pallas_call(
        kernel,
        grid=(segments.num_tiles, out_features // config.expand_columns),
        in_specs=[_IN_PLACE] * 6,
        out_specs=_IN_PLACE,
        out_shape=jax.ShapeDtypeStruct(base.shape, out_dtype),
        # XLA copies a base that is used elsewhere too.
        input_output_aliases={5: 0} if is_in_place else {},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.expand_stages),
        interpret=interpret,
        name="maf_mvm_expand",
    )(layer[None], segments.slot_ids, segments.num_segments, v, slots.b.reshape(-1, out_features), base)


def _expand_swiglu(
    v: Float[Array, "splits padded_tokens packed_rows"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens two_ffn"],
    layer: Int[Array, ""],
    *,
    out_dtype: jnp.dtype,
    config: KernelConfig,
    interpret: bool,
) -> Float[Array, "num_tokens ffn"]:
    num_tokens, out_features = base.shape
    ffn = out_features // 2
    kernel = functools.partial(
        _expand_swiglu_kernel,
        config=config,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel,
        grid=(segments.num_tiles, ffn // config.swiglu_columns),
        in_specs=[_IN_PLACE] * 6,
        out_specs=_IN_PLACE,
        out_shape=jax.ShapeDtypeStruct((num_tokens, ffn), out_dtype),
        compiler_params=plt.CompilerParams(num_warps=config.swiglu_warps, num_stages=config.expand_stages),
        interpret=interpret,
        name="maf_mvm_expand_swiglu",
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
    is_in_place: bool,
) -> None:
    tile, block = pl.program_id(0), pl.program_id(1)
    columns = block * config.expand_columns + _iota(config.expand_columns)
    projection = jnp.int32(0)
    for start in itertools.accumulate(widths[:-1]):
        projection += (block * config.expand_columns >= start).astype(jnp.int32)

    # Where y is the memory of the base, a tile without segments has nothing to write.
    @pl.when(jnp.logical_or(not is_in_place, num_segments_ref[tile] > 0))
    def _() -> None:
        [(base, delta)] = _expanded(
            layer_ref, slot_ids_ref, num_segments_ref, v_ref, b_ref, base_ref, tile, [(projection, columns)],
            config=config, tile_size=tile_size, num_slots=num_slots, slot_rank=slot_rank,
            padded_rows=v_ref.shape[2] // len(widths),
        )  # fmt: skip
        # A token without pairs keeps the very bits of its base: -0.0 + 0.0 would be 0.0.
        y = jnp.where(delta == 0, base, base + delta)
        _store_tokens(y_ref, tile, columns, y.astype(y_ref.dtype))


def _expand_swiglu_kernel(
    layer_ref: Any,  # [1]
    slot_ids_ref: Any,  # [num_tiles, num_slots]
    num_segments_ref: Any,  # [num_tiles]
    v_ref: Any,  # [splits, num_tiles * tile_size, 2 * padded_rows]
    b_ref: Any,  # [num_layers * num_slots * slot_rank, 2 * ffn]
    base_ref: Any,  # [num_tokens, 2 * ffn]
    out_ref: Any,  # [num_tokens, ffn]
    *,
    config: KernelConfig,
    tile_size: int,
    num_slots: int,
    slot_rank: int,
    interpret: bool,
) -> None:
    tile, block = pl.program_id(0), pl.program_id(1)
    columns = block * config.swiglu_columns + _iota(config.swiglu_columns)
    gate, up = _expanded(
        layer_ref, slot_ids_ref, num_segments_ref, v_ref, b_ref, base_ref, tile,
        [(jnp.int32(0), columns), (jnp.int32(1), out_ref.shape[1] + columns)],
        config=config, tile_size=tile_size, num_slots=num_slots, slot_rank=slot_rank,
        padded_rows=v_ref.shape[2] // 2,
    )  # fmt: skip
    gate, up = (base + delta for base, delta in (gate, up))
    if out_ref.dtype == jnp.bfloat16 and not interpret:
        product = _bfloat16_silu_product(gate, up)
    else:
        gate, up = (half.astype(out_ref.dtype).astype(jnp.float32) for half in (gate, up))
        product = gate / (1 + jnp.exp(-gate)) * up
    _store_tokens(out_ref, tile, columns, product.astype(out_ref.dtype))


def _bfloat16_silu_product(gate: Array, up: Array) -> Array:
    """silu(gate) * up to 22 bits of gate and up rounded to bfloat16, both float32.

    In a few instructions an element; as the compiler would have it, they and not memory would limit the kernel.
    """
    [product] = plt.elementwise_inline_asm(
        "{ .reg .b32 pair, g, u; .reg .f32 t; cvt.rn.bf16x2.f32 pair, $2, $1; shl.b32 g, pair, 16; "
        "and.b32 u, pair, 0xffff0000; mul.ftz.f32 t, g, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
        "add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.ftz.f32 t, t, g; mul.ftz.f32 $0, t, u; }",
        args=[gate, up],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(gate.shape, jnp.float32)],
    )
    return product


def _expanded(
    layer_ref: Any,
    slot_ids_ref: Any,
    num_segments_ref: Any,
    v_ref: Any,
    b_ref: Any,
    base_ref: Any,
    tile: Array,
    parts: list[tuple[Array, Array]],
    *,
    config: KernelConfig,
    tile_size: int,
    num_slots: int,
    slot_rank: int,
    padded_rows: int,
) -> list[tuple[Array, Array]]:
    """base and v B of a tile in float32, for each (projection, columns) of `parts`; all parts are equally wide."""
    num_tiles, (num_tokens, _) = num_segments_ref.shape[0], base_ref.shape
    rows_per_step, num_splits = config.expand_rows, v_ref.shape[0]
    num_rows = num_segments_ref[tile] * slot_rank
    first_row_of_layer = layer_ref[0] * (num_slots * slot_rank)
    padded_tokens = tile * tile_size + _iota(tile_size)
    tokens = jnp.minimum(padded_tokens, num_tokens - 1)
    num_columns = parts[0][1].shape[0]
    # One tile reads B once; many tiles share it, and stream the base.
    policies = ("evict_first", None) if num_tiles == 1 else ("evict_last", "evict_first")
    b_policy, base_policy = policies

    def rows_of_step(i: Array | int) -> Array:
        return i * rows_per_step + _iota(rows_per_step)

    def load_b_rows(i: Array | int) -> Array:
        rows = rows_of_step(i)
        slots, is_live = _slots_of_rows(slot_ids_ref, tile, rows, num_rows, slot_rank, num_slots)
        return jnp.where(is_live, first_row_of_layer + slots * slot_rank + lax.rem(rows, slot_rank), -1)

    def load_b(b_rows: Array) -> tuple[Array, ...]:
        mask = jnp.broadcast_to((b_rows >= 0)[:, None], (rows_per_step, num_columns))
        return tuple(
            plt.load(b_ref.at[b_rows[:, None], columns[None, :]], mask=mask, other=0.0, eviction_policy=b_policy)
            for _, columns in parts
        )

    def load_v(i: Array, projection: Array) -> Array:
        rows = rows_of_step(i)
        packed = (projection * padded_rows + rows)[None, :]
        loaded = [plt.load(v_ref.at[jnp.int32(split), padded_tokens[:, None], packed]) for split in range(num_splits)]
        if num_splits == 1 and config.shrink_rows % rows_per_step == 0:
            return loaded[0]  # the shrink writes whole blocks of rows, so every row of this step was written
        v = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in loaded])
        # Rows past the last segment were never written. Loaded without a mask, which would vary along the rows.
        return jnp.where((rows < num_rows)[None, :], v, 0.0).astype(v_ref.dtype)

    def accumulate(
        i: Array, carry: tuple[tuple[Array, ...], tuple[Array, ...], Array]
    ) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
        # B one step and its row numbers two steps ahead: the chain row number, B, dot is bound by latency.
        deltas, bs, next_b_rows = carry
        next_bs = load_b(next_b_rows)
        next_b_rows = load_b_rows(i + 2)
        added = (
            delta + _dot(load_v(i, projection), b) for delta, b, (projection, _) in zip(deltas, bs, parts, strict=True)
        )
        return tuple(added), next_bs, next_b_rows

    first_bs = load_b(load_b_rows(0))
    # Before the loop, which then waits for memory at the same time.
    bases = [
        plt.load(base_ref.at[tokens[:, None], columns[None, :]], eviction_policy=base_policy) for _, columns in parts
    ]
    num_steps = lax.div(num_rows + (rows_per_step - 1), rows_per_step)
    zeros = (jnp.zeros((tile_size, num_columns), jnp.float32),) * len(parts)
    deltas, *_ = lax.fori_loop(0, num_steps, accumulate, (zeros, first_bs, load_b_rows(1)))
    return [(base.astype(jnp.float32), delta) for base, delta in zip(bases, deltas, strict=True)]


def _store_tokens(out_ref: Any, tile: Array, columns: Array, values: Array) -> None:
    """Stores the rows of a tile that are tokens."""
    num_tokens, tile_size = out_ref.shape[0], values.shape[0]
    padded_tokens = tile * tile_size + _iota(tile_size)
    index = out_ref.at[padded_tokens[:, None], columns[None, :]]
    if num_tokens % tile_size:
        plt.store(index, values, mask=jnp.broadcast_to((padded_tokens < num_tokens)[:, None], values.shape))
    else:
        plt.store(index, values)


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
