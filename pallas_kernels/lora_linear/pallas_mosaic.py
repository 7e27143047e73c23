"""Two Pallas launches a site (Mosaic GPU: TMA and wgmma, Hopper): shrink, then a skinny GEMM whose tail expands.

The shrink kernel computes v = weight * scale * (x A^T): a CTA takes a block of rank rows and a share of the input
features, one TMA box of A for each slot in it. Shares are not added up: v keeps them side by side, rounded to the dtype
of x, and the tail of the site kernel multiplies each by the same rows of B. That needs neither a counter, nor a third
launch, nor more shared memory, as the shares of a block fill exactly the tile that x leaves behind in the ring.

The site kernel streams x and the base weights through a ring of tiles, each CTA for its block of columns and its share
of the input features, then v and B through the same ring, so that the tail's loads start before the base product ends.
Both kernels launch dependents early (programmatic dependent launch): base weights, constant during a step, are fetched
before the wait for the kernels ahead, and nothing else is read or written before it.

Tokens lie on wgmma's 64 rows: TMA fills rows past the last token with zeros and drops them on the way out. There are no
atomics and all sums have a fixed order: the same input gives the same bits.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import check_hopper
from pallas_kernels.lora_linear.mosaic_config import (
    MAX_TOKENS,
    MosaicConfig,
    MosaicProblem,
    check_supported,
    pick_config,
)
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.pallas_mosaic import TILE_ROWS, interpret_args
from pallas_kernels.segments import Segments

# Weights of a slot come as a TMA box of 8 slots' columns, of which one counts: 8 is the least that wgmma's register
# layout takes. Boxes start at a multiple of it: TMA traps, as an illegal instruction, on a box whose innermost
# coordinate is no multiple of 16 bytes.
_WEIGHT_COLUMNS = 8
_TMA_STRIDE_BYTES = 16


def lora_linear(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
    *,
    config: MosaicConfig | None = None,
) -> Float[Array, "num_partials num_tokens out_features"]:
    """See `pallas_kernels.lora_linear.lora_linear`. `config` overrides the block sizes that the shapes would pick.

    Raises:
      NotImplementedError: If the kernels do not support the shapes or the dtype.
    """
    return _lora_linear(x, w, slots, segments, layer, config, is_swiglu=False)


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
    *,
    config: MosaicConfig | None = None,
) -> Float[Array, "num_tokens ffn"]:
    """See `pallas_kernels.lora_linear.lora_swiglu`. `config` must not split the input features.

    Raises:
      NotImplementedError: If the kernels do not support the shapes or the dtype.
    """
    return _lora_linear(x, w, slots, segments, layer, config, is_swiglu=True)[0]


def _lora_linear(
    x: Array,
    w: Array,
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Array,
    config: MosaicConfig | None,
    *,
    is_swiglu: bool,
) -> Float[Array, "num_partials num_tokens out_features"]:
    _check_supported(x, slots, segments)
    problem = MosaicProblem(x.shape[1], slots.widths, is_swiglu)
    if config is None:
        config = pick_config(problem)
    else:
        check_supported(problem, config)
    num_tokens = x.shape[0]
    x = _padded(x)
    static = {"config": config, "interpret": jax.default_backend() == "cpu"}
    if segments is None:
        y = _launch_site(x, w, None, None, None, None, widths=slots.widths, is_swiglu=is_swiglu, **static)
    else:
        v = _launch_shrink(x, slots, segments, layer, **static)
        y = _launch_site(x, w, v, slots, segments, layer, widths=slots.widths, is_swiglu=is_swiglu, **static)
    return y[:, :num_tokens]


def _padded(x: Float[Array, "num_tokens in_features"]) -> Float[Array, "padded in_features"]:
    """Whole groups of 8 rows, as TMA's tiles want them where there is more than one: a copy for such counts alone."""
    if x.shape[0] <= TILE_ROWS:
        return x
    return jnp.pad(x, ((0, -x.shape[0] % TILE_ROWS), (0, 0)))


def _check_supported(x: Array, slots: ProjectionSlots, segments: Segments | None) -> None:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype}; the kernels multiply bfloat16 only; use 'separate'")
    if x.shape[0] > MAX_TOKENS:
        raise NotImplementedError(f"{x.shape[0]} tokens are not supported; at most {MAX_TOKENS} fit one tile")
    if segments is not None and segments.num_tiles != 1:
        raise NotImplementedError(f"{x.shape[0]} tokens make {segments.num_tiles} tiles; one launch takes one tile")
    if segments is not None and slots.slot_rank % 8:
        raise NotImplementedError(f"slot_rank {slots.slot_rank} is not supported; use a multiple of 8")
    check_hopper(instead="'pallas_triton' or 'separate'")


