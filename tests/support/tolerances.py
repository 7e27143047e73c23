"""Tolerances of comparisons with a float32 reference, by dtype of the tested result."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


class Tolerance(NamedTuple):
    rtol: float
    atol: float


def tolerance(dtype: DTypeLike) -> Tolerance:
    """Tolerance of a result of `dtype` of order 1."""
    match jnp.dtype(dtype).name:
        case "float32":
            return Tolerance(rtol=2e-5, atol=2e-5)
        case "bfloat16":
            # 8 bits of mantissa: 2^-9 relative for each rounding, of which a result passes a few.
            return Tolerance(rtol=2e-2, atol=2e-2)
        case name:
            raise ValueError(f"no tolerance for {name}; expected float32 or bfloat16")


def assert_close(actual: ArrayLike, expected: ArrayLike, dtype: DTypeLike | None = None) -> None:
    """Compares in float32 with the tolerance of `dtype`, by default that of `actual`."""
    rtol, atol = tolerance(jnp.asarray(actual).dtype if dtype is None else dtype)
    actual, expected = (np.asarray(array).astype(np.float32) for array in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)
