"""Pallas kernel (Mosaic GPU: TMA and wgmma, Hopper) for gate and up of a prefill: base, adapters, SwiGLU in one launch.

A CTA takes one tile of 128 tokens and 128 features after another. Three warpgroups. One fetches tiles of x and of both
halves of the weights into a ring; then, as the tail of the same loop, tiles of v = weight * scale * (x A^T), which the
shrink of `maf_mvm` leaves, and the rows of B that belong to them. The others compute, 64 tokens each: so many are a
tile of the segments, and each walks a list of its own. silu(gate) * up leaves from registers. What a GEMM would write
for the next kernel to read, 470 MB for 8192 tokens of the 8B shape, never exists; where a GPU is at its power limit,
their energy is other kernels' time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import check_hopper
from pallas_kernels.lora_linear import separate
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.maf_mvm import pallas_triton as maf_pallas_triton
from pallas_kernels.maf_mvm.config import pick_config
from pallas_kernels.segments import Segments

TILE_TOKENS, TILE_COLUMNS = 128, 128
_ROWS = 64  # tokens of a warpgroup: of one wgmma, and of a tile of the segments
_DEPTH = 64  # input features, or rank rows, of one step
_BUFFERS = 4  # steps in flight or in use: with the results they take 224 of 227 KiB
_NUM_SMS = 132  # of an H200; on another GPU some CTAs wait for others
# Tiles of neighbouring CTAs are 16 high: 132 of them then read about as many bytes of x as of weights.
_GROUP_TILES = 16
_FETCHER = 2  # index of the warpgroup that fetches
# Registers of a thread: 24 + 2 * 240 are three times the 168 with which each starts.
_FETCH_REGISTERS, _COMPUTE_REGISTERS = 24, 240
_TILE_ROWS = 8
_SWIZZLE_BYTES = 128
_BASE_COPIES = 3  # of one step: x, gate, up
_LOG2_E = 1.4426950408889634


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens ffn"]:
    """See `pallas_kernels.lora_linear.lora_swiglu`. Its gradient is that of the library's GEMM and `maf_mvm`.

    Raises:
      NotImplementedError: If the kernel does not support the shapes, the dtype or the GPU.
    """
    _check_supported(x, w, slots, segments)
    return _differentiable(x, w, slots, segments, layer)


def _check_supported(x: Array, w: Array, slots: ProjectionSlots, segments: Segments | None) -> None:
    (num_tokens, in_features), ffn = x.shape, w.shape[1] // 2
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype}; the kernel multiplies bfloat16 only; use 'separate'")
    if num_tokens % TILE_TOKENS or in_features % _DEPTH or ffn % TILE_COLUMNS:
        raise NotImplementedError(
            f"the kernel needs multiples of {TILE_TOKENS} tokens, {_DEPTH} input features and {TILE_COLUMNS} output "
            f"features, got {num_tokens}, {in_features} and {ffn}; use 'separate'"
        )
    if segments is not None and (segments.tile_size != _ROWS or slots.slot_rank not in (8, 16, 32, 64)):
        raise NotImplementedError(
            f"the kernel needs segments of {_ROWS} tokens and a slot_rank of 8, 16, 32 or 64, got "
            f"{segments.tile_size} and {slots.slot_rank}; use 'separate'"
        )
    check_hopper(instead="'separate'")


@jax.custom_vjp
def _differentiable(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens ffn"]:
    return _launch(x, w, slots, segments, layer, interpret=jax.default_backend() == "cpu")


def _forward(*args: Any) -> tuple[Array, Any]:
    # The kernel does not write y, which its gradient needs.
    *arrays, layer = args
    z, pull_back = jax.vjp(functools.partial(separate.lora_swiglu, layer=jnp.asarray(layer)), *arrays)
    return z, pull_back


def _backward(pull_back: Any, dz: Array) -> tuple[Any, ...]:
    return *pull_back(dz), None


_differentiable.defvjp(_forward, _backward)


# An inner jit with the layer as an argument: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames="interpret")
def _launch(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
    *,
    interpret: bool,
) -> Float[Array, "num_tokens ffn"]:
    num_tokens, ffn = x.shape[0], w.shape[1] // 2
    tiles = _Tiles(num_tokens // TILE_TOKENS, ffn // TILE_COLUMNS, x.shape[1] // _DEPTH)
    if segments is None:
        kernel, operands = functools.partial(_kernel, tail=None), (x, w)
    else:
        v = _shrink(x, slots, segments, layer, interpret=interpret)
        kernel = functools.partial(_lora_kernel, num_slots=slots.num_slots, slot_rank=slots.slot_rank)
        b = slots.b.reshape(-1, w.shape[1])
        operands = (layer[None], segments.slot_ids, segments.num_segments, x, w, v, b)
    call = plgpu.kernel(
        functools.partial(kernel, tiles=tiles),
        out_type=jax.ShapeDtypeStruct((num_tokens, ffn), x.dtype),
        grid=(min(tiles.count, _NUM_SMS),),
        grid_names=("cta",),
        num_threads=_FETCHER + 1,
        thread_name="warpgroup",
        kernel_name="lora_swiglu_prefill",
        # Lanes, as in JAX 0.11 the other semantics store results of wgmma to swizzled memory alone.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **_interpret_args(interpret),
    )
    return call(*operands)


def _shrink(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    *,
    interpret: bool,
) -> Float[Array, "num_tokens packed_rows"]:
    """v, whole steps of rank rows of each projection: all rows of a step that has a segment are written."""
    config = pick_config(
        num_tiles=max(segments.num_tiles, 2),  # one is decoding's
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        in_features=x.shape[1],
        widths=slots.widths,
        dtype_bytes=x.dtype.itemsize,
        ends_in_swiglu=True,
    )
    config = dataclasses.replace(config, shrink_splits=1, expand_rows=_DEPTH)
    with jax.named_scope("shrink"):
        kwargs = {"config": config, "interpret": interpret, "written_rows": _DEPTH}
        return maf_pallas_triton.shrink(x, slots, segments, layer, **kwargs)[0]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How the output is cut up, and the input features.

    Attributes:
      rows, columns: tiles of tokens and of output features.
      steps: of input features.
    """

    rows: int
    columns: int
    steps: int

    @property
    def count(self) -> int:
        return self.rows * self.columns

    def place(self, index: Array) -> tuple[Array, Array]:
        """Row and column of a tile: groups of 16 rows, column after column."""
        group = lax.div(index, _GROUP_TILES * self.columns)
        within = index - group * (_GROUP_TILES * self.columns)
        height = jnp.minimum(self.rows - group * _GROUP_TILES, _GROUP_TILES)
        return group * _GROUP_TILES + lax.rem(within, height), lax.div(within, height)


