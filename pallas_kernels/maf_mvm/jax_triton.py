"""Shrink and expand as raw Triton kernels, called through jax-triton: for when JAX drops the Pallas-Triton lowering.

The same algorithm and block sizes as pallas_triton.py, which says why it is built so; the loops over input features and
over segments are pipelined by Triton. Importing this module raises NotImplementedError where Triton cannot be used, so
that `maf_mvm` may try its next implementation.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import max_shared_bytes
from pallas_kernels.maf_mvm.config import KernelConfig, pick_config
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments

if missing := [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]:
    raise NotImplementedError(
        f"the jax_triton implementation needs the package {' and '.join(missing).replace('_', '-')}; "
        "run: pip install jax-triton==0.4.1"
    )
if jax.__version_info__ >= (0, 12) and importlib.metadata.version("jax-triton") == "0.4.1":
    raise NotImplementedError(
        f"jax-triton 0.4.1 does not work with jax {jax.__version__} (its dead-code rule lacks an argument); "
        "use jax 0.11, or another implementation"
    )

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_MAX_PROJECTIONS = 3

# PTX 8.6, which CUDA 12.7 reads: a newer Triton writes for its own assembler, which XLA's may be older than. Fusion is
# said outright because its default changes with Triton 3.10.
_BACKEND_OPTIONS = types.MappingProxyType({"ptx_version": 86, "enable_fp_fusion": True})


def maf_mvm(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    config: KernelConfig | None = None,
) -> Float[Array, "num_tokens out_features"]:
    """Shrink, then expand onto the base. `config` overrides the block sizes that the shapes would pick.

    Raises:
      NotImplementedError: If the kernels do not support the shapes, or there is no GPU.
    """
    if slots.num_projections > _MAX_PROJECTIONS:
        raise NotImplementedError(f"{slots.num_projections} projections are not supported; at most {_MAX_PROJECTIONS}")
    picked = pick_config(
        num_tiles=segments.num_tiles,
        tile_size=segments.tile_size,
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        in_features=x.shape[1],
        widths=slots.widths,
        dtype_bytes=x.dtype.itemsize,
        shared_bytes=max_shared_bytes(),
    )
    return _shrink_expand(x, slots, segments, base, layer, config=config or picked)


# An inner jit with the layer as an argument: a step of 32 layers lowers each kernel once.
@functools.partial(jax.jit, static_argnames="config")
def _shrink_expand(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
) -> Float[Array, "num_tokens out_features"]:
    with jax.named_scope("shrink"):
        v = _shrink(x, slots, segments, layer, config=config)
    with jax.named_scope("expand"):
        return _expand(v, slots, segments, base, layer, out_dtype=x.dtype, config=config)


def _shrink(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
) -> Float[Array, "splits padded_tokens packed_rows"]:
    num_tokens, in_features = x.shape
    padded_rows = config.padded_rows(slots.num_slots * slots.slot_rank)
    packed_rows = slots.num_projections * padded_rows
    padded_tokens = segments.num_tiles * segments.tile_size
    chunk = in_features // config.shrink_splits
    # One wide dot in place of several accumulators; a block's sides are powers of two.
    wide = config.shrink_columns * (config.shrink_unroll & -config.shrink_unroll)
    return launch(
        layer[None],
        segments.slot_ids,
        segments.num_segments,
        segments.weights,
        slots.scale,
        x,
        slots.a,
        kernel=_shrink_kernel,
        name="maf_mvm_shrink",
        out_type=jax.ShapeDtypeStruct((config.shrink_splits, padded_tokens, packed_rows), x.dtype),
        grid=(config.shrink_splits, packed_rows // config.shrink_rows, segments.num_tiles),
        num_warps=config.num_warps,
        num_stages=config.shrink_stages,
        num_tokens=num_tokens,
        in_features=in_features,
        num_slots=slots.num_slots,
        num_gates=segments.num_gates,
        num_projections=slots.num_projections,
        slot_rank=slots.slot_rank,
        padded_rows=padded_rows,
        padded_tokens=padded_tokens,
        chunk=chunk,
        block_tokens=segments.tile_size,
        block_rows=config.shrink_rows,
        block_columns=wide,
        stages=config.shrink_stages,
        precision=_precision(x),
    )


def _expand(
    v: Float[Array, "splits padded_tokens packed_rows"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    out_dtype: jnp.dtype,
    config: KernelConfig,
) -> Float[Array, "num_tokens out_features"]:
    num_tokens, out_features = base.shape
    num_splits, padded_tokens, packed_rows = v.shape
    starts = [*itertools.accumulate(slots.widths[:-1]), out_features, out_features]
    return launch(
        layer[None],
        segments.slot_ids,
        segments.num_segments,
        v,
        slots.b,
        base,
        kernel=_expand_kernel,
        name="maf_mvm_expand",
        out_type=jax.ShapeDtypeStruct(base.shape, out_dtype),
        grid=(out_features // config.expand_columns, segments.num_tiles),
        num_warps=config.num_warps,
        num_stages=config.expand_stages,
        num_tokens=num_tokens,
        out_features=out_features,
        second_start=starts[0],
        third_start=starts[1],
        num_slots=slots.num_slots,
        slot_rank=slots.slot_rank,
        num_splits=num_splits,
        packed_rows=packed_rows,
        padded_rows=packed_rows // slots.num_projections,
        padded_tokens=padded_tokens,
        block_tokens=segments.tile_size,
        block_rows=config.expand_rows,
        block_columns=config.expand_columns,
        stages=config.expand_stages,
        precision=_precision(v),
    )


def launch(*args: Array, kernel: Any, **kwargs: Any) -> Any:
    """One kernel launch; keywords as of `jax_triton.triton_call`."""
    if jax.default_backend() == "cpu":
        raise NotImplementedError("Triton kernels need a GPU; on a CPU use 'loop', or 'pallas_triton' interpreted")
    return _jax_triton().triton_call(*args, kernel=kernel, backend_options=_BACKEND_OPTIONS, **kwargs)


@functools.cache
def _jax_triton() -> Any:
    import triton.backends.nvidia.driver as driver  # pyright: ignore[reportMissingImports]

    # jax-triton 0.4.1 takes Triton 3.6 for one without the NVIDIA backend because it lacks this constant, which only
    # TMA descriptors use; the value is that of CUDA's CU_TENSOR_MAP_DATA_TYPE_TFLOAT32.
    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = 11  # pyright: ignore[reportAttributeAccessIssue]
    import jax_triton

    return jax_triton


def _precision(x: Array) -> str:
    # For float32 the default would be TF32, which keeps 10 bits of the mantissa.
    return "ieee" if x.dtype == jnp.float32 else "tf32"


@triton.jit
@typing.no_type_check
def _shrink_kernel(
    layer_ptr,  # [1]
    slot_ids_ptr,  # [num_tiles, num_slots]
    num_segments_ptr,  # [num_tiles]
    weights_ptr,  # [num_tokens, num_gates, num_slots]
    scale_ptr,  # [num_layers, num_slots, num_projections]
    x_ptr,  # [num_tokens, in_features]
    a_ptr,  # [num_layers, num_slots, num_projections * slot_rank, in_features]
    v_ptr,  # [splits, padded_tokens, num_projections * padded_rows]
    num_tokens: tl.constexpr,
    in_features: tl.constexpr,
    num_slots: tl.constexpr,
    num_gates: tl.constexpr,
    num_projections: tl.constexpr,
    slot_rank: tl.constexpr,
    padded_rows: tl.constexpr,
    padded_tokens: tl.constexpr,
    chunk: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
):
    split = tl.program_id(0)
    block = tl.program_id(1)
    tile = tl.program_id(2)
    blocks_per_projection: tl.constexpr = padded_rows // block_rows
    projection = block // blocks_per_projection
    first_row = block % blocks_per_projection * block_rows
    num_rows = tl.load(num_segments_ptr + tile) * slot_rank
    if first_row < num_rows:
        layer = tl.load(layer_ptr)
        rows = first_row + tl.arange(0, block_rows)
        is_live = rows < num_rows
        slots = tl.load(slot_ids_ptr + tile * num_slots + tl.minimum(rows // slot_rank, num_slots - 1))
        cells = (layer * num_slots + slots) * num_projections + projection
        a_rows = cells * slot_rank + rows % slot_rank
        tile_tokens = tile * block_tokens + tl.arange(0, block_tokens)
        tokens = tl.minimum(tile_tokens, num_tokens - 1)  # padding repeats the last token: no mask on loads

        gate = tl.minimum(projection, num_gates - 1)
        weights = tl.load(
            weights_ptr + ((tokens * num_gates + gate).to(tl.int64) * num_slots)[:, None] + slots[None, :]
        )
        scale = tl.load(scale_ptr + cells)

        columns = split * chunk + tl.arange(0, block_columns)
        a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * in_features + columns[None, :]
        x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * in_features + columns[None, :]
        u = tl.full((block_tokens, block_rows), 0.0, tl.float32)
        for i in tl.range(0, chunk, block_columns, num_stages=stages):
            a = tl.load(a_ptrs + i, mask=is_live[:, None], other=0.0, eviction_policy="evict_first")
            tile_x = tl.load(x_ptrs + i, eviction_policy="evict_last")
            u = tl.dot(tile_x, tl.trans(a), u, input_precision=precision)

        # A select, not a product with 0: the token's own x may be infinite, and the scale of a dead row NaN.
        is_pair = (weights != 0) & is_live[None, :]
        v = tl.where(is_pair, weights * scale[None, :] * u, 0.0)
        # Dead rows are written too: a store with a mask along the rows would not be vectorized.
        v_rows = (split * padded_tokens + tile_tokens).to(tl.int64) * (num_projections * padded_rows)
        packed = projection * padded_rows + rows
        tl.store(v_ptr + v_rows[:, None] + packed[None, :], v.to(v_ptr.dtype.element_ty))


@triton.jit
@typing.no_type_check
def _expand_kernel(
    layer_ptr,  # [1]
    slot_ids_ptr,  # [num_tiles, num_slots]
    num_segments_ptr,  # [num_tiles]
    v_ptr,  # [splits, padded_tokens, packed_rows]
    b_ptr,  # [num_layers, num_slots, slot_rank, out_features]
    base_ptr,  # [num_tokens, out_features]
    y_ptr,  # [num_tokens, out_features]
    num_tokens: tl.constexpr,
    out_features: tl.constexpr,
    second_start: tl.constexpr,  # first column of the second projection, out_features if there is none
    third_start: tl.constexpr,
    num_slots: tl.constexpr,
    slot_rank: tl.constexpr,
    num_splits: tl.constexpr,
    packed_rows: tl.constexpr,
    padded_rows: tl.constexpr,
    padded_tokens: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
):
    first_column = tl.program_id(0) * block_columns
    tile = tl.program_id(1)
    projection = (first_column >= second_start).to(tl.int32) + (first_column >= third_start).to(tl.int32)
    columns = first_column + tl.arange(0, block_columns)
    num_rows = tl.load(num_segments_ptr + tile) * slot_rank
    first_cell = tl.load(layer_ptr) * num_slots
    tile_tokens = tile * block_tokens + tl.arange(0, block_tokens)

    delta = tl.full((block_tokens, block_columns), 0.0, tl.float32)
    for i in tl.range(0, num_rows, block_rows, num_stages=stages):
        rows = i + tl.arange(0, block_rows)
        is_live = rows < num_rows
        slots = tl.load(slot_ids_ptr + tile * num_slots + tl.minimum(rows // slot_rank, num_slots - 1))
        b_rows = ((first_cell + slots) * slot_rank + rows % slot_rank).to(tl.int64)
        b = tl.load(
            b_ptr + b_rows[:, None] * out_features + columns[None, :],
            mask=is_live[:, None],
            other=0.0,
            eviction_policy="evict_first",
        )
        packed = projection * padded_rows + rows
        v = tl.full((block_tokens, block_rows), 0.0, tl.float32)
        for split in tl.static_range(num_splits):
            v_rows = (split * padded_tokens + tile_tokens).to(tl.int64) * packed_rows
            v += tl.load(v_ptr + v_rows[:, None] + packed[None, :]).to(tl.float32)
        # Rows past the last segment were never written. Loaded without a mask, which would vary along the rows.
        v = tl.where(is_live[None, :], v, 0.0).to(b_ptr.dtype.element_ty)
        delta = tl.dot(v, b, delta, input_precision=precision)

    tokens = tl.minimum(tile_tokens, num_tokens - 1)
    base = tl.load(base_ptr + tokens.to(tl.int64)[:, None] * out_features + columns[None, :]).to(tl.float32)
    # A token without pairs keeps the very bits of its base: -0.0 + 0.0 would be 0.0.
    y = tl.where(delta == 0, base, base + delta).to(y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + tile_tokens.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(y_ptrs, y, mask=(tile_tokens < num_tokens)[:, None])
