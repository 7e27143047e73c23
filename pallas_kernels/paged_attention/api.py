"""The public op: checks shapes, picks an implementation, calls it."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import is_hopper
from pallas_kernels.paged_attention import pallas_triton, portable, reference
from pallas_kernels.paged_attention.config import prefers_mosaic
from pallas_kernels.paged_attention.query_tiles import QueryTiles, build_query_tiles

__all__ = ["Implementation", "QueryTiles", "build_query_tiles", "paged_attention"]

Implementation = Literal["reference", "portable", "pallas_triton", "pallas_mosaic"]


def _pallas_mosaic(*args: Any) -> Array:
    from pallas_kernels.paged_attention import pallas_mosaic  # its backend takes most of a second to import

    return pallas_mosaic.paged_attention(*args)


_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": reference.paged_attention,
    "portable": portable.paged_attention,
    "pallas_triton": pallas_triton.paged_attention,
    "pallas_mosaic": _pallas_mosaic,
}


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal grouped-query attention of each query token over its sequence's cached tokens, itself included.

    Semantics: y[t, n] = sum over c <= position(t) of softmax_c(q[t, n] @ K[c, n // g] / sqrt(head_dim)) * V[c, n // g],
    with g = num_q_heads / num_kv_heads, K[c, k] = kv[block(c), 0, k, c % block_size], V likewise at index 1, and
    block(c) = block_tables[sequence(t), c // block_size].

    The keys and values of the step's own tokens are already in `kv`. Free blocks, and blocks past a sequence's end,
    may hold anything, NaN included; so may the entries of a block table past the sequence's last block. A sequence's
    result does not depend on the other sequences of the batch.

    Args:
      q: [num_tokens, num_q_heads, head_dim] queries after rotary embedding, bfloat16 or float32.
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim] cache of one layer (0: keys, 1: values), dtype of `q`.
      block_tables: [num_seqs, blocks_per_seq] int32, block ids of each sequence in order.
      tiles: which tokens belong to which sequence, from `build_query_tiles`.
      implementation: "reference", "portable", "pallas_triton" or, for tiles of 64 tokens on Hopper, "pallas_mosaic"
        (both interpreted where there is no GPU); None picks the fastest that supports the arguments.

    Returns:
      [num_tokens, num_q_heads, head_dim] in the dtype of `q`, accumulated in float32. Rows of tokens outside every
      tile are finite where `q` is, and otherwise unspecified.

    Raises:
      ValueError: If the shapes do not fit together, or `implementation` is unknown.
      TypeError: If `q` and `kv` differ in dtype, or the block table does not hold integers.
      NotImplementedError: If the named implementation does not support the shapes or dtypes.
    """
    _check_arguments(q, kv, block_tables)
    if implementation is None:
        return _call_first_supported(q, kv, block_tables, tiles)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {sorted(_IMPLEMENTATIONS)} or None, got {implementation!r}")
    return _IMPLEMENTATIONS[implementation](q, kv, block_tables, tiles)


def _call_first_supported(q: Array, kv: Array, block_tables: Array, tiles: QueryTiles) -> Array:
    if jax.default_backend() == "gpu":
        has_long_prompts = prefers_mosaic(
            num_tokens=q.shape[0],
            tile_size=tiles.tile_size,
            head_dim=q.shape[2],
            max_context=block_tables.shape[1] * kv.shape[3],
            dtype=q.dtype,
        )
        if has_long_prompts and is_hopper():
            with contextlib.suppress(NotImplementedError):
                return _pallas_mosaic(q, kv, block_tables, tiles)
        with contextlib.suppress(NotImplementedError):  # the portable form supports everything
            return pallas_triton.paged_attention(q, kv, block_tables, tiles)
    return portable.paged_attention(q, kv, block_tables, tiles)


def _check_arguments(q: Array, kv: Array, block_tables: Array) -> None:
    if q.ndim != 3 or kv.ndim != 5 or kv.shape[1] != 2 or block_tables.ndim != 2:
        raise ValueError(
            "expected q [num_tokens, num_q_heads, head_dim], kv [num_blocks, 2, num_kv_heads, block_size, head_dim] "
            f"and block_tables [num_seqs, blocks_per_seq], got {q.shape}, {kv.shape} and {block_tables.shape}"
        )
    if q.shape[2] != kv.shape[4]:
        raise ValueError(f"q has head_dim {q.shape[2]} but kv has {kv.shape[4]}; they must be equal")
    if q.shape[1] % kv.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {kv.shape[2]} heads of kv")
    if q.dtype != kv.dtype:
        raise TypeError(f"q is {q.dtype} but kv is {kv.dtype}; cast one of them")
    if not jnp.issubdtype(block_tables.dtype, jnp.integer):
        raise TypeError(f"block_tables must hold integers, got {block_tables.dtype}")