# Inner jits with the layer as an argument: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _launch_shrink(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    *,
    config: MosaicConfig,
    interpret: bool,
) -> Float[Array, "num_projections num_tokens packed"]:
    """v: the shares of each block of rank rows side by side, `config.depth` columns a block.

    Blocks past the last segment are not written.
    """
    most = slots.num_slots if segments.max_segments is None else min(segments.max_segments, slots.num_slots)
    num_blocks = config.num_blocks(max(most, 1) * slots.slot_rank)
    call = plgpu.kernel(
        functools.partial(
            _shrink_kernel, config=config, num_blocks=num_blocks, slot_rank=slots.slot_rank, is_interpreted=interpret
        ),
        out_type=jax.ShapeDtypeStruct((slots.num_projections, x.shape[0], num_blocks * config.depth), x.dtype),
        grid=(slots.num_projections * num_blocks, config.shrink_splits),
        grid_names=("block", "share"),
        kernel_name="lora_shrink",
        **interpret_args(interpret),
    )
    operands = (layer[None], segments.slot_ids, segments.num_segments, _aligned(segments.weights), slots.scale)
    return call(*operands, x, slots.a.reshape(-1, x.shape[1]))


@functools.partial(jax.jit, static_argnames=("config", "widths", "is_swiglu", "interpret"))
def _launch_site(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features width"],
    v: Float[Array, "num_projections num_tokens packed"] | None,
    slots: ProjectionSlots | None,
    segments: Segments | None,
    layer: Int[Array, ""] | None,
    *,
    widths: tuple[int, ...],
    config: MosaicConfig,
    is_swiglu: bool,
    interpret: bool,
) -> Float[Array, "num_partials num_tokens out_features"]:
    out_features = w.shape[1] // 2 if is_swiglu else w.shape[1]
    dtype = x.dtype if config.splits == 1 else jnp.float32
    static = {"config": config, "is_swiglu": is_swiglu, "is_interpreted": interpret}
    if v is None or slots is None or segments is None or layer is None:
        kernel, name, operands = functools.partial(_site_kernel, tail=None, **static), "linear", (x, w)
    else:
        sizes = {"num_slots": slots.num_slots, "slot_rank": slots.slot_rank, "widths": widths}
        kernel, name = functools.partial(_lora_kernel, **sizes, **static), "lora_linear"
        b = slots.b.reshape(-1, w.shape[1])
        operands = (layer[None], segments.slot_ids, segments.num_segments, x, w, v, b)
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((config.splits, x.shape[0], out_features), dtype),
        grid=(config.splits, out_features // config.columns),
        grid_names=("split", "block"),
        kernel_name=name.replace("linear", "swiglu") if is_swiglu else name,
        **interpret_args(interpret),
    )
    return call(*operands)


def _aligned(weights: Float[Array, "num_tokens num_gates num_slots"]) -> Float[Array, "num_tokens num_gates padded"]:
    """Weights with rows that TMA takes; a copy only for a number of slots that is no multiple of 4."""
    unit = _TMA_STRIDE_BYTES // weights.dtype.itemsize
    return jnp.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[2] % unit)))


