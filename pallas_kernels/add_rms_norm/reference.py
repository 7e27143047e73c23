"""Plain jnp: this file defines what the op means."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def add_rms_norm(
    x: Float[Array, "num_tokens hidden"],
    delta: Float[Array, "num_partials num_tokens hidden"],
    weight: Float[Array, " hidden"],
    eps: float,
) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"]]:
    """See `pallas_kernels.add_rms_norm.add_rms_norm`."""
    y = delta[0].astype(jnp.float32)
    for p in range(1, delta.shape[0]):
        y += delta[p].astype(jnp.float32)
    total = x + y.astype(x.dtype)
    return total, rms_norm(total, weight, eps)


def rms_norm(
    x: Float[Array, "num_tokens hidden"], weight: Float[Array, " hidden"], eps: float
) -> Float[Array, "num_tokens hidden"]:
    """x / sqrt(mean(x^2) + eps) in float32, rounded to the dtype of x, times weight."""
    xf = x.astype(jnp.float32)
    normed = xf * lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight[None, :]
