"""Rotation, cache write and dense float32 attention, one after another: this file defines what the op means."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import QueryTiles
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.rope_kv_write import reference as rope_reference


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
    num_seqs, num_blocks, block_size = positions.shape[0], kv.shape[0], kv.shape[3]
    is_used = positions >= 0
    positions = jnp.maximum(positions, 0)
    seq_ids = jnp.arange(num_seqs, dtype=jnp.int32)
    blocks = jnp.where(is_used, block_tables[seq_ids, positions // block_size], num_blocks)
    partials = qkv.reshape(-1, *qkv.shape[-2:])
    q, kv = rope_reference.rope_kv_write(partials, kv, blocks, positions % block_size, cos, sin)

    lengths = is_used.astype(jnp.int32)
    tiles = QueryTiles(seq_ids=seq_ids, starts=seq_ids, lengths=lengths, positions=positions, tile_size=1)
    out = attend(q, kv, block_tables, tiles)
    return out.reshape(num_seqs, -1), kv