@dataclasses.dataclass(frozen=True)
class _Tail:
    """The adapters' part of every tile.

    Attributes:
      v: [num_tokens, 2 * padded_rows].
      b: [num_layers * num_slots * slot_rank, 2 * ffn].
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
        """Of one step: v of gate and of up, and of each slot the rows of B for both."""
        return 2 + 2 * self.slots_per_step

    def num_steps(self, tile: Array) -> Array:
        """Of a tile of the segments."""
        return lax.div(self.num_segments[tile] + (self.slots_per_step - 1), self.slots_per_step)

    def b_row(self, tile: Array, segment: Array) -> Array:
        """First row of B of a tile's segment. Past the last, that one's again: zeros of v need numbers beside them."""
        slot = self.slot_ids[tile, jnp.minimum(segment, self.num_segments[tile] - 1)]
        return (self.layer * self.num_slots + slot) * self.slot_rank


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What the warpgroups of a CTA share.

    Attributes:
      x: [buffers, 128, depth] ring of tiles of x, or of v for gate and for up, 64 rows each.
      gate: [buffers, depth, 128] ring of tiles of the weights, or of B; up likewise.
      out: [2, 64, 128] results.
      ready: a barrier a buffer: a step of input features has arrived.
      tail_ready: likewise a step of rank rows, which comes in other copies.
      free: a barrier a buffer: both computing warpgroups have used it.
    """

    x: Any
    gate: Any
    up: Any
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
    v_ref: Any,  # [num_tokens, 2 * padded_rows]
    b_ref: Any,  # [num_layers * num_slots * slot_rank, 2 * ffn]
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
    w_ref: Any,  # [in_features, 2 * ffn]
    out_ref: Any,  # [num_tokens, ffn]
    *,
    tiles: _Tiles,
    tail: _Tail | None,
) -> None:
    dtype = x_ref.dtype

    def run(*refs: Any) -> None:
        shared = _Shared(*refs)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _FETCHER)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map  # a whole warpgroup would wait for its threads at every copy
            def _(warp: Array) -> None:
                pl.when(warp == 0)(lambda: _fetch(x_ref, w_ref, tiles, tail, shared))

        @pl.when(warpgroup != _FETCHER)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute(out_ref, tiles, tail, shared, warpgroup)

    weights = _swizzled((_BUFFERS, _DEPTH, TILE_COLUMNS), dtype)
    pl.run_scoped(
        run,
        _swizzled((_BUFFERS, TILE_TOKENS, _DEPTH), dtype),
        weights,
        weights,
        _swizzled((_FETCHER, _ROWS, TILE_COLUMNS), dtype),
        plgpu.Barrier(num_arrivals=_BASE_COPIES, num_barriers=_BUFFERS),
        plgpu.Barrier(num_arrivals=1 if tail is None else tail.copies, num_barriers=_BUFFERS),
        plgpu.Barrier(num_arrivals=_FETCHER, num_barriers=_BUFFERS),
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
    ffn = w_ref.shape[1] // 2

    def fetch_tile(row: Array, column: Array, first: Array) -> Array:
        tokens = pl.ds(row * TILE_TOKENS, TILE_TOKENS)
        gate, up = (pl.ds(start + column * TILE_COLUMNS, TILE_COLUMNS) for start in (0, ffn))

        @pl.loop(0, tiles.steps)
        def _base(i: Array) -> None:
            buffer, features = _free_buffer(first + i, shared), pl.ds(i * _DEPTH, _DEPTH)
            ready = shared.ready.at[buffer]
            plgpu.copy_gmem_to_smem(x_ref.at[tokens, features], shared.x.at[buffer], ready)
            plgpu.copy_gmem_to_smem(w_ref.at[features, gate], shared.gate.at[buffer], ready)
            plgpu.copy_gmem_to_smem(w_ref.at[features, up], shared.up.at[buffer], ready)

        step = first + tiles.steps
        if tail is not None:
            for half in range(2):
                tile = 2 * row + half
                _fetch_tail(tail, tile, (gate, up), step, shared)
                step += tail.num_steps(tile)
        return step - first

    total = _for_each_tile(tiles, fetch_tile)

    # A GPU does not need it; JAX's interpreter wants whoever waits at a barrier to wait for all of its phases.
    @pl.loop(jnp.maximum(total - _BUFFERS, 0), total)
    def _drain(step: Array) -> None:
        plgpu.barrier_wait(shared.free.at[lax.rem(step, _BUFFERS)])


def _fetch_tail(tail: _Tail, tile: Array, columns: tuple[Any, Any], first: Array, shared: _Shared) -> None:
    """The steps of a tile of the segments."""

    @pl.loop(0, tail.num_steps(tile))
    def _step(i: Array) -> None:
        buffer = _free_buffer(first + i, shared)
        ready = shared.tail_ready.at[buffer]
        rings = shared.gate, shared.up
        for projection in range(2):
            rank_rows = pl.ds(projection * (tail.v.shape[1] // 2) + i * _DEPTH, _DEPTH)
            target = shared.x.at[buffer, pl.ds(projection * _ROWS, _ROWS)]
            plgpu.copy_gmem_to_smem(tail.v.at[pl.ds(tile * _ROWS, _ROWS), rank_rows], target, ready)
        for slot in range(tail.slots_per_step):
            source = pl.ds(tail.b_row(tile, i * tail.slots_per_step + slot), tail.slot_rank)
            target = pl.ds(slot * tail.slot_rank, tail.slot_rank)
            for ring, half in zip(rings, columns, strict=True):
                plgpu.copy_gmem_to_smem(tail.b.at[source, half], ring.at[buffer, target], ready)


def _free_buffer(step: Array, shared: _Shared) -> Array:
    """The buffer of a step, once it is free."""
    buffer = lax.rem(step, _BUFFERS)
    pl.when(step >= _BUFFERS)(lambda: plgpu.barrier_wait(shared.free.at[buffer]))
    return buffer


def _compute(out_ref: Any, tiles: _Tiles, tail: _Tail | None, shared: _Shared, warpgroup: Array) -> None:
    """64 tokens of every tile."""
    mine = pl.ds(warpgroup * _ROWS, _ROWS)

    def multiply(first: Array, count: Any, ready: Any, products: Any) -> None:
        @pl.loop(0, count)
        def _step(i: Array) -> None:
            buffer = lax.rem(first + i, _BUFFERS)
            plgpu.barrier_wait(ready.at[buffer])
            for sums, rows, factors in products:
                plgpu.wgmma(sums, shared.x.at[buffer, rows], factors.at[buffer])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.free.at[buffer])

    def compute_tile(row: Array, column: Array, first: Array) -> Array:
        counts = [jnp.int32(0)] * 2 if tail is None else [tail.num_steps(2 * row + half) for half in range(2)]

        def sum_up(gate_sums: Any, up_sums: Any) -> tuple[Array, Array]:
            base = (gate_sums, mine, shared.gate), (up_sums, mine, shared.up)
            multiply(first, tiles.steps, shared.ready, base)
            if tail is not None:
                rank = (gate_sums, pl.ds(0, _ROWS), shared.gate), (up_sums, pl.ds(_ROWS, _ROWS), shared.up)
                start = first + tiles.steps
                # The first warpgroup's rank rows come first; each lets the other's pass.
                is_first = warpgroup == 0
                multiply(start, jnp.where(is_first, 0, counts[0]), shared.tail_ready, ())
                start += jnp.where(is_first, 0, counts[0])
                multiply(start, jnp.where(is_first, counts[0], counts[1]), shared.tail_ready, rank)
                start += jnp.where(is_first, counts[0], counts[1])
                multiply(start, jnp.where(is_first, counts[1], 0), shared.tail_ready, ())
            return gate_sums[...], up_sums[...]

        sums = plgpu.WGMMAAccumulatorRef((_ROWS, TILE_COLUMNS), jnp.float32)
        gate, up = pl.run_scoped(sum_up, sums, sums)
        result = _silu_product(gate, up, out_ref.dtype)
        out = shared.out.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results before
        out[...] = result
        plgpu.commit_smem()
        tokens = pl.ds(row * TILE_TOKENS + warpgroup * _ROWS, _ROWS)
        plgpu.copy_smem_to_gmem(out, out_ref.at[tokens, pl.ds(column * TILE_COLUMNS, TILE_COLUMNS)])
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


def _interpret_args(interpret: bool) -> dict[str, Any]:
    return {"interpret": plgpu.InterpretGPUParams()} if interpret else {}


def _swizzled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Memory whose last two axes lie in the tiles that wgmma reads."""
    columns = _SWIZZLE_BYTES // dtype.itemsize
    transforms: Any = (
        plgpu.TilingTransform((_TILE_ROWS, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(_SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)
