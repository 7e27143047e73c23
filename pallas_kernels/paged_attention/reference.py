"""Dense float32 attention, one tile after another over the whole block table: this file defines what the op means."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.query_tiles import QueryTiles


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; rows outside the tiles are zero."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    context_size = block_tables.shape[1] * block_size
    in_tile = jnp.arange(tiles.tile_size, dtype=jnp.int32)

    def attend(seq_id: Array, start: Array, length: Array, position: Array) -> Array:
        blocks = kv.at[block_tables[seq_id]].get(mode="clip").astype(jnp.float32)
        keys, values = (blocks[:, i].swapaxes(0, 1).reshape(num_kv_heads, context_size, head_dim) for i in (0, 1))
        queries = q.at[start + in_tile].get(mode="clip").astype(jnp.float32)
        queries = queries.reshape(tiles.tile_size, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
        scores = jnp.einsum("tkgh,kch->tkgc", queries, keys, precision="highest") * head_dim**-0.5
        slots = jnp.arange(context_size, dtype=jnp.int32)
        visible = slots[None, :] <= (position + in_tile)[:, None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -jnp.inf), axis=-1)
        # Memory past the sequence's end may hold NaN, which a weight of zero would not silence.
        values = jnp.where((slots < position + length)[None, :, None], values, 0)
        out = jnp.einsum("tkgc,kch->tkgh", weights, values, precision="highest")
        return out.reshape(tiles.tile_size, num_q_heads, head_dim).astype(q.dtype)

    out = jax.lax.map(lambda tile: attend(*tile), (tiles.seq_ids, tiles.starts, tiles.lengths, tiles.positions))
    is_token = in_tile[None, :] < tiles.lengths[:, None]
    rows = jnp.where(is_token, tiles.starts[:, None] + in_tile[None, :], num_tokens)
    return jnp.zeros_like(q).at[rows].set(out, mode="drop")
