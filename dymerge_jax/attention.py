"""Grouped-query attention: over the paged cache, or among the tokens of whole sequences where there is none."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dymerge_jax.config import LlamaConfig
from dymerge_jax.kv_cache import LayerKV
from pallas_kernels.decode_attention import Implementation, decode_attention
from pallas_kernels.paged_attention import QueryTiles, paged_attention
from pallas_kernels.pytree import pytree_dataclass, static_field
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.rope_kv_write.reference import rotate


@pytree_dataclass
class AttentionContext:
    """Where the tokens of a step stand.

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

    @property
    def is_decode(self) -> bool:
        """True for as many tokens as sequences: token i is then the only new one of sequence i."""
        return self.tiles.tile_size == 1 and self.tiles.starts.shape[0] == self.block_tables.shape[0]


@pytree_dataclass
class WholeSequences:
    """A flat batch of whole sequences of one padded length, which attend without a cache: for training and embeddings.

    Padding lies on the right, where no token sees it.

    Attributes:
      cos, sin: [num_tokens, 1, head_dim // 2] float32 rotation of each token.
      num_seqs: sequences; each has num_tokens // num_seqs tokens.
    """

    cos: Float[Array, "num_tokens 1 half_dim"]
    sin: Float[Array, "num_tokens 1 half_dim"]
    num_seqs: int = static_field()


def attend(
    qkv: Float[Array, "num_tokens qkv_width"] | Float[Array, "num_partials num_tokens qkv_width"],
    kv: LayerKV,
    context: AttentionContext | WholeSequences,
    config: LlamaConfig,
    implementation: Implementation | None,
) -> tuple[Float[Array, "num_tokens q_width"], LayerKV]:
    """Rotates, stores keys and values, attends: in a decode step on a GPU in one kernel, else one after another.

    Args:
      qkv: q, k and v of each token, side by side; or float32 partial sums of them.
      kv: this layer's cache, updated in place when the step donates it; not used by whole sequences.
      context: where the tokens stand.
      config: head counts.
      implementation: of `decode_attention` and `paged_attention`; None picks one.

    Returns:
      The heads' outputs side by side, and the cache with the step's tokens in it.
    """
    if qkv.ndim == 3 and qkv.shape[0] == 1:
        qkv = qkv[0]
    if isinstance(context, WholeSequences):
        return _attend_whole(qkv, context, config), kv
    if _is_fused(implementation) and context.is_decode:
        positions = jnp.where(context.tiles.lengths > 0, context.tiles.positions, -1)
        cos, sin = context.cos.squeeze(1), context.sin.squeeze(1)
        return decode_attention(qkv, kv, context.block_tables, positions, cos, sin, implementation=implementation)
    q, kv = _rotate_and_store(qkv, kv, context, implementation)
    out = paged_attention(q, kv, context.block_tables, context.tiles, implementation=implementation)
    return out.reshape(-1, config.q_width), kv


def attend_at_ends(
    qkv: Float[Array, "num_tokens qkv_width"] | Float[Array, "num_partials num_tokens qkv_width"],
    kv: LayerKV,
    context: AttentionContext,
    index: Int[Array, " num_seqs"],
    tiles: QueryTiles,
    config: LlamaConfig,
    implementation: Implementation | None,
) -> tuple[Float[Array, "num_seqs q_width"], LayerKV]:
    """Stores the keys and values of all tokens as `attend` does; only each sequence's last new token attends.

    Args:
      qkv, kv, context, config, implementation: see `attend`.
      index: [num_seqs] int32, where those tokens lie among all.
      tiles: of those tokens, one each.

    Returns:
      [num_seqs, q_width], the heads' outputs of those tokens side by side, and the cache with all tokens in it.
    """
    q, kv = _rotate_and_store(qkv, kv, context, implementation)
    out = paged_attention(q[index], kv, context.block_tables, tiles, implementation=implementation)
    return out.reshape(-1, config.q_width), kv


def _rotate_and_store(
    qkv: Float[Array, "num_tokens qkv_width"] | Float[Array, "num_partials num_tokens qkv_width"],
    kv: LayerKV,
    context: AttentionContext,
    implementation: Implementation | None,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], LayerKV]:
    with jax.named_scope("rope_kv_write"):
        return rope_kv_write(
            qkv.reshape(-1, *qkv.shape[-2:]),
            kv,
            context.block_ids,
            context.offsets,
            context.cos.squeeze(1),
            context.sin.squeeze(1),
            implementation="pallas_triton" if _is_fused(implementation) else "reference",
        )


def _is_fused(implementation: Implementation | None) -> bool:
    """Whether rotation and storing are kernels too; of a decode step, one with attention."""
    return implementation == "pallas_triton" or (implementation is None and jax.default_backend() == "gpu")


def _attend_whole(
    qkv: Float[Array, "num_tokens qkv_width"], context: WholeSequences, config: LlamaConfig
) -> Float[Array, "num_tokens q_width"]:
    """Causal attention within each sequence, products accumulated in float32, in plain jnp."""
    heads = qkv.reshape(qkv.shape[0], -1, config.head_dim)
    num_kv, queries_per_kv = config.num_kv_heads, config.num_q_heads // config.num_kv_heads
    q, k, v = jnp.split(heads, (config.num_q_heads, config.num_q_heads + num_kv), axis=1)
    cos, sin = context.cos.squeeze(1), context.sin.squeeze(1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    seq_len = qkv.shape[0] // context.num_seqs
    q = q.reshape(context.num_seqs, seq_len, num_kv, queries_per_kv, config.head_dim)
    k, v = (x.reshape(context.num_seqs, seq_len, num_kv, config.head_dim) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST if qkv.dtype == jnp.float32 else None
    scores = jnp.einsum("btkgh,bckh->bkgtc", q, k, precision=precision, preferred_element_type=jnp.float32)
    position = jnp.arange(seq_len, dtype=jnp.int32)
    is_visible = (position[None, :] <= position[:, None])[None, None, None]
    weights = jax.nn.softmax(jnp.where(is_visible, scores * config.head_dim**-0.5, -jnp.inf), axis=-1)
    out = jnp.einsum(
        "bkgtc,bckh->btkgh", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(qkv.dtype).reshape(qkv.shape[0], config.q_width)
