"""The public op: checks shapes, picks an implementation, calls it."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention import pallas_triton, reference
from pallas_kernels.paged_attention import portable

__all__ = ["Implementation", "decode_attention"]

Implementation = Literal["reference", "portable", "pallas_triton"]

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "reference": reference.decode_attention,
    "portable": functools.partial(reference.decode_attention, attend=portable.paged_attention),
    "pallas_triton": pallas_triton.decode_attention,
}


def decode_attention(
    qkv: Float[Array, "num_seqs qkv_width"] | Float[Array, "num_partials num_seqs qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    positions: Int[Array, " num_seqs"],
    cos: Float[Array, "num_seqs half_dim"],
    sin: Float[Array, "num_seqs half_dim"],
    *,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "num_seqs q_width"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    """Rotates one new token of each sequence, writes its key and value into the cache and attends over the sequence.

    Semantics: [q | k | v] = heads of sum over p of qkv[p, b], rounded to the dtype of `kv`; q and k are turned by the
    token's angles in float32 and rounded again; kv[block(c), 0 or 1, :, c % block_size] = k or v for c = positions[b];
    y[b, n] = sum over c <= positions[b] of softmax_c(q[n] @ K[c, n // g] / sqrt(head_dim)) * V[c, n // g], with K, V,
    g and block(c) as in `paged_attention`.

    Free blocks, and blocks past a sequence's end, may hold anything, NaN included; so may the entries of a block
    table past the sequence's last block. Nothing but the new tokens' cells of `kv` changes. A sequence's result does
    not depend on the other sequences of the batch.

    Args:
      qkv: [num_seqs, qkv_width] output of the fused projection, q heads, then k heads, then v heads, in the dtype of
        `kv` or float32; or [num_partials, num_seqs, qkv_width] float32, whose sum over axis 0, in order, that is.
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim] cache of one layer (0: keys, 1: values), bfloat16 or
        float32; updated in place when the caller donates it.
      block_tables: [num_seqs, blocks_per_seq] int32, block ids of each sequence in order, the new token's included.
      positions: [num_seqs] int32, position of each new token in its sequence (= tokens cached before it), less than
        blocks_per_seq * block_size; -1 for a row that is not used, which writes nothing.
      cos, sin: [num_seqs, head_dim // 2] float32 rotation of each new token.
      implementation: "reference", "portable" or "pallas_triton" (interpreted where there is no GPU); None picks the
        fastest that supports the arguments.

    Returns:
      [num_seqs, q_width] outputs of the heads side by side, in the dtype of `kv`, zero for rows that are not used;
      and the cache with the new tokens in it.

    Raises:
      ValueError: If the shapes do not fit together, or `implementation` is unknown.
      TypeError: If the dtypes do not fit together.
      NotImplementedError: If the named implementation does not support the shapes or dtypes.
    """
    _check_shapes(qkv, kv, block_tables, positions, cos, sin)
    _check_dtypes(qkv, kv, block_tables, positions)
    args = qkv, kv, block_tables, positions, cos, sin
    if implementation is None:
        return _call_first_supported(*args)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {sorted(_IMPLEMENTATIONS)} or None, got {implementation!r}")
    return _IMPLEMENTATIONS[implementation](*args)


def _call_first_supported(*args: Array) -> tuple[Array, Array]:
    if jax.default_backend() == "gpu":
        try:
            return pallas_triton.decode_attention(*args)
        except NotImplementedError:
            pass  # the portable form supports everything
    return _IMPLEMENTATIONS["portable"](*args)


def _check_shapes(qkv: Array, kv: Array, block_tables: Array, positions: Array, cos: Array, sin: Array) -> None:
    if kv.ndim != 5 or kv.shape[1] != 2 or block_tables.ndim != 2 or qkv.ndim not in (2, 3):
        raise ValueError(
            "expected qkv [num_seqs, qkv_width] or [num_partials, num_seqs, qkv_width], kv [num_blocks, 2, "
            "num_kv_heads, block_size, head_dim] and block_tables [num_seqs, blocks_per_seq], "
            f"got {qkv.shape}, {kv.shape} and {block_tables.shape}"
        )
    num_seqs = qkv.shape[-2]
    if block_tables.shape[0] != num_seqs or positions.shape != (num_seqs,):
        raise ValueError(
            f"qkv holds one token of each of {num_seqs} sequences, but block_tables has {block_tables.shape[0]} rows "
            f"and positions is {positions.shape}; all must have one entry a sequence"
        )
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    q_width = qkv.shape[-1] - 2 * num_kv_heads * head_dim
    if q_width <= 0 or q_width % (num_kv_heads * head_dim) or head_dim % 2:
        raise ValueError(
            f"qkv has width {qkv.shape[-1]}, which is not (num_q_heads + 2 * {num_kv_heads}) * {head_dim} for any "
            f"multiple num_q_heads of kv's {num_kv_heads} heads of even head_dim {head_dim}"
        )
    if cos.shape != (num_seqs, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be [{num_seqs}, {head_dim // 2}] for {num_seqs} sequences and head_dim {head_dim}, "
            f"got {cos.shape} and {sin.shape}"
        )


def _check_dtypes(qkv: Array, kv: Array, block_tables: Array, positions: Array) -> None:
    if qkv.dtype != jnp.float32 and (qkv.ndim == 3 or qkv.dtype != kv.dtype):
        raise TypeError(
            f"qkv is {qkv.dtype} and kv is {kv.dtype}; qkv must be float32, or without partial sums of kv's dtype"
        )
    if not (jnp.issubdtype(block_tables.dtype, jnp.integer) and jnp.issubdtype(positions.dtype, jnp.integer)):
        raise TypeError(
            f"block_tables and positions must hold integers, got {block_tables.dtype} and {positions.dtype}"
        )
