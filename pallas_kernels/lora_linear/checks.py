"""What is checked when a call is traced."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lora_linear.arrivals import ARRIVALS_PER_SITE
from pallas_kernels.maf_mvm import checks as maf_checks
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments


def static_validate(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    layer: int | Array,
    site: int | Array,
) -> None:
    """Checks shapes and dtypes.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If a shape is wrong, or a Python `layer` or `site` is out of range.
    """
    if w.dtype != x.dtype:
        raise TypeError(f"w is {w.dtype}, but x is {x.dtype}; expected the same dtype")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; expected float32 or bfloat16")
    wanted = (x.shape[1], sum(slots.widths))
    if w.shape != wanted:
        raise ValueError(
            f"w has shape {w.shape}, but x {x.shape} and projections of widths {slots.widths} need {wanted}"
        )
    _check_arrivals(arrivals, site)
    if isinstance(layer, int) and not 0 <= layer < slots.num_layers:
        raise ValueError(f"layer {layer} is out of range: the slot array has {slots.num_layers} layers")
    if segments is None:
        return
    base = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    maf_checks.static_validate(x, slots, segments, base, layer)


def _check_arrivals(arrivals: Int[Array, "num_sites cells"], site: int | Array) -> None:
    # A kernel that counts past the end of a row would count for the next site, or wait for ever.
    if arrivals.dtype != jnp.int32:
        raise TypeError(f"arrivals is {arrivals.dtype}; expected int32, from new_arrivals")
    if arrivals.ndim != 2 or arrivals.shape[1] != ARRIVALS_PER_SITE:
        raise ValueError(
            f"arrivals has shape {arrivals.shape}; expected (num_sites, {ARRIVALS_PER_SITE}), from new_arrivals"
        )
    if isinstance(site, int) and not 0 <= site < arrivals.shape[0]:
        raise ValueError(f"site {site} is out of range: arrivals has rows for {arrivals.shape[0]} sites")
