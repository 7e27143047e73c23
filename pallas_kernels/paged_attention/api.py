"""The public op: checks shapes, picks an implementation, calls it."""

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import pytree_dataclass, static_field

Implementation = Literal["reference", "portable", "pallas_triton"]


@pytree_dataclass
class QueryTiles:
    """Which query tokens of a flat batch belong together: a tile never crosses a sequence.

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

    Args:
      seq_starts: flat index of each sequence's first new token.
      seq_lens: new tokens of each sequence in this step; 0 for an unused row.
      context_lens: tokens of each sequence cached before this step.
      num_tokens: length of the flat batch, padding included.
      tile_size: tokens per tile.
    """
    raise NotImplementedError("being written")


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal grouped-query attention of each query token over its sequence's cached tokens, itself included.

    The keys and values of the step's own tokens are already in `kv` (0: keys, 1: values). Softmax scale is
    head_dim ** -0.5. Rows of tokens outside every tile are finite and otherwise unspecified.
    """
    raise NotImplementedError("being written")
