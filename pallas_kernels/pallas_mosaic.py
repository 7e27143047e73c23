"""What the kernels on Mosaic GPU share."""

from typing import Any

import jax.numpy as jnp
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


def interpret_args(interpret: bool) -> dict[str, Any]:
    """Of `plgpu.kernel`: run the kernel's operations one by one on any backend."""
    return {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