def _shrink_kernel(
    layer_ref: Any,  # [1]
    slot_ids_ref: Any,  # [1, num_slots]
    num_segments_ref: Any,  # [1]
    weights_ref: Any,  # [num_tokens, num_gates, padded num_slots]
    scale_ref: Any,  # [num_layers, num_slots, num_projections]
    x_ref: Any,  # [num_tokens, in_features]
    a_ref: Any,  # [num_layers * num_slots * num_projections * slot_rank, in_features]
    v_ref: Any,  # [num_projections, num_tokens, num_blocks * depth]
    *,
    config: MosaicConfig,
    num_blocks: int,
    slot_rank: int,
    is_interpreted: bool,
) -> None:
    _wait_for_inputs(is_interpreted)
    c = config
    share = lax.axis_index("share")
    projection, block = _div_rem(lax.axis_index("block"), num_blocks)
    num_segments = num_segments_ref[0]
    num_rows = num_segments * slot_rank
    first_row = block * c.block_rows
    box = _box_rows(slot_rank, c)
    chunk = x_ref.shape[1] // c.shrink_splits
    num_steps = chunk // c.shrink_depth
    buffers = min(c.shrink_buffers, num_steps)
    _, num_slots, num_projections = scale_ref.shape
    all_tokens = _all_tokens(share)

    @pl.when(first_row < num_rows)
    def _live() -> None:
        boxes = [
            _slot_of_row(slot_ids_ref, first_row + i * box, num_segments, slot_rank) for i in range(c.block_rows // box)
        ]

        def run(x_smem: Any, a_smem: Any, weight_smem: Any, factor_smem: Any, v_smem: Any, ready: Any, weighed: Any):
            gate = jnp.minimum(projection, weights_ref.shape[1] - 1)
            for i, (slot, _) in enumerate(boxes):
                columns = pl.ds(slot - lax.rem(slot, _WEIGHT_COLUMNS), _WEIGHT_COLUMNS)
                plgpu.copy_gmem_to_smem(weights_ref.at[all_tokens, gate, columns], weight_smem.at[i], weighed)

            def fetch(step: Array | int, buffer: Array | int) -> None:
                columns = pl.ds(share * chunk + step * c.shrink_depth, c.shrink_depth)
                plgpu.copy_gmem_to_smem(x_ref.at[all_tokens, columns], x_smem.at[buffer], ready.at[buffer])
                for i, (slot, rank_row) in enumerate(boxes):
                    row = ((layer_ref[0] * num_slots + slot) * num_projections + projection) * slot_rank + rank_row
                    rows = pl.ds(pl.multiple_of(row, 8), box)
                    plgpu.copy_gmem_to_smem(
                        a_ref.at[rows, columns], a_smem.at[buffer, pl.ds(i * box, box)], ready.at[buffer]
                    )

            for buffer in range(buffers):
                fetch(buffer, buffer)
            # While the first tiles are on their way.
            plgpu.barrier_wait(weighed)
            for i, (slot, _) in enumerate(boxes):
                # Rows past the last segment stand for a live slot, whose weights are finite.
                scale = jnp.where(first_row + i * box < num_rows, scale_ref[layer_ref[0], slot, projection], 0.0)
                factor = _column(weight_smem.at[i], lax.rem(slot, _WEIGHT_COLUMNS)) * scale
                factor_smem[:, pl.ds(i * box, box)] = lax.broadcast_in_dim(factor, (MAX_TOKENS, box), (0,))
            plgpu.commit_smem()  # all threads have stored before one loads

            def product(sum_ref: Any) -> Array:
                def step(i: Array, _: None) -> None:
                    buffer = lax.rem(i, buffers)
                    plgpu.barrier_wait(ready.at[buffer])
                    plgpu.wgmma(sum_ref, x_smem.at[buffer], a_smem.at[buffer].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    pl.when(i + buffers < num_steps)(functools.partial(fetch, i + buffers, buffer))

                lax.fori_loop(0, num_steps, step, None)
                return sum_ref[...]

            u = pl.run_scoped(product, _sum_type(c.block_rows))
            factor = plgpu.load(factor_smem, layout=plgpu.Layout.WGMMA)
            # A select, not a product with 0: the token's own x may be infinite.
            v_smem[...] = jnp.where(factor != 0, factor * u, 0.0).astype(v_smem.dtype)
            plgpu.commit_smem()
            packed = pl.ds(block * c.depth + share * c.block_rows, c.block_rows)
            plgpu.copy_smem_to_gmem(v_smem, v_ref.at[projection, all_tokens, packed])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            plgpu.SMEM((buffers, MAX_TOKENS, c.shrink_depth), x_ref.dtype),
            plgpu.SMEM((buffers, c.block_rows, c.shrink_depth), x_ref.dtype),
            plgpu.SMEM((len(boxes), MAX_TOKENS, _WEIGHT_COLUMNS), jnp.float32),
            plgpu.SMEM((MAX_TOKENS, c.block_rows), jnp.float32),
            plgpu.SMEM((MAX_TOKENS, c.block_rows), x_ref.dtype),
            plgpu.Barrier(num_arrivals=1 + len(boxes), num_barriers=buffers),
            plgpu.Barrier(num_arrivals=len(boxes)),
        )


@dataclasses.dataclass(frozen=True)
class _Tail:
    """What a CTA of the site kernel adds to its base product: v B, a block of rank rows a step.

    Attributes:
      layer_ref: [1].
      slot_ids_ref: [1, num_slots].
      num_segments_ref: [1].
      v_ref: [num_projections, num_tokens, num_blocks * depth].
      b_ref: [num_layers * num_slots * slot_rank, width].
    """

    layer_ref: Any
    slot_ids_ref: Any
    num_segments_ref: Any
    v_ref: Any
    b_ref: Any
    num_slots: int
    slot_rank: int
    widths: tuple[int, ...]
    config: MosaicConfig

    def num_blocks(self, split: Array) -> Array:
        """Blocks of rank rows that this split takes: they are dealt to the splits in turn."""
        num_rows = self.num_segments_ref[0] * self.slot_rank
        return _cdiv(_cdiv(num_rows, self.config.block_rows) - split, self.config.splits)

    def fetch(self, block: Array, start: Array, v_tile: Any, b_tile: Any, ready: Any) -> None:
        """Starts the loads of one step, for the columns from `start`."""
        c = self.config
        projection = sum((start >= edge).astype(jnp.int32) for edge in itertools.accumulate(self.widths[:-1]))
        packed = pl.ds(block * c.depth, c.depth)
        plgpu.copy_gmem_to_smem(self.v_ref.at[projection, _all_tokens(block), packed], v_tile, ready)
        box = _box_rows(self.slot_rank, c)
        for i in range(c.block_rows // box):
            # Rows past the last segment meet zeros in v: those of a live slot hold numbers.
            row = block * c.block_rows + i * box
            slot, rank_row = _slot_of_row(self.slot_ids_ref, row, self.num_segments_ref[0], self.slot_rank)
            b_row = (self.layer_ref[0] * self.num_slots + slot) * self.slot_rank + rank_row
            source = self.b_ref.at[pl.ds(pl.multiple_of(b_row, 8), box), pl.ds(start, c.columns)]
            plgpu.copy_gmem_to_smem(source, b_tile.at[pl.ds(i * box, box)], ready)


def _lora_kernel(
    layer_ref: Any,
    slot_ids_ref: Any,
    num_segments_ref: Any,
    x_ref: Any,
    w_ref: Any,
    v_ref: Any,
    b_ref: Any,
    y_ref: Any,
    *,
    num_slots: int,
    slot_rank: int,
    widths: tuple[int, ...],
    config: MosaicConfig,
    **static: Any,
) -> None:
    refs = (layer_ref, slot_ids_ref, num_segments_ref, v_ref, b_ref)
    tail = _Tail(*refs, num_slots=num_slots, slot_rank=slot_rank, widths=widths, config=config)
    _site_kernel(x_ref, w_ref, y_ref, tail=tail, config=config, **static)


def _site_kernel(
    x_ref: Any,  # [num_tokens, in_features]
    w_ref: Any,  # [in_features, width]
    y_ref: Any,  # [splits, num_tokens, out_features]
    *,
    tail: _Tail | None,
    config: MosaicConfig,
    is_swiglu: bool,
    is_interpreted: bool,
) -> None:
    """Without a tail, the same sums: the bits that a token without pairs gets beside others that have some."""
    c = config
    split, block = lax.axis_index("split"), lax.axis_index("block")
    # With SwiGLU a CTA streams its block of the gate and of the up projection.
    halves = 2 if is_swiglu else 1
    starts = [block * c.columns + half * y_ref.shape[2] for half in range(halves)]
    chunk = x_ref.shape[1] // c.splits
    num_steps = chunk // c.depth
    buffers = min(c.buffers, num_steps)
    all_tokens = _all_tokens(split)

    def run(x_smem: Any, w_smem: Any, y_smem: Any, ready: Any, tail_ready: Any) -> None:
        def fetch_w(step: Array | int, buffer: Array | int) -> None:
            rows = pl.ds(split * chunk + step * c.depth, c.depth)
            for half, start in enumerate(starts):
                source = w_ref.at[rows, pl.ds(start, c.columns)]
                plgpu.copy_gmem_to_smem(source, w_smem.at[buffer, half], ready.at[buffer])

        def fetch_x(step: Array | int, buffer: Array | int) -> None:
            columns = pl.ds(split * chunk + step * c.depth, c.depth)
            plgpu.copy_gmem_to_smem(x_ref.at[all_tokens, columns], x_smem.at[buffer], ready.at[buffer])

        for buffer in range(buffers):
            fetch_w(buffer, buffer)
        _wait_for_inputs(is_interpreted)
        for buffer in range(buffers):
            fetch_x(buffer, buffer)
        # A step of the tail takes one block of rank rows for one half of the columns.
        tail_blocks = None if tail is None else tail.num_blocks(split)

        def fetch_base(step: Array, buffer: Array) -> None:
            fetch_w(step, buffer)
            fetch_x(step, buffer)

        def fetch_tail(tail: _Tail, step: Array, buffer: Array) -> None:
            dealt, half = _div_rem(step, halves)
            start = starts[0] + half * y_ref.shape[2]
            row_block = split + dealt * c.splits
            tail.fetch(row_block, start, x_smem.at[buffer], w_smem.at[buffer, 0], tail_ready.at[buffer])

        def refill(step: Array, buffer: Array) -> None:
            """Starts the loads of a step of the base product or, past its end, of the tail."""
            pl.when(step < num_steps)(functools.partial(fetch_base, step, buffer))
            if tail is not None and tail_blocks is not None:
                is_tail = jnp.logical_and(step >= num_steps, step < num_steps + tail_blocks * halves)
                pl.when(is_tail)(functools.partial(fetch_tail, tail, step - num_steps, buffer))

        def product(*sum_refs: Any) -> tuple[Array, ...]:
            def base_step(i: Array, _: None) -> None:
                buffer = lax.rem(i, buffers)
                plgpu.barrier_wait(ready.at[buffer])
                for half, sum_ref in enumerate(sum_refs):
                    plgpu.wgmma(sum_ref, x_smem.at[buffer], w_smem.at[buffer, half])
                plgpu.wgmma_wait(0)
                refill(i + buffers, buffer)

            def tail_step(i: Array, _: None) -> None:
                for half, sum_ref in enumerate(sum_refs):
                    step = num_steps + i * halves + half
                    buffer = lax.rem(step, buffers)
                    plgpu.barrier_wait(tail_ready.at[buffer])
                    for share in range(c.shrink_splits):
                        v_tile = x_smem.at[buffer, :, pl.ds(share * c.block_rows, c.block_rows)]
                        plgpu.wgmma(sum_ref, v_tile, w_smem.at[buffer, 0, pl.ds(0, c.block_rows)])
                    plgpu.wgmma_wait(0)
                    refill(step + buffers, buffer)

            lax.fori_loop(0, num_steps, base_step, None)
            if tail_blocks is not None:
                lax.fori_loop(0, tail_blocks, tail_step, None)
            return tuple(sum_ref[...] for sum_ref in sum_refs)

        sums = pl.run_scoped(product, *[_sum_type(c.columns)] * halves)
        y_smem[...] = _activated(sums, x_ref.dtype).astype(y_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, y_ref.at[split, all_tokens, pl.ds(starts[0], c.columns)])
        plgpu.wait_smem_to_gmem(0)

    boxes = 0 if tail is None else c.block_rows // _box_rows(tail.slot_rank, c)
    pl.run_scoped(
        run,
        plgpu.SMEM((buffers, MAX_TOKENS, c.depth), x_ref.dtype),
        plgpu.SMEM((buffers, halves, c.depth, c.columns), x_ref.dtype),
        plgpu.SMEM((MAX_TOKENS, c.columns), y_ref.dtype),
        plgpu.Barrier(num_arrivals=1 + halves, num_barriers=buffers),
        plgpu.Barrier(num_arrivals=1 + boxes, num_barriers=buffers),
    )


def _wait_for_inputs(is_interpreted: bool) -> None:
    """Waits for the kernels ahead, and lets the next one start its own loads of weights; on every path of a kernel.

    A kernel that ended without having waited would let its successor start before its predecessors are done.
    """
    if not is_interpreted:  # where launches run one after another
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def _sum_type(columns: int) -> Any:
    return plgpu.WGMMAAccumulatorRef((MAX_TOKENS, columns), jnp.float32)


def _box_rows(slot_rank: int, config: MosaicConfig) -> int:
    """Rank rows of one TMA box: all in one slot and in one block."""
    return math.gcd(slot_rank, config.block_rows)


def _all_tokens(index: Array) -> Any:
    """All rows of a tile, also where fewer tokens exist. A traced start, as JAX checks bounds of static ones."""
    return pl.ds(index * 0, MAX_TOKENS)


def _slot_of_row(slot_ids_ref: Any, row: Array, num_segments: Array, slot_rank: int) -> tuple[Array, Array]:
    """Slot of a packed rank row, and the row's place in it; past the last segment a row of the last one's slot."""
    segment, rank_row = _div_rem(row, slot_rank)
    return slot_ids_ref[0, jnp.minimum(segment, num_segments - 1)], rank_row


def _column(ref: Any, index: Array) -> Array:
    """[tokens] of a [tokens, 8] tile."""
    tile = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    column = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.sum(jnp.where(column == index, tile, 0.0), axis=1)


def _activated(sums: tuple[Array, ...], dtype: jnp.dtype) -> Array:
    """The sum, or silu(gate) * up of two sums rounded to `dtype` first."""
    if len(sums) == 1:
        return sums[0]
    gate, up = (total.astype(dtype).astype(jnp.float32) for total in sums)
    return gate / (1.0 + jnp.exp(-gate)) * up


def _div_rem(a: Array, b: int) -> tuple[Array, Array]:
    return lax.div(a, b), lax.rem(a, b)


def _cdiv(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), b)
