"""The public op: checks shapes, picks an implementation, calls it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.rope_kv_write import reference

Implementation = Literal["reference", "pallas_triton"]


def rope_kv_write(
    qkv: Float[Array, "num_partials num_tokens qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_ids: Int[Array, " num_tokens"],
    offsets: Int[Array, " num_tokens"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
    *,
    implementation: Implementation | None = None,
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    """Rotates the queries and keys of a flat batch of tokens and writes its keys and values into the cache.

    Semantics: [q | k | v] = heads of sum over p of qkv[p, t], in order, rounded to the dtype of `kv`; q and k are
    turned by the token's angles in float32, dimension i with i + head_dim / 2, and rounded again;
    kv[block_ids[t], 0 or 1, :, offsets[t]] = k or v of token t.

    Args:
      qkv: [num_partials, num_tokens, qkv_width] partial sums of the fused projection, q heads, then k heads, then v
        heads; several in float32, or one in the dtype of `kv`.
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim] cache of one layer (0: keys, 1: values), bfloat16 or
        float32; updated in place when the caller donates it.
      block_ids, offsets: [num_tokens] int32, each token's place in the cache; no two the same. Block id num_blocks
        drops a token.
      cos, sin: [num_tokens, head_dim // 2] float32 rotation of each token.
      implementation: "reference" (any backend) or "pallas_triton" (interpreted on a CPU); None picks the latter on a
        GPU for shapes that it supports.

    Returns:
      [num_tokens, num_q_heads, head_dim] rotated queries in the dtype of `kv`; and the cache with the tokens in it.

    Raises:
      ValueError: If the shapes do not fit together, or `implementation` is unknown.
      TypeError: If the dtypes do not fit together.
      NotImplementedError: If the named implementation does not support the dtype.
    """
    _check(qkv, kv, block_ids, offsets, cos, sin)
    args = qkv, kv, block_ids, offsets, cos, sin
    match implementation or ("pallas_triton" if jax.default_backend() == "gpu" else "reference"):
        case "reference":
            return reference.rope_kv_write(*args)
        case "pallas_triton":
            from pallas_kernels.rope_kv_write import pallas_triton  # the GPU backend is imported where it is used only

            try:
                return pallas_triton.rope_kv_write(*args)
            except NotImplementedError:
                if implementation is not None:
                    raise
            return reference.rope_kv_write(*args)
        case unknown:
            raise ValueError(f"implementation {unknown!r} is unknown; expected 'reference' or 'pallas_triton'")


def _check(qkv: Array, kv: Array, block_ids: Array, offsets: Array, cos: Array, sin: Array) -> None:
    if qkv.ndim != 3 or kv.ndim != 5 or kv.shape[1] != 2:
        raise ValueError(
            "expected qkv [num_partials, num_tokens, qkv_width] and kv [num_blocks, 2, num_kv_heads, block_size, "
            f"head_dim], got {qkv.shape} and {kv.shape}"
        )
    num_tokens = qkv.shape[1]
    kv_width, head_dim = kv.shape[2] * kv.shape[4], kv.shape[4]
    q_width = qkv.shape[2] - 2 * kv_width
    if q_width <= 0 or q_width % kv_width or head_dim % 2:
        raise ValueError(
            f"qkv has width {qkv.shape[2]}, which is not (num_q_heads + 2 * {kv.shape[2]}) * {head_dim} for any "
            f"multiple num_q_heads of kv's {kv.shape[2]} heads of even head_dim {head_dim}"
        )
    if block_ids.shape != (num_tokens,) or offsets.shape != (num_tokens,):
        raise ValueError(
            f"block_ids and offsets must be [{num_tokens}] for {num_tokens} tokens, got {block_ids.shape} and "
            f"{offsets.shape}"
        )
    if cos.shape != (num_tokens, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be [{num_tokens}, {head_dim // 2}] for {num_tokens} tokens and head_dim {head_dim}, got "
            f"{cos.shape} and {sin.shape}"
        )
    if qkv.dtype != jnp.float32 and (qkv.shape[0] > 1 or qkv.dtype != kv.dtype):
        raise TypeError(
            f"qkv is {qkv.dtype} in {qkv.shape[0]} partial sums and kv is {kv.dtype}; qkv must be float32, or one sum "
            "in kv's dtype"
        )
