"""Pallas kernel (Triton lowering): one program a block of tokens and a few heads; in interpret mode on a CPU.

It only moves bytes: each program loads all halves of its heads before it uses the first, and a token's angles once for
all of its heads.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

# Of a program: 16 tokens x 4 heads x 128 dimensions in bfloat16 are 16 KiB, 64 bytes in flight a thread.
_BLOCK_TOKENS = 16
_MAX_HEADS = 4

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def rope_kv_write(
    qkv: Float[Array, "num_partials num_tokens qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_ids: Int[Array, " num_tokens"],
    offsets: Int[Array, " num_tokens"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    """See `pallas_kernels.rope_kv_write.rope_kv_write`.

    Raises:
      NotImplementedError: If `kv` is neither bfloat16 nor float32.
    """
    if kv.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"pallas_triton writes bfloat16 or float32, got {kv.dtype}; use 'reference'")
    return _rope_kv_write(qkv, kv, block_ids, offsets, cos, sin, interpret=jax.default_backend() != "gpu")


# An inner jit: the identical calls of a model's layers are traced and compiled once.
@functools.partial(jax.jit, static_argnames="interpret")
def _rope_kv_write(
    qkv: Float[Array, "num_partials num_tokens qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_ids: Int[Array, " num_tokens"],
    offsets: Int[Array, " num_tokens"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
    *,
    interpret: bool,
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    _, num_tokens, qkv_width = qkv.shape
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    num_heads = qkv_width // head_dim
    num_q_heads = num_heads - 2 * num_kv_heads
    heads_per_program = next(n for n in range(_MAX_HEADS, 0, -1) if math.gcd(num_q_heads, num_kv_heads) % n == 0)
    return pl.pallas_call(
        functools.partial(_kernel, heads_per_program=heads_per_program),
        grid=(pl.cdiv(num_tokens, _BLOCK_TOKENS), num_heads // heads_per_program),
        in_specs=[_WHOLE] * 6,
        out_specs=[_WHOLE] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, num_q_heads, head_dim), kv.dtype),
            jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        ],
        input_output_aliases={1: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rope_kv_write",
    )(qkv, kv, block_ids, offsets, cos, sin)


def _kernel(
    qkv_ref: Any,  # [num_partials, num_tokens, qkv_width]
    kv_ref: Any,  # not read: gives the output its memory
    block_ids_ref: Any,  # [num_tokens]
    offsets_ref: Any,  # [num_tokens]
    cos_ref: Any,  # [num_tokens, half_dim]
    sin_ref: Any,  # [num_tokens, half_dim]
    q_ref: Any,  # [num_tokens, num_q_heads, head_dim]
    new_kv_ref: Any,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    *,
    heads_per_program: int,
) -> None:
    num_partials, num_tokens, _ = qkv_ref.shape
    num_blocks, _, num_kv_heads, _, head_dim = new_kv_ref.shape
    num_q_heads, half_dim = q_ref.shape[1], cos_ref.shape[1]
    dtype = new_kv_ref.dtype
    tokens = pl.program_id(0) * _BLOCK_TOKENS + jnp.arange(_BLOCK_TOKENS, dtype=jnp.int32)
    first_head = pl.program_id(1) * heads_per_program
    lanes = jnp.arange(pl.next_power_of_2(half_dim), dtype=jnp.int32)
    is_token = tokens < num_tokens
    # A mask along the lanes would keep accesses from being vectorized, so there is one only where it must be.
    mask = jnp.broadcast_to(is_token[:, None], (tokens.shape[0], lanes.shape[0]))
    if lanes.shape[0] > half_dim:
        mask &= (lanes < half_dim)[None, :]

    def load_half(head: Array, half: int) -> Array:
        """Half of the dimensions of a head as the projection would have rounded them."""
        columns = (head * head_dim + half * half_dim + lanes)[None, :]
        parts = [
            plt.load(qkv_ref.at[jnp.int32(p), tokens[:, None], columns], mask=mask, other=0.0)
            for p in range(num_partials)
        ]
        return functools.reduce(jnp.add, parts).astype(dtype)

    heads = [first_head + i for i in range(heads_per_program)]
    halves = [(load_half(head, 0), load_half(head, 1)) for head in heads]

    def rotated() -> list[tuple[Array, Array]]:
        angles = tokens[:, None], lanes[None, :]
        cos, sin = (plt.load(ref.at[angles], mask=mask, other=0.0) for ref in (cos_ref, sin_ref))
        wide = [(x1.astype(jnp.float32), x2.astype(jnp.float32)) for x1, x2 in halves]
        return [((x1 * cos - x2 * sin).astype(dtype), (x2 * cos + x1 * sin).astype(dtype)) for x1, x2 in wide]

    def write_cache(values: list[tuple[Array, Array]], kind: int, first: Array) -> None:
        block_ids = plt.load(block_ids_ref.at[tokens], mask=is_token, other=num_blocks)
        offsets = plt.load(offsets_ref.at[tokens], mask=is_token, other=0)
        is_kept = mask & (block_ids < num_blocks)[:, None]
        for i, pair in enumerate(values):
            for half, x in enumerate(pair):
                cells = block_ids[:, None], kind, first + i, offsets[:, None], (half * half_dim + lanes)[None, :]
                plt.store(new_kv_ref.at[cells], x, mask=is_kept)

    @pl.when(first_head < num_q_heads)
    def _queries() -> None:
        for head, pair in zip(heads, rotated(), strict=True):
            for half, x in enumerate(pair):
                plt.store(q_ref.at[tokens[:, None], head, (half * half_dim + lanes)[None, :]], x, mask=mask)

    @pl.when((first_head >= num_q_heads) & (first_head < num_q_heads + num_kv_heads))
    def _keys() -> None:
        write_cache(rotated(), 0, first_head - num_q_heads)

    @pl.when(first_head >= num_q_heads + num_kv_heads)
    def _values() -> None:
        write_cache(halves, 1, first_head - num_q_heads - num_kv_heads)
