"""The op's two checks: shapes and dtypes at trace time, always; values in tests and debug runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments


def static_validate(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"] | jax.ShapeDtypeStruct,
    layer: int | Array,
) -> None:
    """Checks what is known when the call is traced.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If a shape is wrong, or a Python `layer` is out of range.
    """
    _check_dtypes(x, slots, segments, base)
    num_tokens, in_features = x.shape
    layers, num_slots, slot_rank, out_features = slots.b.shape
    num_projections = slots.num_projections
    num_tiles = -(-num_tokens // segments.tile_size)
    expected = [
        ("slots.a", slots.a.shape, (layers, num_slots, num_projections * slot_rank, in_features)),
        ("slots.b", slots.b.shape, (layers, num_slots, slot_rank, sum(slots.widths))),
        ("slots.scale", slots.scale.shape, (layers, num_slots, num_projections)),
        ("segments.weights", segments.weights.shape, (num_tokens, segments.num_gates, num_slots)),
        ("segments.slot_ids", segments.slot_ids.shape, (num_tiles, num_slots)),
        ("segments.num_segments", segments.num_segments.shape, (num_tiles,)),
        ("base", base.shape, (num_tokens, out_features)),
    ]
    for name, shape, wanted in expected:
        if shape != wanted:
            raise ValueError(
                f"{name} has shape {shape}, but x {x.shape}, {num_projections} projections of widths {slots.widths}, "
                f"{num_slots} slots of rank {slot_rank} and tiles of {segments.tile_size} tokens need {wanted}"
            )
    if segments.num_gates not in (1, num_projections):
        raise ValueError(
            f"segments.weights has {segments.num_gates} gates, but a group of {num_projections} projections needs 1 "
            f"(one weight for all of them) or {num_projections}"
        )
    if isinstance(layer, int) and not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is out of range: the slot array has {layers} layers")


def dynamic_validate(slots: ProjectionSlots, segments: Segments, layer: int) -> None:
    """Checks the values that the kernels rely on; reads the arrays back to the host.

    Raises:
      ValueError: If slot ids are not ascending and in range, a weight lies outside the segments of its tile or is not
        finite, or a slot that has a segment holds values that are not finite.
    """
    segments = jax.device_get(segments)
    with_segment: set[int] = set()
    for tile, num_segments in enumerate(segments.num_segments.tolist()):
        if segments.max_segments is not None and num_segments > segments.max_segments:
            raise ValueError(
                f"tile {tile} has {num_segments} segments, but max_segments promises at most {segments.max_segments}"
            )
        ids = segments.slot_ids[tile, :num_segments].tolist()
        if ids != sorted(set(ids)) or not set(ids) <= set(range(slots.num_slots)):
            raise ValueError(
                f"segments.slot_ids of tile {tile} is {ids}; the first num_segments ids must ascend and lie in "
                f"[0, {slots.num_slots})"
            )
        with_segment.update(ids)
        rows = segments.weights[tile * segments.tile_size : (tile + 1) * segments.tile_size]
        outside = sorted(_used_slots(rows) - set(ids))
        if outside:
            raise ValueError(
                f"slots {outside} have weights in tile {tile}, but its segments are {ids}; "
                "give build_segments all pairs in is_used"
            )
    if not jnp.isfinite(segments.weights).all():
        raise ValueError("segments.weights holds NaN or infinity; every weight must be finite")
    for slot in sorted(with_segment):
        for name, array in [("a", slots.a), ("b", slots.b), ("scale", slots.scale)]:
            if not jnp.isfinite(array[layer, slot]).all():
                raise ValueError(f"slots.{name} of slot {slot}, layer {layer}, has a segment and holds NaN or infinity")


def _used_slots(weights: Any) -> set[int]:
    return {slot for slot, is_used in enumerate((weights != 0).any((0, 1)).tolist()) if is_used}


def _check_dtypes(x: Array, slots: ProjectionSlots, segments: Segments, base: Array | jax.ShapeDtypeStruct) -> None:
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; expected float32 or bfloat16")
    expected = [
        ("slots.a", slots.a.dtype, {x.dtype}),
        ("slots.b", slots.b.dtype, {x.dtype}),
        ("slots.scale", slots.scale.dtype, {jnp.dtype(jnp.float32)}),
        ("segments.weights", segments.weights.dtype, {jnp.dtype(jnp.float32)}),
        ("segments.slot_ids", segments.slot_ids.dtype, {jnp.dtype(jnp.int32)}),
        ("segments.num_segments", segments.num_segments.dtype, {jnp.dtype(jnp.int32)}),
        ("base", base.dtype, {x.dtype, jnp.dtype(jnp.float32)}),
    ]
    for name, dtype, wanted in expected:
        if dtype not in wanted:
            names = " or ".join(sorted(str(w) for w in wanted))
            raise TypeError(f"{name} is {dtype}, but x is {x.dtype}; expected {names}")
