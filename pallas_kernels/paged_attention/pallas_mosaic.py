"""Pallas kernel (Mosaic GPU: TMA and wgmma, Hopper) for long prefill chunks: one CTA a tile and pair of query heads.

Three warpgroups. Two compute: each takes one query head of the pair, whose 64 tokens fill the rows of one wgmma, walks
the context in chunks with an online softmax and takes turns with the other, so that one's products run beneath the
other's softmax (the ping-pong of FlashAttention-3). The third fetches keys and values, a TMA box a block, into rings of
chunks that all three share.

A tile may start at any row, which TMA's swizzled tiles cannot: queries come through registers, and results leave from
memory without swizzle, row by row where the tile is not full.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import check_hopper
from pallas_kernels.paged_attention.config import MOSAIC_TILE_SIZE, MosaicConfig
from pallas_kernels.paged_attention.query_tiles import QueryTiles
from pallas_kernels.paged_attention.softmax import MASKED, NO_PEAK
from pallas_kernels.pallas_mosaic import TILE_ROWS, fetch_and_compute, interpret_args, swizzled

_TILE_SIZE = MOSAIC_TILE_SIZE
_HEADS_PER_CTA = 2
# Registers of a thread: 56 + 2 * 224 are three times the 168 with which each starts. With a larger sum, the warpgroups
# that compute would wait forever.
_FETCH_REGISTERS, _COMPUTE_REGISTERS = 56, 224


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
    *,
    config: MosaicConfig = MosaicConfig(),  # noqa: B008 (frozen)
    interpret: bool | None = None,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; rows outside the tiles keep the values of `q`.

    Args:
      q: [num_tokens, num_q_heads, head_dim] bfloat16 queries.
      kv: [num_blocks, 2, num_kv_heads, block_size, head_dim] cache.
      block_tables: [num_seqs, blocks_per_seq] int32.
      tiles: query tiles of the batch, of 64 tokens.
      config: block sizes.
      interpret: run the kernel's operations one by one on any backend; None does so where there is no GPU.

    Raises:
      NotImplementedError: If the kernel does not support the shapes, the dtype or the GPU.
    """
    _check_supported(q, kv, tiles, config)
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    return _paged_attention(q, kv, block_tables, tiles, config=config, interpret=interpret)


def _check_supported(q: Array, kv: Array, tiles: QueryTiles, config: MosaicConfig) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"pallas_mosaic attends in bfloat16, got {q.dtype}; use 'pallas_triton'")
    if tiles.tile_size != _TILE_SIZE or num_tokens < _TILE_SIZE:
        raise NotImplementedError(
            f"pallas_mosaic needs tiles of {_TILE_SIZE} tokens and as many tokens, got tiles of {tiles.tile_size} and "
            f"{num_tokens} tokens; use 'pallas_triton'"
        )
    if head_dim not in (64, 128) or num_q_heads // num_kv_heads % _HEADS_PER_CTA:
        raise NotImplementedError(
            f"pallas_mosaic needs head_dim 64 or 128 and an even number of query heads to a KV head, got {head_dim} "
            f"and {num_q_heads // num_kv_heads}; use 'pallas_triton'"
        )
    if config.chunk_tokens % block_size or block_size % TILE_ROWS:
        raise NotImplementedError(
            f"pallas_mosaic needs a block_size that divides {config.chunk_tokens} and is a multiple of {TILE_ROWS}, "
            f"got {block_size}; use 'pallas_triton'"
        )
    config.check_fits(head_dim)
    check_hopper(instead="'pallas_triton'")


