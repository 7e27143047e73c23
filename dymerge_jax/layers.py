"""The stateless pieces of the model: matrix product and rotary angles."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dymerge_jax.config import RopeConfig


def matmul(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "num_tokens out_features"]:
    """x @ w, accumulated in float32; float32 inputs get full-precision products on every backend (no TF32)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=out_dtype or x.dtype
    )


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Float[np.ndarray, " half_dim"]:
    """Angular frequency of each pair of dimensions, in radians a token.

    With scaling, Llama 3's rule: wavelengths longer than original_max_position / low_freq_factor are stretched by
    `factor`, those shorter than original_max_position / high_freq_factor are kept, those between are interpolated.
    """
    freqs = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.factor is None:
        return freqs.astype(np.float32)
    turns = rope.original_max_position * freqs / (2 * np.pi)  # rotations within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (freqs * (smooth + (1 - smooth) / rope.factor)).astype(np.float32)


def rope_angles(
    positions: Int[Array, " num_tokens"], head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "num_tokens 1 half_dim"], Float[Array, "num_tokens 1 half_dim"]]:
    """Cosine and sine of each token's rotation, float32; computed once a step for all layers."""
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(rope_frequencies(head_dim, rope))[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)
