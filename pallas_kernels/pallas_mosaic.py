"""What the kernels on Mosaic GPU share."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 8  # of the tiles that wgmma and TMA know
_SWIZZLE_BYTES = 128


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory whose last two axes lie in the tiles that wgmma reads."""
    columns = _SWIZZLE_BYTES // dtype.itemsize
    transforms: Any = (
        plgpu.TilingTransform((TILE_ROWS, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(_SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def fetch_and_compute(
    fetch: Callable[[], None],
    compute: Callable[[Array], None],
    *,
    num_computing: int,
    fetch_registers: int,
    compute_registers: int,
) -> None:
    """Parts the warpgroups of a CTA, the axis "warpgroup" of the kernel: the last one fetches, the others compute.

    Args:
      fetch: run by one warp of the last warpgroup.
      compute: run by each of the others, with its index.
      num_computing: warpgroups that compute.
      fetch_registers, compute_registers: of a thread. In all no more than the warpgroups start with: with a larger sum,
        those that compute would wait forever.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == num_computing)
    def _() -> None:
        plgpu.set_max_registers(fetch_registers, action="decrease")

        @plgpu.warp_map  # a whole warpgroup would wait for its threads at every copy
        def _(warp: Array) -> None:
            pl.when(warp == 0)(fetch)

    @pl.when(warpgroup != num_computing)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        compute(warpgroup)


def interpret_args(interpret: bool) -> dict[str, Any]:
    """Of `plgpu.kernel`: run the kernel's operations one by one on any backend."""
    return {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
