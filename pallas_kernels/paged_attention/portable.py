"""Attention in plain jnp for any backend, the default on a CPU: online softmax over chunks of KV blocks.

Tiles are taken a few at a time. Each such group loops over the chunks of its own longest context, so the cost follows
the live tokens, not the width of the block table, and trailing unused tiles cost nothing. A chunk beyond a sequence's
end changes nothing bit for bit (its scores leave the running maximum alone, its weights are exactly zero), so a result
does not depend on which sequences share the group.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.query_tiles import QueryTiles

# Measured on 2 CPU cores (9 query heads, 3 KV heads, head_dim 64): fewer tiles or smaller chunks pay more for the
# loops' fixed costs, more of them do more masked work when contexts differ.
_TILES_PER_GROUP = 8
_CHUNK_TOKENS = 128

# Lowest score: finite, so that the difference of two of them is 0 and not NaN.
_MASKED = -1e30


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; rows outside the tiles are zero."""
    num_tokens = q.shape[0]
    tiles_per_group = min(_TILES_PER_GROUP, tiles.lengths.shape[0])
    groups = jax.tree.map(lambda x: _split_into_groups(x, tiles_per_group), tiles)
    in_tile = jnp.arange(tiles.tile_size, dtype=jnp.int32)

    def attend_group(i: Array, out: Array) -> Array:
        group = jax.tree.map(lambda x: x[i], groups)
        rows = group.starts[:, None] + in_tile[None, :]
        attended = _attend(q.at[rows].get(mode="clip"), kv, block_tables, group)
        is_token = in_tile[None, :] < group.lengths[:, None]
        return out.at[jnp.where(is_token, rows, num_tokens)].set(attended.astype(q.dtype), mode="drop")

    has_tokens = (groups.lengths > 0).any(1)
    num_groups = jnp.where(has_tokens, jnp.arange(1, has_tokens.shape[0] + 1, dtype=jnp.int32), 0).max()
    return lax.fori_loop(0, num_groups, attend_group, jnp.zeros_like(q))


def _split_into_groups(x: Int[Array, " num_tiles"], tiles_per_group: int) -> Int[Array, "num_groups tiles_per_group"]:
    return jnp.pad(x, (0, -x.shape[0] % tiles_per_group)).reshape(-1, tiles_per_group)


def _attend(
    q: Float[Array, "num_tiles tile_size num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
) -> Float[Array, "num_tiles tile_size num_q_heads head_dim"]:
    """Attention of a group of tiles, in float32."""
    num_tiles, tile_size, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    q_per_kv = num_q_heads // num_kv_heads
    blocks_per_chunk = min(-(-_CHUNK_TOKENS // block_size), block_tables.shape[1])
    chunk_tokens = blocks_per_chunk * block_size

    # The query rows of one KV head lie together: row = token * q_per_kv + query head.
    q = q.reshape(num_tiles, tile_size, num_kv_heads, q_per_kv, head_dim).swapaxes(1, 2)
    q = q.reshape(num_tiles, num_kv_heads, tile_size * q_per_kv, head_dim).astype(jnp.float32) * head_dim**-0.5
    row_tokens = jnp.repeat(jnp.arange(tile_size, dtype=jnp.int32), q_per_kv)
    last_visible = tiles.positions[:, None] + row_tokens[None, :]
    context_ends = jnp.where(tiles.lengths > 0, tiles.positions + tiles.lengths, 0)

    def attend_chunk(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, peak, total = carry
        keys, values = _gather_chunk(kv, block_tables, tiles.seq_ids, i, blocks_per_chunk)
        slots = i * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
        # Memory past the sequence's end may hold NaN, which a weight of zero would not silence.
        is_cached = slots[None, :] < context_ends[:, None]
        values = jnp.where(is_cached[:, None, :, None], values, 0)
        is_visible = is_cached[:, None, :] & (slots[None, None, :] <= last_visible[:, :, None])
        scores = jnp.einsum("zkrh,zkch->zkrc", q, keys, precision="highest")
        scores = jnp.where(is_visible[:, None], scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        out = out * decay[..., None] + jnp.einsum("zkrc,zkch->zkrh", weights, values, precision="highest")
        return out, new_peak, total * decay + weights.sum(-1)

    num_chunks = (context_ends.max() + (chunk_tokens - 1)) // chunk_tokens
    rows_shape = q.shape[:-1]
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(rows_shape, _MASKED), jnp.zeros(rows_shape, jnp.float32)
    out, _, total = lax.fori_loop(0, num_chunks, attend_chunk, start)
    # A group may hold an unused tile before its first chunk: total 0.
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    out = out.reshape(num_tiles, num_kv_heads, tile_size, q_per_kv, head_dim).swapaxes(1, 2)
    return out.reshape(num_tiles, tile_size, num_q_heads, head_dim)


def _gather_chunk(
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    seq_ids: Int[Array, " num_tiles"],
    chunk: Array,
    blocks_per_chunk: int,
) -> tuple[
    Float[Array, "num_tiles num_kv_heads chunk head_dim"], Float[Array, "num_tiles num_kv_heads chunk head_dim"]
]:
    """Keys and values of one chunk of each tile's sequence, head-major, so that no transpose follows."""
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    columns = chunk * blocks_per_chunk + jnp.arange(blocks_per_chunk, dtype=jnp.int32)
    blocks = block_tables.at[seq_ids[:, None], columns[None, :]].get(mode="clip")[:, None, :]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    shape = (seq_ids.shape[0], num_kv_heads, blocks_per_chunk * block_size, head_dim)
    keys, values = (kv.at[blocks, i, heads].get(mode="clip").reshape(shape).astype(jnp.float32) for i in (0, 1))
    return keys, values
