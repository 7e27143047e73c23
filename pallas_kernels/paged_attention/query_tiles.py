"""Query tiles: which tokens of a flat batch a program handles together, and where in their sequence they stand."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.pytree import pytree_dataclass, static_field


@pytree_dataclass
class QueryTiles:
    """Which query tokens of a flat batch belong together: a tile never crosses a sequence.

    Unused tiles have length 0, start and position 0 or more, and any valid row of the block table.

    Attributes:
      seq_ids: [num_tiles] int32, row of the block table.
      starts: [num_tiles] int32, flat index of the tile's first token.
      lengths: [num_tiles] int32, tokens in the tile, 0 to tile_size; 0 marks an unused tile.
      positions: [num_tiles] int32, position of that first token in its sequence (= tokens cached before it).
      tile_size: tokens per tile.
    """

    seq_ids: Int[Array, " num_tiles"]
    starts: Int[Array, " num_tiles"]
    lengths: Int[Array, " num_tiles"]
    positions: Int[Array, " num_tiles"]
    tile_size: int = static_field()


def build_query_tiles(
    seq_starts: Int[Array, " num_seqs"],
    seq_lens: Int[Array, " num_seqs"],
    context_lens: Int[Array, " num_seqs"],
    *,
    num_tokens: int,
    tile_size: int,
) -> QueryTiles:
    """Cuts the new tokens of each sequence into tiles, on the device, with shapes that depend on sizes alone.

    Semantics: sequence b becomes ceil(seq_lens[b] / tile_size) tiles, in order of b; unused tiles come last. With
    tile_size 1, tile t is token t instead (a decode batch of one token a sequence: tile b is sequence b), and the tiles
    of tokens that belong to no sequence are the unused ones.

    The sequences may lie anywhere in the flat batch (packed, or padded to [num_seqs, max_len]) but must not overlap.

    Args:
      seq_starts: [num_seqs] int32, flat index of each sequence's first new token.
      seq_lens: [num_seqs] int32, new tokens of each sequence in this step; 0 for an unused row.
      context_lens: [num_seqs] int32, tokens of each sequence cached before this step.
      num_tokens: length of the flat batch, padding included.
      tile_size: tokens per tile; `query_tile_size` picks one.

    Returns:
      num_tokens tiles if tile_size is 1, else ceil(num_tokens / tile_size) + num_seqs tiles.

    Raises:
      ValueError: If `tile_size` or `num_tokens` is less than 1, or the three arrays differ in shape.
    """
    if tile_size < 1 or num_tokens < 1:
        raise ValueError(f"tile_size and num_tokens must be at least 1, got {tile_size} and {num_tokens}")
    if not seq_starts.shape == seq_lens.shape == context_lens.shape:
        raise ValueError(
            "seq_starts, seq_lens and context_lens must all be [num_seqs], got "
            f"{seq_starts.shape}, {seq_lens.shape} and {context_lens.shape}"
        )
    build = _token_tiles if tile_size == 1 else _packed_tiles
    starts, lens, context = (x.astype(jnp.int32) for x in (seq_starts, seq_lens, context_lens))
    return build(starts, lens, context, num_tokens, tile_size)


def _token_tiles(
    seq_starts: Int[Array, " num_seqs"],
    seq_lens: Int[Array, " num_seqs"],
    context_lens: Int[Array, " num_seqs"],
    num_tokens: int,
    tile_size: int,
) -> QueryTiles:
    """One tile a token: a [num_tokens, num_seqs] comparison says which sequence owns each token."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    offsets = tokens[:, None] - seq_starts[None, :]
    owns = (offsets >= 0) & (offsets < seq_lens[None, :])
    seq_ids = jnp.arange(seq_starts.shape[0], dtype=jnp.int32)
    return QueryTiles(
        seq_ids=jnp.where(owns, seq_ids[None, :], 0).sum(1, dtype=jnp.int32),
        starts=tokens,
        lengths=owns.sum(1, dtype=jnp.int32),
        positions=jnp.where(owns, context_lens[None, :] + offsets, 0).sum(1, dtype=jnp.int32),
        tile_size=tile_size,
    )


def _packed_tiles(
    seq_starts: Int[Array, " num_seqs"],
    seq_lens: Int[Array, " num_seqs"],
    context_lens: Int[Array, " num_seqs"],
    num_tokens: int,
    tile_size: int,
) -> QueryTiles:
    """The tiles of all sequences one after another; each sequence leaves at most one tile that is not full."""
    num_seqs = seq_starts.shape[0]
    tiles_per_seq = (seq_lens + (tile_size - 1)) // tile_size
    tile_ends = jnp.cumsum(tiles_per_seq, dtype=jnp.int32)
    tile_ids = jnp.arange(-(-num_tokens // tile_size) + num_seqs, dtype=jnp.int32)
    seq_ids = (tile_ends[None, :] <= tile_ids[:, None]).sum(1, dtype=jnp.int32)
    is_used = seq_ids < num_seqs
    seq_ids = jnp.minimum(seq_ids, num_seqs - 1)
    offsets = (tile_ids - (tile_ends - tiles_per_seq)[seq_ids]) * tile_size
    return QueryTiles(
        seq_ids=seq_ids,
        starts=jnp.where(is_used, seq_starts[seq_ids] + offsets, 0),
        lengths=jnp.where(is_used, jnp.minimum(seq_lens[seq_ids] - offsets, tile_size), 0),
        positions=jnp.where(is_used, context_lens[seq_ids] + offsets, 0),
        tile_size=tile_size,
    )
