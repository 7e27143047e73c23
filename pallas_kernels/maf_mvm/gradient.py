"""The op's gradient: slot after slot of those in use, each for all tokens, in plain jnp on any backend.

JAX cannot differentiate the kernels, and it differentiates the dense forms wrongly where an adapter starts: `B` is zero
there, and "the very bits of base where delta is zero" hides that delta would move with B.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments


@pytree_dataclass
class _Sums:
    """What the walk over the slots adds up, all in float32.

    Attributes:
      x: [num_tokens, in_features].
      a, b, scale: of one layer of `ProjectionSlots`.
      weights: [num_tokens, num_projections, num_slots].
    """

    x: Float[Array, "num_tokens in_features"]
    a: Float[Array, "num_slots rows in_features"]
    b: Float[Array, "num_slots slot_rank out_features"]
    scale: Float[Array, "num_slots num_projections"]
    weights: Float[Array, "num_tokens num_projections num_slots"]


def backward(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    layer: Int[Array, ""],
    dy: Float[Array, "num_tokens out_features"],
) -> tuple[Float[Array, "num_tokens in_features"], ProjectionSlots, Float[Array, "num_tokens num_gates num_slots"]]:
    """Gradients of sum(dy * maf_mvm(...)) by x, by A, B and scale, and by the weights; that by the base is dy.

    A weight of zero is no pair and gets a gradient of zero; slots that no pair uses are never read. The cost is that of
    num_tokens times the slots in use.

    Args:
      x, slots, segments, layer: what the op was called with.
      dy: gradient by the op's result, in any float dtype.

    Returns:
      The gradients, each in the dtype of what it belongs to.
    """
    num_tokens, num_projections = x.shape[0], slots.num_projections
    # An adapter's gradient is a sum over tokens: float32 until the end, from operands in the dtype of the forward pass.
    dy = dy.astype(x.dtype)
    weights = jnp.broadcast_to(segments.weights, (num_tokens, num_projections, slots.num_slots))
    is_used = (weights != 0).any((0, 1))
    order = jnp.argsort(jnp.logical_not(is_used), stable=True).astype(jnp.int32)

    def add_slot(i: Int[Array, ""], sums: _Sums) -> _Sums:
        return _add_slot(order[i], sums, x, slots, weights, layer, dy)

    zeros = _Sums(
        x=jnp.zeros(x.shape, jnp.float32),
        a=jnp.zeros(slots.a.shape[1:], jnp.float32),
        b=jnp.zeros(slots.b.shape[1:], jnp.float32),
        scale=jnp.zeros(slots.scale.shape[1:], jnp.float32),
        weights=jnp.zeros(weights.shape, jnp.float32),
    )
    sums = lax.fori_loop(0, is_used.sum(dtype=jnp.int32), add_slot, zeros)
    d_weights = sums.weights.sum(1, keepdims=True) if segments.num_gates == 1 else sums.weights
    d_slots = dataclasses.replace(
        slots,
        **{
            name: jnp.zeros_like(whole).at[layer].set(getattr(sums, name).astype(whole.dtype))
            for name, whole in (("a", slots.a), ("b", slots.b), ("scale", slots.scale))
        },
    )
    return sums.x.astype(x.dtype), d_slots, d_weights


def _add_slot(
    slot: Int[Array, ""],
    sums: _Sums,
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    weights: Float[Array, "num_tokens num_projections num_slots"],
    layer: Int[Array, ""],
    dy: Float[Array, "num_tokens out_features"],
) -> _Sums:
    """One slot's part: y = ((w * scale) * (x @ A.T)) @ B, backwards, projection by projection."""
    rank = slots.slot_rank
    a, b, scale = slots.a[layer, slot], slots.b[layer, slot], slots.scale[layer, slot]
    w = weights[:, :, slot]
    # Tokens that do not use the slot may hold NaN, which a weight of zero would not silence.
    is_pair = w != 0
    xs = jnp.where(is_pair.any(1, keepdims=True), x, jnp.zeros((), x.dtype))
    u = _dot("ti,ri->tr", xs, a)
    dx, da, db, d_scale, d_w = sums.x, [], [], [], []
    for p, columns in enumerate(slots.column_slices):
        rows = slice(p * rank, (p + 1) * rank)
        dyp = jnp.where(is_pair[:, p, None], dy[:, columns], jnp.zeros((), dy.dtype))
        up = jnp.where(is_pair[:, p, None], u[:, rows], 0.0)
        factor = (w[:, p] * scale[p])[:, None]
        dv = _dot("to,ro->tr", dyp, b[:, columns])
        du = (factor * dv).astype(x.dtype)
        dx = dx + _dot("tr,ri->ti", du, a[rows])
        da.append(_dot("tr,ti->ri", du, xs))
        db.append(_dot("tr,to->ro", (factor * up).astype(x.dtype), dyp))
        along = (up * dv).sum(1)
        d_w.append(along * scale[p])
        d_scale.append((along * w[:, p]).sum())
    return _Sums(
        x=dx,
        a=sums.a.at[slot].set(jnp.concatenate(da)),
        b=sums.b.at[slot].set(jnp.concatenate(db, axis=1)),
        scale=sums.scale.at[slot].set(jnp.stack(d_scale)),
        weights=sums.weights.at[:, :, slot].set(jnp.stack(d_w, axis=1)),
    )


def _dot(spec: str, x: Array, y: Array) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)
