"""The public op: checks shapes, picks an implementation, calls it; differentiable, whichever it picks."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm import dense, gradient, loop, reference
from pallas_kernels.maf_mvm.checks import static_validate
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments

__all__ = ["Implementation", "ProjectionSlots", "maf_mvm", "maf_swiglu", "swiglu"]

Implementation = Literal["reference", "dense", "loop", "pallas_triton", "jax_triton", "bmm", "copy_sgmv"]


def maf_mvm(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    *,
    layer: int | Array,
    implementation: Implementation | None = None,
) -> Float[Array, "num_tokens out_features"]:
    """Adds up, for each token, the base and the weighted outputs of its slots.

    Semantics: y[t, cols(p)] = base[t, cols(p)] + sum over slots s with w = weights[t, min(p, num_gates - 1), s] != 0 of
    (w * scale[layer, s, p]) * (x[t] @ a[layer, s, rows(p)].T) @ b[layer, s, :, cols(p)], for each projection p with
    rank rows rows(p) of a slot and columns cols(p) of the output.

    A weight of zero is no pair: it adds nothing, whatever x or the slot hold, and a token without pairs gets its base
    bit for bit. Slots that have a segment must hold finite values; the others are never read into a result.

    The gradients by x, a, b, scale, weights and base are `gradient.backward`, for every implementation.

    Args:
      x: [num_tokens, in_features] activations, bfloat16 or float32.
      slots: A, B and scale of this group of projections by layer and slot, in the dtype of x.
      segments: Pairs sorted by slot, one list of slots for each tile of tokens.
      base: [num_tokens, out_features] output of the base projections, in the dtype of x or float32.
      layer: Layer of `slots` to use, a Python int or an int32 scalar; a traced one is not checked.
      implementation: "reference", "dense", "loop", "pallas_triton" (interpreted on a CPU) or "jax_triton" (GPU only,
        optional packages); or "bmm" and "copy_sgmv", what others do in its place (`baselines`). None picks "loop" on a
        CPU; elsewhere the first of "pallas_triton", "jax_triton" and "dense" that is there and supports the shapes.

    Returns:
      [num_tokens, out_features] in the dtype of x, accumulated in float32.

    Raises:
      ValueError: If shapes disagree, or a Python `layer` is out of range.
      TypeError: If a dtype is not supported.
      NotImplementedError: If the named implementation does not support the shapes or cannot be used here.
    """
    static_validate(x, slots, segments, base, layer)
    return _differentiable(implementation, x, slots, segments, base, jnp.asarray(layer, jnp.int32))


def maf_swiglu(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens two_ffn"],
    *,
    layer: int | Array,
    implementation: Implementation | None = None,
) -> Float[Array, "num_tokens ffn"]:
    """silu(gate) * up of the two halves of `maf_mvm`'s y, each rounded to the dtype of x first.

    Args and errors: as for `maf_mvm`; `slots` has two projections of equal width, gate and up. "pallas_triton" is one
    kernel less and never writes y; the other implementations are `maf_mvm` and `swiglu`.

    Returns:
      [num_tokens, ffn] in the dtype of x.
    """
    static_validate(x, slots, segments, base, layer)
    if slots.num_projections != 2 or slots.widths[0] != slots.widths[1]:
        raise ValueError(f"slots has projections of widths {slots.widths}; expected two of equal width, gate and up")
    return _differentiable_swiglu(implementation, x, slots, segments, base, jnp.asarray(layer, jnp.int32))


def swiglu(gate_up: Float[Array, "num_tokens two_ffn"]) -> Float[Array, "num_tokens ffn"]:
    """silu(gate) * up of the two halves, in float32, rounded to their dtype."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


_Residuals = tuple[Any, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    implementation: Implementation | None,
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """`maf_mvm` after its checks."""
    if implementation is not None:
        return _run(implementation, x, slots, segments, base, layer)
    if jax.default_backend() == "cpu":
        return _run("loop", x, slots, segments, base, layer)
    for kernel in ("pallas_triton", "jax_triton"):
        try:
            return _run(kernel, x, slots, segments, base, layer)
        except NotImplementedError:
            continue
    return _run("dense", x, slots, segments, base, layer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_swiglu(
    implementation: Implementation | None,
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens two_ffn"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens ffn"]:
    """`maf_swiglu` after its checks."""
    if implementation == "pallas_triton" or (implementation is None and jax.default_backend() == "gpu"):
        from pallas_kernels.maf_mvm import pallas_triton

        try:
            return pallas_triton.maf_mvm(x, slots, segments, base, layer, ends_in_swiglu=True)
        except NotImplementedError:
            if implementation is not None:
                raise
    return swiglu(_differentiable(implementation, x, slots, segments, base, layer))


def _forward(implementation: Implementation | None, *args: Any) -> tuple[Array, _Residuals]:
    x, slots, segments, base, layer = args
    return _differentiable(implementation, *args), (x, slots, segments, layer, _dtype_token(base))


def _backward(implementation: Implementation | None, residuals: _Residuals, dy: Array) -> _Residuals:
    x, slots, segments, layer, base = residuals
    # JAX hands a constant residual of a scan back as numpy's.
    dx, d_slots, d_weights = gradient.backward(x, slots, segments, jnp.asarray(layer), dy)
    # None: integers have no gradient.
    d_segments = dataclasses.replace(segments, weights=d_weights, slot_ids=None, num_segments=None)
    return dx, d_slots, d_segments, dy.astype(base.dtype), None


def _forward_swiglu(implementation: Implementation | None, *args: Any) -> tuple[Array, _Residuals]:
    # The kernel that ends in SwiGLU does not write y, which its gradient needs.
    y, residuals = _forward(implementation, *args)
    return swiglu(y), (*residuals, y)


def _backward_swiglu(implementation: Implementation | None, residuals: _Residuals, dz: Array) -> _Residuals:
    (dy,) = jax.vjp(swiglu, residuals[-1])[1](dz)
    return _backward(implementation, residuals[:-1], dy)


def _dtype_token(array: Array) -> Array:
    """Nothing but a dtype, as a residual."""
    return jnp.zeros((0,), array.dtype)


_differentiable.defvjp(_forward, _backward)
_differentiable_swiglu.defvjp(_forward_swiglu, _backward_swiglu)


def _run(
    implementation: Implementation,
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    match implementation:
        case "reference":
            return reference.maf_mvm(x, slots, segments, base, layer)
        case "dense":
            return dense.maf_mvm(x, slots, segments, base, layer)
        case "loop":
            return loop.maf_mvm(x, slots, segments, base, layer)
        case "pallas_triton":
            from pallas_kernels.maf_mvm import pallas_triton  # the GPU backend is imported where it is used only

            return pallas_triton.maf_mvm(x, slots, segments, base, layer)
        case "jax_triton":
            from pallas_kernels.maf_mvm import jax_triton  # raises NotImplementedError where Triton cannot be used

            return jax_triton.maf_mvm(x, slots, segments, base, layer)
        case "bmm":
            from pallas_kernels.maf_mvm import baselines  # it calls this op, and is for benchmarks only

            return baselines.bmm_of_step(x, slots, segments, base, layer)
        case "copy_sgmv":
            from pallas_kernels.maf_mvm import baselines

            return baselines.copy_sgmv_of_step(x, slots, segments, base, layer)
        case _:
            known = ", ".join(repr(name) for name in get_args(Implementation))
            raise ValueError(f"implementation {implementation!r} is unknown; expected one of {known}")
