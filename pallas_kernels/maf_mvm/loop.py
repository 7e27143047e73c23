"""One segment after another, tile by tile: portable, cost proportional to the slots that each tile uses."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm.reference import add_to_base
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments


@jax.jit
def maf_mvm(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """Adds segment after segment, in slot order within a tile, to the tokens of its tile.

    A token's contributions are added in slot order and those of other tokens' slots are zeros, so that a token's
    result does not depend on what shares its batch.
    """
    num_tokens, rank = x.shape[0], slots.slot_rank
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    # A single tile, such as a decode batch, needs no padding.
    tile_rows = num_tokens if segments.num_tiles == 1 else segments.tile_size
    padding = segments.num_tiles * tile_rows - num_tokens
    x = jnp.pad(x, ((0, padding), (0, 0)))
    weights = jnp.pad(segments.weights, ((0, padding), (0, 0), (0, 0)))
    segment_ends = jnp.cumsum(segments.num_segments)

    def add_segment(i: Int[Array, ""], deltas: tuple[Array, ...]) -> tuple[Array, ...]:
        tile = (segment_ends <= i).sum(dtype=jnp.int32)
        slot = segments.slot_ids[tile, i - (segment_ends[tile] - segments.num_segments[tile])]
        first_token = tile * tile_rows
        tile_x = lax.dynamic_slice_in_dim(x, first_token, tile_rows)
        tile_weights = lax.dynamic_slice_in_dim(weights, first_token, tile_rows)[:, :, slot]
        tile_weights = jnp.broadcast_to(tile_weights, (tile_rows, slots.num_projections))
        factors = jnp.repeat(tile_weights * slots.scale[layer, slot][None], rank, axis=1)
        is_pair = jnp.repeat(tile_weights != 0, rank, axis=1)
        u = jnp.einsum(
            "ti,ri->tr", tile_x, slots.a[layer, slot], precision=precision, preferred_element_type=jnp.float32
        )
        v = jnp.where(is_pair, factors * u, 0).astype(x.dtype)
        b = slots.b[layer, slot]
        results = []
        for p, (delta, columns) in enumerate(zip(deltas, slots.column_slices, strict=True)):
            rows = slice(p * rank, (p + 1) * rank)
            part = jnp.einsum(
                "tr,ro->to", v[:, rows], b[:, columns], precision=precision, preferred_element_type=jnp.float32
            )
            so_far = lax.dynamic_slice_in_dim(delta, first_token, tile_rows)
            results.append(lax.dynamic_update_slice_in_dim(delta, so_far + part, first_token, 0))
        return tuple(results)

    zeros = tuple(jnp.zeros((num_tokens + padding, width), jnp.float32) for width in slots.widths)
    deltas = lax.fori_loop(0, segment_ends[-1], add_segment, zeros)
    return add_to_base(base, jnp.concatenate(deltas, 1)[:num_tokens]).astype(x.dtype)
