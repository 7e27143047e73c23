"""The plain matrix product that every op and the model share."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def matmul(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "num_tokens out_features"]:
    """x @ w, accumulated in float32; float32 inputs get full-precision products on every backend (no TF32)."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=out_dtype or x.dtype
    )
