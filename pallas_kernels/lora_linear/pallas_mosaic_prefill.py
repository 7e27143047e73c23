"""Pallas kernel (Mosaic GPU: TMA and wgmma, Hopper) for prefills: base, adapters and, of gate and up, SwiGLU in a GEMM.

A CTA takes one tile of 128 tokens after another, by one or two blocks of 128 output features. Three warpgroups. One
fetches tiles of x and of the weights into a ring; then, as the tail of the same loop, tiles of v = weight * scale *
(x A^T), which the shrink of `maf_mvm` leaves, and the rows of B that belong to them. The others compute, 64 tokens
each: so many are a tile of the segments, and each walks a list of its own. Of gate and up, silu(gate) * up leaves from
registers: what a GEMM would write for the next kernel to read, 470 MB for 8192 tokens of the 8B shape, never exists;
where a GPU is at its power limit, their energy is other kernels' time.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import check_hopper, num_multiprocessors
from pallas_kernels.lora_linear import separate
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.maf_mvm import pallas_triton as maf_pallas_triton
from pallas_kernels.maf_mvm.config import pick_config
from pallas_kernels.pallas_mosaic import fetch_and_compute, interpret_args, swizzled
from pallas_kernels.segments import Segments

TILE_TOKENS, BLOCK_COLUMNS = 128, 128
_ROWS = 64  # tokens of a warpgroup: of one wgmma, and of a tile of the segments
_DEPTH = 64  # input features, or rank rows, of one step
_RING_BYTES = 192 * 1024  # steps in flight or in use; with the results 224 of 227 KiB
# Tiles of neighbouring CTAs are 16 high: 132 of them, of two blocks, then read about as many bytes of x as of weights.
_GROUP_TILES = 16
_NUM_COMPUTING = 2  # warpgroups that compute; one more fetches
# Registers of a thread: 24 + 2 * 240 are three times the 168 with which each starts.
_FETCH_REGISTERS, _COMPUTE_REGISTERS = 24, 240
_LOG2_E = 1.4426950408889634


def lora_linear(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """See `pallas_kernels.lora_linear.lora_linear`: one sum. Its gradient is that of the library's GEMM and `maf_mvm`.

    Raises:
      NotImplementedError: If the kernel does not support the shapes, the dtype or the GPU.
    """
    _check_supported(x, slots, segments)
    return _differentiable(False, x, w, slots, segments, layer)


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens ffn"]:
    """See `pallas_kernels.lora_linear.lora_swiglu`. Gradient and errors: as for `lora_linear`."""
    _check_supported(x, slots, segments)
    return _differentiable(True, x, w, slots, segments, layer)


def _check_supported(x: Array, slots: ProjectionSlots, segments: Segments | None) -> None:
    num_tokens, in_features = x.shape
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype}; the kernel multiplies bfloat16 only; use 'separate'")
    if num_tokens % TILE_TOKENS or in_features % _DEPTH or any(width % BLOCK_COLUMNS for width in slots.widths):
        raise NotImplementedError(
            f"the kernel needs multiples of {TILE_TOKENS} tokens, {_DEPTH} input features and {BLOCK_COLUMNS} output "
            f"features of a projection, got {num_tokens}, {in_features} and {slots.widths}; use 'separate'"
        )
    if segments is not None and (segments.tile_size != _ROWS or slots.slot_rank not in (8, 16, 32, 64)):
        raise NotImplementedError(
            f"the kernel needs segments of {_ROWS} tokens and a slot_rank of 8, 16, 32 or 64, got "
            f"{segments.tile_size} and {slots.slot_rank}; use 'separate'"
        )
    check_hopper(instead="'separate'")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    is_swiglu: bool,
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens columns"]:
    return _launch(x, w, slots, segments, layer, is_swiglu=is_swiglu, interpret=jax.default_backend() == "cpu")


def _forward(is_swiglu: bool, *args: Any) -> tuple[Array, Any]:
    # The kernel does not write what SwiGLU's gradient needs.
    *arrays, layer = args
    op = separate.lora_swiglu if is_swiglu else separate.lora_linear
    return jax.vjp(functools.partial(op, layer=jnp.asarray(layer)), *arrays)


def _backward(is_swiglu: bool, pull_back: Any, dz: Array) -> tuple[Any, ...]:
    del is_swiglu
    return *pull_back(dz), None


_differentiable.defvjp(_forward, _backward)


# An inner jit with the layer as an argument: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames=("is_swiglu", "interpret"))
def _launch(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
    *,
    is_swiglu: bool,
    interpret: bool,
) -> Float[Array, "num_tokens columns"]:
    num_tokens, in_features = x.shape
    tiles = _Tiles.of(num_tokens, in_features, slots.widths, is_swiglu=is_swiglu)
    if segments is None:
        kernel, operands = functools.partial(_kernel, tail=None), (x, w)
    else:
        v = _shrink(x, slots, segments, layer, interpret=interpret)
        kernel = functools.partial(_lora_kernel, num_slots=slots.num_slots, slot_rank=slots.slot_rank)
        b = slots.b.reshape(-1, w.shape[1])
        operands = (layer[None], segments.slot_ids, segments.num_segments, x, w, v, b)
    call = plgpu.kernel(
        functools.partial(kernel, tiles=tiles),
        out_type=jax.ShapeDtypeStruct((num_tokens, w.shape[1] // (2 if is_swiglu else 1)), x.dtype),
        grid=(min(tiles.count, num_multiprocessors()),),
        grid_names=("cta",),
        num_threads=_NUM_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="lora_swiglu_prefill" if is_swiglu else "lora_linear_prefill",
        # Lanes, as in JAX 0.11 the other semantics store results of wgmma to swizzled memory alone.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **interpret_args(interpret),
    )
    return call(*operands)


def _shrink(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    *,
    interpret: bool,
) -> Float[Array, "splits num_tokens packed_rows"]:
    """v in partial sums, whole steps of rank rows of each projection: where a step has a segment, all are written."""
    config = pick_config(
        num_tiles=segments.num_tiles,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        in_features=x.shape[1],
        widths=slots.widths,
        dtype_bytes=x.dtype.itemsize,
    )
    config = dataclasses.replace(config, expand_rows=_DEPTH)
    with jax.named_scope("shrink"):
        kwargs = {"config": config, "interpret": interpret, "written_rows": _DEPTH}
        return maf_pallas_triton.shrink(x, slots, segments, layer, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How the output is cut up, and the input features.

    Attributes:
      rows, columns: tiles of tokens and of output features.
      steps: of input features.
      widths: of the projections.
      num_blocks: of 128 output features that a tile has.
      is_swiglu: the two blocks of a tile are of gate and of up.
    """

    rows: int
    columns: int
    steps: int
    widths: tuple[int, ...]
    num_blocks: int
    is_swiglu: bool

    @classmethod
    def of(cls, num_tokens: int, in_features: int, widths: tuple[int, ...], *, is_swiglu: bool) -> "_Tiles":
        """The tiles of a problem: of two blocks, which read fewer bytes, unless those of one are done sooner."""
        rows, blocks = num_tokens // TILE_TOKENS, sum(widths) // BLOCK_COLUMNS
        turns = {n: n * -(-rows * blocks // n // num_multiprocessors()) for n in (2, 1) if blocks % n == 0}
        num_blocks = 2 if is_swiglu else min(turns, key=lambda n: turns[n])
        return cls(rows, blocks // num_blocks, in_features // _DEPTH, widths, num_blocks, is_swiglu)

    @property
    def count(self) -> int:
        return self.rows * self.columns

    @property
    def num_buffers(self) -> int:
        return _RING_BYTES // (2 * _DEPTH * (TILE_TOKENS + self.num_blocks * BLOCK_COLUMNS))

    def place(self, index: Array) -> tuple[Array, Array]:
        """Row and column of a tile: groups of 16 rows, column after column."""
        group = lax.div(index, _GROUP_TILES * self.columns)
        within = index - group * (_GROUP_TILES * self.columns)
        height = jnp.minimum(self.rows - group * _GROUP_TILES, _GROUP_TILES)
        return group * _GROUP_TILES + lax.rem(within, height), lax.div(within, height)

    def blocks(self, column: Array) -> list[Array]:
        """First output feature of each block of a tile, among those of all projections."""
        if self.is_swiglu:
            return [column * BLOCK_COLUMNS + projection * self.widths[0] for projection in range(2)]
        return [(column * self.num_blocks + block) * BLOCK_COLUMNS for block in range(self.num_blocks)]

    def projection(self, start: Array) -> Array:
        """Of an output feature."""
        ends = itertools.accumulate(self.widths[:-1])
        return sum(((start >= end).astype(jnp.int32) for end in ends), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class _Tail:
    """The adapters' part of every tile.

    Attributes:
      v: [splits, num_tokens, num_projections * padded_rows].
      b: [num_layers * num_slots * slot_rank, sum(widths)].
    """

    layer: Any
    slot_ids: Any
    num_segments: Any
    v: Any
    b: Any
    num_slots: int
    slot_rank: int

    @property
    def slots_per_step(self) -> int:
        return _DEPTH // self.slot_rank

    @property
    def copies(self) -> int:
        """Of one step and block: v, and the rows of B of each slot."""
        return 1 + self.slots_per_step

    def num_steps(self, tile: Array) -> Array:
        """Of a tile of the segments: each partial sum of v by the same rows of B."""
        rank_steps = lax.div(self.num_segments[tile] + (self.slots_per_step - 1), self.slots_per_step)
        return rank_steps * self.v.shape[0]

    def b_row(self, tile: Array, segment: Array) -> Array:
        """First row of B of a tile's segment. Past the last, that one's again: zeros of v need numbers beside them."""
        slot = self.slot_ids[tile, jnp.minimum(segment, self.num_segments[tile] - 1)]
        return (self.layer * self.num_slots + slot) * self.slot_rank


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What the warpgroups of a CTA share.

    Attributes:
      x: [buffers, 128, depth] ring of tiles of x, or of v: 64 rows for each block.
      w: for each block a [buffers, depth, 128] ring of tiles of the weights, or of B.
      out: [2, 64, 128] results.
      ready: a barrier a buffer: a step of input features has arrived.
      tail_ready: likewise a step of rank rows, which comes in other copies.
      free: a barrier a buffer: both computing warpgroups have used it.
    """

    x: Any
    w: Any
    out: Any
    ready: Any
    tail_ready: Any
    free: Any


def _lora_kernel(
    layer_ref: Any,  # [1]
    slot_ids_ref: Any,  # [num_tiles, num_slots]
    num_segments_ref: Any,  # [num_tiles]
    x_ref: Any,
    w_ref: Any,
    v_ref: Any,
    b_ref: Any,
    out_ref: Any,
    *,
    tiles: _Tiles,
    num_slots: int,
    slot_rank: int,
) -> None:
    tail = _Tail(layer_ref[0], slot_ids_ref, num_segments_ref, v_ref, b_ref, num_slots, slot_rank)
    _kernel(x_ref, w_ref, out_ref, tiles=tiles, tail=tail)


def _kernel(
    x_ref: Any,  # [num_tokens, in_features]
    w_ref: Any,  # [in_features, sum(widths)]
    out_ref: Any,  # [num_tokens, sum(widths)], or half of it
    *,
    tiles: _Tiles,
    tail: _Tail | None,
) -> None:
    dtype, num_buffers = x_ref.dtype, tiles.num_buffers

    def run(*refs: Any) -> None:
        shared = _Shared(*refs)
        fetch_and_compute(
            functools.partial(_fetch, x_ref, w_ref, tiles, tail, shared),
            functools.partial(_compute, out_ref, tiles, tail, shared),
            num_computing=_NUM_COMPUTING,
            fetch_registers=_FETCH_REGISTERS,
            compute_registers=_COMPUTE_REGISTERS,
        )

    copies = 1 if tail is None else tiles.num_blocks * tail.copies
    pl.run_scoped(
        run,
        swizzled((num_buffers, TILE_TOKENS, _DEPTH), dtype),
        [swizzled((num_buffers, _DEPTH, BLOCK_COLUMNS), dtype)] * tiles.num_blocks,
        swizzled((_NUM_COMPUTING, _ROWS, BLOCK_COLUMNS), dtype),
        plgpu.Barrier(num_arrivals=1 + tiles.num_blocks, num_barriers=num_buffers),
        plgpu.Barrier(num_arrivals=copies, num_barriers=num_buffers),
        plgpu.Barrier(num_arrivals=_NUM_COMPUTING, num_barriers=num_buffers),
        collective_axes="warpgroup",
    )


def _for_each_tile(tiles: _Tiles, work: Any) -> Array:
    """Calls work(row, column, first), which returns the number of its steps, for the tiles of this CTA.

    `first` counts all steps before the tile; returned is their number in the end.
    """
    start, stride = lax.axis_index("cta"), lax.axis_size("cta")

    def one(i: Array, first: Array) -> Array:
        row, column = tiles.place(start + i * stride)
        return first + work(row, column, first)

    return lax.fori_loop(0, lax.div(tiles.count - start + (stride - 1), stride), one, jnp.int32(0))


def _fetch(x_ref: Any, w_ref: Any, tiles: _Tiles, tail: _Tail | None, shared: _Shared) -> None:
    """The steps of all tiles, as buffers become free."""
    num_buffers = tiles.num_buffers

    def fetch_tile(row: Array, column: Array, first: Array) -> Array:
        tokens = pl.ds(row * TILE_TOKENS, TILE_TOKENS)

        @pl.loop(0, tiles.steps)
        def _base(i: Array) -> None:
            buffer, features = _free_buffer(first + i, num_buffers, shared), pl.ds(i * _DEPTH, _DEPTH)
            ready = shared.ready.at[buffer]
            plgpu.copy_gmem_to_smem(x_ref.at[tokens, features], shared.x.at[buffer], ready)
            for start, ring in zip(tiles.blocks(column), shared.w, strict=True):
                plgpu.copy_gmem_to_smem(w_ref.at[features, pl.ds(start, BLOCK_COLUMNS)], ring.at[buffer], ready)

        step = first + tiles.steps
        if tail is not None:
            for half in range(2):
                tile = 2 * row + half
                _fetch_tail(tiles, tail, tile, column, step, shared)
                step += tail.num_steps(tile)
        return step - first

    total = _for_each_tile(tiles, fetch_tile)

    # A GPU does not need it; JAX's interpreter wants whoever waits at a barrier to wait for all of its phases.
    @pl.loop(jnp.maximum(total - num_buffers, 0), total)
    def _drain(step: Array) -> None:
        plgpu.barrier_wait(shared.free.at[lax.rem(step, num_buffers)])


def _fetch_tail(tiles: _Tiles, tail: _Tail, tile: Array, column: Array, first: Array, shared: _Shared) -> None:
    """The steps of a tile of the segments."""
    num_splits, _, packed_rows = tail.v.shape
    padded_rows = packed_rows // len(tiles.widths)

    @pl.loop(0, tail.num_steps(tile))
    def _step(i: Array) -> None:
        buffer = _free_buffer(first + i, tiles.num_buffers, shared)
        ready = shared.tail_ready.at[buffer]
        split, rank_step = lax.rem(i, num_splits), lax.div(i, num_splits)
        for block, (start, ring) in enumerate(zip(tiles.blocks(column), shared.w, strict=True)):
            rank_rows = pl.ds(tiles.projection(start) * padded_rows + rank_step * _DEPTH, _DEPTH)
            target = shared.x.at[buffer, pl.ds(block * _ROWS, _ROWS)]
            plgpu.copy_gmem_to_smem(tail.v.at[split, pl.ds(tile * _ROWS, _ROWS), rank_rows], target, ready)
            for slot in range(tail.slots_per_step):
                source = pl.ds(tail.b_row(tile, rank_step * tail.slots_per_step + slot), tail.slot_rank)
                target = ring.at[buffer, pl.ds(slot * tail.slot_rank, tail.slot_rank)]
                plgpu.copy_gmem_to_smem(tail.b.at[source, pl.ds(start, BLOCK_COLUMNS)], target, ready)


def _free_buffer(step: Array, num_buffers: int, shared: _Shared) -> Array:
    """The buffer of a step, once it is free."""
    buffer = lax.rem(step, num_buffers)
    pl.when(step >= num_buffers)(lambda: plgpu.barrier_wait(shared.free.at[buffer]))
    return buffer


def _compute(out_ref: Any, tiles: _Tiles, tail: _Tail | None, shared: _Shared, warpgroup: Array) -> None:
    """64 tokens of every tile."""
    mine = pl.ds(warpgroup * _ROWS, _ROWS)

    def multiply(first: Array, count: Any, ready: Any, products: Any) -> None:
        @pl.loop(0, count)
        def _step(i: Array) -> None:
            buffer = lax.rem(first + i, tiles.num_buffers)
            plgpu.barrier_wait(ready.at[buffer])
            for sums, rows, ring in products:
                plgpu.wgmma(sums, shared.x.at[buffer, rows], ring.at[buffer])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.free.at[buffer])

    def compute_tile(row: Array, column: Array, first: Array) -> Array:
        counts = [jnp.int32(0)] * 2 if tail is None else [tail.num_steps(2 * row + half) for half in range(2)]

        def sum_up(*sums: Any) -> list[Array]:
            multiply(
                first, tiles.steps, shared.ready, [(s, mine, ring) for s, ring in zip(sums, shared.w, strict=True)]
            )
            if tail is not None:
                blocks = enumerate(zip(sums, shared.w, strict=True))
                rank = [(s, pl.ds(block * _ROWS, _ROWS), ring) for block, (s, ring) in blocks]
                start = first + tiles.steps
                # The first warpgroup's rank rows come first; each lets the other's pass.
                is_first = warpgroup == 0
                multiply(start, jnp.where(is_first, 0, counts[0]), shared.tail_ready, ())
                start += jnp.where(is_first, 0, counts[0])
                multiply(start, jnp.where(is_first, counts[0], counts[1]), shared.tail_ready, rank)
                start += jnp.where(is_first, counts[0], counts[1])
                multiply(start, jnp.where(is_first, counts[1], 0), shared.tail_ready, ())
            return [s[...] for s in sums]

        accumulator = plgpu.WGMMAAccumulatorRef((_ROWS, BLOCK_COLUMNS), jnp.float32)
        results, starts = pl.run_scoped(sum_up, *[accumulator] * tiles.num_blocks), tiles.blocks(column)
        if tiles.is_swiglu:
            gate, up = results
            results, starts = [_silu_product(gate, up, out_ref.dtype)], starts[:1]
        out, tokens = shared.out.at[warpgroup], pl.ds(row * TILE_TOKENS + warpgroup * _ROWS, _ROWS)
        for result, start in zip(results, starts, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results before
            out[...] = result.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, out_ref.at[tokens, pl.ds(start, BLOCK_COLUMNS)])
        return tiles.steps + counts[0] + counts[1]

    _for_each_tile(tiles, compute_tile)
    plgpu.wait_smem_to_gmem(0)


def _silu_product(gate: Array, up: Array, dtype: jnp.dtype) -> Array:
    """silu(gate) * up of gate and up rounded to `dtype`.

    In instructions that the multiprocessor has many units for: unbarred, each number would be rounded on its own, at a
    sixteenth of the speed of pairs; and a division takes several more than a square root's reciprocal.
    """
    gate, up = lax.optimization_barrier((gate.astype(dtype), up.astype(dtype)))
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    root = lax.rsqrt(1 + jnp.exp2(gate * -_LOG2_E))
    return (gate * (root * root) * up).astype(dtype)
