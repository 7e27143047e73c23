"""One slot after another, only those that the batch uses: portable, cost proportional to the active slots."""

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
    """Walks the active slots of the whole batch in slot order.

    A token's contributions are added in slot order and those of other tokens' slots are zeros, so that a token's
    result does not depend on what shares its batch.
    """
    rank = slots.slot_rank
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    is_used = (segments.weights != 0).any((0, 1))
    slot_ids = jnp.argsort(jnp.logical_not(is_used), stable=True).astype(jnp.int32)

    def add_slot(i: Int[Array, ""], delta: Float[Array, "t o"]) -> Float[Array, "t o"]:
        slot = slot_ids[i]
        a = slots.a[layer, slot]
        b = slots.b[layer, slot]
        scale = slots.scale[layer, slot]
        weights = jnp.broadcast_to(segments.weights[:, :, slot], (x.shape[0], slots.num_projections))
        u = jnp.einsum("ti,ri->tr", x, a, precision=precision, preferred_element_type=jnp.float32)
        factors = jnp.repeat(weights * scale[None], rank, axis=1)
        v = jnp.where(jnp.repeat(weights != 0, rank, axis=1), factors * u, 0).astype(x.dtype)
        parts = [
            jnp.einsum(
                "tr,ro->to",
                v[:, p * rank : (p + 1) * rank],
                b[:, columns],
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            for p, columns in enumerate(slots.column_slices)
        ]
        return delta + jnp.concatenate(parts, 1)

    delta = lax.fori_loop(0, is_used.sum(dtype=jnp.int32), add_slot, jnp.zeros(base.shape, jnp.float32))
    return add_to_base(base, delta).astype(x.dtype)
