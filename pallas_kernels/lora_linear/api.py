"""The public ops: check shapes, pick an implementation, call it."""

import contextlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import is_hopper
from pallas_kernels.lora_linear import reference, separate
from pallas_kernels.lora_linear.checks import static_validate
from pallas_kernels.lora_linear.mosaic_config import MAX_TOKENS
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments

Implementation = Literal["reference", "separate", "pallas_triton", "pallas_mosaic"]

# Whole steps on an H200, 8B shape, a prompt of 1024 tokens with three adapters, qkv, o and down by the same kernel:
# 25.1 ms with lora_swiglu as one kernel, 26.8 without; with decode rows beside it not measured. At 512 tokens it gains
# 0.2 ms without decode rows, with 30 of them none. qkv, o and down gain 2 % at most; below 384 tokens all lose.
_MOSAIC_PREFILL_TOKENS = 1024


def lora_linear(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    *,
    layer: int | Array,
    site: int | Array,
    implementation: Implementation | None = None,
    maf_implementation: str | None = None,
) -> tuple[Float[Array, "num_partials num_tokens out_features"], Int[Array, "num_sites cells"]]:
    """The base product plus the weighted outputs of each token's slots, as partial sums.

    Semantics: y[t] = x[t] @ w + maf_mvm(x, slots, segments, 0)[t], see `pallas_kernels.maf_mvm`. The consumer of y adds
    the partial sums up, in float32 and in order, and rounds to the dtype of x: an addition that it gets for nothing.

    Args:
      x: [num_tokens, in_features] activations, bfloat16 or float32.
      w: [in_features, out_features] base weights of the group's projections, side by side, in the dtype of x.
      slots: A, B and scale of this group of projections by layer and slot, in the dtype of x.
      segments: pairs sorted by slot; None for a step without adapters, which then costs nothing more than x @ w.
      arrivals: from `new_arrivals`, handed on by every call of the step; donated where the step is one program.
      layer: layer of `slots`, a Python int or an int32 scalar.
      site: which cell of `arrivals` is this call's own; no other call of the step may use it.
      implementation: "reference", "separate" (the library's GEMM, then `maf_mvm`), "pallas_triton" (one launch) or
        "pallas_mosaic" (two launches, Hopper; more than 64 tokens in whole tiles of 128). None picks "pallas_triton" on
        a GPU for shapes that it supports, else "pallas_mosaic" for `lora_swiglu` of a long prefill, else "separate".
      maf_implementation: of `maf_mvm` where it is called.

    Returns:
      [num_partials, num_tokens, out_features]: several in float32, or one in the dtype of x. And `arrivals` for the
      next call.

    Raises:
      ValueError: If shapes disagree, or a Python `layer` or `site` is out of range.
      TypeError: If a dtype is not supported.
      NotImplementedError: If the named implementation does not support the shapes.
    """
    static_validate(x, w, slots, segments, arrivals, layer, site)
    layer, site = jnp.asarray(layer, jnp.int32), jnp.asarray(site, jnp.int32)
    args = x, w, slots, segments, arrivals, layer, site
    y, arrivals = _run("lora_linear", implementation, maf_implementation, *args)
    return y if y.ndim == 3 else y[None], arrivals


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    *,
    layer: int | Array,
    site: int | Array,
    implementation: Implementation | None = None,
    maf_implementation: str | None = None,
) -> tuple[Float[Array, "num_tokens ffn"], Int[Array, "num_sites cells"]]:
    """silu(gate) * up of the two halves of `lora_linear`'s y, each rounded to the dtype of x first.

    Args and errors: as for `lora_linear`; `slots` has two projections of equal width, gate and up.

    Returns:
      [num_tokens, ffn] in the dtype of x, and `arrivals` for the next call.
    """
    static_validate(x, w, slots, segments, arrivals, layer, site)
    if len(set(slots.widths)) != 1 or slots.num_projections != 2:
        raise ValueError(f"slots has projections of widths {slots.widths}; expected two of equal width, gate and up")
    layer, site = jnp.asarray(layer, jnp.int32), jnp.asarray(site, jnp.int32)
    return _run("lora_swiglu", implementation, maf_implementation, x, w, slots, segments, arrivals, layer, site)


def _run(
    op: Literal["lora_linear", "lora_swiglu"],
    implementation: Implementation | None,
    maf_implementation: str | None,
    x: Array,
    w: Array,
    slots: ProjectionSlots,
    segments: Segments | None,
    arrivals: Int[Array, "num_sites cells"],
    layer: Int[Array, ""],
    site: Int[Array, ""],
) -> tuple[Array, Int[Array, "num_sites cells"]]:
    """The function `op` of an implementation; of lora_linear either partial sums or their sum."""
    args = x, w, slots, segments
    match implementation or _pick():
        case "reference":
            return getattr(reference, op)(*args, layer), arrivals
        case "separate":
            return getattr(separate, op)(*args, layer, maf_implementation=maf_implementation), arrivals
        case "pallas_triton":
            from pallas_kernels.lora_linear import pallas_triton  # the GPU backend is imported where it is used only

            try:
                return getattr(pallas_triton, op)(*args, arrivals, layer, site)
            except NotImplementedError:
                if implementation is not None:
                    raise
            is_long = op == "lora_swiglu" and x.shape[0] >= _MOSAIC_PREFILL_TOKENS
            if is_long and is_hopper() and maf_implementation is None:
                with contextlib.suppress(NotImplementedError):
                    return _pallas_mosaic(op, *args, layer), arrivals
            return getattr(separate, op)(*args, layer, maf_implementation=maf_implementation), arrivals
        case "pallas_mosaic":
            return _pallas_mosaic(op, *args, layer), arrivals
        case unknown:
            raise ValueError(
                f"implementation {unknown!r} is unknown; "
                "expected 'reference', 'separate', 'pallas_triton' or 'pallas_mosaic'"
            )


def _pallas_mosaic(op: Literal["lora_linear", "lora_swiglu"], x: Array, *args: Any) -> Array:
    # Their backend takes most of a second to import.
    if x.shape[0] > MAX_TOKENS:
        from pallas_kernels.lora_linear import pallas_mosaic_prefill

        return getattr(pallas_mosaic_prefill, op)(x, *args)
    from pallas_kernels.lora_linear import pallas_mosaic

    return getattr(pallas_mosaic, op)(x, *args)


def _pick() -> Implementation:
    # In interpret mode on a CPU the kernel runs element by element: "separate" is what a CPU is good at.
    return "separate" if jax.default_backend() == "cpu" else "pallas_triton"
