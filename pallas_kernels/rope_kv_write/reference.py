"""Plain jnp: this file defines what the op means."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_kv_write(
    qkv: Float[Array, "num_partials num_tokens qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_ids: Int[Array, " num_tokens"],
    offsets: Int[Array, " num_tokens"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    """See `pallas_kernels.rope_kv_write.rope_kv_write`."""
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    heads = functools.reduce(jnp.add, list(qkv)).astype(kv.dtype).reshape(qkv.shape[1], -1, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(heads, (num_q_heads, num_q_heads + num_kv_heads), axis=1)
    keys_values = jnp.stack([rotate(k, cos, sin), v], axis=1)
    return rotate(q, cos, sin), kv.at[block_ids, :, :, offsets].set(keys_values, mode="drop")


def rotate(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Turns dimension pairs (i, i + head_dim // 2), as Hugging Face checkpoints lay them out."""
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
