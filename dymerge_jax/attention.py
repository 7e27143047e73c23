"""Grouped-query attention over the paged cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dymerge_jax.config import LlamaConfig
from dymerge_jax.kv_cache import LayerKV, write_tokens
from dymerge_jax.layers import apply_rope
from pallas_kernels.paged_attention import QueryTiles, paged_attention
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.pytree import pytree_dataclass


@pytree_dataclass
class AttentionContext:
    """Where the tokens of a step stand; the same for all layers.

    Attributes:
      cos, sin: [num_tokens, 1, head_dim // 2] float32 rotation of each token.
      block_ids, offsets: [num_tokens] int32, where each token's key and value go; block id num_blocks drops them.
      block_tables: [num_seqs, blocks_per_seq] int32.
      tiles: query tokens by sequence.
    """

    cos: Float[Array, "num_tokens 1 half_dim"]
    sin: Float[Array, "num_tokens 1 half_dim"]
    block_ids: Int[Array, " num_tokens"]
    offsets: Int[Array, " num_tokens"]
    block_tables: Int[Array, "num_seqs blocks_per_seq"]
    tiles: QueryTiles


def attend(
    qkv: Float[Array, "num_tokens qkv_width"],
    kv: LayerKV,
    context: AttentionContext,
    config: LlamaConfig,
    implementation: Implementation | None,
) -> tuple[Float[Array, "num_tokens q_width"], LayerKV]:
    """Rotates, stores keys and values, attends.

    Args:
      qkv: q, k and v of each token, side by side.
      kv: this layer's cache; updated in place when the step donates it.
      context: where the tokens stand.
      config: head counts.
      implementation: of `paged_attention`; None picks one.

    Returns:
      The heads' outputs side by side, and the cache with the step's tokens in it.
    """
    q, k, v = jnp.split(qkv, (config.q_width, config.q_width + config.kv_width), axis=-1)
    q = apply_rope(q.reshape(-1, config.num_q_heads, config.head_dim), context.cos, context.sin)
    k = apply_rope(k.reshape(-1, config.num_kv_heads, config.head_dim), context.cos, context.sin)
    v = v.reshape(-1, config.num_kv_heads, config.head_dim)
    with jax.named_scope("kv_write"):
        kv = write_tokens(kv, k, v, context.block_ids, context.offsets)
    out = paged_attention(q, kv, context.block_tables, context.tiles, implementation=implementation)
    return out.reshape(-1, config.q_width), kv
