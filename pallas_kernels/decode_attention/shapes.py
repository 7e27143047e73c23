"""Random inputs of decode_attention, and the heads of the models that it is timed for."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.pytree import pytree_dataclass


@dataclasses.dataclass(frozen=True)
class Heads:
    """Attention heads of a model.

    Attributes:
      num_q_heads: query heads.
      num_kv_heads: KV heads, a divisor of `num_q_heads`.
      head_dim: width of a head.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


HEADS: dict[str, Heads] = {
    "8b": Heads(num_q_heads=32, num_kv_heads=8, head_dim=128),
    "3b": Heads(num_q_heads=24, num_kv_heads=8, head_dim=128),
    "1b": Heads(num_q_heads=32, num_kv_heads=8, head_dim=64),
    "135m": Heads(num_q_heads=9, num_kv_heads=3, head_dim=64),
    "tiny": Heads(num_q_heads=4, num_kv_heads=2, head_dim=16),
}


@pytree_dataclass
class DecodeInputs:
    """Arguments of `decode_attention`, in its order.

    Attributes:
      qkv: [num_seqs, qkv_width], or [num_partials, num_seqs, qkv_width] float32.
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim].
      block_tables: [num_seqs, blocks_per_seq] int32.
      positions: [num_seqs] int32; -1 for rows that are not used.
      cos, sin: [num_seqs, head_dim // 2] float32.
    """

    qkv: Float[Array, "num_seqs qkv_width"] | Float[Array, "num_partials num_seqs qkv_width"]
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"]
    block_tables: Int[Array, "num_seqs blocks_per_seq"]
    positions: Int[Array, " num_seqs"]
    cos: Float[Array, "num_seqs half_dim"]
    sin: Float[Array, "num_seqs half_dim"]

    @property
    def arguments(self) -> tuple[Array, ...]:
        return self.qkv, self.kv, self.block_tables, self.positions, self.cos, self.sin


def random_inputs(
    positions: tuple[int, ...],
    heads: Heads,
    dtype: DTypeLike,
    rng: np.random.Generator,
    *,
    block_size: int = 16,
    num_partials: int | None = None,
) -> DecodeInputs:
    """Normal values over a shuffled block table; every cell of the cache that holds no earlier token is NaN.

    Args:
      positions: of each sequence's new token; -1 for a row that is not used.
      heads: of the model.
      dtype: of the cache, and of qkv unless it is given as partial sums.
      rng: source of the numbers and of the block order.
      block_size: tokens per KV block.
      num_partials: partial sums of qkv; None gives qkv itself.
    """
    shape = paged_shapes.AttentionShape(
        seq_lens=tuple(int(position >= 0) for position in positions),
        context_lens=tuple(max(position, 0) for position in positions),
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=block_size,
        tile_size=1,
        padded_len=1,
    )
    paged = paged_shapes.random_inputs(shape, dtype, rng)
    kv, tables = np.array(paged.kv), np.asarray(paged.block_tables)
    for seq, position in enumerate(positions):
        if position >= 0:
            kv[tables[seq, position // block_size], :, :, position % block_size] = np.nan
    num_seqs = len(positions)
    leading = () if num_partials is None else (num_partials,)
    qkv = rng.standard_normal((*leading, num_seqs, heads.qkv_width), np.float32) * (num_partials or 1) ** -0.5
    angles = rng.uniform(0, 2 * np.pi, (num_seqs, heads.head_dim // 2)).astype(np.float32)
    return DecodeInputs(
        qkv=jnp.asarray(qkv.astype(dtype if num_partials is None else np.float32)),
        kv=jnp.asarray(kv),
        block_tables=paged.block_tables,
        positions=jnp.asarray(positions, jnp.int32),
        cos=jnp.asarray(np.cos(angles)),
        sin=jnp.asarray(np.sin(angles)),
    )
