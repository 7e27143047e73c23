"""Rotation, cache write and dense float32 attention, one after another: this file defines what the op means."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import QueryTiles
from pallas_kernels.paged_attention import reference as paged_reference


def decode_attention(
    qkv: Float[Array, "num_seqs qkv_width"] | Float[Array, "num_partials num_seqs qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    positions: Int[Array, " num_seqs"],
    cos: Float[Array, "num_seqs half_dim"],
    sin: Float[Array, "num_seqs half_dim"],
    *,
    attend: Callable[[Array, Array, Array, QueryTiles], Array] = paged_reference.paged_attention,
) -> tuple[
    Float[Array, "num_seqs q_width"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    """See `pallas_kernels.decode_attention.decode_attention`; `attend` is an implementation of paged_attention."""
    num_seqs = positions.shape[0]
    num_blocks, _, num_kv_heads, block_size, head_dim = kv.shape
    if qkv.ndim == 3:
        qkv = sum(list(qkv[1:]), start=qkv[0])
    heads = qkv.astype(kv.dtype).reshape(num_seqs, -1, head_dim)
    q, k, v = jnp.split(heads, (heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads), axis=1)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)

    is_used = positions >= 0
    positions = jnp.maximum(positions, 0)
    seq_ids = jnp.arange(num_seqs, dtype=jnp.int32)
    blocks = jnp.where(is_used, block_tables[seq_ids, positions // block_size], num_blocks)
    kv = kv.at[blocks, :, :, positions % block_size].set(jnp.stack([k, v], axis=1), mode="drop")

    lengths = is_used.astype(jnp.int32)
    tiles = QueryTiles(seq_ids=seq_ids, starts=seq_ids, lengths=lengths, positions=positions, tile_size=1)
    out = attend(q, kv, block_tables, tiles)
    return out.reshape(num_seqs, -1), kv


def _rotated(
    x: Float[Array, "num_seqs num_heads head_dim"],
    cos: Float[Array, "num_seqs half_dim"],
    sin: Float[Array, "num_seqs half_dim"],
) -> Float[Array, "num_seqs num_heads head_dim"]:
    """Dimension pairs (i, i + half_dim) turned by each token's angles, in float32."""
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
