"""The float32 form: this file defines what the op means."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm import reference as maf_reference
from pallas_kernels.maf_mvm import swiglu
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments


@jax.jit
def lora_linear(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """The base product in float32, and every token through every slot."""
    base = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    if segments is None:
        return base.astype(x.dtype)
    return maf_reference.maf_mvm(x, slots, segments, base, layer)


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens ffn"]:
    """silu(gate) * up of the halves of `lora_linear`."""
    return swiglu(lora_linear(x, w, slots, segments, layer))
