"""Block sizes of the kernels and the rule that picks them from the shapes of a problem."""

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels.gpu import HOPPER_SHARED_BYTES

# A program of the shrink keeps this many bytes of x and A in shared memory; two or three programs then share an SM, and
# every GPU has as much. Where few programs have work, each may have an SM for itself.
_SHRINK_SHARED_BYTES = 96 * 1024
_LONE_SHRINK_SHARED_BYTES = 2 * _SHRINK_SHARED_BYTES
# Between 8, 32 and 128, at which sizes were measured (benchmarks/results/2026-11-30-maf-mvm-few-tiles.json).
_FEW_TILES, _MANY_TILES = 16, 64
_MAX_TILE_SIZE = 64
_MAX_SHRINK_GROUP = 4  # accumulators of a shrink program that registers hold beside each other
_NUM_SMS = 132  # of an H200; other GPUs get the same split
MIN_DOT_SIZE = 16  # the tensor cores' smallest tile side


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes of the Triton kernels; all are powers of two but the splits and the unrolling.

    Attributes:
      shrink_rows: rank rows of one shrink program.
      shrink_group: projections that one shrink program computes, reading x once for all of them: one or all.
      shrink_programs: programs of a tile and group; each takes every shrink_programs-th block of rank rows.
      shrink_columns: input features of one load of the shrink.
      shrink_splits: programs that share the input features of one block of rank rows; more of them fill the chip.
      shrink_unroll: independent accumulators of a projection; a shrink's loop is bound by the latency of the dots.
      shrink_stages: software pipelining depth of the shrink's loop.
      expand_rows: rank rows of one step of the expand's loop.
      expand_columns: output features of one expand program; divides the width of every projection.
      expand_stages: software pipelining depth of the expand's loop.
      num_warps: warps of a program.
    """

    shrink_rows: int
    shrink_group: int
    shrink_programs: int
    shrink_columns: int
    shrink_splits: int
    shrink_unroll: int
    shrink_stages: int
    expand_rows: int
    expand_columns: int
    expand_stages: int
    num_warps: int

    @property
    def swiglu_columns(self) -> int:
        """Output features of one program that ends in silu(gate) * up: it holds as many of gate and of up."""
        return max(self.expand_columns // 2, MIN_DOT_SIZE)

    @property
    def swiglu_warps(self) -> int:
        """Warps of such a program: 367 us for 8192 tokens of the 8B shape on an H200, 426 with half as many."""
        return 2 * self.num_warps

    def padded_rows(self, num_rows: int) -> int:
        """Rank rows of one projection, rounded up so that no block of rows reaches into the next projection."""
        block = max(self.shrink_rows, self.expand_rows)
        return -(-num_rows // block) * block


def token_tile_size(num_tokens: int) -> int:
    """Tokens per tile for a step of `num_tokens`: one tile for a decode batch, 64 tokens in a prefill.

    A power of two from 16 to 64. A and B are read once per tile, so a tile is as large as registers allow.
    """
    return min(max(pl.next_power_of_2(num_tokens), MIN_DOT_SIZE), _MAX_TILE_SIZE)


def pick_config(
    *,
    num_tiles: int,
    tile_size: int,
    num_slots: int,
    slot_rank: int,
    in_features: int,
    widths: tuple[int, ...],
    dtype_bytes: int,
    ends_in_swiglu: bool = False,
    shared_bytes: int = HOPPER_SHARED_BYTES,
) -> KernelConfig:
    """The block sizes for one problem, measured on an H200.

    Args:
      num_tiles: tiles of tokens of the step.
      tile_size: tokens of a tile.
      num_slots, slot_rank: of the slot array.
      in_features, widths: of the group of projections.
      dtype_bytes: of an element of x, A and B.
      ends_in_swiglu: the expand ends in silu(gate) * up.
      shared_bytes: that a block of this GPU may have.

    Raises:
      NotImplementedError: If the kernels do not support the shapes.
    """
    _check_supported(tile_size, slot_rank, in_features, widths)
    num_rows = max(pl.next_power_of_2(num_slots * slot_rank), MIN_DOT_SIZE)
    if num_tiles == 1:
        return _decode_config(tile_size, num_rows, in_features, widths, dtype_bytes)
    return _prefill_config(
        num_tiles=num_tiles,
        tile_size=tile_size,
        num_rows=num_rows,
        in_features=in_features,
        widths=widths,
        dtype_bytes=dtype_bytes,
        ends_in_swiglu=ends_in_swiglu,
        shared_bytes=shared_bytes,
    )


def _decode_config(
    tile_size: int, num_rows: int, in_features: int, widths: tuple[int, ...], dtype_bytes: int
) -> KernelConfig:
    """For one tile, whose rank rows and input features are shared out so that they fill the chip."""
    rows, columns = min(16, num_rows), _expand_columns(1, widths)
    load = min(_power_of_two_factor(in_features), 128 // dtype_bytes)  # a row of 128 B fills a cache line
    # Every block of output columns reads v of all splits, so a wide output wants fewer of them.
    splits = _largest_divisor(in_features // load, at_most=2 if columns == 128 else 4)
    unroll = _largest_divisor(in_features // load // splits, at_most=2 if splits > 2 else 4)
    return KernelConfig(
        shrink_rows=rows,
        shrink_group=1,
        shrink_programs=-(-num_rows // rows),
        shrink_columns=load,
        shrink_splits=splits,
        shrink_unroll=unroll,
        shrink_stages=_shrink_stages((tile_size + rows) * load * unroll * dtype_bytes, _SHRINK_SHARED_BYTES),
        expand_rows=min(128 // dtype_bytes, num_rows),
        expand_columns=columns,
        expand_stages=3,
        num_warps=4,
    )


def _prefill_config(
    *,
    num_tiles: int,
    tile_size: int,
    num_rows: int,
    in_features: int,
    widths: tuple[int, ...],
    dtype_bytes: int,
    ends_in_swiglu: bool,
    shared_bytes: int,
) -> KernelConfig:
    """For several tiles, of which most have few segments.

    In a step of a few hundred tokens one tile has all decode rows, hundreds of rank rows of their adapters, and how
    long that one takes is how long the step does. From some tiles on the chip is full whatever a program does.
    """
    has_few_tiles, has_many_tiles = num_tiles <= _FEW_TILES, num_tiles > _MANY_TILES
    rows, columns = min(32, num_rows), _expand_columns(num_tiles, widths)
    group = len(widths) if has_many_tiles and len(widths) <= _MAX_SHRINK_GROUP else 1
    # Products of float32 are unrolled: twice as many columns compile for seconds.
    row_bytes = 128 if group > 1 or dtype_bytes > 2 else 256
    load = min(_power_of_two_factor(in_features), row_bytes // dtype_bytes)
    num_loads = in_features // load
    # A narrow output reads v of two splits in less time than they save.
    splits = 1 if has_many_tiles or sum(widths) > in_features else _largest_divisor(num_loads, at_most=2)
    has_sm_alone = has_few_tiles and shared_bytes >= _LONE_SHRINK_SHARED_BYTES
    unroll = _largest_divisor(num_loads // splits, at_most=2 if has_sm_alone or group == 2 else 1)
    # Most programs of one for each possible block of rank rows end at once: at 128 tiles and 1024 rank rows, launching
    # them costs as much as the work.
    num_blocks = -(-num_rows // rows)
    programs = num_blocks if has_few_tiles else min(num_blocks, -(-_NUM_SMS // num_tiles))
    # Each step of the expand's loop waits for memory, and the tile with the decode rows has many.
    has_large_steps = has_few_tiles and not ends_in_swiglu and dtype_bytes == 2
    return KernelConfig(
        shrink_rows=rows,
        shrink_group=group,
        shrink_programs=programs,
        shrink_columns=load,
        shrink_splits=splits,
        shrink_unroll=unroll,
        shrink_stages=_shrink_stages(
            (tile_size + group * rows) * load * unroll * dtype_bytes,
            _LONE_SHRINK_SHARED_BYTES if has_sm_alone else _SHRINK_SHARED_BYTES,
        ),
        expand_rows=min(128 if has_large_steps else 32, num_rows),
        expand_columns=min(64, columns) if has_large_steps else columns,
        expand_stages=1 if has_large_steps else 3,
        num_warps=4,
    )


def _shrink_stages(stage_bytes: int, shared_bytes: int) -> int:
    return min(max(shared_bytes // stage_bytes, 1), 4)


def _expand_columns(num_tiles: int, widths: tuple[int, ...]) -> int:
    """The widest block of output columns that still gives each of an H200's 132 SMs a program."""
    widest = min(_power_of_two_factor(width) for width in widths)
    fills_chip = [columns for columns in (128, 64) if sum(widths) // columns * num_tiles >= 128]
    return min(next(iter(fills_chip), 32), widest)


def _check_supported(tile_size: int, slot_rank: int, in_features: int, widths: tuple[int, ...]) -> None:
    if not _is_power_of_two(tile_size) or not MIN_DOT_SIZE <= tile_size <= _MAX_TILE_SIZE:
        raise NotImplementedError(
            f"tile_size {tile_size} of the segments is not supported; use 16, 32 or 64, as token_tile_size gives it"
        )
    if not _is_power_of_two(slot_rank):
        raise NotImplementedError(f"slot_rank {slot_rank} is not supported; use a power of two such as 8 or 16")
    for name, width in [("in_features", in_features), *(("width", width) for width in widths)]:
        if _power_of_two_factor(width) < MIN_DOT_SIZE:
            raise NotImplementedError(f"{name} {width} is not supported; it must be a multiple of {MIN_DOT_SIZE}")


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _power_of_two_factor(n: int) -> int:
    return n & -n


def _largest_divisor(n: int, *, at_most: int) -> int:
    return next(d for d in range(at_most, 0, -1) if n % d == 0)