# An inner jit: the identical calls of a model's layers are traced and compiled once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    kv: Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"],
    block_tables: Int[Array, "num_seqs blocks_per_seq"],
    tiles: QueryTiles,
    *,
    config: MosaicConfig,
    interpret: bool,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    call = plgpu.kernel(
        functools.partial(
            _kernel,
            num_kv_heads=num_kv_heads,
            q_per_kv=num_q_heads // num_kv_heads,
            block_size=block_size,
            config=config,
            is_interpreted=interpret,
        ),
        out_type=(),
        grid=(tiles.lengths.shape[0], num_q_heads // _HEADS_PER_CTA),
        grid_names=("tile", "heads"),
        num_threads=_HEADS_PER_CTA + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        # Lanes, as in JAX 0.11 the other semantics store results of wgmma to swizzled memory alone.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **interpret_args(interpret),
    )
    # The output takes q's buffer (a CTA overwrites exactly the rows that it alone uses): rows outside the tiles stay
    # finite without a memset.
    out = jax.new_ref(q.reshape(num_tokens, num_q_heads * head_dim))
    call(out, kv.reshape(-1, head_dim), block_tables, tiles.seq_ids, tiles.starts, tiles.lengths, tiles.positions)
    return out[...].reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What one CTA works on, and the block sizes.

    Attributes:
      seq_id, start, length, position: of the tile, as in `QueryTiles`.
      first_head: first of its query heads.
      kv_head: the KV head that they share.
    """

    seq_id: Array
    start: Array
    length: Array
    position: Array
    first_head: Array
    kv_head: Array
    num_kv_heads: int
    block_size: int
    head_dim: int
    chunk_tokens: int
    num_buffers: int

    @property
    def context_end(self) -> Array:
        return self.position + self.length

    @property
    def num_chunks(self) -> Array:
        return lax.div(self.context_end + (self.chunk_tokens - 1), self.chunk_tokens)

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_size


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What the warpgroups of a CTA share.

    Attributes:
      q: [2, 64, head_dim] queries.
      k: [num_buffers, chunk_tokens, head_dim] ring of keys; v likewise of values.
      out: [2, 64, head_dim] results.
      k_ready: a barrier a buffer: its blocks have arrived; v_ready likewise.
      k_free: a barrier a buffer: both warpgroups have used it; v_free likewise.
      turn: both computing warpgroups have reached the point where they change places.
      cleared: both have cleared their part of a chunk.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    cleared: Any

    def take_turn(self) -> None:
        _meet(self.turn)


def _kernel(
    q_ref: Any,  # [num_tokens, num_q_heads * head_dim]
    kv_ref: Any,  # [num_blocks * 2 * num_kv_heads * block_size, head_dim]
    block_tables_ref: Any,  # [num_seqs, blocks_per_seq]
    seq_ids_ref: Any,  # [num_tiles]
    starts_ref: Any,  # [num_tiles]
    lengths_ref: Any,  # [num_tiles]
    positions_ref: Any,  # [num_tiles]
    *,
    num_kv_heads: int,
    q_per_kv: int,
    block_size: int,
    config: MosaicConfig,
    is_interpreted: bool,
) -> None:
    # The last tiles of a sequence have the most work: they go first, so that the chip runs out of work evenly.
    index = starts_ref.shape[0] - 1 - lax.axis_index("tile")
    first_head = lax.axis_index("heads") * _HEADS_PER_CTA
    head_dim = kv_ref.shape[1]
    tile = _Tile(
        seq_id=seq_ids_ref[index],
        start=starts_ref[index],
        length=lengths_ref[index],
        position=positions_ref[index],
        first_head=first_head,
        kv_head=lax.div(first_head, q_per_kv),
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        chunk_tokens=config.chunk_tokens,
        num_buffers=config.num_buffers,
    )

    def run(*refs: Any) -> None:
        shared = _Shared(*refs)
        fetch_and_compute(
            functools.partial(_fetch, kv_ref, block_tables_ref, tile, shared),
            functools.partial(_compute, q_ref, tile, shared, is_interpreted=is_interpreted),
            num_computing=_HEADS_PER_CTA,
            fetch_registers=_FETCH_REGISTERS,
            compute_registers=_COMPUTE_REGISTERS,
        )

    @pl.when(tile.length > 0)
    def _live() -> None:
        dtype = kv_ref.dtype
        ring = swizzled((config.num_buffers, config.chunk_tokens, head_dim), dtype)
        ready = plgpu.Barrier(num_arrivals=tile.blocks_per_chunk, num_barriers=config.num_buffers)
        free = plgpu.Barrier(num_arrivals=_HEADS_PER_CTA, num_barriers=config.num_buffers)
        pl.run_scoped(
            run,
            swizzled((_HEADS_PER_CTA, _TILE_SIZE, head_dim), dtype),
            ring,
            ring,
            plgpu.SMEM((_HEADS_PER_CTA, _TILE_SIZE, head_dim), dtype),
            ready,
            ready,
            free,
            free,
            plgpu.Barrier(num_arrivals=_HEADS_PER_CTA),
            plgpu.Barrier(num_arrivals=_HEADS_PER_CTA),
            collective_axes="warpgroup",
        )


def _fetch(kv_ref: Any, block_tables_ref: Any, tile: _Tile, shared: _Shared) -> None:
    """Keys and values of every chunk, as buffers become free."""
    last_block = lax.div(tile.context_end - 1, tile.block_size)
    rings = (shared.k, shared.k_ready, shared.k_free), (shared.v, shared.v_ready, shared.v_free)

    @pl.loop(0, tile.num_chunks)
    def _chunk(i: Array) -> None:
        buffer = lax.rem(i, tile.num_buffers)
        # Past the end the last block once more: as far as the sequence goes, it holds numbers.
        columns = [jnp.minimum(i * tile.blocks_per_chunk + j, last_block) for j in range(tile.blocks_per_chunk)]
        blocks = [block_tables_ref[tile.seq_id, column] for column in columns]
        for part, (ring, ready, free) in enumerate(rings):
            pl.when(i >= tile.num_buffers)(functools.partial(plgpu.barrier_wait, free.at[buffer]))
            for j, block in enumerate(blocks):
                row = ((block * 2 + part) * tile.num_kv_heads + tile.kv_head) * tile.block_size
                source = kv_ref.at[pl.ds(row, tile.block_size)]
                target = ring.at[buffer, pl.ds(j * tile.block_size, tile.block_size)]
                plgpu.copy_gmem_to_smem(source, target, ready.at[buffer])

    # A GPU does not need it; JAX's interpreter wants whoever waits at a barrier to wait for all of its phases.
    @pl.loop(jnp.maximum(tile.num_chunks - tile.num_buffers, 0), tile.num_chunks)
    def _drain(i: Array) -> None:
        for _, _, free in rings:
            plgpu.barrier_wait(free.at[lax.rem(i, tile.num_buffers)])


def _compute(q_ref: Any, tile: _Tile, shared: _Shared, warpgroup: Array, *, is_interpreted: bool) -> None:
    """One query head: its queries, the walk over the chunks, its results."""
    columns = pl.ds((tile.first_head + warpgroup) * tile.head_dim, tile.head_dim)
    # A tile at the end of the batch is moved up, so that all its rows exist: the first `shift` are not its own.
    first_row = jnp.minimum(tile.start, q_ref.shape[0] - _TILE_SIZE)
    shift = tile.start - first_row
    all_rows = q_ref.at[pl.ds(first_row, _TILE_SIZE), columns]
    q, out = shared.q.at[warpgroup], shared.out.at[warpgroup]
    q[...] = plgpu.load(all_rows, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()

    attend = functools.partial(
        _attend_chunk, q, tile, shared, warpgroup, tile.position - shift, is_interpreted=is_interpreted
    )
    rows = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.zeros((_TILE_SIZE, tile.head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((_TILE_SIZE,), NO_PEAK, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((_TILE_SIZE,), jnp.float32), rows),
    )
    num_whole = lax.div(tile.position + 1, tile.chunk_tokens)  # chunks that every row sees whole need no mask
    pl.when(warpgroup == 1)(shared.take_turn)  # half a step behind the other
    carry = lax.fori_loop(0, num_whole, functools.partial(attend, is_edge=False), carry)
    y, _, total = lax.fori_loop(num_whole, tile.num_chunks, functools.partial(attend, is_edge=True), carry)
    pl.when(warpgroup == 0)(shared.take_turn)

    _store_unswizzled(out, (y * _along_rows(1.0 / total, y.shape)).astype(out.dtype))
    plgpu.commit_smem()

    @pl.when(tile.length == _TILE_SIZE)
    def _store_tile() -> None:
        plgpu.copy_smem_to_gmem(out, all_rows)

    @pl.when(tile.length < _TILE_SIZE)
    def _store_rows() -> None:
        @pl.loop(0, tile.length)
        def _row(row: Array) -> None:
            plgpu.copy_smem_to_gmem(out.at[shift + row], q_ref.at[tile.start + row, columns])

    plgpu.wait_smem_to_gmem(0)


def _attend_chunk(
    q: Any,  # [64, head_dim]
    tile: _Tile,
    shared: _Shared,
    warpgroup: Array,
    first_position: Array,  # of row 0
    chunk: Array,
    carry: tuple[Array, Array, Array],  # unnormalized result, peak of the scaled scores, sum of the weights
    *,
    is_edge: bool,
    is_interpreted: bool,
) -> tuple[Array, Array, Array]:
    """One step of the online softmax. Only a chunk at the edge holds tokens that some row does not see."""
    out, peak, total = carry
    buffer = lax.rem(chunk, tile.num_buffers)
    scale = tile.head_dim**-0.5 * math.log2(math.e)
    plgpu.barrier_wait(shared.k_ready.at[buffer])

    def multiply(scores_ref: Any) -> Array:
        plgpu.wgmma(scores_ref, q, shared.k.at[buffer].transpose((1, 0)))
        shared.take_turn()
        return scores_ref[...]

    scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((_TILE_SIZE, tile.chunk_tokens), jnp.float32))
    plgpu.barrier_arrive(shared.k_free.at[buffer])
    if is_edge:
        slots = _iota(scores.shape, 1) + chunk * tile.chunk_tokens
        last_visible = jnp.minimum(_iota(scores.shape, 0) + first_position, tile.context_end - 1)
        scores = jnp.where(slots <= last_visible, scores, MASKED)
    new_peak = jnp.maximum(peak, scores.max(1) * scale)
    decay = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores * scale - _along_rows(new_peak, scores.shape))
    out *= _along_rows(decay, out.shape)
    total = total * decay + weights.sum(1)
    weights = weights.astype(shared.v.dtype)
    out, total, new_peak, weights = lax.optimization_barrier((out, total, new_peak, weights))

    plgpu.barrier_arrive(shared.turn)
    values = shared.v.at[buffer]
    plgpu.barrier_wait(shared.v_ready.at[buffer])
    if is_edge:
        _clear_unowned(values, tile.context_end - chunk * tile.chunk_tokens, tile, shared, warpgroup)
    plgpu.barrier_wait(shared.turn)

    def add(out_ref: Any) -> None:
        plgpu.wgmma(out_ref, weights, values)

    # The interpreter knows no accumulator that starts with values, and no operand in registers.
    if is_interpreted:
        summed = out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike wgmma's, these reads are not ordered before the next fetch
    else:
        summed: Any = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(out))
    plgpu.barrier_arrive(shared.v_free.at[buffer])
    return summed, new_peak, total


def _clear_unowned(values: Any, num_owned: Array, tile: _Tile, shared: _Shared, warpgroup: Array) -> None:
    """Zeroes the rows of a chunk past the sequence's end: they may hold NaN, which no weight of zero would silence."""

    def clear(first: int) -> None:
        part = values.at[pl.ds(first, _TILE_SIZE)]
        numbers = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
        is_owned = _iota(numbers.shape, 0) + first < num_owned
        part[...] = jnp.where(is_owned, numbers, jnp.zeros_like(numbers))
        plgpu.commit_smem()

    @pl.when(jnp.logical_and(num_owned < tile.chunk_tokens, lax.rem(num_owned, tile.block_size) != 0))
    def _clear() -> None:
        for i in range(tile.chunk_tokens // _TILE_SIZE):
            pl.when(warpgroup == i)(functools.partial(clear, i * _TILE_SIZE))
        _meet(shared.cleared)  # also where only one clears: neither multiplies before it is done


def _meet(barrier: Any) -> None:
    """Waits until both computing warpgroups are here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _store_unswizzled(ref: Any, values: Array) -> None:
    """A store with bank conflicts: JAX 0.11 makes one unasked, 0.12 wants to be asked."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = values
    else:
        store(ref, values, optimized=False)


def _iota(shape: tuple[int, ...], axis: int) -> Int[Array, "rows columns"]:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _along_rows(x: Float[Array, " rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    return lax.broadcast_in_dim(x, shape, (0,))
