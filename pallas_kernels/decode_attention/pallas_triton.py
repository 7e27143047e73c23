"""Pallas kernel (Triton lowering) of a decode step's attention in one launch, from the qkv projection to the output.

One program a sequence, KV head and range of the context. It adds up and rotates its query heads and the new key, walks
its range of the cached tokens in chunks with an online softmax, and takes the new token from registers: no program
reads what another one writes to the cache. A sequence is cut into as many ranges as its length is worth; of those, the
program that ends last merges all results in the order of the ranges, so that the sums do not depend on who that is.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.config import KernelConfig, kernel_config
from pallas_kernels.lent_counters import NONE_ENDED, lent_counters
from pallas_kernels.pallas_launch import launch_dependents

# Lowest score: finite, so that the difference of two of them is 0 and not NaN.
_MASKED = -1e30

# Triton's matrix product takes no side below 16.
_MIN_DOT_SIZE = 16

# Splits whose results are loaded together: short contexts have no more, and wait for memory once.
_MERGED_AT_ONCE = 8

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def decode_attention(
    qkv: Float[Array, "num_seqs qkv_width"] | Float[Array, "num_partials num_seqs qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    positions: Int[Array, " num_seqs"],
    cos: Float[Array, "num_seqs half_dim"],
    sin: Float[Array, "num_seqs half_dim"],
    *,
    config: KernelConfig | None = None,
    interpret: bool | None = None,
) -> tuple[
    Float[Array, "num_seqs q_width"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    """See `pallas_kernels.decode_attention.decode_attention`.

    Args:
      qkv: output of the projection, or its partial sums.
      kv: cache of one layer.
      block_tables: block ids of each sequence.
      positions: of the new tokens; -1 for rows that are not used.
      cos, sin: rotation of the new tokens.
      config: block sizes; None picks them from the shapes.
      interpret: run the kernel's operations one by one on any backend; None does so where there is no GPU.

    Returns:
      [num_seqs, q_width] in the dtype of `kv`, and the cache.

    Raises:
      NotImplementedError: If `kv` is neither bfloat16 nor float32, or block_size is no power of two.
    """
    _check_supported(kv)
    if config is None:
        config = kernel_config(
            num_seqs=block_tables.shape[0],
            num_kv_heads=kv.shape[2],
            head_dim=kv.shape[4],
            max_context=block_tables.shape[1] * kv.shape[3],
            dtype=kv.dtype,
        )
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    qkv = qkv.reshape(-1, *qkv.shape[-2:])
    return _decode_attention(qkv, kv, block_tables, positions, cos, sin, config=config, interpret=interpret)


def _check_supported(kv: Array) -> None:
    if kv.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"pallas_triton attends in bfloat16 or float32, got {kv.dtype}; use 'portable'")
    block_size = kv.shape[3]
    if block_size & (block_size - 1):
        raise NotImplementedError(
            f"pallas_triton needs a block_size that is a power of two, got {block_size}; use 'portable'"
        )


# An inner jit: the identical calls of a model's layers are traced and compiled once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _decode_attention(
    qkv: Float[Array, "num_partials num_seqs qkv_width"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    positions: Int[Array, " num_seqs"],
    cos: Float[Array, "num_seqs half_dim"],
    sin: Float[Array, "num_seqs half_dim"],
    *,
    config: KernelConfig,
    interpret: bool,
) -> tuple[
    Float[Array, "num_seqs q_width"],
    Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
]:
    num_seqs = positions.shape[0]
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    q_width = qkv.shape[2] - 2 * num_kv_heads * head_dim
    # One array, larger than the step's results: XLA would put the positions by themselves into the memory of the step's
    # tokens, another address with every step, and the launches of all layers would have to be set anew.
    places = jnp.concatenate([positions[:, None], block_tables], axis=1)
    operands = [qkv, kv, places, cos, sin]
    out_shape = [jax.ShapeDtypeStruct((num_seqs, q_width), kv.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype)]
    if config.num_splits > 1:
        counters = lent_counters(positions, lowest=-1)
        operands.append(jnp.broadcast_to(counters[:, None], (num_seqs, num_kv_heads)))
        num_q_heads = q_width // head_dim
        out_shape += [
            jax.ShapeDtypeStruct((config.num_splits, num_seqs, num_q_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((config.num_splits, num_seqs, num_q_heads), jnp.float32),
        ]
    out, kv, *_ = pl.pallas_call(
        functools.partial(_kernel, config=config, interpret=interpret),
        grid=(num_seqs, num_kv_heads, config.num_splits),
        in_specs=[_WHOLE] * len(operands),
        out_specs=[_WHOLE] * len(out_shape),
        out_shape=out_shape,
        input_output_aliases={1: 1},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="decode_paged_attention",
    )(*operands)
    return out, kv


def _kernel(*refs: Any, config: KernelConfig, interpret: bool) -> None:
    """Names the refs that are there with several ranges only."""
    qkv_ref, kv_ref, places_ref, cos_ref, sin_ref, *others = refs
    counters_ref = others.pop(0) if config.num_splits > 1 else None
    out_ref, new_kv_ref, *partials = others
    partial_ref, lse_ref = partials or (None, None)
    _attend(
        qkv_ref, kv_ref, places_ref, cos_ref, sin_ref, counters_ref, out_ref, new_kv_ref, partial_ref, lse_ref,
        config=config, interpret=interpret,
    )  # fmt: skip


def _attend(
    qkv_ref: Any,  # [num_partials, num_seqs, qkv_width]
    kv_ref: Any,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    places_ref: Any,  # [num_seqs, 1 + blocks_per_seq] position, then block ids
    cos_ref: Any,  # [num_seqs, half_dim]
    sin_ref: Any,  # [num_seqs, half_dim]
    counters_ref: Any,  # [num_seqs, num_kv_heads] of `lent_counters`, or None
    out_ref: Any,  # [num_seqs, q_width]
    new_kv_ref: Any,  # the memory of kv_ref
    partial_ref: Any,  # [num_splits, num_seqs, num_q_heads, head_dim] float32 results of the splits, or None
    lse_ref: Any,  # [num_splits, num_seqs, num_q_heads] log2 of each split's softmax denominator, or None
    *,
    config: KernelConfig,
    interpret: bool,
) -> None:
    _, _, num_kv_heads, block_size, head_dim = kv_ref.shape
    q_per_kv = out_ref.shape[1] // (num_kv_heads * head_dim)
    max_context = (places_ref.shape[1] - 1) * block_size
    chunk_tokens = config.chunk_tokens
    dtype = kv_ref.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    seq, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    if config.launch_dependents and not interpret:
        seq = launch_dependents(seq)
    position = jnp.minimum(places_ref[seq, 0], max_context - 1)

    # Rows and lanes past the end come from the rounding up to powers of two. A mask along the contiguous axis would
    # keep loads from being vectorized: such lanes read the last column again, meet zeros in q and are never stored.
    rows = jnp.arange(max(_MIN_DOT_SIZE, pl.next_power_of_2(q_per_kv)), dtype=jnp.int32)
    lanes = jnp.arange(max(_MIN_DOT_SIZE, pl.next_power_of_2(head_dim)), dtype=jnp.int32)
    is_padded = lanes.shape[0] > head_dim
    columns = jnp.minimum(lanes, head_dim - 1) if is_padded else lanes
    first_row = kv_head * q_per_kv
    out_mask = _row_mask(rows < q_per_kv, lanes, head_dim)
    out_index = seq, (first_row + rows)[:, None] * head_dim + lanes[None, :]

    def load_heads(index: Array, mask: Array | None = None) -> Array:
        """The sum of qkv's partial sums as the projection would have rounded it, in float32."""
        other = None if mask is None else 0.0
        parts = [
            plt.load(qkv_ref.at[partial, seq, index], mask=mask, other=other).astype(jnp.float32)
            for partial in range(qkv_ref.shape[0])
        ]
        return functools.reduce(jnp.add, parts).astype(dtype).astype(jnp.float32)

    # Each lane's other half is loaded a second time: turning needs no exchange between threads. None of these loads
    # waits for the position, so that it and they are in flight together.
    half_dim = head_dim // 2
    partners = lax.rem(columns + half_dim, jnp.int32(head_dim))
    angles = lax.rem(columns, jnp.int32(half_dim))
    q_mask = jnp.broadcast_to((rows < q_per_kv)[:, None], out_mask.shape)
    q_start = (first_row + rows)[:, None] * head_dim
    k_start = (num_kv_heads * q_per_kv + kv_head) * head_dim
    q_own = load_heads(q_start + columns[None, :], q_mask)
    q_partner = load_heads(q_start + partners[None, :], q_mask)
    k_own, k_partner = load_heads(k_start + columns), load_heads(k_start + partners)
    v = load_heads(k_start + num_kv_heads * head_dim + columns)
    cos, sin = plt.load(cos_ref.at[seq, angles]), plt.load(sin_ref.at[seq, angles])

    @pl.when((position < 0) & (split == 0))
    def _clear_unused() -> None:
        plt.store(out_ref.at[out_index], jnp.zeros(out_mask.shape, dtype), mask=out_mask)

    # Cached tokens are cut into ranges of whole chunks; the new token belongs to the last range.
    num_chunks = pl.cdiv(position, chunk_tokens)
    chunks_per_split = jnp.maximum(pl.cdiv(num_chunks, config.num_splits), config.min_split_chunks)
    num_active = jnp.maximum(pl.cdiv(num_chunks, chunks_per_split), 1)

    @pl.when((position >= 0) & (split < num_active))
    def _attend_range() -> None:
        def load_blocks(chunk: Array) -> Array:
            slots = _cached_slots(chunk, chunk_tokens, position)
            return plt.load(places_ref.at[seq, 1 + lax.div(slots, jnp.int32(block_size))])

        first = split * chunks_per_split
        last = jnp.minimum(first + chunks_per_split, num_chunks)
        blocks = load_blocks(first)
        new_block = places_ref[seq, 1 + lax.div(position, jnp.int32(block_size))]

        signed_sin = jnp.where(columns < half_dim, -sin, sin)
        q = (q_own * cos[None, :] + q_partner * signed_sin[None, :]).astype(dtype)
        k = (k_own * cos + k_partner * signed_sin).astype(dtype)
        if is_padded:
            q = jnp.where((lanes < head_dim)[None, :], q, jnp.zeros_like(q))

        scale = head_dim**-0.5 * math.log2(math.e)
        has_new = split == num_active - 1

        @pl.when(has_new)
        def _write() -> None:
            cell = kv_head, lax.rem(position, jnp.int32(block_size)), lanes
            mask = lanes < head_dim if is_padded else None
            plt.store(new_kv_ref.at[(new_block, 0, *cell)], k, mask=mask)
            plt.store(new_kv_ref.at[(new_block, 1, *cell)], v.astype(dtype), mask=mask)

        new_score = (q.astype(jnp.float32) * k.astype(jnp.float32)[None, :]).sum(1) * scale

        def attend_chunk(chunk: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            out, peak, total, blocks = carry
            slots = _cached_slots(chunk, chunk_tokens, position)
            cells = kv_head, lax.rem(slots, jnp.int32(block_size))[:, None], columns[None, :]
            keys = plt.load(kv_ref.at[(blocks[:, None], 0, *cells)])
            values = plt.load(kv_ref.at[(blocks[:, None], 1, *cells)])
            # The next chunk's blocks are read ahead: its loads then wait for no other load.
            next_blocks = load_blocks(chunk + 1)
            scores = lax.dot_general(
                q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            is_cached = chunk * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32) < position
            scores = jnp.where(is_cached[None, :], scores * scale, _MASKED)
            new_peak = jnp.maximum(peak, scores.max(1))
            decay = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - new_peak[:, None])
            out = out * decay[:, None] + lax.dot_general(
                weights.astype(dtype),
                values,
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return out, new_peak, total * decay + weights.sum(1), next_blocks

        # The softmax begins with the new token where it belongs to this range, else with nothing.
        carry = (
            jnp.where(has_new, jnp.broadcast_to(v[None, :], out_mask.shape), 0.0),
            jnp.where(has_new, new_score, _MASKED),
            jnp.where(has_new, jnp.ones_like(new_score), 0.0),
            blocks,
        )
        out, peak, total, _ = lax.fori_loop(first, last, attend_chunk, carry)
        out = out / total[:, None]

        if config.num_splits == 1:
            plt.store(out_ref.at[out_index], out.astype(dtype), mask=out_mask)
            return

        @pl.when(num_active == 1)
        def _store() -> None:
            plt.store(out_ref.at[out_index], out.astype(dtype), mask=out_mask)

        @pl.when(num_active > 1)
        def _store_partial() -> None:
            heads = first_row + rows
            plt.store(partial_ref.at[split, seq, heads[:, None], lanes[None, :]], out, mask=out_mask)
            plt.store(lse_ref.at[split, seq, heads], peak + jnp.log2(total), mask=rows < q_per_kv)
            # All threads' stores come before the count, which releases them and acquires those of the others.
            if not interpret:
                plt.debug_barrier()
            num_ended = plt.atomic_add(counters_ref, (seq, kv_head), jnp.int32(1))
            pl.when(num_ended == NONE_ENDED + num_active - 1)(
                functools.partial(
                    _merge,
                    partial_ref,
                    lse_ref,
                    counters_ref,
                    out_ref,
                    seq=seq,
                    kv_head=kv_head,
                    num_active=num_active,
                    q_per_kv=q_per_kv,
                    num_splits=config.num_splits,
                )
            )


def _merge(
    partial_ref: Any,
    lse_ref: Any,
    counters_ref: Any,
    out_ref: Any,
    *,
    seq: Array,
    kv_head: Array,
    num_active: Array,
    q_per_kv: int,
    num_splits: int,
) -> None:
    """The mean of the splits' results, weighted by their softmax denominators, in the order of the splits."""
    head_dim = partial_ref.shape[3]
    plt.store(counters_ref.at[seq, kv_head], jnp.int32(NONE_ENDED))
    rows = jnp.arange(pl.next_power_of_2(q_per_kv), dtype=jnp.int32)
    lanes = jnp.arange(max(_MIN_DOT_SIZE, pl.next_power_of_2(head_dim)), dtype=jnp.int32)
    heads = kv_head * q_per_kv + rows
    is_head = rows < q_per_kv
    mask = _row_mask(is_head, lanes, head_dim)
    num_unrolled = min(num_splits, _MERGED_AT_ONCE)

    def merge_some(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, peak, total = carry
        splits = [i * num_unrolled + j for j in range(num_unrolled)]
        # Volatile: written by other programs of this launch. Unrolled, so that all loads are in flight together.
        lses = [
            plt.load(lse_ref.at[x, seq, heads], mask=is_head & (x < num_active), other=_MASKED, volatile=True)
            for x in splits
        ]
        partials = [
            plt.load(
                partial_ref.at[x, seq, heads[:, None], lanes[None, :]],
                mask=mask & (x < num_active),
                other=0.0,
                volatile=True,
            )
            for x in splits
        ]
        new_peak = functools.reduce(jnp.maximum, lses, peak)
        decay = jnp.exp2(peak - new_peak)
        out, total = out * decay[:, None], total * decay
        for lse, partial in zip(lses, partials, strict=True):
            weight = jnp.exp2(lse - new_peak)
            out, total = out + weight[:, None] * partial, total + weight
        return out, new_peak, total

    carry = jnp.zeros(mask.shape, jnp.float32), jnp.full(rows.shape, _MASKED), jnp.zeros(rows.shape, jnp.float32)
    out, _, total = lax.fori_loop(0, pl.cdiv(num_active, num_unrolled), merge_some, carry)
    out /= total[:, None]
    index = seq, heads[:, None] * head_dim + lanes[None, :]
    plt.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)


def _cached_slots(chunk: Array, chunk_tokens: int, position: Array) -> Array:
    """The cache slots of a chunk; those past the last cached token repeat it, so that no stray cell is ever read."""
    slots = chunk * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
    return jnp.clip(slots, 0, jnp.maximum(position - 1, 0))


def _row_mask(is_row: Array, lanes: Array, head_dim: int) -> Array:
    """[num_rows, num_lanes] mask, constant along the lanes (accesses stay vectorized) if head_dim is a power of two."""
    mask = jnp.broadcast_to(is_row[:, None], (is_row.shape[0], lanes.shape[0]))
    return mask if lanes.shape[0] == head_dim else mask & (lanes < head_dim)[None, :]
