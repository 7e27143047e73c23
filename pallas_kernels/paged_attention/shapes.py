"""Named problem shapes, shared by tests and bench, and random inputs for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.config import query_tile_size
from pallas_kernels.paged_attention.query_tiles import QueryTiles, build_query_tiles
from pallas_kernels.pytree import pytree_dataclass


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One step's sequences and the model's heads.

    Attributes:
      seq_lens: new tokens of each sequence.
      context_lens: tokens of each sequence cached before the step.
      num_q_heads: query heads.
      num_kv_heads: KV heads, a divisor of `num_q_heads`.
      head_dim: width of a head.
      block_size: tokens per KV block.
      tile_size: tokens per query tile; None takes `query_tile_size`.
      padded_len: None packs the sequences one after another; otherwise each one begins at a multiple of this.
    """

    seq_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    tile_size: int | None = None
    padded_len: int | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def seq_starts(self) -> tuple[int, ...]:
        if self.padded_len is not None:
            return tuple(i * self.padded_len for i in range(self.num_seqs))
        return tuple(sum(self.seq_lens[:i]) for i in range(self.num_seqs))

    @property
    def num_tokens(self) -> int:
        """Length of the flat batch; at least 1, so that a batch of empty sequences has a shape."""
        return max(1, sum(self.seq_lens) if self.padded_len is None else self.num_seqs * self.padded_len)

    @property
    def context_ends(self) -> tuple[int, ...]:
        """Tokens of each sequence in the cache once the step's own are written."""
        return tuple(n + c for n, c in zip(self.seq_lens, self.context_lens, strict=True))

    def cache_bytes(self, dtype: DTypeLike) -> int:
        """Bytes of the keys and values that the step must read at least once."""
        live = sum(end for end, n in zip(self.context_ends, self.seq_lens, strict=True) if n)
        return 2 * live * self.num_kv_heads * self.head_dim * jnp.dtype(dtype).itemsize

    def flops(self) -> int:
        """Floating-point operations of the two products over the visible keys."""
        visible = sum(n * c + n * (n + 1) // 2 for n, c in zip(self.seq_lens, self.context_lens, strict=True))
        return 4 * visible * self.num_q_heads * self.head_dim


@pytree_dataclass
class AttentionInputs:
    """Arguments of `paged_attention`, in its order.

    Attributes:
      q: [num_tokens, num_q_heads, head_dim].
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim].
      block_tables: [num_seqs, blocks_per_seq] int32.
      tiles: query tiles of the batch.
    """

    q: Float[Array, "num_tokens num_q_heads head_dim"]
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"]
    block_tables: Int[Array, "num_seqs blocks_per_seq"]
    tiles: QueryTiles


def random_inputs(
    shape: AttentionShape, dtype: DTypeLike, rng: np.random.Generator, *, spare_blocks: int = 3
) -> AttentionInputs:
    """Normal q and cache over a shuffled block table; every cache cell that no token owns is NaN.

    Args:
      shape: sequences and heads.
      dtype: of q and of the cache.
      rng: source of the numbers and of the block order.
      spare_blocks: free blocks besides the ones in use, and free columns of the block table.
    """
    blocks_needed = [-(-end // shape.block_size) for end in shape.context_ends]
    num_blocks = sum(blocks_needed) + spare_blocks
    order = rng.permutation(num_blocks)
    # Columns past a sequence's last block hold a free block, whose cells are all NaN.
    block_tables = np.full((shape.num_seqs, max(blocks_needed) + spare_blocks), order[-1], np.int32)
    is_owned = np.zeros((num_blocks, shape.block_size), np.bool_)
    taken = 0
    for row, (count, end) in enumerate(zip(blocks_needed, shape.context_ends, strict=True)):
        blocks = order[taken : taken + count]
        block_tables[row, :count] = blocks
        is_owned[blocks] = np.arange(count * shape.block_size).reshape(count, shape.block_size) < end
        taken += count
    kv_shape = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    q = rng.standard_normal((shape.num_tokens, shape.num_q_heads, shape.head_dim), np.float32)
    # A prime number of values, repeated: no two blocks are alike, and a cache of gigabytes is made in a second.
    kv = np.resize(rng.standard_normal(1_000_003, np.float32).astype(dtype), kv_shape)
    kv[np.broadcast_to(~is_owned[:, None, None, :], kv.shape[:-1])] = np.nan
    return AttentionInputs(
        q=jnp.asarray(q.astype(dtype)),
        kv=jnp.asarray(kv),
        block_tables=jnp.asarray(block_tables),
        tiles=query_tiles(shape),
    )


def query_tiles(shape: AttentionShape) -> QueryTiles:
    """The tiles of a step of this shape."""
    seqs = (jnp.asarray(x, jnp.int32) for x in (shape.seq_starts, shape.seq_lens, shape.context_lens))
    tile_size = shape.tile_size or query_tile_size(shape.num_tokens, shape.num_seqs)
    build = jax.jit(build_query_tiles, static_argnames=("num_tokens", "tile_size"))
    return build(*seqs, num_tokens=shape.num_tokens, tile_size=tile_size)


def _llama_8b(seq_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> AttentionShape:
    return AttentionShape(seq_lens, context_lens, num_q_heads=32, num_kv_heads=8, head_dim=128)


def _smollm2_135m(seq_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> AttentionShape:
    return AttentionShape(seq_lens, context_lens, num_q_heads=9, num_kv_heads=3, head_dim=64)


# Decode steps are named batch x context, prefill chunks tokens + context; a mixed step has one chunk among decode rows.
SHAPES: dict[str, AttentionShape] = {
    "8b_decode_1x1024": _llama_8b((1,), (1023,)),
    "8b_decode_1x8192": _llama_8b((1,), (8191,)),
    "8b_decode_32x1024": _llama_8b((1,) * 32, (1023,) * 32),
    "8b_decode_32x2048": _llama_8b((1,) * 32, (2047,) * 32),
    "8b_decode_32_skewed": _llama_8b((1,) * 32, tuple(8191 // (i + 1) for i in range(32))),
    "8b_prefill_512+0": _llama_8b((512,), (0,)),
    "8b_prefill_4x512+0": _llama_8b((512,) * 4, (0,) * 4),
    "8b_prefill_4x2048+0": _llama_8b((2048,) * 4, (0,) * 4),
    "8b_prefill_4x2048+0_blocks_of_128": dataclasses.replace(_llama_8b((2048,) * 4, (0,) * 4), block_size=128),
    "8b_prefill_16x512+0": _llama_8b((512,) * 16, (0,) * 16),
    "8b_prefill_2048+2048": _llama_8b((2048,), (2048,)),
    "8b_mixed_512": _llama_8b((481, *(1,) * 31), (512, *(1023,) * 31)),
    "135m_decode_1x256": _smollm2_135m((1,), (255,)),
    "135m_decode_32x256": _smollm2_135m((1,) * 32, (255,) * 32),
    "135m_prefill_512+0": _smollm2_135m((512,), (0,)),
    "135m_mixed_256": _smollm2_135m((225, *(1,) * 31), (0, *(255,) * 31)),
}
