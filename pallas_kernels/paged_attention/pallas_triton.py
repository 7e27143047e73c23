"""Pallas kernel (Triton lowering) for prefill chunks and decode rows: one program a tile, KV head and context range.

A program holds the query rows that share one KV head (tile_size tokens times the query heads of the group) and walks
its range of the context in chunks with an online softmax, as FlashAttention does; with more than one range (few tiles,
long contexts) a second small kernel merges the partial results, as flash-decoding does.
"""

import functools
import math
import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import is_hopper, max_shared_bytes
from pallas_kernels.paged_attention.config import MIN_DOT_SIZE, KernelConfig, kernel_config
from pallas_kernels.paged_attention.query_tiles import QueryTiles
from pallas_kernels.paged_attention.softmax import MASKED, NO_PEAK

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
    *,
    config: KernelConfig | None = None,
    interpret: bool | None = None,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; rows outside the tiles keep the values of `q`.

    Args:
      q: [num_tokens, num_q_heads, head_dim] queries.
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim] cache.
      block_tables: [num_seqs, blocks_per_seq] int32.
      tiles: query tiles of the batch.
      config: block sizes; None picks them from the shapes.
      interpret: run the kernel's operations one by one on any backend; None does so where there is no GPU.

    Returns:
      [num_tokens, num_q_heads, head_dim] in the dtype of `q`.

    Raises:
      NotImplementedError: If the dtype is neither bfloat16 nor float32, block_size is no power of two, or a tile of
        queries does not fit into the GPU's shared memory.
    """
    _check_supported(q, kv)
    if config is None:
        config = kernel_config(
            num_tiles=tiles.lengths.shape[0],
            tile_size=tiles.tile_size,
            num_kv_heads=kv.shape[2],
            q_per_kv=q.shape[1] // kv.shape[2],
            head_dim=q.shape[2],
            max_context=block_tables.shape[1] * kv.shape[3],
            dtype=q.dtype,
            shared_bytes=max_shared_bytes(),
            has_wgmma=is_hopper(),
        )
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    return _paged_attention(q, kv, block_tables, tiles, config=config, interpret=interpret)


def _check_supported(q: Array, kv: Array) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"pallas_triton attends in bfloat16 or float32, got {q.dtype}; use 'portable'")
    block_size = kv.shape[3]
    if block_size & (block_size - 1):
        raise NotImplementedError(
            f"pallas_triton needs a block_size that is a power of two, got {block_size}; use 'portable'"
        )


# An inner jit: the identical calls of a model's layers are traced and compiled once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
    *,
    config: KernelConfig,
    interpret: bool,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    num_tiles = tiles.lengths.shape[0]
    num_kv_heads = kv.shape[2]
    q_per_kv = q.shape[1] // num_kv_heads
    operands = q, kv, block_tables, tiles.seq_ids, tiles.starts, tiles.lengths, tiles.positions
    is_split = config.num_splits > 1
    partials = [
        jax.ShapeDtypeStruct((config.num_splits, *q.shape), jnp.float32),
        jax.ShapeDtypeStruct((config.num_splits, *q.shape[:2]), jnp.float32),
    ]
    attended = pl.pallas_call(
        functools.partial(
            _attend_kernel, tile_size=tiles.tile_size, q_per_kv=q_per_kv, config=config, interpret=interpret
        ),
        grid=(num_tiles, num_kv_heads, config.num_splits),
        in_specs=[_WHOLE] * len(operands),
        out_specs=[_WHOLE, _WHOLE] if is_split else _WHOLE,
        out_shape=partials if is_split else jax.ShapeDtypeStruct(q.shape, q.dtype),
        # The output takes q's buffer (a program overwrites exactly the rows that it alone has read): rows outside the
        # tiles stay finite without a memset.
        input_output_aliases={} if is_split else {0: 0},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(*operands)
    if not is_split:
        return attended
    return pl.pallas_call(
        functools.partial(_merge_kernel, num_splits=config.num_splits, q_per_kv=q_per_kv),
        grid=(num_tiles, tiles.tile_size, num_kv_heads),
        in_specs=[_WHOLE] * 5,
        out_specs=_WHOLE,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(q, *attended, tiles.starts, tiles.lengths)


def _attend_kernel(
    q_ref: Any,  # [num_tokens, num_q_heads, head_dim]
    kv_ref: Any,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables_ref: Any,  # [num_seqs, blocks_per_seq]
    seq_ids_ref: Any,  # [num_tiles]
    starts_ref: Any,  # [num_tiles]
    lengths_ref: Any,  # [num_tiles]
    positions_ref: Any,  # [num_tiles]
    out_ref: Any,  # [num_tokens, num_q_heads, head_dim], or [num_splits, ...] float32 partial results
    lse_ref: Any = None,  # [num_splits, num_tokens, num_q_heads] log2 of each partial softmax's denominator
    *,
    tile_size: int,
    q_per_kv: int,
    config: KernelConfig,
    interpret: bool,
) -> None:
    head_dim = q_ref.shape[2]
    block_size = kv_ref.shape[3]
    chunk_tokens = config.chunk_tokens
    num_rows = max(MIN_DOT_SIZE, pl.next_power_of_2(tile_size * q_per_kv))
    precision = lax.Precision.HIGHEST if kv_ref.dtype == jnp.float32 else None
    scale = head_dim**-0.5 * math.log2(math.e)
    # The last tiles of a sequence have the most work: they go first, so that the chip runs out of work evenly.
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    kv_head, split = pl.program_id(1), pl.program_id(2)
    length = lengths_ref[tile]

    @pl.when(length > 0)
    def _attend() -> None:
        seq_id, start, position = seq_ids_ref[tile], starts_ref[tile], positions_ref[tile]
        context_end = position + length

        # Row = token of the tile * q_per_kv + query head of the group. Rows and lanes past the end come from the
        # rounding up to powers of two.
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        row_tokens = lax.div(rows, jnp.int32(q_per_kv))
        row_heads = kv_head * q_per_kv + lax.rem(rows, jnp.int32(q_per_kv))
        lanes = _head_lanes(head_dim)
        # A mask along the contiguous axis would keep the cache's loads from being vectorized: lanes past the
        # end of head_dim read its last column again, which meets zeros in q and is never stored.
        columns = jnp.minimum(lanes, head_dim - 1) if lanes.shape[0] > head_dim else lanes
        is_row = row_tokens < length
        row_index = (start + row_tokens)[:, None], row_heads[:, None], lanes[None, :]
        row_mask = _mask_rows(is_row, lanes, head_dim)
        q = plt.load(q_ref.at[row_index], mask=row_mask, other=0.0)

        def load_blocks(i: Array) -> Array:
            """The block of each token of a chunk; that of the last token for those past the end."""
            slots = jnp.minimum(i * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32), context_end - 1)
            return plt.load(block_tables_ref.at[seq_id, lax.div(slots, jnp.int32(block_size))])

        last_visible = jnp.minimum(position + row_tokens, context_end - 1)

        def mask(slots: Array, scores: Array) -> Array:
            return jnp.where(slots[None, :] <= last_visible[:, None], scores, MASKED)

        def attend_chunk(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            out, peak, total, blocks = carry
            slots = i * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
            cells = kv_head, lax.rem(slots, jnp.int32(block_size))[:, None], columns[None, :]
            keys = plt.load(kv_ref.at[(blocks[:, None], 0, *cells)])
            values_ref = kv_ref.at[(blocks[:, None], 1, *cells)]
            # Memory past the sequence's end may hold NaN, which a weight of zero would not silence.
            value_mask = jnp.broadcast_to((slots < context_end)[:, None], (chunk_tokens, lanes.shape[0]))
            values = plt.load(values_ref, mask=value_mask, other=0.0)
            # One step ahead: loads whose addresses were loaded in the same step would not run ahead of the products.
            next_blocks = load_blocks(i + 1)
            scores = lax.dot_general(
                q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            # A branch in one loop, not a second loop: with two of them the assembler waits for every single product.
            scores = lax.cond(i < num_whole, lambda scores: scores, functools.partial(mask, slots), scores)
            new_peak = jnp.maximum(peak, scores.max(1) * scale)
            decay = jnp.exp2(peak - new_peak)
            weights = _scaled_exp2(scores, new_peak, scale, interpret=interpret)
            out = out * decay[:, None] + lax.dot_general(
                weights.astype(values.dtype),
                values,
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return out, new_peak, total * decay + weights.sum(1), next_blocks

        num_chunks = pl.cdiv(context_end, chunk_tokens)
        chunks_per_split = pl.cdiv(num_chunks, config.num_splits)
        first = split * chunks_per_split
        last = jnp.minimum(first + chunks_per_split, num_chunks)
        num_whole = lax.div(position + 1, jnp.int32(chunk_tokens))  # chunks that every row sees whole need no mask
        carry = (
            jnp.zeros((num_rows, lanes.shape[0]), jnp.float32),
            jnp.full((num_rows,), NO_PEAK, jnp.float32),
            jnp.zeros((num_rows,), jnp.float32),
            load_blocks(first),
        )
        out, peak, total, _ = lax.fori_loop(first, last, attend_chunk, carry)

        safe_total = jnp.maximum(total, 1e-30)
        out = out * (1.0 / safe_total)[:, None]
        if lse_ref is None:
            plt.store(out_ref.at[row_index], out.astype(out_ref.dtype), mask=row_mask)
        else:
            plt.store(out_ref.at[(split, *row_index)], out, mask=row_mask)
            # A split past the end of a short context saw nothing: weight 0 in the merge.
            lse = jnp.where(total > 0, peak + jnp.log2(safe_total), MASKED)
            plt.store(lse_ref.at[split, start + row_tokens, row_heads], lse, mask=is_row)


def _scaled_exp2(
    scores: Float[Array, "rows chunk"], peak: Float[Array, " rows"], scale: float, *, interpret: bool
) -> Float[Array, "rows chunk"]:
    """2 ** (scores * scale - peak), at most 1: two instructions an element where the compiler makes six."""
    if interpret:
        return jnp.exp2(scores * scale - peak[:, None])
    factor = struct.pack(">f", scale).hex().upper()
    [weights] = plt.elementwise_inline_asm(
        f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, 0f{factor}, $2; ex2.approx.ftz.f32 $0, t; }}",
        args=[scores, jnp.broadcast_to(-peak[:, None], scores.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
    )
    return weights


def _merge_kernel(
    q_ref: Any,  # not read: gives the output its buffer
    partial_ref: Any,  # [num_splits, num_tokens, num_q_heads, head_dim] float32
    lse_ref: Any,  # [num_splits, num_tokens, num_q_heads]
    starts_ref: Any,  # [num_tiles]
    lengths_ref: Any,  # [num_tiles]
    out_ref: Any,  # [num_tokens, num_q_heads, head_dim]
    *,
    num_splits: int,
    q_per_kv: int,
) -> None:
    """One token, one KV head: the mean of the splits' results, weighted by their softmax denominators."""
    tile, in_tile, kv_head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_dim = out_ref.shape[2]

    @pl.when(in_tile < lengths_ref[tile])
    def _merge() -> None:
        token = starts_ref[tile] + in_tile
        rows = jnp.arange(pl.next_power_of_2(q_per_kv), dtype=jnp.int32)
        heads = kv_head * q_per_kv + rows
        is_head = rows < q_per_kv
        lanes = _head_lanes(head_dim)
        index = token, heads[:, None], lanes[None, :]
        mask = _mask_rows(is_head, lanes, head_dim)
        # Unrolled over the splits, so that all loads are in flight together.
        lses = [plt.load(lse_ref.at[split, token, heads], mask=is_head, other=0.0) for split in range(num_splits)]
        peak = functools.reduce(jnp.maximum, lses)
        weights = [jnp.exp2(lse - peak) for lse in lses]
        out = jnp.zeros(mask.shape, jnp.float32)
        for split, weight in enumerate(weights):
            out += weight[:, None] * plt.load(partial_ref.at[(split, *index)], mask=mask, other=0.0)
        out /= functools.reduce(jnp.add, weights)[:, None]
        plt.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)


def _head_lanes(head_dim: int) -> Array:
    return jnp.arange(max(MIN_DOT_SIZE, pl.next_power_of_2(head_dim)), dtype=jnp.int32)


def _mask_rows(is_row: Array, lanes: Array, head_dim: int) -> Array:
    """[num_rows, num_lanes] mask, constant along the lanes (accesses stay vectorized) if head_dim is a power of two."""
    mask = jnp.broadcast_to(is_row[:, None], (is_row.shape[0], lanes.shape[0]))
    return mask if lanes.shape[0] == head_dim else mask & (lanes < head_dim)[None, :]
