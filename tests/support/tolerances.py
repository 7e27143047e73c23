"""Tolerances of comparisons with a float32 reference, by dtype of the tested result."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# bfloat16 has 8 bits of mantissa (2^-9 relative per rounding); results of order 1 pass a few roundings.
TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {"rtol": 2e-5, "atol": 2e-5},
    "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
}


def tolerance(dtype: DTypeLike) -> dict[str, float]:
    """rtol and atol for a result of `dtype` of order 1."""
    return TOLERANCES[jnp.dtype(dtype).name]


def assert_close(actual: ArrayLike, expected: ArrayLike, dtype: DTypeLike | None = None) -> None:
    """Compares in float32 with the tolerance of `dtype`, by default that of `actual`."""
    dtype = jnp.asarray(actual).dtype if dtype is None else dtype
    as_float32 = [np.asarray(array).astype(np.float32) for array in (actual, expected)]
    np.testing.assert_allclose(*as_float32, **tolerance(dtype))
