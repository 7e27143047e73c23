"""Plain GEMMs over all slots with a mask between them: portable, and strong when slots x rank is small."""

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
    """One GEMM gives all rank rows of all slots; one more a projection brings the masked rows back."""
    num_tokens, in_features = x.shape
    num_slots, rank = slots.num_slots, slots.slot_rank
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    a = lax.dynamic_index_in_dim(slots.a, layer, keepdims=False).reshape(-1, in_features)
    scale = lax.dynamic_index_in_dim(slots.scale, layer, keepdims=False)

    with jax.named_scope("shrink"):
        u = jnp.einsum("ti,ri->tr", x, a, precision=precision, preferred_element_type=jnp.float32)
        u = u.reshape(num_tokens, num_slots, slots.num_projections, rank)
        weights = jnp.broadcast_to(segments.weights, (num_tokens, slots.num_projections, num_slots))
        weights = jnp.swapaxes(weights, 1, 2)
        v = jnp.where((weights != 0)[..., None], (weights * scale[None])[..., None] * u, 0).astype(x.dtype)

    with jax.named_scope("expand"):
        # 0 * NaN is NaN: rows of slots that nobody uses must not reach the GEMM. Those of A are masked in v.
        is_used = (segments.weights != 0).any((0, 1))[:, None, None]
        b = lax.dynamic_index_in_dim(slots.b, layer, keepdims=False)
        b = jnp.where(is_used, b, jnp.zeros((), b.dtype)).reshape(num_slots * rank, -1)
        deltas = [
            jnp.einsum(
                "tr,ro->to",
                v[:, :, p].reshape(num_tokens, num_slots * rank),
                b[:, columns],
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            for p, columns in enumerate(slots.column_slices)
        ]
        return add_to_base(base, jnp.concatenate(deltas, 1)).astype(x.dtype)
