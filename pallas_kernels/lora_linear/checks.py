"""What is checked when a call is traced."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.maf_mvm import checks as maf_checks
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments


def static_validate(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: int | Array,
) -> None:
    """Checks shapes and dtypes.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If a shape is wrong, or a Python `layer` is out of range.
    """
    if w.dtype != x.dtype:
        raise TypeError(f"w is {w.dtype}, but x is {x.dtype}; expected the same dtype")
    wanted = (x.shape[1], sum(slots.widths))
    if w.shape != wanted:
        raise ValueError(
            f"w has shape {w.shape}, but x {x.shape} and projections of widths {slots.widths} need {wanted}"
        )
    if segments is None:
        return
    base = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    maf_checks.static_validate(x, slots, segments, base, layer)
