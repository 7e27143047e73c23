"""The dense float32 form: this file defines what the op means."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
    """Every token through every slot, projection by projection, in float32."""
    # The contents of slots that nobody uses are not part of the op's input.
    is_used = (segments.weights != 0).any((0, 1))[:, None, None]
    a = jnp.where(is_used, _take_layer(slots.a, layer).astype(jnp.float32), 0)
    b = jnp.where(is_used, _take_layer(slots.b, layer).astype(jnp.float32), 0)
    scale = _take_layer(slots.scale, layer)

    deltas = []
    for p, columns in enumerate(slots.column_slices):
        rows = slice(p * slots.slot_rank, (p + 1) * slots.slot_rank)
        weights = segments.weights[:, min(p, segments.num_gates - 1)]
        u = jnp.einsum("ti,sri->tsr", x.astype(jnp.float32), a[:, rows], precision=lax.Precision.HIGHEST)
        v = jnp.where(weights[:, :, None] != 0, (weights * scale[None, :, p])[:, :, None] * u, 0)
        deltas.append(jnp.einsum("tsr,sro->to", v, b[:, :, columns], precision=lax.Precision.HIGHEST))
    return add_to_base(base, jnp.concatenate(deltas, 1)).astype(x.dtype)


def add_to_base(
    base: Float[Array, "num_tokens out_features"], delta: Float[Array, "num_tokens out_features"]
) -> Float[Array, "num_tokens out_features"]:
    """base + delta in float32; the very bits of `base` where delta is zero (-0.0 + 0.0 would be 0.0)."""
    base = base.astype(jnp.float32)
    return jnp.where(delta == 0, base, base + delta)


def _take_layer(array: Array, layer: Int[Array, ""]) -> Array:
    return lax.dynamic_index_in_dim(array, layer, keepdims=False)
