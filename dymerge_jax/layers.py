"""The stateless pieces of the model: rotary frequencies and angles."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dymerge_jax.config import RopeConfig


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
